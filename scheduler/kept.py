"""Terminal results whose client could not be reached: kept for a while, fetchable by rid.

Invariants: bounded by bytes and by age, oldest dropped first; keeping a result never delays or fails the engine.
"""

from collections import OrderedDict
from dataclasses import dataclass
from time import monotonic

from ..io_struct import GenerateReqOutput
from .backlog import result_bytes

MAX_KEPT_BYTES = 64 << 20


@dataclass(slots=True)
class _Entry:
    expires: float
    generation: bytes
    results: dict[int, GenerateReqOutput]
    nbytes: int


class KeptResults:
    """Results by rid, for ``ttl_s`` seconds after the last one came."""

    def __init__(self, ttl_s: float, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # in the order of expiry
        self._nbytes = 0

    def add(self, result: GenerateReqOutput, generation: bytes) -> None:
        """Keep ``result`` beside the other samples of its rid; ``generation`` says of which request."""
        entry = self._entries.pop(result.rid, None) or _Entry(0.0, generation, {}, 0)
        added = 0 if result.index in entry.results else result_bytes(result)
        entry.results[result.index] = result
        entry.nbytes += added
        entry.expires = monotonic() + self._ttl_s
        self._nbytes += added
        self._entries[result.rid] = entry
        self._drop_old()

    def get(self, rid: str, generation: bytes | None = None) -> list[GenerateReqOutput]:
        """What is kept under ``rid``, by sample index; only if it is of this ``generation`` where one is given."""
        self._drop_old()
        entry = self._entries.get(rid)
        if entry is None or (generation is not None and entry.generation != generation):
            return []
        return [entry.results[index] for index in sorted(entry.results)]

    def forget(self, rid: str) -> None:
        """``rid`` names a new generation from now on."""
        entry = self._entries.pop(rid, None)
        if entry is not None:
            self._nbytes -= entry.nbytes

    def _drop_old(self) -> None:
        now = monotonic()
        while self._entries:
            rid, entry = next(iter(self._entries.items()))
            if entry.expires > now and self._nbytes <= self._max_bytes:
                return
            self.forget(rid)
