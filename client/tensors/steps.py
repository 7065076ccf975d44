"""The messages of one update, whichever client sends them.

An update is a generator. It yields what it wants done, and is sent what came of it, so that the blocking and the asyncio
client drive the same code:

    Send(request, buffers) -> a ticket, at once       Await(ticket) -> the reply, or the error is thrown into the generator
    Run(work)              -> what ``work()`` returns; it may block

Invariants:
- At most two buckets are under way: while the engine copies one, the next is made. A bucket's memory is not written again
  before its own reply is there.
- Tensors must not change until the update has returned.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    ControlRequest,
    EndWeightUpdateReqInput,
    ErrorCode,
    Reply,
    TensorSpec,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateReqOutput,
)
from .buckets import Bucket, NamedTensors, as_frames, buckets, manifest
from .cuda_ipc import common_cuda_device
from .shared import SharedBuckets, SharedTensors

MIN_SLOT_BYTES = 8 << 20
"""Shared memory is cut into slots so that copying in and copying out overlap, but no finer than this."""


class Ticket(Protocol):
    """A message that was sent: a future of either kind."""

    def done(self) -> bool:
        """The answer has come."""
        ...


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message and go on; the generator gets its :class:`Ticket`."""

    request: ControlRequest
    buffers: list[memoryview] = field(default_factory=list)

    @property
    def expects(self) -> type[Reply]:
        """The answer's type."""
        begins = isinstance(self.request, BeginWeightUpdateReqInput)
        return BeginWeightUpdateReqOutput if begins else WeightUpdateReqOutput


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the answer; the generator gets the reply."""

    ticket: Any
    """A :class:`Ticket` of this client."""
    request: ControlRequest


@dataclass(frozen=True, slots=True)
class Run:
    """Do something that may block; the generator gets its result."""

    work: Callable[[], Any]


Steps = Generator[Send | Await | Run, Any, WeightUpdateReqOutput]
Exchanges = Generator[Send | Await | Run, Any, None]


def call(
    request: ControlRequest, buffers: list[memoryview] | None = None
) -> Generator[Send | Await, Any, Any]:
    """Send and wait: what most messages need."""
    ticket = yield Send(request, buffers or [])
    return (yield Await(ticket, request))


def tensor_steps(
    named_tensors: NamedTensors, options: dict[str, Any], *, bucket_bytes: int, in_session: bool
) -> Steps:
    """All messages of one update over frames; ``options`` are fields of ``WeightUpdateOptions``."""
    tensors = list(named_tensors)
    requests = [
        (UpdateWeightsFromTensorReqInput(specs=specs, **options), frames)
        for specs, frames in map(as_frames, buckets(tensors, bucket_bytes))
    ]
    return (yield from in_one_session(tensors, options, len(requests), in_session, _each(iter(requests))))


def ipc_steps(
    named_tensors: NamedTensors,
    options: dict[str, Any],
    *,
    bucket_bytes: int,
    in_session: bool,
    shared: SharedBuckets,
) -> Steps:
    """All messages of one update through shared memory of at most ``bucket_bytes``, in two slots.

    :class:`SharedTensors` are in such memory already: one message hands all of them over.
    """
    if isinstance(named_tensors, SharedTensors):
        request = UpdateWeightsFromIPCReqInput(
            handle=named_tensors.memory.handle, specs=named_tensors.specs, **options
        )
        only: WeightUpdateReqOutput = yield from call(request)
        return only
    tensors = list(named_tensors)
    total = sum(tensor.nbytes for _, tensor in tensors)
    slot_bytes = (
        bucket_bytes if total <= MIN_SLOT_BYTES else min(bucket_bytes // 2, max(total // 8, MIN_SLOT_BYTES))
    )
    parts = list(buckets(tensors, max(slot_bytes, 1)))
    return (
        yield from in_one_session(tensors, options, len(parts), in_session, _shared(parts, options, shared))
    )


def in_one_session(
    tensors: list[tuple[str, Any]],
    options: dict[str, Any],
    num_calls: int,
    in_session: bool,
    exchanges: Generator[Send | Await | Run, Any, WeightUpdateReqOutput],
) -> Steps:
    """``exchanges``, which makes ``num_calls`` calls, in a session of its own where it is more than one: all or nothing."""
    if not num_calls:
        raise CaesuraError(ErrorCode.INVALID_REQUEST, "there are no tensors to send", field="named_tensors")
    if num_calls == 1 or in_session:
        return (yield from exchanges)
    yield from call(BeginWeightUpdateReqInput(manifest=manifest(tensors)))
    try:
        yield from exchanges
    except Exception as error:
        try:
            yield from call(EndWeightUpdateReqInput(commit=False))
        except CaesuraError as second:
            error.add_note(f"aborting the session: {second}")
        raise
    final: WeightUpdateReqOutput = yield from call(
        EndWeightUpdateReqInput(weight_version=options.get("weight_version"))
    )
    return final


def _each(messages: Iterator[tuple[ControlRequest, list[memoryview]]]) -> Steps:
    """One after the other: the answer is the credit for the next."""
    reply: WeightUpdateReqOutput | None = None
    for request, buffers in messages:
        reply = yield from call(request, buffers)
    assert reply is not None
    return reply


def _shared(parts: list[Bucket], options: dict[str, Any], shared: SharedBuckets) -> Steps:
    """Fill one slot while the engine copies the other out; on the device where all tensors are on one."""
    slot = max(part.nbytes for part in parts)
    device = common_cuda_device(piece.rows for part in parts for piece in part.pieces)
    memory = shared.get(slot * min(len(parts), 2), device)
    pending: list[tuple[Ticket, ControlRequest]] = []
    reply: WeightUpdateReqOutput | None = None
    try:
        for number, part in enumerate(parts):
            if len(pending) == 2:
                reply = yield Await(*pending.pop(0))
            specs: list[TensorSpec] = yield Run(lambda part=part, at=number % 2 * slot: memory.fill(part, at))  # type: ignore[misc]
            request = UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=specs, **options)
            pending.append(((yield Send(request)), request))
        while pending:
            reply = yield Await(*pending.pop(0))
    except Exception:
        for sent in pending:  # the first error tells; the others are its consequences
            with contextlib.suppress(CaesuraError):
                yield Await(*sent)
        raise
    assert reply is not None
    return reply
