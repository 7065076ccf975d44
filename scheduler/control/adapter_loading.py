"""Loading of adapters: check, read, stage, and let a name mean the new version.

Invariants:
- A load changes nothing until its last byte is in a free slot, or on the host; then, or when its session
  commits, the name means the new version, for later requests. A load that fails leaves no trace, and never
  poisons the weights.
- The state file names a version before its name means it, so a restart has no older one.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from math import prod
from time import sleep
from typing import TYPE_CHECKING

import torch
from msgspec.json import encode
from torch import Tensor

from ...io_struct import (
    CaesuraError,
    ErrorCode,
    LoadAdapterReqInput,
    LoadAdapterReqOutput,
    UnloadAdapterReqInput,
    UnloadAdapterReqOutput,
    UpdateWeightsFromDistributedReqInput,
)
from ...transfer.shared_memory import map_memory
from ..layers.embedding import TIED
from ..memory.storage import bytes_of
from ..runtime.dtypes import DTYPES
from ..scheduling.batcher import Batcher
from ..scheduling.request import Adapter
from ..weights.loaded_model import LoadedModel
from ..weights.peft import (
    AdapterConfig,
    AdapterPlan,
    change_norm,
    parse_config,
    plan_adapter,
    read_config,
)
from ..weights.source import BufferSource, WeightSource
from ..weights.transports.disk import open_checkpoint
from ..weights.transports.distributed import DistributedSource
from .adapters import StagedAdapter, digest_of
from .committed_weights import AdapterRecord
from .engine_state import Sender
from .operations import Operation, Wait, barrier, waiting

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

_ROWS = 4096
"""Rows of a weight that are compared at a time."""


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
        engine.state.require_resident("weights")  # and the slots with them
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
        digests[name] = digest_of(bytes_of(tensor), scales.get(name, b""))
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
