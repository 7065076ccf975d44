"""LoRA adapters by name: loaded beside running requests, swapped between two steps.

Invariants:
- A load changes nothing until its last byte is in a free slot, or on the host; then, or when its session
  commits, the name means the new version, for later requests. A load that fails leaves no trace, and never
  poisons the weights.
- The state file names a version before its name means it, so a restart has no older one.
- A version keeps its slot while samples are computed from it, whatever becomes of its name; without a copy on
  the host, while any have it. Samples wait until their version is in a slot, and every version gets its turn.
- KV belongs to a version: its serial number is part of the salt of its requests, so no prefix crosses a swap.
"""

import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from math import prod
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import torch
from msgspec.json import encode
from torch import Tensor

from ...io_struct import (
    AdapterStatus,
    CaesuraError,
    ErrorCode,
    LoadAdapterReqInput,
    LoadAdapterReqOutput,
    OnRunning,
    UnloadAdapterReqInput,
    UnloadAdapterReqOutput,
    UpdateWeightsFromDistributedReqInput,
)
from ...transfer.shared_memory import map_memory
from ..execution.forward import NO_ADAPTER
from ..layers.embedding import TIED
from ..layers.lora import Factors
from ..memory.storage import bytes_of
from ..runtime.dtypes import DTYPES
from ..scheduling.batcher import Batcher
from ..scheduling.request import Adapter, Request
from ..weights.loaded_model import LoadedModel
from ..weights.peft import (
    AdapterConfig,
    AdapterPlan,
    change_norm,
    parse_config,
    plan_adapter,
    read_config,
    sent,
)
from ..weights.source import BufferSource, WeightSource
from ..weights.transports.disk import open_checkpoint
from ..weights.transports.distributed import DistributedSource
from .committed_weights import AdapterRecord
from .engine_state import Sender
from .operations import SLICE_S, Operation, Wait, barrier, waiting

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

_ROWS = 4096
"""Rows of a weight that are compared at a time."""


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
        """What the first of these waits for."""
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
        """Let versions keep their slots."""
        self._staying.update(versions)
        try:
            yield
        finally:
            self._staying.clear()

    def _ask_to_make_way(self) -> Adapter | None:
        """Let no more samples start of the version that came to its slot first, once one of it has."""
        in_use = self._slots_in_use()
        asked = [each for each in self._versions if each.slot in in_use and self._may_leave(each)]
        asked = [each for each in asked if each.slot != NO_ADAPTER and not each.makes_way]
        if not asked:
            return None
        first = min(asked, key=lambda each: each.came)
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
            digest=_digest(
                *(part for name in sorted(digests) for part in (name.encode(), digests[name]))
            ).hex(),
        )
        if slot is not None:
            self._came_to(slot, version)
        return version

    def count_from(self, epoch: int) -> None:
        """Count later versions from above ``epoch``."""
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


def load_adapter(
    engine: "Engine", request: LoadAdapterReqInput, sender: Sender, buffers: Sequence[memoryview] = ()
) -> Operation:
    """Check, read and stage an adapter while serving, then let its name mean it unless a session does."""
    staged, reply = yield from _staged(engine, request, buffers)
    if request.session_id is None:
        reply.switched = yield from publish(engine, [staged])
    else:
        session = engine.sessions.named(request.session_id)
        session.adapters[request.name] = staged
        session.counts.written_tensors += reply.tensors
    return reply


def restore(engine: "Engine") -> None:
    """Load the adapters of the state file again; log those that are lost, which errors of requests name."""
    adapters, records = engine.adapters, engine.weights_file.adapters
    adapters.count_from(max((each.epoch for each in records), default=0))
    for each in records:
        try:
            staged = _again(engine, each)
            adapters.publish(staged)
            lost = {version.name: f"only {adapters.most} are kept" for version in staged.evicted}
        except CaesuraError as error:
            lost = {each.name: error.message}
        for name, reason in lost.items():
            adapters.lost[name] = reason
            logger.error("adapter %r of before the restart is lost: %s", name, reason)
    engine.weights_file.keep_adapters(adapters.records())


def _again(engine: "Engine", record: AdapterRecord) -> StagedAdapter:
    if not record.path:
        reason = "its tensors were sent, which leaves no copy"
        raise CaesuraError(ErrorCode.CHECKPOINT_ERROR, reason, path="", reason=reason)
    request = LoadAdapterReqInput(
        name=record.name, path=record.path, pinned=record.pinned, adapter_epoch=record.epoch
    )
    loading = _staged(engine, request)
    while True:
        try:
            if next(loading) is Wait.THREAD:
                sleep(0.001)
        except StopIteration as end:
            staged: StagedAdapter = end.value[0]
            break
    if staged.version.digest != record.digest:
        reason = f"{record.path} has other tensors now than were loaded from it"
        raise CaesuraError(ErrorCode.CHECKPOINT_ERROR, reason, path=record.path, reason=reason)
    return staged


def _staged(
    engine: "Engine", request: LoadAdapterReqInput, buffers: Sequence[memoryview] = ()
) -> Generator[Wait, None, tuple[StagedAdapter, LoadAdapterReqOutput]]:
    """Check and read an adapter, and write it into a slot that no step reads."""
    try:
        plan, tensors = yield from _read(engine, request, buffers)
    except BaseException as error:
        if request.group_name is not None:
            engine.updates.end_group(error, request.group_name)
        raise
    if request.expected_checksums is not None:
        yield from _require_checksums(tensors, request.expected_checksums)
    adapters, slots, model = engine.adapters, engine.adapters.slots, engine.loaded
    assert slots is not None and isinstance(model, LoadedModel)
    copies = {module: tensors.pop(name) for name, module in plan.copies.items()}
    yield from _require_base(engine, model, copies)
    factors = plan.values(tensors)
    norm: float = yield from waiting(change_norm(factors.values()), Wait.SLICE)
    scales = {b: str(scale).encode() for _, b, scale in plan.factors.values()}
    digests: dict[str, bytes] = {}
    for name, tensor in tensors.items():
        digests[name] = _digest(bytes_of(tensor), scales.get(name, b""))
        yield Wait.SLICE
    slot, evicted = adapters.make_room(request)
    if slot is not None:
        yield from adapters.write(slot, factors)
    before = adapters.loaded.get(request.name)
    known = {} if before is None else before.digests
    version = adapters.version(request, slot, plan.rank, digests, factors)
    reply = LoadAdapterReqOutput(
        id=request.id,
        adapter_epoch=version.epoch,
        tensors=len(tensors),
        changed_tensors=sum(known.get(name) != digests.get(name) for name in known.keys() | digests.keys()),
        norm=norm,
        rank=version.rank,
        evicted=[each.name for each in evicted],
        digest=version.digest,
    )
    return StagedAdapter(version, request.on_running, evicted), reply


def _read(
    engine: "Engine", request: LoadAdapterReqInput, buffers: Sequence[memoryview]
) -> Generator[Wait, None, tuple[AdapterPlan, dict[str, Tensor]]]:
    """Check an adapter against the model, then read its tensors."""
    adapters, model = engine.adapters, engine.loaded
    adapters.require_slots()
    slots = adapters.slots
    assert slots is not None and isinstance(model, LoadedModel)
    if request.name in adapters.loaded and not request.replace:
        reason = f"adapter {request.name!r} is loaded: replace it, or unload it first"
        raise CaesuraError(ErrorCode.ADAPTER_EXISTS, reason, adapter=request.name)
    if request.session_id is not None:
        engine.sessions.named(request.session_id)
    source, config = _source(engine, request, buffers)
    plan = plan_adapter(
        config, source.specs, slots.shapes(), model.model.own_name, slots.max_rank, slots.experts
    )
    tensors: dict[str, Tensor] = {}
    elsewhere = None
    if isinstance(source, DistributedSource):
        elsewhere = engine.executor.call("drain", source.request)
    with closing(source.pieces(engine.config.load_bucket_bytes, lambda name: False)) as pieces:
        for piece in pieces:
            if piece is None:
                yield Wait.THREAD
                continue
            whole = tensors.setdefault(piece.name, torch.empty(piece.shape, dtype=piece.dtype))
            with engine.runner.on_stream():  # after the broadcast that brings it
                whole[piece.start_row : piece.start_row + len(piece.rows)] = piece.rows
            yield Wait.SLICE
    if elsewhere is not None:
        yield from waiting(elsewhere)
    return plan, tensors


def _require_checksums(
    tensors: Mapping[str, Tensor], expected: Mapping[str, str]
) -> Generator[Wait, None, None]:
    problems = [f"{name} has not come" for name in expected.keys() - tensors.keys()]
    problems += [f"{name} is not among them" for name in tensors.keys() - expected.keys()]
    for name in tensors.keys() & expected.keys():
        if sha256(bytes_of(tensors[name])).hexdigest() != expected[name].lower():
            problems.append(f"{name} has another")
        yield Wait.SLICE
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        reason = f"the adapter does not have the expected checksums: {'; '.join(sorted(problems)[:8])}{more}"
        raise CaesuraError(ErrorCode.WEIGHT_MISMATCH, reason, problems=sorted(problems)[:64])


def publish(engine: "Engine", given: Sequence[StagedAdapter]) -> Generator[Wait, None, int]:
    """Let the names mean the staged versions, all at once; return how many samples went on with them."""
    engine.weights_file.keep_adapters(engine.adapters.records(given))
    replaced = [(staged, engine.adapters.publish(staged)) for staged in given]
    switched = 0
    with engine.adapters.staying([each.version for each in given if each.on_running == "keep"]):
        for staged, before in replaced:
            if before is not None and staged.on_running != "finish_old":
                keep = staged.on_running == "keep"
                switched += yield from _switch(engine, before, staged.version, keep=keep)
    return switched


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _source(
    engine: "Engine", request: LoadAdapterReqInput, buffers: Sequence[memoryview]
) -> tuple[WeightSource, AdapterConfig]:
    """Return an adapter's tensors and config; raises ``invalid_request`` unless it has one source."""
    from_group = request.group_name is not None
    if sum([request.path is not None, bool(buffers), request.handle is not None, from_group]) != 1:
        reason = "an adapter comes from a path, from frames, from a handle or a group: give one of them"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="path", value=request.path)
    if request.path is not None:
        return open_checkpoint(request.path, ("adapter_model",)), read_config(request.path)
    if request.config is None:
        reason = "tensors of an adapter need its config: the content of adapter_config.json"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="config", value=None)
    if len({spec.name for spec in request.specs}) < len(request.specs):
        reason = "two tensors have the same name"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="specs", value=len(request.specs))
    config = parse_config(encode(request.config), "config")
    if request.group_name is not None:
        described = UpdateWeightsFromDistributedReqInput(specs=request.specs, group_name=request.group_name)
        return engine.process_groups.open(described), config
    for spec in request.specs:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None or spec.nbytes != prod(spec.shape) * dtype.itemsize:
            reason = f"tensor {spec.name!r} has {spec.nbytes} bytes for {spec.dtype} {spec.shape}"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="specs", value=spec.name)
    memory = buffers if request.handle is None else [memoryview(map_memory(request.handle))]
    return BufferSource("adapter", request.specs, memory), config


def _require_base(
    engine: "Engine", model: LoadedModel, given: dict[str, Tensor]
) -> Generator[Wait, None, None]:
    """Raise ``weight_mismatch`` if a module's weight is not the base's, as far as this rank holds it."""
    if not given:
        return
    engine.state.require_resident("weights")
    held = model.model.weight_slots()
    for module, weight in given.items():
        slot = held.get(f"{module}.weight") or held[TIED]
        for start in range(0, len(weight), _ROWS):
            if slot.differs(weight[start : start + _ROWS], start):
                reason = f"the adapter brings a weight of {module} that is not the base's"
                raise CaesuraError(ErrorCode.WEIGHT_MISMATCH, reason, problems=[module])
            yield Wait.SLICE


def _switch(engine: "Engine", before: Adapter, version: Adapter, *, keep: bool) -> Generator[Wait, None, int]:
    """Give the samples of ``before`` the new version, between two steps; return how many there were."""
    closes = engine.state.weights == "valid"
    if closes:
        engine.state.start_writing()
    try:
        yield from barrier(engine)
        assert isinstance(engine.batcher, Batcher), "image pipelines have no adapters"
        engine.batcher.change_adapter(before, version.slot if keep else None)
        samples = [sample for sample in engine.live if sample.adapter is before]
        engine.adapters.give(version, samples)
    finally:
        if closes:
            engine.state.stop_writing()
    return len(samples)


def unload_adapter(engine: "Engine", request: UnloadAdapterReqInput, sender: Sender) -> Operation:
    engine.adapters.named(request.name)
    engine.weights_file.keep_adapters(engine.adapters.records(without=[request.name]))
    version = engine.adapters.loaded.pop(request.name)
    engine.adapters.prune()
    yield from ()  # an operation is a generator
    return UnloadAdapterReqOutput(id=request.id, running=version.running)
