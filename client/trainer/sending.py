"""The messages of one update, whichever client sends them.

Invariants:
- Two or three messages, together at most one bucket, are in flight: one is prepared while the engine copies
  another. Memory is reused after the reply only; if no caller waits for it any more, it is left to them.
- An update that fails, is interrupted or cancelled aborts its own session and no other: it names the session
  by the id of its ``begin``, which is known before the reply.
- Tensors must not change until the update has returned or raised; later the engine reads only copies or
  aborts.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ... import io_struct as wire
from ...io_struct import CaesuraError
from ...io_struct.base import MAX_FRAME_BYTES
from ...io_struct.field_errors import one_of
from ..connection.client_options import folder_of, must_be, require_group
from ..exceptions import InvalidRequest, NoSession, WeightMismatch, is_answer
from .buckets import Bucket, NamedTensors, Sendable, as_frames, bucket_size, buckets, manifest, pairs
from .shared import SharedBucket, SharedBuckets, SharedTensors, common_cuda_device
from .sparse_updates import WeightDelta

MIN_PART_BYTES = 8 << 20
"""Size of a message below which tensors are not cut further to occupy both sides."""
_SPARSE_TRANSPORTS = ("disk", "distributed", "ipc", "tensor")
UNDER_WAY = 2
"""Number of messages of one update that wait for their answers."""
HOST_UNDER_WAY = 3
"""The same through shared memory of the host; the third one hides the time that a message takes."""


_REPLIES: dict[type[wire.ControlRequest], type[wire.Reply]] = {
    wire.BeginWeightUpdateReqInput: wire.BeginWeightUpdateReqOutput,
    wire.LoadAdapterReqInput: wire.LoadAdapterReqOutput,
}


class Ticket(Protocol):
    """A future of either kind."""

    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Call the function, which is kept alive until then, when the answer has arrived."""
        ...


@dataclass(frozen=True, slots=True)
class Sender:
    """A client's ways to send and to wait, or those of several clients at once."""

    start: Callable[[wire.ControlRequest, type[wire.Reply], Sequence[memoryview]], Any]
    """Sends a message, given its reply's type and the frames behind its header."""
    wait: Callable[[Any, wire.ControlRequest], Awaitable[Any]]
    """Waits for the reply to a message."""
    run: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Calls a function that may block."""
    timeout: float | None
    """Longest wait for a reply in seconds; None: no limit."""

    def send(self, request: wire.ControlRequest, buffers: Sequence[memoryview] = ()) -> Any:
        return self.start(request, _REPLIES.get(type(request), wire.WeightUpdateReqOutput), buffers)

    async def call(self, request: wire.ControlRequest, buffers: Sequence[memoryview] = ()) -> Any:
        return await self.wait(self.send(request, buffers), request)


async def send_tensors(
    sender: Sender,
    named_tensors: Sendable,
    options: dict[str, Any],
    *,
    bucket_bytes: int,
    shared: SharedBuckets,
) -> wire.WeightUpdateReqOutput:
    """Send one update over the socket; ``options`` are fields of ``WeightUpdateOptions``."""
    tensors, options = list(pairs(named_tensors)), with_base(named_tensors, options)
    bucket_bytes = min(bucket_size(bucket_bytes), MAX_FRAME_BYTES)
    size, total = bucket_bytes, total_bytes(tensors)
    if total > bucket_bytes:  # several messages, so that one can be sent while another is copied
        size = part_bytes(total // 4, bucket_bytes, UNDER_WAY)
    parts = list(buckets(tensors, size))
    if len(parts) == 1:
        return await _copied(sender, parts[0], options, shared)
    return await in_one_session(
        sender, tensors, options, len(parts), lambda named: _frames(sender, parts, named)
    )


async def share_tensors(
    sender: Sender,
    named_tensors: Sendable,
    options: dict[str, Any],
    *,
    bucket_bytes: int,
    shared: SharedBuckets,
) -> wire.WeightUpdateReqOutput:
    """Send one update through shared memory of at most ``bucket_bytes``, or one message for SharedTensors."""
    if isinstance(named_tensors, SharedTensors):
        return await _handed_over(sender, named_tensors, options)
    tensors, options = list(pairs(named_tensors)), with_base(named_tensors, options)
    size, total = bucket_size(bucket_bytes), total_bytes(tensors)
    device = common_cuda_device(tensor for _, tensor in tensors)
    under_way = HOST_UNDER_WAY if device is None else UNDER_WAY
    if total > MIN_PART_BYTES:
        size = part_bytes(0 if device is None else total // 8, bucket_bytes, under_way)
    parts = list(buckets(tensors, size))
    return await in_one_session(
        sender,
        tensors,
        options,
        len(parts),
        lambda named: _shared(sender, parts, named, shared, device, under_way),
    )


async def send_delta(
    sender: Sender,
    delta: WeightDelta,
    options: dict[str, Any],
    *,
    transport: str,
    folder: str | os.PathLike[str] | None,
    group: Any,
    bucket_bytes: int,
    shared: SharedBuckets,
) -> wire.WeightUpdateReqOutput:
    """Send a delta by ``transport``, or all tensors if that is faster; nothing if nothing has changed."""
    if transport not in _SPARSE_TRANSPORTS:
        raise must_be("transport", transport, one_of(_SPARSE_TRANSPORTS))
    if not delta:  # the base is compared, and the label changes
        empty: wire.WeightUpdateReqOutput = await sender.call(
            wire.UpdateWeightsFromTensorReqInput(specs=[], **options)
        )
        return empty
    tensors: Sendable = delta
    if delta.after is not None and not delta.is_small(transport) and transport != "disk":
        tensors, options = delta.after, {**options, "delta": None}
    if transport == "disk":
        if folder is None:
            raise InvalidRequest("disk needs a folder that the engine reads, too", field="folder")
        version = options.get("weight_version")
        await sender.run(lambda: delta.save(folder, weight_version=version))
        only: wire.WeightUpdateReqOutput = await sender.call(
            wire.UpdateWeightFromDiskReqInput(model_path=folder_of(folder), **options)
        )
        return only
    if transport == "distributed":
        require_group(group)
        reply: wire.WeightUpdateReqOutput = await group.carry_out(
            sender, tensors, options, bucket_bytes=bucket_bytes
        )
        return reply
    send = send_tensors if transport == "tensor" else share_tensors
    return await send(sender, tensors, options, bucket_bytes=bucket_bytes, shared=shared)


@contextlib.contextmanager
def adapter_memory(
    request: wire.LoadAdapterReqInput, named_tensors: NamedTensors, *, shared: bool
) -> Iterator[list[memoryview]]:
    """Name tensors in ``request``, and yield its frames; ``shared`` ones are in memory until the end."""
    tensors = list(pairs(named_tensors))
    parts = list(buckets(tensors, MAX_FRAME_BYTES))
    if not tensors:
        raise InvalidRequest("an adapter without tensors", field="tensors")
    if len(parts) != 1:
        raise InvalidRequest(
            f"an adapter of {total_bytes(tensors)} bytes does not fit one message: save it in a folder",
            field="tensors",
        )
    if not shared:
        request.specs, frames = as_frames(parts[0])
        yield frames
        return
    with SharedBucket(parts[0].nbytes) as memory:
        assert isinstance(memory.handle, wire.SharedMemoryHandle), "no device was named"
        request.specs, request.handle = memory.fill(parts[0]), memory.handle
        yield []


def with_base(named_tensors: Sendable, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an update, with the base of a delta unless they have one."""
    if not isinstance(named_tensors, WeightDelta) or options.get("delta") is not None:
        return options
    return {**options, "delta": named_tensors.base()}


def total_bytes(tensors: list[tuple[str, Any]]) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


def part_bytes(wanted: int, bucket_bytes: int, under_way: int) -> int:
    """Return the bytes of a message: ``wanted``, or less if more than ``bucket_bytes`` would be under way."""
    return max(min(bucket_bytes // under_way, max(wanted, MIN_PART_BYTES)), 1)


async def in_one_session(
    sender: Sender,
    tensors: list[tuple[str, Any]],
    options: dict[str, Any],
    num_calls: int,
    exchanges: Callable[[dict[str, Any]], Awaitable[wire.WeightUpdateReqOutput]],
) -> wire.WeightUpdateReqOutput:
    """Make ``num_calls`` calls by ``exchanges`` in the session of ``options``, else in one if several."""
    if not num_calls:
        raise InvalidRequest(
            "there are no tensors to send: named_tensors is empty, or a generator that was used up before",
            field="named_tensors",
        )
    if num_calls == 1 or options.get("session_id") is not None:
        return await exchanges(options)
    begin = wire.BeginWeightUpdateReqInput()
    if options.get("delta") is None:
        begin.manifest, begin.component = manifest(tensors), options.get("component")
    try:
        async with _aborting(sender, begin):
            await sender.call(begin)
    except WeightMismatch as error:  # a subset is no manifest, but fits if nothing else was wrong with it
        if error.detail.get("unexpected") or error.detail.get("mismatched"):
            raise
        begin = wire.BeginWeightUpdateReqInput()
        async with _aborting(sender, begin):
            await sender.call(begin)
    async with _aborting(sender, begin):
        await exchanges({**options, "session_id": begin.id})
        return await _commit(sender, begin, options)


async def _handed_over(
    sender: Sender, tensors: SharedTensors, options: dict[str, Any]
) -> wire.WeightUpdateReqOutput:
    """Send one message in a session: after a timeout the engine may read memory changed since."""
    begin = wire.BeginWeightUpdateReqInput()
    named = options if options.get("session_id") is not None else {**options, "session_id": begin.id}
    request = wire.UpdateWeightsFromIPCReqInput(handle=tensors.memory.handle, specs=tensors.specs, **named)
    if named is options:
        only: wire.WeightUpdateReqOutput = await sender.call(request)
        return only
    async with _aborting(sender, begin):
        opened, written = sender.send(begin), sender.send(request)
        await sender.wait(opened, begin)
        await sender.wait(written, request)
        return await _commit(sender, begin, options)


async def _commit(
    sender: Sender, begin: wire.BeginWeightUpdateReqInput, options: dict[str, Any]
) -> wire.WeightUpdateReqOutput:
    end = wire.EndWeightUpdateReqInput(session_id=begin.id, weight_version=options.get("weight_version"))
    committed: wire.WeightUpdateReqOutput = await sender.call(end)
    return committed


@contextlib.asynccontextmanager
async def _aborting(sender: Sender, begin: wire.BeginWeightUpdateReqInput) -> AsyncIterator[None]:
    """Abort the session after an error inside, whatever its state; wait only if the engine has answered."""
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        request = wire.EndWeightUpdateReqInput(commit=False, session_id=begin.id)
        try:
            ticket = sender.send(request)
            if is_answer(error):
                await sender.wait(ticket, request)
        except NoSession:  # it had ended with the error, or was never opened
            pass
        except CaesuraError as second:
            error.add_note(f"aborting the session: {second}")
        raise


async def _frames(sender: Sender, parts: list[Bucket], options: dict[str, Any]) -> wire.WeightUpdateReqOutput:
    """Send frames of the tensors' own memory; one is copied to the host only when its turn has come."""

    async def send(number: int) -> tuple[Ticket, wire.ControlRequest]:
        specs, frames = as_frames(parts[number])
        request = wire.UpdateWeightsFromTensorReqInput(specs=specs, **options)
        return sender.send(request, frames), request

    return await _some_at_a_time(sender, len(parts), send, UNDER_WAY)


async def _copied(
    sender: Sender, part: Bucket, options: dict[str, Any], shared: SharedBuckets
) -> wire.WeightUpdateReqOutput:
    """Send one message of one frame, from memory that does not change before the answer is there."""
    memory = shared.take(part.nbytes, None)
    specs: list[wire.TensorSpec] = await sender.run(lambda: memory.fill(part))
    frame: memoryview = memory.view(0, part.nbytes).numpy().data
    request = wire.UpdateWeightsFromTensorReqInput(specs=specs, **options)
    reply: wire.WeightUpdateReqOutput = await sender.call(request, [frame])
    shared.give_back(memory)
    return reply


async def _shared(
    sender: Sender,
    parts: list[Bucket],
    options: dict[str, Any],
    shared: SharedBuckets,
    device: torch.device | None,
    under_way: int,
) -> wire.WeightUpdateReqOutput:
    """Fill one slot, in host memory or on ``device``, while the engine copies another out."""
    slot = max(part.nbytes for part in parts)
    memory = shared.take(slot * min(len(parts), under_way), device)

    async def send(number: int) -> tuple[Ticket, wire.ControlRequest]:
        specs: list[wire.TensorSpec] = await sender.run(
            lambda: memory.fill(parts[number], number % under_way * slot)
        )
        request = wire.UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=specs, **options)
        return sender.send(request), request

    reply = await _some_at_a_time(sender, len(parts), send, under_way, kept=memory)
    shared.give_back(memory)
    return reply


async def _some_at_a_time(
    sender: Sender,
    count: int,
    send: Callable[[int], Awaitable[tuple[Ticket, wire.ControlRequest]]],
    under_way: int,
    kept: object = None,
) -> wire.WeightUpdateReqOutput:
    """Send messages, at most ``under_way`` unanswered; ``kept`` memory lives until the last answer."""
    pending: list[tuple[Ticket, wire.ControlRequest]] = []
    reply: wire.WeightUpdateReqOutput | None = None
    try:
        for number in range(count):
            if len(pending) == under_way:
                reply = await sender.wait(*pending[0])
                del pending[0]
            pending.append(await send(number))
        while pending:
            reply = await sender.wait(*pending[0])
            del pending[0]
    except BaseException as error:
        if is_answer(error):  # the first error counts; the others are its consequences
            for sent in pending:
                with contextlib.suppress(CaesuraError):
                    await sender.wait(*sent)
        for ticket, _ in pending:
            if not ticket.done():  # the engine has yet to read this memory, which must live until then
                ticket.add_done_callback(lambda _: kept)
        raise
    assert reply is not None
    return reply
