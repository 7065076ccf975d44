"""Commands on the process groups over which weights are broadcast: join, leave, and send committed weights.

- Each rank of the engine is in a group that it receives from. Where the engine is rank 0, it sends, and is
  there by its own rank 0 alone, which asks the other ranks for their parts.
- Joining waits for other processes while other work goes on. A group that could not be joined is removed.
- All bytes of a send are of one commit: while it is under way, commands that write or release weights keep
  their place in the queue (:meth:`WeightSending.holds_back`), and everything else runs.
- A send that fails ends its group, so that no receiver waits for what does not come.
"""

import contextlib
import logging
from collections.abc import Generator
from math import prod
from time import monotonic
from typing import TYPE_CHECKING

from torch import Tensor

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ..layers.parameters import WeightSlot
from ..runtime.dtypes import NAMES
from ..weights.mismatches import Mismatches
from ..weights.reading import Held, is_divided, read_into, require_placeable
from ..weights.source import chosen
from ..weights.transports.broadcasts import Batch, batches_of, nbytes_of
from ..weights.transports.distributed import LEAVE_S
from .engine_state import Sender
from .operations import Operation, Wait, waiting

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


def init_group(engine: "Engine", request: wire.InitWeightsUpdateGroupReqInput, sender: Sender) -> Operation:
    group = engine.process_groups.join(request)
    elsewhere = engine.executor.call("join_group", request) if request.rank_offset else None
    try:
        while not group.joined():
            yield Wait.CHANGE
        if elsewhere is not None:
            yield from waiting(elsewhere, Wait.CHANGE)
    except CaesuraError:
        engine.process_groups.forget(group)
        engine.executor.call("leave_group", request.group_name, None)
        raise
    except BaseException:
        engine.process_groups.forget(group)
        raise
    finally:
        if elsewhere is not None:
            elsewhere.close()  # its failure keeps this frame, and would keep what the other ranks answer
    member = group.membership
    logger.info(
        "joined weight update group %r at %s as rank %d of %d (%s)",
        member.group_name, member.address, member.rank, member.world_size, member.backend,
    )  # fmt: skip
    return wire.InitWeightsUpdateGroupReqOutput(id=request.id, rank=member.rank, world_size=member.world_size)


def destroy_group(
    engine: "Engine", request: wire.DestroyWeightsUpdateGroupReqInput, sender: Sender
) -> Operation:
    """Leave a process group; an init or update that waits in it fails, as it may wait for ever."""
    with contextlib.suppress(CaesuraError):  # there is none: said in its turn
        group = engine.process_groups.find(request.group_name)
        if group.has_joined and group.membership.rank != 0:  # what this engine sends goes on
            group.kill("the group was destroyed")
    return _left(engine, request)


def _left(engine: "Engine", request: wire.DestroyWeightsUpdateGroupReqInput) -> Operation:
    group, limit = engine.process_groups.leave(request.group_name), monotonic() + LEAVE_S
    elsewhere = engine.executor.call("leave_group", request.group_name, None)
    while group.is_leaving and monotonic() < limit:
        yield Wait.CHANGE
    yield from waiting(elsewhere, Wait.CHANGE)
    return wire.DestroyWeightsUpdateGroupReqOutput(id=request.id)


class WeightSending:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._under_way = 0

    def holds_back(self, message: wire.ControlRequest) -> bool:
        """Return True if ``message`` may change or release weights that are being sent."""
        if not self._under_way:
            return False
        if isinstance(message, wire.WeightsCheckerReqInput):
            return message.action == "reset_tensors"
        if isinstance(message, wire.ReleaseMemoryOccupationReqInput):
            return message.tags is None or "weights" in message.tags
        return isinstance(message, wire.WeightUpdateOptions | wire.EndWeightUpdateReqInput)

    def manifest(self, request: wire.GetWeightsManifestReqInput) -> wire.GetWeightsManifestReqOutput:
        """Return all tensors of a component as they are stored, under their names in its checkpoint."""
        stamp = self._engine.state.stamp
        return wire.GetWeightsManifestReqOutput(
            id=request.id,
            tensors=[_stored(name, slot) for name, slot in self._slots(request.component).items()],
            weights_epoch=stamp.epoch,
            weight_version=stamp.version,
        )

    def send(self, request: wire.SendWeightsReqInput) -> Operation:
        try:
            return (yield from self._send(request))
        except BaseException as error:
            self._engine.process_groups.out_of_step(request.group_name, f"sending weights failed: {error}")
            raise

    def _send(self, request: wire.SendWeightsReqInput) -> Operation:
        engine = self._engine
        self._require_committed()
        slots = self._slots(request.component)
        batches = batches_of(request)
        _require_stored(batches, slots)
        if engine.executor.workers:
            require_placeable(slots[spec.name] for batch in batches for spec in batch)
        total, started, stamp = sum(map(nbytes_of, batches)), monotonic(), engine.state.stamp
        group = engine.process_groups.find(request.group_name)
        transmission = group.transmit(max(map(nbytes_of, batches), default=0))
        self._under_way += 1
        try:
            for batch in batches:
                while (buffer := transmission.room()) is None:
                    yield Wait.CHANGE
                    group.joined()  # not any more where it has been destroyed
                yield from self._fill(buffer, batch, slots)
                group.joined()  # nor is there a thread that would send
                transmission.send(nbytes_of(batch))
            while not transmission.is_over():
                yield Wait.CHANGE
                group.joined()
        finally:
            self._under_way -= 1
            transmission.close()
        seconds = monotonic() - started
        logger.info(
            "sent weights: %d tensors, %.1f MiB, epoch %d, version %r, over group %r, %.1f ms",
            len(request.specs), total / 2**20, stamp.epoch, stamp.version, request.group_name, 1e3 * seconds,
        )  # fmt: skip
        return wire.SendWeightsReqOutput(
            id=request.id,
            weights_epoch=stamp.epoch,
            weight_version=stamp.version,
            sent_tensors=len(request.specs),
            sent_bytes=total,
            seconds=seconds,
        )

    def _fill(
        self, buffer: Tensor, batch: Batch, slots: dict[str, WeightSlot]
    ) -> Generator[Wait, None, None]:
        engine = self._engine
        self._require_committed()
        divided = [spec for spec in batch if is_divided(slots[spec.name])]
        names = [spec.name for spec in divided]
        elsewhere = engine.executor.call("read", names, reply=list[Held]) if divided else None
        whole = [spec for spec in batch if not is_divided(slots[spec.name])]
        for _ in read_into(buffer, whole, slots, engine.runner.on_stream):
            yield Wait.SLICE
        if elsewhere is None:
            return
        for spec in divided:
            with engine.runner.on_stream():
                Held.of(slots[spec.name]).place(buffer, spec)
            yield Wait.SLICE
        of_ranks: list[list[Held]] = yield from waiting(elsewhere)
        for parts in of_ranks:
            for spec, part in zip(divided, parts, strict=True):
                with engine.runner.on_stream():
                    part.place(buffer, spec)
                yield Wait.SLICE

    def _slots(self, named: str | None) -> dict[str, WeightSlot]:
        """Return those of one component, by the names of its checkpoint."""
        engine = self._engine
        component, slots = chosen(engine.model.components, named), engine.model.weight_slots()
        if component is None:
            return slots
        prefix = f"{component}."
        return {name.removeprefix(prefix): slot for name, slot in slots.items() if name.startswith(prefix)}

    def _require_committed(self) -> None:
        engine = self._engine
        engine.state.require_resident("weights")
        engine.state.require_serviceable("cannot send weights")
        if engine.state.weights != "valid":
            reason = "cannot send weights: an update has written some of them, and has not committed"
            raise CaesuraError(
                ErrorCode.SESSION_OPEN, reason, kind="explicit" if engine.sessions.is_explicit else "implicit"
            )


def _require_stored(batches: list[Batch], slots: dict[str, WeightSlot]) -> None:
    """Raise ``weight_mismatch`` unless each tensor is stored as it is described, and named once."""
    found, seen = Mismatches(slots), set[str]()
    for spec in (spec for batch in batches for spec in batch):
        slot = slots.get(spec.name)
        if slot is None:
            found.add_unexpected(spec.name, spec.shape)
            continue
        if tuple(spec.shape) != slot.shape:
            found.add(spec.name, expected_shape=list(slot.shape), got_shape=list(spec.shape))
        if spec.dtype != NAMES[slot.dtype]:
            found.add(spec.name, expected_dtype=NAMES[slot.dtype], got_dtype=spec.dtype)
        if spec.name in seen:
            found.add(spec.name, reason="named twice")
        seen.add(spec.name)
    found.raise_if_any(given=seen)


def _stored(name: str, slot: WeightSlot) -> wire.StoredTensor:
    nbytes = prod(slot.shape) * slot.dtype.itemsize
    return wire.StoredTensor(name=name, dtype=NAMES[slot.dtype], shape=list(slot.shape), nbytes=nbytes)
