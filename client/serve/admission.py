"""Admission of generations while vLLM's ``/pause`` drains the engine, and during pauses that refuse new ones.

Invariant: a pause that has ended elsewhere (its lease, a client of the socket) refuses nothing, since the
engine is asked.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..exceptions import Busy, EnginePaused, NotIdle
from .health import EngineHealth

POLL_S = 0.02
"""Seconds between two looks at an engine that drains."""


class Admission:
    """Refuses generations from the beginning of a pause in mode ``abort`` or ``wait`` to its end."""

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

    async def check(self) -> None:
        """Check that a generation may begin.

        Raises:
            EnginePaused: not now.
        """
        if self._refuses and not self.pausing:
            self._refuses = (await self._health.status()).generation != "running"
        if self.pausing or self._refuses:
            raise EnginePaused("POST /pause refuses new requests until POST /resume")

    @asynccontextmanager
    async def refusing(self, *, drain: bool) -> AsyncGenerator[None, None]:
        """Refuse generations inside the block, which pauses the engine, and then until that pause ends.

        Args:
            drain: wait until every request has ended before the block is entered.

        Raises:
            Busy: ``/resume`` or another pause came during the drain.
            NotIdle: the engine is paused, so its requests would never end.
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
                raise NotIdle(
                    "the engine is paused, so its requests would never end: call POST /resume first"
                )
            await asyncio.sleep(POLL_S)
