"""Health checks: whether the engine answers, determined within a second.

Invariants:
- There is one question to the engine at a time, shared by all who want to know; a late answer counts when it comes.
- An engine that is gone is not healthy at once. One that is silent is not healthy, unless it has work, in which case it may be
  computing a long step: then its last answer counts for :data:`BUSY_S`.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from ...io_struct import GetStatusReqOutput
from ..connection.async_client import AsyncSchedulerClient
from ..exceptions import TimedOut

NOBODY = ""
"""The owner of what the front end asks by itself, or for a supervisor or a page: it is no sign of life of a trainer."""
PROBE_S = 0.8
"""How long an answer is waited for; an engine without a step to compute answers within 0.1 s."""
BUSY_S = 10.0
"""How long a working engine may be silent: longer than a step, or than a bucket of weights."""


class EngineHealth:
    """Asks the engine of one client."""

    def __init__(self, client: AsyncSchedulerClient, has_work: Callable[[], bool]) -> None:
        """``has_work``: whether something is being generated for this front end."""
        self._client = client
        self._has_work = has_work
        self._last: GetStatusReqOutput | None = None
        self._answered_at = float("-inf")
        self._probe: asyncio.Task[GetStatusReqOutput] | None = None
        self._asked_at = 0.0

    async def check(self) -> GetStatusReqOutput:
        """The engine's status, or its last one while it works; within :data:`PROBE_S`.

        Raises:
            EngineError: it is gone, or silent without a reason.
        """
        probe = self._shared_probe()
        await asyncio.wait({probe}, timeout=PROBE_S)
        if probe.done():
            return probe.result()
        silent = monotonic() - self._answered_at
        if self._last is not None and silent < BUSY_S and self._works(self._last):
            return self._last
        raise TimedOut("the engine does not answer", id="", timeout=PROBE_S)

    async def status(self) -> GetStatusReqOutput:
        """A status of now; a working engine is waited for, one that is known to hang is not.

        Raises:
            EngineError: it is gone, or does not answer.
        """
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
