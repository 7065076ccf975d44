"""One update of several engines in two phases: all of them load, then those that could commit.

Invariants:
- A refusal comes before a byte is written: each engine opens a session with the whole manifest first, or none does.
- No engine commits before every engine has everything, or cannot get it.
- An engine that fails costs no other its update: :class:`PartialUpdate` says who has it and who has not. Those that have not are
  poisoned at worst, until the next complete update (``clone_weights`` from one that has it).
- What is still open when an update ends early is aborted, without waiting for engines that may be gone.
"""

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NoReturn

from ...io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    EndWeightUpdateReqInput,
    ErrorCode,
    Message,
    Request,
    TensorSpec,
    WeightUpdateOptions,
    WeightUpdateReqOutput,
)
from ..connection.channel import wait_for
from ..exceptions import EngineError, InvalidRequest, PartialUpdate

if TYPE_CHECKING:
    from ..connection.control_client import ControlClient

Errors = dict[int, CaesuraError]
"""By position among the engines."""


class TwoPhaseUpdate:
    """An update of ``clients``, from its sessions to the commits."""

    def __init__(
        self,
        clients: "Sequence[ControlClient]",
        specs: list[TensorSpec],
        options: dict[str, Any],
        timeout: float | None,
    ) -> None:
        """Open a session on every engine, or on none.

        Args:
            options: fields of ``WeightUpdateOptions``.
            timeout: limits each wait for an answer, in seconds.

        Raises:
            CaesuraError: what an engine refused.
        """
        self._clients = clients
        self._options = options
        self._timeout = timeout
        self._errors: Errors = {}
        begins: list[Request] = [
            BeginWeightUpdateReqInput(manifest=specs, component=options.get("component")) for _ in clients
        ]
        self._sessions = [begin.id for begin in begins]  # which name the sessions as well
        self._requests: Sequence[Request] = begins
        self.tickets = self._started(BeginWeightUpdateReqOutput)
        self._gather()
        if self._errors:
            self.abort()
            raise self._errors[min(self._errors)]

    def start(self, calls: Sequence[WeightUpdateOptions]) -> None:
        """Send each engine its call, which joins its session; :attr:`tickets` are theirs then."""
        for call, session in zip(calls, self._sessions, strict=True):
            call.session_id = session
        self._requests = calls
        self.tickets = self._started(WeightUpdateReqOutput)

    def commit(self, version: str | None = None) -> list[WeightUpdateReqOutput]:
        """Wait for the calls, then commit where they succeeded; the commits' replies.

        ``version`` is the label, unless the options have one; None: unchanged.

        Raises:
            PartialUpdate: some engines failed.
        """
        try:
            replies = self._committed(self._gather(), version)
        except BaseException:
            self.abort()
            raise
        if self._errors:
            self.abort(self._errors)
            raise self._partial(replies) from self._errors[min(self._errors)]
        return [replies[number] for number in range(len(self._clients))]

    def fail(self, cause: CaesuraError) -> NoReturn:
        """Nothing can be committed, for ``cause``. Waits for the calls, which end where ``cause`` has closed what they receive from.

        Raises:
            PartialUpdate: engines failed, and ``cause`` may be a consequence.
            CaesuraError: else ``cause``.
        """
        self._gather()
        self.abort()
        if cause.code != ErrorCode.GROUP_ERROR or not self._errors:
            raise cause
        raise self._partial({}) from cause

    def abort(self, numbers: "Sequence[int] | Errors | None" = None) -> None:
        """Abort the sessions of the engines ``numbers`` (None: of all), without waiting."""
        for number in range(len(self._clients)) if numbers is None else numbers:
            request = EndWeightUpdateReqInput(commit=False, session_id=self._sessions[number])
            with contextlib.suppress(CaesuraError):
                self._clients[number].start(request, WeightUpdateReqOutput)

    def _committed(self, loaded: list[int], version: str | None) -> dict[int, WeightUpdateReqOutput]:
        """The commits of the engines ``loaded``; what fails is among the errors."""
        given = self._options.get("weight_version")
        label = version if given is None else given
        ends = {
            number: EndWeightUpdateReqInput(session_id=self._sessions[number], weight_version=label)
            for number in loaded
        }
        tickets = {
            number: started(self._clients[number], end, WeightUpdateReqOutput) for number, end in ends.items()
        }
        replies: dict[int, WeightUpdateReqOutput] = {}
        for number, ticket in tickets.items():
            try:
                replies[number] = wait_for(ticket, ends[number].id, self._timeout)
            except CaesuraError as error:
                self._errors[number] = error
        return replies

    def _started(self, expects: type[Message]) -> list[Future[Any]]:
        both = zip(self._clients, self._requests, strict=True)
        return [started(client, request, expects) for client, request in both]

    def _gather(self) -> list[int]:
        """Wait for all tickets; which engines have not failed."""
        for number, (ticket, request) in enumerate(zip(self.tickets, self._requests, strict=True)):
            try:
                wait_for(ticket, request.id, self._timeout)
            except CaesuraError as error:
                error.add_note(f"engine at {self._clients[number].endpoint}")
                self._errors[number] = error
        return [number for number in range(len(self._clients)) if number not in self._errors]

    def _partial(self, replies: dict[int, WeightUpdateReqOutput]) -> PartialUpdate:
        return PartialUpdate([client.endpoint for client in self._clients], replies, self._errors)


def started(client: "ControlClient", request: Request, expects: type[Message]) -> Future[Any]:
    """``client.start``, whose error is that engine's answer: what the others were sent is not forgotten for it."""
    try:
        return client.start(request, expects)
    except EngineError as error:
        future: Future[Any] = Future()
        future.set_exception(error)
        return future


def require_clients(clients: object) -> None:
    """Raise ``invalid_request`` unless these are several clients, or one, in a list."""
    if not isinstance(clients, Sequence) or not clients:
        raise InvalidRequest(
            f"clients must be a list of clients, at least one, not a {type(clients).__name__}",
            field="clients",
        )
