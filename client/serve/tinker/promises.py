"""Sessions of Tinker's clients, their samplers, and the promises that they have of results.

Invariants: all ends with its session, which ends after :data:`SESSION_S` seconds without a heartbeat. A
sampler of an adapter has one version of it, or follows its trainer; it never has another adapter. A result
stays after it was retrieved, for a client whose connection broke, until :data:`MAX_RETRIEVED` others were.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from litestar import Response

from ....io_struct import GetStatusReqOutput
from ...connection.async_client import AsyncSchedulerClient
from ...exceptions import QueueFull, UnknownAdapter

SESSION_S = 300.0
MAX_PROMISES = 1 << 16
MAX_RETRIEVED = 256


class TinkerError(Exception):
    """An error as Tinker's futures have it, in the words of who raised it."""

    def __init__(self, message: str, category: str = "server") -> None:
        super().__init__(message)
        self.category = category


class GoneError(Exception):
    """There will be no result: the client should make its request anew."""


@dataclass(eq=False, slots=True)
class Session:
    id: str
    ends: asyncio.TimerHandle
    samplers: set[str] = field(default_factory=set)
    promises: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The weights that a sampling client has."""

    id: str
    session: Session
    path: str | None = None
    """``tinker://`` path that it was made of; None for the model itself."""
    adapter: str | None = None
    version: tuple[int, str] | None = None
    """Epoch and digest of the adapter, which an engine that is restarted loads under the same epoch. None: it
    follows what is there."""
    clones: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of the clients in other processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    id: str
    session: Session
    task: "asyncio.Task[Any]"
    answer: Callable[[Any, bool], Awaitable[Response[bytes]]]
    """Makes the response of the task's result, in protobuf if that is wanted."""
    samples: int = 0


class TinkerClients:
    def __init__(
        self,
        client: AsyncSchedulerClient,
        *,
        session_s: float = SESSION_S,
        max_promises: int = MAX_PROMISES,
        max_retrieved: int = MAX_RETRIEVED,
    ) -> None:
        self._session_s, self._max_promises, self._max_retrieved = session_s, max_promises, max_retrieved
        self.sessions: dict[str, Session] = {}
        self.samplers: dict[str, Sampler] = {}
        self.promises: dict[str, Promise] = {}
        self._retrieved: dict[str, None] = {}
        self._client = client
        self._asking: asyncio.Task[GetStatusReqOutput] | None = None
        self._next: asyncio.Task[GetStatusReqOutput] | None = None

    def begin(self, name: str) -> Session:
        """Return the session ``name``, alive from now on."""
        session = self.sessions.get(name)
        ends = asyncio.get_running_loop().call_later(self._session_s, self.end, name)
        if session is None:
            session = self.sessions[name] = Session(name, ends)
        else:
            session.ends.cancel()
            session.ends = ends
        return session

    def end(self, name: str) -> None:
        """Forget a session, and abort what is generated for it."""
        session = self.sessions.pop(name, None)
        if session is not None:
            session.ends.cancel()
            for each in session.samplers:
                del self.samplers[each]
            for each in list(session.promises):
                self.drop(each)

    def add(self, sampler: Sampler) -> Sampler:
        self.samplers[sampler.id] = sampler
        sampler.session.samplers.add(sampler.id)
        return sampler

    def promise(
        self,
        name: str,
        session: Session,
        work: Coroutine[Any, Any, Any],
        answer: Callable[[Any, bool], Awaitable[Response[bytes]]],
        *,
        samples: int = 0,
    ) -> Promise:
        """Start ``work``; raise QueueFull if too many results have not been retrieved."""
        if len(self.promises) >= self._max_promises:
            work.close()
            raise QueueFull(f"{len(self.promises)} results have not been retrieved; retrieve them first")
        task = asyncio.ensure_future(work)
        task.add_done_callback(_seen)
        promise = Promise(id=name, session=session, task=task, answer=answer, samples=samples)
        self.promises[name] = promise
        session.promises.add(name)
        return promise

    def drop(self, name: str) -> None:
        """Forget a promise, and abort what is generated for it."""
        promise = self.promises.pop(name, None)
        self._retrieved.pop(name, None)
        if promise is not None:
            promise.session.promises.discard(name)
            promise.task.cancel()

    def retrieved(self, promise: Promise) -> None:
        """Note that the result was sent; it, or an older one, will be forgotten."""
        if promise.id in self.promises:
            self._retrieved[promise.id] = None
            if len(self._retrieved) > self._max_retrieved:
                self.drop(next(iter(self._retrieved)))

    async def admitted(self, promise: Promise, sampler: Sampler) -> None:
        """Return when the engine has taken the request; raise its refusal, or that the version is gone.

        The engine answers in order: a status that was asked for after the request follows a refusal of it,
        and has the version of the adapter that the request was given, or a newer one.
        """
        asked = self.status()
        await asyncio.wait({promise.task, asked}, return_when=asyncio.FIRST_COMPLETED)
        if promise.task.done():
            if not promise.task.cancelled():  # by the client, in the meantime
                promise.task.result()
        elif sampler.version is not None:
            found = version_of(await asked, sampler.adapter)
            if found != sampler.version:
                raise other_version(sampler, found and found[0])

    def status(self) -> "asyncio.Task[GetStatusReqOutput]":
        """Return the answer to a question that is not asked yet; many callers share one."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._ask(self._asking))
            self._next.add_done_callback(_seen)
        return self._next

    async def _ask(self, before: "asyncio.Task[GetStatusReqOutput] | None") -> GetStatusReqOutput:
        if before is not None:
            await asyncio.wait([before])
        self._asking, self._next = self._next, None
        return await self._client.status(owner="")


def _seen(task: "asyncio.Task[Any]") -> None:
    """Have no failure logged as unnoticed: whoever asks for the result gets it."""
    if not task.cancelled():
        task.exception()


def version_of(status: GetStatusReqOutput, adapter: str | None) -> tuple[int, str] | None:
    """Return the version that requests for an adapter get; None if it is not loaded."""
    for each in status.adapters:
        if each.name == adapter and not each.replaced:
            return each.adapter_epoch, each.digest
    return None


def other_version(sampler: Sampler, epoch: int | None) -> UnknownAdapter:
    """Return the error of a version of the adapter that is not the sampler's; None: it is not loaded."""
    assert sampler.version is not None
    now = "is not loaded any more" if epoch is None else f"has adapter_epoch {epoch} now"
    return UnknownAdapter(
        f"{sampler.path} was adapter_epoch {sampler.version[0]} of {sampler.adapter!r}, which {now}: "
        "create a new sampling client",
        adapter=sampler.adapter,
        adapter_epoch=sampler.version[0],
    )
