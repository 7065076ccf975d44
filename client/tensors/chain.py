"""Updates that engines pass on, one to the next, so that the first sender sends once however many engines there are.

    sender --link 0--> engine 0 --link 1--> engine 1 --link 2--> …        a link: a process group of two, the sender its rank 0

Invariants:
- Everything that can be refused is refused before a byte is written: each engine opens a session with the whole manifest first.
- Two phases: no engine commits before every engine of the chain has everything, or cannot get it.
- An engine that fails costs itself and those behind it, never those before it: these commit, and :class:`PartialUpdate` says who has
  not. What it costs is a poisoned engine, which the next complete update makes valid (``clone_weights`` from one that has it).
- Links belong to one chain. An engine's end closes when an update over it fails, so that neither neighbour waits for the other.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ...io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    EndWeightUpdateReqInput,
    ErrorCode,
    Message,
    Request,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
    WeightUpdateReqOutput,
)
from ..exceptions import EngineError, PartialUpdate
from ..wire.channel import wait_for

if TYPE_CHECKING:
    from ..wire.control_client import ControlClient

Hopeless = Callable[[], bool]
"""Whether the first engine of the chain has answered, so that it takes no further broadcast."""
Head = Callable[[Hopeless], str | None]
"""Broadcasts all tensors over link 0; returns the label that the update is committed with, None: unchanged."""


class Chain:
    """Engines in the order in which they pass an update on."""

    def __init__(self, clients: "Sequence[ControlClient]", links: Sequence[str]) -> None:
        """``links``: per client, the name of the group that it receives from; it is rank 0 of the next one's."""
        self.clients = list(clients)
        self.links = list(links)

    def update(
        self,
        specs: list[TensorSpec],
        counts: Sequence[int],
        options: dict[str, Any],
        head: Head,
        timeout: float | None,
    ) -> list[WeightUpdateReqOutput]:
        """Load ``specs`` into every engine, then commit; the commits' replies in the order of the chain.

        Args:
            counts: tensors in each broadcast.
            options: fields of ``WeightUpdateOptions``; a label there takes the place of the head's.
            timeout: limits each wait for an answer, in seconds.

        Raises:
            CaesuraError: what an engine or the head refused; nothing has changed then.
            PartialUpdate: some engines have not got everything.
        """
        sessions = self._begin(specs, options.get("component"), timeout)
        calls = [
            UpdateWeightsFromDistributedReqInput(
                specs=specs,
                group_name=self.links[number],
                relay_to=self.links[number + 1] if number + 1 < len(self.links) else None,
                load_format="flattened_bucket",
                tensors_per_broadcast=list(counts),
                **{**options, "session_id": sessions[number]},
            )
            for number in range(len(self.clients))
        ]
        tickets = [
            started(client, call, WeightUpdateReqOutput)
            for client, call in zip(self.clients, calls, strict=True)
        ]
        failure: CaesuraError | None = None
        version: str | None = None
        try:
            version = head(tickets[0].done)
        except CaesuraError as error:
            failure = error
        except BaseException:
            self._abort(sessions)
            raise
        written, errors = self._gathered(tickets, calls, timeout)
        if failure is not None:
            self._abort(sessions)
            if failure.code != ErrorCode.GROUP_ERROR or not errors:
                raise failure
        replies = self._commit(
            [number for number in written if failure is None], sessions, options, version, timeout, errors
        )
        if errors:
            names = [client.endpoint for client in self.clients]
            raise PartialUpdate(names, replies, errors) from (failure or errors[min(errors)])
        return [replies[number] for number in range(len(self.clients))]

    def _begin(self, specs: list[TensorSpec], component: str | None, timeout: float | None) -> list[str]:
        """A session on every engine, or on none."""
        requests = [BeginWeightUpdateReqInput(manifest=specs, component=component) for _ in self.clients]
        tickets = [
            started(client, request, BeginWeightUpdateReqOutput)
            for client, request in zip(self.clients, requests, strict=True)
        ]
        _, errors = self._gathered(tickets, requests, timeout)
        sessions = [request.id for request in requests]  # which name the sessions as well
        if errors:
            self._abort(sessions)
            raise errors[min(errors)]
        return sessions

    def _commit(
        self,
        numbers: Sequence[int],
        sessions: Sequence[str],
        options: dict[str, Any],
        version: str | None,
        timeout: float | None,
        errors: dict[int, CaesuraError],
    ) -> dict[int, WeightUpdateReqOutput]:
        """Of the engines ``numbers``; those that fail now are added to ``errors``."""
        label = options.get("weight_version")
        requests = {
            number: EndWeightUpdateReqInput(
                session_id=sessions[number], weight_version=version if label is None else label
            )
            for number in numbers
        }
        tickets = {
            number: started(self.clients[number], request, WeightUpdateReqOutput)
            for number, request in requests.items()
        }
        replies = {}
        for number, ticket in tickets.items():
            try:
                replies[number] = wait_for(ticket, requests[number].id, timeout)
            except CaesuraError as error:
                errors[number] = error
        return replies

    def _gathered(
        self, tickets: Sequence[Future[Any]], requests: Sequence[Request], timeout: float | None
    ) -> tuple[dict[int, Any], dict[int, CaesuraError]]:
        """Replies and errors, by position in the chain."""
        replies: dict[int, Any] = {}
        errors: dict[int, CaesuraError] = {}
        for number, (ticket, request) in enumerate(zip(tickets, requests, strict=True)):
            try:
                replies[number] = wait_for(ticket, request.id, timeout)
            except CaesuraError as error:
                error.add_note(f"engine at {self.clients[number].endpoint}")
                errors[number] = error
        return replies, errors

    def _abort(self, sessions: Sequence[str]) -> None:
        """End what is still open, without waiting: an engine that is gone must not hold up the others."""
        for client, session in zip(self.clients, sessions, strict=True):
            request = EndWeightUpdateReqInput(commit=False, session_id=session)
            with contextlib.suppress(CaesuraError):
                client.start(request, WeightUpdateReqOutput)


def started(client: "ControlClient", request: Request, expects: type[Message]) -> Future[Any]:
    """``client.start``, whose error is that engine's answer: what the others were sent is not forgotten for it."""
    try:
        return client.start(request, expects)
    except EngineError as error:
        future: Future[Any] = Future()
        future.set_exception(error)
        return future
