"""The blocks that the device allocator keeps unused: when they go back to the system, and how many bytes each
place gave back.

- Every emptying of a running engine goes through one :class:`DeviceCache`: it is ordered after the work of
  the forward stream, logged under the name of its place, and counted.
- An operation that failed, or ran out of memory, gives unused blocks back before it is answered: a step, a
  command, a score, a component that could not leave. The caller has let go of the exception by then, since a
  traceback keeps the tensors of the frames that it passed.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from ...io_struct import EmptyCacheTotal, RankMemory
from .device_memory import EmptyCacheReport, empty_device_cache
from .device_module import DeviceModule

logger = logging.getLogger(__name__)

EmptyCachePlace = Literal[
    "start",
    "continue",
    "flush",
    "lease_expiry",
    "update",
    "release",
    "resume",
    "component",
    "idle",
    "failure",
]
"""Reason for an emptying (docs/explanation/memory.md lists them)."""

_LOGGED_AS_INFO: dict[EmptyCachePlace, str] = {
    "continue": "continue_generation",
    "flush": "flush_cache",
    "lease_expiry": "lease_expiry",
    "release": "release_memory",
}
"""Names of the places whose line operators read; the others log at DEBUG."""


class DeviceCache:
    def __init__(
        self,
        device_module: DeviceModule,
        *,
        synchronize: Callable[[], None] = lambda: None,
        elsewhere: Callable[[str], Sequence[RankMemory]] = lambda place: (),
        note_failure: Callable[[str, int], None] = lambda what, freed: None,
    ) -> None:
        """Args:
        synchronize: waits for the forward stream. A running score uses blocks until then.
        elsewhere: empties the caches of other ranks, given the place.
        note_failure: told of each emptying after a failure: what failed, and the bytes given back.
        """
        self._module = device_module
        self._synchronize = synchronize
        self._elsewhere = elsewhere
        self._note_failure = note_failure
        self._counts: dict[EmptyCachePlace, int] = {}
        self._freed: dict[EmptyCachePlace, int] = {}

    @property
    def reserved(self) -> int:
        """Bytes that the allocator holds now."""
        return self._module.memory_reserved()

    def empty(self, place: EmptyCachePlace, *, reserved_before: int | None = None) -> EmptyCacheReport:
        """Return unused blocks to the system once the forward stream is idle.

        ``reserved_before`` is an earlier reading, to count what has been given back since; by default that of
        now.
        """
        self._synchronize()
        before = self.reserved if reserved_before is None else reserved_before
        empty_device_cache(self._module)
        report = EmptyCacheReport(before, self.reserved, tuple(self._elsewhere(place)))
        self._counts[place] = self._counts.get(place, 0) + 1
        self._freed[place] = self._freed.get(place, 0) + report.freed
        name = _LOGGED_AS_INFO.get(place)
        level = logging.DEBUG if name is None else logging.INFO
        logger.log(level, "%s", report.describe(name or place))
        return report

    def after_failure(self, what: str) -> None:
        """Give back what a failed operation has left unused; never raise, as the device may be in any state.

        ``what`` names the failure, for the memory history.
        """
        try:
            freed = self.empty("failure").freed
        except RuntimeError as error:
            logger.error("the device cache could not be emptied after a failure", exc_info=error)
            freed = 0
        self._note_failure(what, freed)

    def totals(self) -> list[EmptyCacheTotal]:
        return [
            EmptyCacheTotal(place=place, count=count, freed_bytes=self._freed[place])
            for place, count in self._counts.items()
        ]
