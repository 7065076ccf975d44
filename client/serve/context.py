"""State that every handler uses, made once before the first request; it holds no state of the engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from litestar.di import NamedDependency

from ..exceptions import QueueFull
from ..text.tokenizer_manager import TokenizerManager
from .bodies import UnknownKeys
from .health import Admission, EngineHealth
from .options import ServeOptions
from .pages.document import LastImage

if TYPE_CHECKING:
    from ..group.replicas import ReplicaFleet
    from .pages.metrics import Metrics

OWNER = "http"
"""Owner token of the front end's commands: all HTTP clients count as one owner."""
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
        metrics.engine.fleet = fleet
        self.workers = Workers()
        self.last_image = LastImage()
        self.unknown_keys = UnknownKeys()
        self.health = EngineHealth(self.client, lambda: metrics.under_way > 0)
        self.admission = Admission(self.health)


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
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
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
