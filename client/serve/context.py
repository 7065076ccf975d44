"""State that every handler uses, made once before the first request; health of the engine; admission.

Invariants: nothing here holds state of the engine. All callers share one health probe, whose late answer
counts when it comes. An engine that is gone is unhealthy at once; a silent one, too, unless it has work, when
its last answer counts for :data:`BUSY_S`. A pause that has ended elsewhere refuses no generation, since the
engine is asked.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from litestar.di import NamedDependency

from ...io_struct import CaesuraError, GetStatusReqOutput
from ..connection.async_client import AsyncSchedulerClient
from ..exceptions import Busy, EnginePaused, NotIdle, QueueFull, TimedOut
from ..text.sessions import SessionStore
from ..text.tokenizer_manager import TokenizerManager
from .bodies import UnknownKeys
from .options import ServeOptions
from .pages.document import LastImage
from .tinker.promises import TinkerClients
from .tinker.upstream_trainer import UpstreamTrainer
from .vllm.transfer import WeightTransfer
from .weight_copies import PublishedWeights

if TYPE_CHECKING:
    from ..group.replicas import ReplicaFleet
    from .generations import EventStream
    from .pages.metrics import Metrics

NOBODY = ""
"""Owner of the front end's own questions, which are no sign of life of a trainer."""
PROBE_S = 0.8
"""Seconds to wait for an answer, which takes 0.1 s without a step to compute."""
BUSY_S = 10.0
"""Seconds that a working engine may be silent: longer than a step, or than a bucket of weights."""
POLL_S = 0.02
OWNER = "http"
"""Owner token of the front end's commands: all HTTP clients count as one owner."""
MAX_KEPT, MAX_KEPT_TOKENS = 1 << 15, 1 << 23
THREADS = 4
MAX_WAITING = 256
SLICE = 32
T = TypeVar("T")


class FrontEnd:
    def __init__(
        self,
        *,
        manager: TokenizerManager,
        options: ServeOptions,
        metrics: "Metrics",
        fleet: "ReplicaFleet | None" = None,
    ) -> None:
        self.manager = manager
        self.fleet = fleet
        """Replicas behind ``client``. None means that it is one engine's."""
        self.client = manager.client
        self.options = options
        self.metrics = metrics
        self.workers = Workers()
        self.sessions = SessionStore(options.max_sessions, options.session_tokens, options.session_lease_s)
        self.responses = SessionStore(MAX_KEPT, MAX_KEPT_TOKENS, math.inf)
        """Sessions of kept answers that were given none."""
        self.last_image = LastImage()
        self.unknown_keys = UnknownKeys()
        self.health = EngineHealth(self.client, lambda: metrics.under_way > 0)
        self.admission = Admission(self.health)
        self.woken: list[EventStream] = []
        """Streams with something to send."""
        self.transfer = WeightTransfer(self.client, options.weight_transfer_backend)
        self.published = PublishedWeights(self.client)
        self.tinker = TinkerClients(self.client)
        self.trainer = UpstreamTrainer(options.tinker_trainer) if options.tinker_trainer else None

    def store_of(self, session_id: str) -> SessionStore:
        return self.responses if session_id in self.responses else self.sessions


Front = NamedDependency[FrontEnd]


class Workers:
    """At most :data:`THREADS` threads for long work; :data:`MAX_WAITING` pieces may wait for one."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="caesura-http")
        self._held = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which counts until it ends; raise QueueFull if too much waits."""
        if self._held >= THREADS + MAX_WAITING:
            raise QueueFull(f"{self._held} pieces of text work are waiting; try again later")
        self._held += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, work)
        future.add_done_callback(self._release)
        return await future

    def _release(self, _: object) -> None:
        self._held -= 1


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield ``items``, letting other tasks run after every :data:`SLICE` of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)


class EngineHealth:
    def __init__(self, client: AsyncSchedulerClient, has_work: Callable[[], bool]) -> None:
        self._client = client
        self._has_work = has_work
        self._last: GetStatusReqOutput | None = None
        self._answered_at = float("-inf")
        self._probe: asyncio.Task[GetStatusReqOutput] | None = None
        self._asked_at = 0.0

    async def check(self) -> GetStatusReqOutput:
        """Return the engine's status within :data:`PROBE_S`; its last one if it works and is silent."""
        probe = self._shared_probe()
        await asyncio.wait({probe}, timeout=PROBE_S)
        if probe.done():
            return probe.result()
        silent = monotonic() - self._answered_at
        if self._last is not None and silent < BUSY_S and self._works(self._last):
            return self._last
        raise TimedOut("the engine does not answer", id="", timeout=PROBE_S)

    async def status(self) -> GetStatusReqOutput:
        """Return a fresh status, waiting for a working engine but not for one that is known to hang."""
        asked = self._probe is not None and not self._probe.done()
        hangs = asked and monotonic() - self._asked_at > BUSY_S
        status = await self._client.status(owner=NOBODY, timeout=PROBE_S if hangs else BUSY_S)
        self._last, self._answered_at = status, monotonic()
        return status

    def _works(self, last: GetStatusReqOutput) -> bool:
        return (
            self._has_work()
            or last.running_requests + last.prefilling_requests > 0
            or last.session is not None
        )

    def _shared_probe(self) -> "asyncio.Task[GetStatusReqOutput]":
        if self._probe is None or self._probe.done():
            self._asked_at = monotonic()
            self._probe = asyncio.ensure_future(self._client.status(owner=NOBODY))
            self._probe.add_done_callback(self._on_answer)
        return self._probe

    def _on_answer(self, probe: "asyncio.Task[GetStatusReqOutput]") -> None:
        if not probe.cancelled() and probe.exception() is None:
            self._last, self._answered_at = probe.result(), monotonic()


class Admission:
    def __init__(self, health: EngineHealth) -> None:
        self._health = health
        self._pausing: object | None = None  # the call of /pause that drains the engine, or pauses it
        self._refuses = False  # as long as the engine is paused

    @property
    def pausing(self) -> bool:
        """True while a call of ``/pause`` refuses generations."""
        return self._pausing is not None

    def open(self) -> None:
        """Admit generations again: during a pause the engine queues them. End a drain in progress."""
        self._pausing, self._refuses = None, False

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Admit generations as :meth:`open` does, but not if the block, which continues the engine, fails."""
        refused = self._refuses
        self.open()
        try:
            yield
        except CaesuraError:
            self._refuses |= refused
            raise

    async def check(self) -> None:
        """Raise EnginePaused if a pause refuses new generations."""
        if self._refuses and not self.pausing:
            self._refuses = (await self._health.status()).generation != "running"
        if self.pausing or self._refuses:
            raise EnginePaused("POST /pause refuses new requests until POST /resume")

    @asynccontextmanager
    async def refusing(self, *, drain: bool) -> AsyncGenerator[None, None]:
        """Refuse generations inside the block, which pauses the engine, and then until that pause ends.

        With ``drain`` it is entered when all requests have ended; Busy if a pause or ``/resume`` comes
        meanwhile, NotIdle if the engine is paused, so that they would never end.
        """
        own = self._pausing = object()
        try:
            if drain:
                await self._drain(own)
            yield
            self._refuses = True
        finally:
            if self._pausing is own:
                self._pausing = None

    async def _drain(self, own: object) -> None:
        while True:
            status = await self._health.status()
            if not status.running_requests + status.prefilling_requests + status.waiting_requests:
                return
            if self._pausing is not own:
                raise Busy("POST /resume or another pause came before the last request had ended")
            if status.generation != "running":
                reason = "the engine is paused, so its requests would never end: call POST /resume first"
                raise NotIdle(reason)
            await asyncio.sleep(POLL_S)
