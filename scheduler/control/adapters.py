"""LoRA adapters by name, their versions and slots.

Invariants:
- A version keeps its slot while samples are computed from it, whatever becomes of its name; without a copy on
  the host, while any have it. Samples wait until their version is in a slot, and every version gets its turn.
- KV belongs to a version: its serial number is part of the salt of its requests, so no prefix crosses a swap.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from time import perf_counter
from typing import TYPE_CHECKING

from ...io_struct import AdapterStatus, CaesuraError, ErrorCode, LoadAdapterReqInput, OnRunning
from ..execution.forward import NO_ADAPTER
from ..layers.lora import Factors
from ..scheduling.batcher import Batcher
from ..scheduling.request import Adapter, Request
from ..weights.loaded_model import LoadedModel
from ..weights.peft import sent
from .committed_weights import AdapterRecord
from .operations import SLICE_S, Wait, waiting

if TYPE_CHECKING:
    from ..runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """A version that its name does not mean yet."""

    version: Adapter
    on_running: OnRunning
    evicted: list[Adapter]
    """Versions that are unloaded for it."""


class Adapters:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.slots = engine.loaded.adapters if isinstance(engine.loaded, LoadedModel) else None
        here = 0 if self.slots is None else self.slots.count - 1
        self.most = (engine.config.max_loaded_loras or here) if here else 0
        """Maximum number of loaded adapters."""
        self.keeps_copies = self.most > here
        self.loaded: dict[str, Adapter] = {}
        self._versions: list[Adapter] = []
        """Every version: the loaded ones, and replaced ones that samples have."""
        self.lost: dict[str, str] = {}
        """Why adapters of the engine before a restart are not there, by name."""
        self._writing: set[int] = set()
        """Slots that are being written, for versions that are not there yet."""
        self._coming: deque[Adapter] = deque()
        """Versions for which samples wait, in the order in which they get slots."""
        self._bringing: Generator[Wait, None, None] | None = None
        self._wait: Wait | None = None
        """Reason why the first of these waits; None if none does."""
        self._staying: set[Adapter] = set()
        """Versions that samples are about to go on with, over their KV."""
        self._epoch = self._clock = self._serial = self._arrivals = 0

    def named(self, name: str | None) -> Adapter | None:
        """Return the adapter of a request; raises ``unknown_adapter``, or ``unsupported`` without slots."""
        if name is None:
            return None
        self.require_slots()
        if name not in self.loaded:
            loaded = sorted(self.loaded)
            reason = f"no adapter {name!r} is loaded: {', '.join(loaded) or 'none is'}"
            if name in self.lost:
                reason = f"adapter {name!r} was lost in a restart, load it again: {self.lost[name]}"
            raise CaesuraError(ErrorCode.UNKNOWN_ADAPTER, reason, adapter=name, loaded=loaded)
        return self.loaded[name]

    def give(self, adapter: Adapter, requests: Iterable[Request]) -> None:
        self._clock += 1
        adapter.last_used = self._clock
        for request in requests:
            salt = request.salt if isinstance(request.salt, str) else request.salt[1]
            if request.adapter is not None:
                request.adapter.running -= 1
            request.adapter, request.salt = adapter, (adapter.serial, salt)
            request.prompt_key = hash((request.salt, request.prompt.tobytes()))
            adapter.running += 1
        self.bring(adapter)

    def require_slots(self) -> None:
        if self.slots is None:
            reason = "this engine serves no adapters: start it with enable_lora"
            raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="enable_lora")

    def make_room(self, request: LoadAdapterReqInput) -> tuple[int | None, list[Adapter]]:
        """Return a free slot, or None to load to the host alone, and what to unload once it is loaded.

        Where replaced versions are in use and have no copies, one of these is unloaded now for its slot.
        Raises ``no_adapter_slot``.
        """
        assert self.slots is not None
        staged = {each.name for each in self._staged()} | {request.name}
        gone = {*request.evict} - {request.name}
        evicted = [each for each in self.loaded.values() if each.name in gone]
        others = [each for each in self.loaded.values() if each.name not in {*gone, request.name}]
        idle = [each for each in others if not (each.running or each.pinned or each.name in staged)]
        idle.sort(key=lambda each: each.last_used)
        limit, pinned = self.slots.count - 1, sum(each.pinned for each in others)
        excess = max(0, len(staged | {each.name for each in others}) - self.most)
        in_session = request.session_id is not None
        host_will_do = self.keeps_copies and not request.pinned and request.on_running != "keep"
        slot = None
        # One slot is never pinned, for the others to take turns in.
        fits = excess <= len(idle) and not (request.pinned and pinned >= limit)
        if fits and not (in_session and host_will_do):  # what is only staged keeps nobody waiting
            slot = self.free_slot()
        evicted += idle[:excess]
        if fits and slot is None and not (in_session or self.keeps_copies):
            unused = [each for each in (*evicted, *idle[excess:]) if not each.running]
            if unused:
                del self.loaded[unused[0].name]
                slot = self.free_slot()
                evicted += [each for each in unused[:1] if each not in evicted]
        if not fits or (slot is None and not host_will_do):
            in_use = sum(each.running > 0 for each in self._versions)
            reason = f"of {limit} adapter slots {pinned} are pinned, and requests use {in_use} versions"
            raise CaesuraError(ErrorCode.NO_ADAPTER_SLOT, reason, slots=limit, pinned=pinned, in_use=in_use)
        return slot, evicted

    def _staged(self) -> list[Adapter]:
        session = self._engine.sessions.current
        return [] if session is None else [staged.version for staged in session.adapters.values()]

    def free_slot(self) -> int | None:
        """Return a slot that no sample is computed from; a version there is on the host alone from now on."""
        assert self.slots is not None
        self.prune()
        there = {each.slot: each for each in self._versions if each.slot != NO_ADAPTER}
        taken = {*there, *self._writing, *(each.slot for each in self._staged())}
        free = [slot for slot in range(self.slots.count) if slot not in taken]
        if free:
            return free[0]
        in_use = self._slots_in_use()
        idle = [
            each
            for slot, each in there.items()
            if slot not in in_use and self._may_leave(each) and (each.makes_way or not each.running)
        ]
        if not idle:
            return None
        leaving = min(idle, key=lambda each: (each.running > 0, each.last_used))
        slot, leaving.slot, leaving.makes_way = leaving.slot, NO_ADAPTER, False
        self.bring(leaving)
        return slot

    def prune(self) -> None:
        """Forget versions that are neither loaded nor had by samples."""
        current = set(self.loaded.values())
        self._versions = [each for each in self._versions if each in current or each.running]

    def _slots_in_use(self) -> set[int]:
        assert isinstance(self._engine.batcher, Batcher), "image pipelines have no adapters"
        table = self._engine.batcher.table
        return set(table.adapter[table.live].tolist())

    def _may_leave(self, version: Adapter) -> bool:
        pinned = version.pinned and self.loaded.get(version.name) is version
        return version.copy is not None and not (pinned or version in self._staying)

    def bring(self, version: Adapter) -> None:
        """Have a version written into a slot if samples wait for that, and none is bringing it already."""
        if version.running and version.slot == NO_ADAPTER and version not in self._coming:
            self._coming.append(version)

    @property
    def wants_tick(self) -> bool:
        return self._wait is Wait.SLICE

    @property
    def waits(self) -> bool:
        return bool(self._coming)

    def advance(self) -> None:
        """Bring versions to slots, for at most :data:`SLICE_S` seconds."""
        started = perf_counter()
        while self._coming and perf_counter() - started < SLICE_S:
            if self._bringing is None:
                self._bringing = self._brought(self._coming[0])
            self._wait = None
            try:
                self._wait = next(self._bringing, None)
            finally:
                if self._wait is None:
                    self._bringing = None
                    self._coming.popleft()
            if self._wait in (Wait.THREAD, Wait.CHANGE):
                return

    def _brought(self, version: Adapter) -> Generator[Wait, None, None]:
        hindering: Adapter | None = None
        slot, is_writing = None, False
        try:
            while version.running and (slot := self.free_slot()) is None:
                if hindering is None or not hindering.makes_way:
                    hindering = self._ask_to_make_way()
                yield Wait.CHANGE
            if slot is None:
                return
            assert version.copy is not None
            is_writing = True
            yield from self.write(slot, version.copy)
            self._came_to(slot, version)
            is_writing = False
        finally:
            if hindering is not None:
                hindering.makes_way = False
            if is_writing:
                samples = [sample for sample in self._engine.live if sample.adapter is version]
                self._engine.outputs.fail(samples, f"adapter {version.name!r} could not be brought to a slot")

    @contextmanager
    def staying(self, versions: Iterable[Adapter]) -> Iterator[None]:
        self._staying.update(versions)
        try:
            yield
        finally:
            self._staying.clear()

    def _ask_to_make_way(self) -> Adapter | None:
        """Let no more samples start of the version that came to its slot first, once one of it has."""
        in_use = self._slots_in_use() - {NO_ADAPTER}
        asked = [
            each
            for each in self._versions
            if each.slot in in_use and self._may_leave(each) and not each.makes_way
        ]
        first = min(asked, key=lambda each: each.came, default=None)
        if first is not None:
            first.makes_way = True
        return first

    def write(self, slot: int, factors: Mapping[str, Factors]) -> Generator[Wait, None, None]:
        """Write factors into a slot that nobody reads, on all ranks."""
        engine = self._engine
        assert self.slots is not None
        self._writing.add(slot)
        try:
            described, frames = sent(factors) if engine.executor.workers else ([], [])
            elsewhere = engine.executor.call("write_adapter", slot, described, frames=frames)
            writing = self.slots.write(slot, factors)
            while True:
                with engine.runner.on_stream():  # after the steps that read what was in the slot
                    if next(writing, True):
                        break
                yield Wait.SLICE
            yield from waiting(elsewhere)
        finally:
            self._writing.discard(slot)

    def version(
        self,
        request: LoadAdapterReqInput,
        slot: int | None,
        rank: int,
        digests: dict[str, bytes],
        factors: Mapping[str, Factors],
    ) -> Adapter:
        """Return a new version, which is in ``slot``."""
        epoch = self._epoch + 1 if request.adapter_epoch is None else request.adapter_epoch
        self.count_from(epoch)
        self._serial += 1
        version = Adapter(
            name=request.name,
            epoch=epoch,
            serial=self._serial,
            copy=factors if self.keeps_copies else None,
            rank=rank,
            pinned=request.pinned,
            path=request.path or "",
            digests=digests,
            digest=digest_of(
                *(part for name in sorted(digests) for part in (name.encode(), digests[name]))
            ).hex(),
        )
        if slot is not None:
            self._came_to(slot, version)
        return version

    def count_from(self, epoch: int) -> None:
        self._epoch = max(self._epoch, epoch)

    def _came_to(self, slot: int, version: Adapter) -> None:
        self._arrivals += 1
        version.slot, version.came = slot, self._arrivals

    def publish(self, staged: StagedAdapter) -> Adapter | None:
        """Let the name mean the version; return the one that it meant."""
        before = self.loaded.get(staged.version.name)
        self._clock += 1
        for each in staged.evicted:
            if self.loaded.get(each.name) is each:
                del self.loaded[each.name]
        staged.version.last_used = self._clock
        self.lost.pop(staged.version.name, None)
        self.loaded[staged.version.name] = staged.version
        self._versions.append(staged.version)
        self._engine.drift.updated(staged.version.name)
        return before

    def records(
        self, staged: Sequence[StagedAdapter] = (), without: Sequence[str] = ()
    ) -> list[AdapterRecord]:
        """Return what the state file says when ``staged`` is published, and ``without`` is unloaded."""
        gone = {*without, *(version.name for each in staged for version in each.evicted)}
        loaded = {name: each for name, each in self.loaded.items() if name not in gone}
        loaded |= {each.version.name: each.version for each in staged}
        return [
            AdapterRecord(
                name=each.name, path=each.path, pinned=each.pinned, epoch=each.epoch, digest=each.digest
            )
            for each in loaded.values()
        ]

    def status(self) -> list[AdapterStatus]:
        current = set(self.loaded.values())
        return [
            AdapterStatus(
                name=each.name,
                adapter_epoch=each.epoch,
                path=each.path,
                rank=each.rank,
                pinned=each.pinned,
                running=each.running,
                resident=each.slot != NO_ADAPTER,
                replaced=each not in current,
                digest=each.digest,
            )
            for each in self._versions
            if each in current or each.running
        ]


def digest_of(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()
