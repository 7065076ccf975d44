"""The memory history: a record of memory readings and their causes, of a fixed size that is allocated at
start.

Readings have no side effect and are taken at commands, at failures and every few seconds. Older events are
summarised by period. Readings of steady memory are one event; a drift beyond :data:`STEADY_BYTES`, however
slow, starts another.
"""

from collections.abc import Callable
from time import monotonic, time
from typing import Any, NamedTuple, get_args

import numpy as np

from ... import io_struct as wire
from ..memory.device_memory import DeviceMemoryReading
from ..memory.device_module import DeviceModule
from ..memory.residency import ComponentResidencyManager

EVENTS = 4096
STRETCHES = 256
SAMPLE_S = 5.0
STEADY_BYTES = 1 << 20
DETAIL_BYTES = 96

_TAGS = wire.MemoryByTag.__struct_fields__
_CAUSES: tuple[wire.MemoryCause, ...] = get_args(wire.MemoryCause)
_AWAITED: tuple[wire.MemoryCause, ...] = ("pause", "continue", "lease_expiry")
"""Causes whose reading generation waits for: microseconds, unless the cache was emptied."""
_NONE = int(np.iinfo(np.int64).min)
_Read = tuple[DeviceMemoryReading, wire.MemoryByTag]
_EVENT = np.dtype(
    [
        *((name, "i8") for name in ("seq", "step", "epoch", "reserved", "allocated", "returned", "residual")),
        *((name, "i8") for name in _TAGS),
        *((name, "f8") for name in ("at", "until")),
        ("cause", "i8"),
        ("detail", f"S{DETAIL_BYTES}"),
    ]
)
_STRETCH = np.dtype(
    [("start", "f8"), ("end", "f8")]
    + [(name, "i8") for name in wire.MemoryStretch.__struct_fields__ if name not in ("start", "end")]
)


class OwnBytes(NamedTuple):
    derived: int = 0
    graphs: int = 0
    answers: int = 0


class MemoryGauges:
    """Reads the memory by tag; made before large allocations, what is in use then is ``runtime``."""

    def __init__(
        self,
        device_module: DeviceModule,
        residency: ComponentResidencyManager,
        own: "Callable[[], OwnBytes]" = lambda: OwnBytes(),
    ) -> None:
        self._module = device_module
        self._residency = residency
        self._own = own
        self._before = DeviceMemoryReading.of(device_module)
        self._occupied = (0, 0, 0)

    def __call__(self, thorough: bool = True) -> _Read:
        """Return reserved and allocated bytes, and the reserved ones by tag.

        With ``thorough`` False, components count as in the last thorough reading: on the CPU the kernel walks
        all pages of a mapping, up to a millisecond per gigabyte. Pages touched since count as ``other``.
        """
        reading, own = DeviceMemoryReading.of(self._module), self._own()
        if thorough:
            memory = self._residency
            self._occupied = (
                memory.occupied_bytes("weights"),
                memory.occupied_bytes("kv_cache"),
                memory.registered_bytes,
            )
        weights, kv_cache, reference = self._occupied
        derived = min(own.derived, weights)
        # Mappings on the CPU are reserved, but nothing that the allocator has handed out.
        components = sum(self._occupied) if self._residency.in_allocator else 0
        sizes = {
            "weights": weights - derived,
            "derived": derived,
            "kv": kv_cache,
            "reference": reference,
            "graphs": own.graphs,
            "answers": own.answers,
            "runtime": self._before.reserved,
            "workspace": reading.allocated - self._before.allocated - components - own.answers,
        }
        rest = reading.reserved
        for name, nbytes in sizes.items():  # readings at different times may add up to more than the total
            sizes[name] = max(0, min(nbytes, rest))
            rest -= sizes[name]
        return reading, wire.MemoryByTag(**sizes, other=rest)

    def describe(self) -> str:
        reading = DeviceMemoryReading.of(self._module)
        return f"reserved {reading.reserved / 2**20:.1f} MiB, allocated {reading.allocated / 2**20:.1f} MiB"


class MemoryHistory:
    def __init__(
        self,
        read: Callable[[bool], _Read],
        where: Callable[[], tuple[int, int]] = lambda: (0, 0),
        *,
        events: int = EVENTS,
        stretches: int = STRETCHES,
    ) -> None:
        """``read`` reads the memory, thoroughly or not; ``where`` returns step and epoch."""
        self._where = where
        self._read = read
        self._ring = np.zeros(events, _EVENT)
        # Fresh zeros are not resident yet: writing commits the pages now, so that the size stays fixed.
        self._ring.view("u1").fill(0)
        self._seq = 0
        self._older = _Stretches(stretches)
        self._next_sample = 0.0
        self._steady_at = 0
        self._paused_at: int | None = None
        # The wall clock may be set while the engine runs; events stay in order.
        self._epoch = time() - monotonic()

    def note(self, cause: wire.MemoryCause, detail: str = "", *, returned: int | None = None) -> None:
        now = monotonic()
        thorough = cause not in _AWAITED or returned is not None
        read = self._read(thorough)
        if thorough:
            self._next_sample = now + SAMPLE_S
        residual, reserved = _NONE, read[0].reserved
        if cause == "pause" and self._paused_at is None:
            self._paused_at = reserved
        elif cause in ("continue", "lease_expiry") and self._paused_at is not None:
            residual, self._paused_at = reserved - self._paused_at, None
        self._append(now, read, cause, detail, _NONE if returned is None else returned, residual)

    def sample(self) -> None:
        now = monotonic()
        if now < self._next_sample:
            return
        self._next_sample = now + SAMPLE_S
        read = self._read(True)
        last = self._ring[(self._seq - 1) % len(self._ring)]
        steady = self._seq and last["cause"] == _CAUSES.index("sample")
        if steady and abs(read[0].reserved - self._steady_at) <= STEADY_BYTES:
            self._write(last, now, read)
            return
        self._steady_at = read[0].reserved
        self._append(now, read, "sample", "")

    @property
    def by_tag(self) -> wire.MemoryByTag | None:
        last = self._ring[(self._seq - 1) % len(self._ring)]
        return wire.MemoryByTag(**{tag: int(last[tag]) for tag in _TAGS}) if self._seq else None

    def answer(self, request: wire.GetMemoryHistoryReqInput) -> wire.GetMemoryHistoryReqOutput:
        events, more = self.events(request.after, request.limit)
        older = self.older(request.after)
        return wire.GetMemoryHistoryReqOutput(id=request.id, events=events, more=more, older=older)

    def events(self, after: int, limit: int) -> tuple[list[wire.MemoryEvent], bool]:
        """Return at most ``limit`` events after number ``after``, and whether there are more."""
        if after >= self._seq:
            return [], False
        first = max(after + 1, self._oldest)
        last = min(self._seq, first + limit - 1)
        rows = self._ring[np.arange(first - 1, last) % len(self._ring)]
        return [_event(row) for row in rows.tolist()], last < self._seq

    def older(self, after: int) -> list[wire.MemoryStretch]:
        return self._older.list() if after < self._oldest - 1 else []

    @property
    def _oldest(self) -> int:
        return max(1, self._seq - len(self._ring) + 1)

    def _append(
        self,
        now: float,
        read: _Read,
        cause: wire.MemoryCause,
        detail: str,
        returned: int = _NONE,
        residual: int = _NONE,
    ) -> None:
        row = self._ring[self._seq % len(self._ring)]
        self._seq += 1
        if row["seq"]:
            self._older.add(row)
        row["seq"], row["at"], row["cause"] = self._seq, self._epoch + now, _CAUSES.index(cause)
        encoded = detail.encode("utf-8", "backslashreplace")[:DETAIL_BYTES]
        row["detail"] = encoded.decode("utf-8", "ignore").encode()  # not within a character
        row["returned"], row["residual"] = returned, residual
        self._write(row, now, read)

    def _write(self, row: np.void, now: float, read: _Read) -> None:
        reading, tags = read
        row["until"] = self._epoch + now
        row["step"], row["epoch"] = self._where()
        row["reserved"], row["allocated"] = reading.reserved, reading.allocated
        for tag in _TAGS:
            row[tag] = getattr(tags, tag)


class _Stretches:
    def __init__(self, count: int) -> None:
        self._table = np.zeros(count, _STRETCH)
        self._used = 0
        self._per = 1

    def add(self, event: np.void) -> None:
        reserved, returned = event["reserved"], max(event["returned"], 0)
        pauses = int(event["cause"] == _CAUSES.index("pause"))
        fresh = (event["at"], event["until"], 1, reserved, reserved, reserved, pauses, returned)
        one = np.array([fresh], _STRETCH)
        if self._used and self._table[self._used - 1]["events"] < self._per:
            self._table[self._used - 1] = _merged(self._table[self._used - 1 : self._used], one)[0]
            return
        if self._used == len(self._table):
            self._used //= 2
            self._table[: self._used] = _merged(self._table[0::2], self._table[1::2])
            self._per *= 2
        self._table[self._used] = one[0]
        self._used += 1

    def list(self) -> list[wire.MemoryStretch]:
        names = _STRETCH.names or ()
        rows = self._table[: self._used].tolist()
        return [wire.MemoryStretch(**dict(zip(names, row, strict=True))) for row in rows]


def _merged(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    result = first.copy()
    for name in ("end", "reserved_last"):
        result[name] = second[name]
    for name in ("events", "pauses", "returned"):
        result[name] += second[name]
    result["reserved_min"] = np.minimum(first["reserved_min"], second["reserved_min"])
    result["reserved_max"] = np.maximum(first["reserved_max"], second["reserved_max"])
    return result


def _event(row: tuple[Any, ...]) -> wire.MemoryEvent:
    seq, step, epoch, reserved, allocated, returned, residual, *tags, at, until, cause, detail = row
    return wire.MemoryEvent(
        seq=seq,
        at=at,
        until=until,
        cause=_CAUSES[cause],
        detail=detail.decode(),
        step=step,
        weights_epoch=epoch,
        reserved=reserved,
        allocated=allocated,
        by_tag=wire.MemoryByTag(**dict(zip(_TAGS, tags, strict=True))),
        returned=None if returned == _NONE else returned,
        residual=None if residual == _NONE else residual,
    )
