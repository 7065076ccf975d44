"""An update of several engines by blocking clients: all of them load, then those commit that could.

Invariants:
- A refusal comes before a byte is written: each engine opens a session with the whole manifest, or none does.
- No engine commits before every engine has everything, or cannot get it.
- An engine that fails costs no other its update: :class:`PartialUpdate` names those that have it and those
  that have not. The latter are poisoned at worst, until the next complete update.
- Sessions that are open when an update ends early are aborted, without waiting for engines that may be gone.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack

import msgspec

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ..connection.channel import wait_for
from ..connection.client_options import UpdateOptions, update_fields
from ..exceptions import EngineError, InvalidRequest, PartialUpdate
from .shared import SharedTensors
from .sparse_updates import WeightDelta

if TYPE_CHECKING:
    from ..connection.blocking import ControlClient
    from .update_group import WeightUpdateGroup


class TwoPhaseUpdate:
    """An update of ``clients``, from its sessions to the commits."""

    def __init__(
        self,
        clients: "Sequence[ControlClient]",
        specs: list[wire.TensorSpec],
        options: dict[str, Any],
        timeout: float | None,
        *,
        session_id: str | None = None,
    ) -> None:
        """Open a session on every engine, or on none: then raise the first refusal.

        ``session_id`` names one that all have open already; its owner ends it.
        """
        self._clients, self._options, self._timeout = clients, options, timeout
        self.errors: dict[int, CaesuraError] = {}
        """Errors of engines, by their positions."""
        if session_id is not None:
            self._sessions = [session_id] * len(clients)
            return
        component = options.get("component")
        begins = [wire.BeginWeightUpdateReqInput(manifest=specs, component=component) for _ in clients]
        self._sessions = [begin.id for begin in begins]  # these messages name the sessions as well
        self._send(enumerate(begins), wire.BeginWeightUpdateReqOutput)
        self.gather()
        if self.errors:
            self.abort()
            raise self.errors[min(self.errors)]

    def start(self, calls: Sequence[wire.WeightUpdateOptions]) -> Future[Any]:
        """Send each engine its call, which joins its session, and return the ticket of the first."""
        for call, session in zip(calls, self._sessions, strict=True):
            call.session_id = session
        self._send(enumerate(calls), wire.WeightUpdateReqOutput)
        return self._asked[0][1]

    def commit(self, version: str | None = None) -> list[wire.WeightUpdateReqOutput]:
        """Wait for the calls, commit what succeeded as ``version``; return replies, or PartialUpdate."""
        given = self._options.get("weight_version")
        label = version if given is None else given
        try:
            loaded = self.gather()
            ends = (
                wire.EndWeightUpdateReqInput(session_id=name, weight_version=label) for name in self._sessions
            )
            self._send([(n, end) for n, end in enumerate(ends) if n in loaded], wire.WeightUpdateReqOutput)
            replies: dict[int, wire.WeightUpdateReqOutput] = self.gather()
        except BaseException:
            self.abort()
            raise
        if self.errors:
            self.abort(self.errors)
            raise self._partial(replies) from self.errors[min(self.errors)]
        return [replies[number] for number in range(len(self._clients))]

    def fail(self, cause: CaesuraError) -> NoReturn:
        """Wait for the calls, then raise ``cause``, or PartialUpdate if it may be a consequence."""
        self.gather()
        self.abort()
        if cause.code != ErrorCode.GROUP_ERROR or not self.errors:
            raise cause
        raise self._partial({}) from cause

    def abort(self, numbers: Iterable[int] | None = None) -> None:
        """Abort the sessions of the engines ``numbers``, or of all, without waiting."""
        for number in range(len(self._clients)) if numbers is None else numbers:
            request = wire.EndWeightUpdateReqInput(commit=False, session_id=self._sessions[number])
            with contextlib.suppress(CaesuraError):
                self._clients[number].start(request, wire.WeightUpdateReqOutput)

    def _send(self, requests: Iterable[tuple[int, wire.Request]], expects: type[wire.Message]) -> None:
        self._asked = {
            number: (request, started(self._clients[number], request, expects))
            for number, request in requests
        }

    def gather(self) -> dict[int, Any]:
        """Wait for all answers; return the replies by position, and keep the errors."""
        replies = {}
        for number, (request, ticket) in self._asked.items():
            try:
                replies[number] = wait_for(ticket, request.id, self._timeout)
            except CaesuraError as error:
                error.add_note(f"engine at {self._clients[number].endpoint}")
                self.errors[number] = error
        return replies

    def _partial(self, replies: dict[int, wire.WeightUpdateReqOutput]) -> PartialUpdate:
        return PartialUpdate([client.endpoint for client in self._clients], replies, self.errors)


def update_from_shared(
    clients: "Sequence[ControlClient]",
    tensors: SharedTensors,
    *,
    timeout: float | None = None,
    **options: Unpack[UpdateOptions],
) -> list[wire.WeightUpdateReqOutput]:
    """Update engines of this host from one export of all tensors, and return their replies in order.

    The memory must not change until then; ``timeout`` is in seconds for each wait. Raises CaesuraError if
    nothing was written, PartialUpdate if some engines failed and the others committed.
    """
    require_clients(clients)
    if not isinstance(tensors, SharedTensors):
        raise InvalidRequest(
            f"tensors must be SharedTensors, not a {type(tensors).__name__}: SharedTensors(named_tensors) "
            "makes them",
            field="tensors",
        )
    fields = sessionless_fields(options)
    manifest = [msgspec.structs.replace(spec, offset=0) for spec in tensors.specs]
    update = TwoPhaseUpdate(clients, manifest, fields, timeout)
    handle = tensors.memory.handle
    call = wire.UpdateWeightsFromIPCReqInput
    update.start([call(handle=handle, specs=tensors.specs, **fields) for _ in clients])
    return update.commit()


def update_sparse(
    clients: "Sequence[ControlClient]",
    delta: WeightDelta,
    *,
    transport: Literal["tensor", "ipc", "disk"] = "tensor",
    folder: str | os.PathLike[str] | None = None,
    group: "WeightUpdateGroup | None" = None,
    timeout: float | None = None,
    **options: Unpack[UpdateOptions],
) -> list[wire.WeightUpdateReqOutput]:
    """Send engines what has changed, and return their replies in order: all commit, or none does.

    Each stages it while it generates, and compares its own weights with those that ``delta`` is of. ``group``
    has these clients, and broadcasts it once instead. Where a commit fails, those of before are rolled back.
    Raises the first refusal with all weights as they were, or PartialUpdate.
    """
    require_clients(clients)
    fields = sessionless_fields(options)
    label = fields.pop("weight_version", None)
    if transport == "disk" and folder is not None:
        delta.save(folder, weight_version=label)

    def send(client: "ControlClient") -> Any:
        if transport == "disk":
            return client.update_weights_from_disk(folder or "", timeout=timeout, **fields)
        call = client.update_weights_from_ipc if transport == "ipc" else client.update_weights_from_tensor
        return call(delta, timeout=timeout, **fields)

    def end(client: "ControlClient") -> Any:
        return client.end_weight_update(weight_version=label, timeout=timeout)

    begun: list[ControlClient] = []
    try:
        for client in clients:
            client.begin_weight_update(timeout=timeout)
            begun.append(client)
        if group is not None:
            group.update(delta, timeout=timeout, **fields)
        else:
            _raise_first(_at_once(clients, send)[1])
        replies, errors = _at_once(clients, end)
    except BaseException:
        _at_once(begun, lambda client: client.end_weight_update(commit=False, timeout=timeout))
        raise
    if not errors:
        return [replies[number] for number in range(len(clients))]
    failed = [clients[number] for number in errors]
    _at_once(failed, lambda client: client.end_weight_update(commit=False, timeout=timeout))
    committed = sorted(replies)
    _, stuck = _at_once([clients[number] for number in committed], lambda client: client.rollback(delta))
    if not stuck:
        _raise_first(errors)
    kept = {number: replies[number] for place, number in enumerate(committed) if place in stuck}
    raise PartialUpdate([client.endpoint for client in clients], kept, errors)


def _raise_first(errors: dict[int, CaesuraError]) -> None:
    if errors:
        raise errors[min(errors)]


def _at_once(
    clients: "Sequence[ControlClient]", act: Callable[["ControlClient"], Any]
) -> tuple[dict[int, Any], dict[int, CaesuraError]]:
    """Do the same with all clients at once; return replies and errors by their positions."""
    replies: dict[int, Any] = {}
    errors: dict[int, CaesuraError] = {}
    with ThreadPoolExecutor(max_workers=max(1, len(clients))) as pool:
        for number, future in enumerate([pool.submit(act, client) for client in clients]):
            try:
                replies[number] = future.result()
            except CaesuraError as error:
                error.add_note(f"engine at {clients[number].endpoint}")
                errors[number] = error
    return replies, errors


def sessionless_fields(options: UpdateOptions) -> dict[str, Any]:
    """Return ``options`` as fields of a request, or raise ``invalid_request`` if they name a session."""
    fields = update_fields(options)
    if fields.pop("session_id", None) is not None:
        raise InvalidRequest("an update of several engines opens sessions of its own", field="session_id")
    return fields


def started(client: "ControlClient", request: wire.Request, expects: type[wire.Message]) -> Future[Any]:
    """Return the ticket of ``client.start``, which also has its error: others may have been sent theirs."""
    try:
        return client.start(request, expects)
    except EngineError as error:
        future: Future[Any] = Future()
        future.set_exception(error)
        return future


def require_clients(clients: object) -> None:
    if not isinstance(clients, Sequence) or not clients:
        reason = f"clients must be a list of clients, at least one, not a {type(clients).__name__}"
        raise InvalidRequest(reason, field="clients")
