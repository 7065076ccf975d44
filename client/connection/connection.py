"""Protocol state of a client between requests and replies; no sockets, threads or clocks.

Invariants:
- Every waiter is resolved exactly once: by its reply, by an error, or by :meth:`Connection.fail_all`.
- A pending message id is registered once: a retry shares its waiter, another body is refused.
- Each token of a streaming sample is delivered once and in order. Deltas after a gap are held back: the
  terminal result carries every token, so its tail closes the gap.

Not thread-safe: the owner serialises calls, and chooses the kind of waiter (a thread's or a loop's future).
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ...io_struct import (
    BatchTokenOutput,
    ErrorReply,
    GenerateImagesReqInput,
    GenerateImagesReqOutput,
    GenerateReqInput,
    GenerateReqOutput,
    Keepalive,
    Message,
    Request,
    StreamDelta,
    UnreadReply,
    decode_reply,
    encode,
    salvage_reply,
)
from ...io_struct.base import MAX_HEADER_BYTES
from ...io_struct.codec import too_large
from ..exceptions import DuplicateRid, EngineError, IdConflict, InternalError, InvalidRequest, error_for
from .image_generation import ImageOutput, decode_images
from .results import (
    GenerateOutput,
    TokenDelta,
    decode_output,
    further_logprobs,
    known_logprobs,
    read_floats,
    read_ints,
    token_details,
)

logger = logging.getLogger(__name__)


class Waiter(Protocol):
    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


WaiterT = TypeVar("WaiterT", bound=Waiter)


class DeltaQueue(Protocol):
    """None marks the end of the stream."""

    def put_nowait(self, item: TokenDelta | None, /) -> None: ...


class Sink(Protocol):
    """Takes tokens of a generation as they come and returns soon; an exception ends only this one."""

    def on_tokens(self, delta: TokenDelta, /) -> None: ...
    def on_finished(self, output: GenerateOutput, /) -> None: ...  # after all its tokens


QueueT = TypeVar("QueueT", bound=DeltaQueue)
OutputT = TypeVar("OutputT", GenerateOutput, ImageOutput)
ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class _Call(Generic[WaiterT]):
    message_id: str
    frame: bytes
    expects: type[Message]
    waiter: WaiterT

    def fail(self, error: EngineError) -> None:
        resolve(self.waiter, error)


class _InFlight(Generic[WaiterT, OutputT]):
    """One prompt in flight: collects its ``n`` samples; the waiter gets them as a list in sample order."""

    def __init__(
        self, request: GenerateReqInput | GenerateImagesReqInput, n: object, frame: bytes, waiter: WaiterT
    ) -> None:
        self.message_id = request.id
        self.rid = request.id if request.rid is None else request.rid
        self.frame = frame
        self.waiter = waiter
        # A bad n (a string, 0) travels on: the engine refuses it with its own error.
        self.n = n if isinstance(n, int) else 1
        self._outputs: dict[int, OutputT] = {}

    def fail(self, error: EngineError) -> None:
        """End the whole request with ``error``; samples that had ended are attached to it."""
        if self._outputs:
            error.outputs = tuple(self._ordered())
        self._end(error)

    def _end_if_complete(self) -> bool:
        if len(self._outputs) < self.n:
            return False
        outputs = self._ordered()
        failed = next((each for each in outputs if each.finish_reason.type == "error"), None)
        if failed is None:
            self._end(outputs)
            return True
        reason = failed.finish_reason
        failure = error_for(reason.code or "", reason.message or "the generation failed", {"rid": self.rid})
        if isinstance(failed, GenerateOutput):
            failure.output = failed
        self.fail(failure)
        return True

    def _ordered(self) -> list[OutputT]:
        return [self._outputs[index] for index in sorted(self._outputs)]

    def _end(self, result: list[OutputT] | EngineError) -> None:
        resolve(self.waiter, result)


class Generation(_InFlight[WaiterT, GenerateOutput], Generic[WaiterT, QueueT]):
    """A generation in flight. ``deltas`` is None unless the request streams into no ``sink``."""

    def __init__(
        self,
        request: GenerateReqInput,
        frame: bytes,
        waiter: WaiterT,
        deltas: QueueT | None,
        sink: Sink | None = None,
    ) -> None:
        super().__init__(request, request.sampling_params.n, frame, waiter)
        self.deltas = deltas
        self.sink = sink
        self._delivered: dict[int, int] = {}

    def deliver(self, delta: TokenDelta) -> None:
        """Hand on what is new in a delta; one behind a gap is held back."""
        index, start = delta.index, delta.start
        end, seen = start + len(delta.output_ids), self._delivered.get(index, 0)
        if not start <= seen < end or index in self._outputs:
            return
        self._delivered[index] = end
        self._hand_on(delta if seen == start else delta.cut(seen - start))

    def complete(self, output: GenerateOutput) -> bool:
        """Take the terminal result of one sample; return True when the whole request has ended."""
        if output.index in self._outputs:
            return False
        self._outputs[output.index] = output
        delivered = self._delivered.get(output.index, 0)
        if delivered < len(output.output_ids) and (self.sink is not None or self.deltas is not None):
            self._hand_on(output.as_delta(delivered))
        if self.sink is not None:
            self._tell(self.sink.on_finished, output)
        return self._end_if_complete()

    def _hand_on(self, delta: TokenDelta) -> None:
        if self.sink is not None:
            self._tell(self.sink.on_tokens, delta)
        elif self.deltas is not None:
            self.deltas.put_nowait(delta)

    def _tell(self, listener: Callable[[ItemT], None], item: ItemT) -> None:
        """Call the sink. One that raises gets nothing more; the engine's answer is still awaited."""
        try:
            listener(item)
        except Exception as error:  # the caller's code, on the way of everybody's messages
            logger.exception("the sink of generation %s raised", self.rid)
            self.sink = None
            failure = InternalError(f"the sink of generation {self.rid!r} raised {error!r}", rid=self.rid)
            failure.__cause__ = error
            self.fail(failure)

    def _end(self, result: list[GenerateOutput] | EngineError) -> None:
        super()._end(result)
        if self.deltas is not None:
            # after the waiter: a reader that sees the end may ask for the result
            self.deltas.put_nowait(None)


class ImageGeneration(_InFlight[WaiterT, ImageOutput]):
    def complete(self, output: ImageOutput) -> bool:
        self._outputs.setdefault(output.index, output)
        return self._end_if_complete()


AnyGeneration = Generation[WaiterT, QueueT] | ImageGeneration[WaiterT]
Started = _Call[WaiterT] | Generation[WaiterT, QueueT] | ImageGeneration[WaiterT]


class Connection(Generic[WaiterT, QueueT]):
    """All that is still unanswered. When no answer can come, new requests raise the error ``failure``."""

    def __init__(self, new_waiter: Callable[[], WaiterT], new_queue: Callable[[], QueueT]) -> None:
        self.failure: EngineError | None = None
        self._new_waiter = new_waiter
        self._new_queue = new_queue
        self._pending: dict[str, Started[WaiterT, QueueT]] = {}
        self._by_rid: dict[str, AnyGeneration[WaiterT, QueueT]] = {}

    @property
    def pending(self) -> int:
        return len(self._pending)

    def start_call(self, request: Request, expects: type[Message]) -> tuple[WaiterT, bytes]:
        """Register a control message; return its waiter and frame; EngineError if gone or taken."""
        known, frame = self._known(request)
        if known is None:
            known = self._pending[request.id] = _Call(request.id, frame, expects, self._new_waiter())
        elif not isinstance(known, _Call):
            raise _conflict(request.id)
        return known.waiter, frame

    def start_generation(
        self, request: GenerateReqInput, sink: Sink | None = None
    ) -> tuple[Generation[WaiterT, QueueT], bytes]:
        """Register a generation; DuplicateRid if its rid is live. Raises like :meth:`start_call`."""
        known, frame = self._known(request)
        if known is None:
            deltas = self._new_queue() if request.stream and sink is None else None
            known = Generation(request, frame, self._new_waiter(), deltas, sink)
            self._register(known)
        elif not isinstance(known, Generation):
            raise _conflict(request.id)
        return known, frame

    def start_images(self, request: GenerateImagesReqInput) -> tuple[ImageGeneration[WaiterT], bytes]:
        known, frame = self._known(request)
        if known is None:
            known = ImageGeneration(request, request.n, frame, self._new_waiter())
            self._register(known)
        elif not isinstance(known, ImageGeneration):
            raise _conflict(request.id)
        return known, frame

    def _known(self, request: Request) -> tuple[Started[WaiterT, QueueT] | None, bytes]:
        """Return the pending message that ``request`` repeats, if there is one, and its frame."""
        frame = self._encode(request)
        known = self._pending.get(request.id)
        if known is not None and known.frame != frame:
            raise _conflict(request.id)
        return known, frame

    def _register(self, generation: AnyGeneration[WaiterT, QueueT]) -> None:
        if generation.rid in self._by_rid:
            raise DuplicateRid(f"rid {generation.rid!r} is live in this client", rid=generation.rid)
        self._pending[generation.message_id] = self._by_rid[generation.rid] = generation

    def receive(self, frames: list[bytes]) -> None:
        """Process one message from the scheduler. An unreadable one fails only the request that it names."""
        try:
            message = decode_reply(frames[0])
        except msgspec.DecodeError as broken:
            self._take_unread(salvage_reply(frames[0]), broken)
            return
        if isinstance(message, BatchTokenOutput):
            self._take_tokens(message)
            return
        if isinstance(message, GenerateImagesReqOutput):
            images = self._by_rid.get(message.rid)
            if isinstance(images, ImageGeneration):
                self._finish(images, lambda: images.complete(decode_images(message, frames[1:])))
            return
        if isinstance(message, Keepalive):
            return
        if isinstance(message, ErrorReply):
            self._take_error(message.id, error_for(message.code, message.message, message.detail))
            return
        call = self._pending.get(message.id)
        if not isinstance(call, _Call):
            logger.debug("dropped a %s for unknown message id %s", type(message).__name__, message.id)
            return
        self._forget(call)
        if isinstance(message, call.expects):
            resolve(call.waiter, message)
        else:
            expected, got = call.expects.__name__, type(message).__name__
            call.fail(InternalError(f"expected {expected}, got {got}", id=message.id))

    def awaits(self, message_id: Any) -> bool:
        """Return True if a message of that id has no final answer yet."""
        return isinstance(message_id, str) and message_id in self._pending

    def fail_all(self, error: EngineError, spare: Collection[str] = ()) -> None:
        """Fail every waiter but those of ``spare``, each with an error of its own."""
        for started in [each for each in self._pending.values() if each.message_id not in spare]:
            self._forget(started)
            started.fail(error_for(error.code, error.message, error.detail))

    def _encode(self, request: Request) -> bytes:
        if self.failure is not None:
            raise error_for(self.failure.code, self.failure.message, self.failure.detail)
        if not isinstance(request.id, str):  # the engine could not say whom its refusal is for
            raise InvalidRequest(
                f"message_id = {request.id!r} must be a string", field="id", value=request.id
            )
        try:
            frame = encode(request)
        except (TypeError, OverflowError, ValueError) as error:
            raise unencodable(request, error) from error
        if len(frame) > MAX_HEADER_BYTES:
            reason = f"request of {len(frame)} bytes is over the limit of {MAX_HEADER_BYTES}"
            raise InvalidRequest(reason, value=len(frame))
        return frame

    def _take_tokens(self, message: BatchTokenOutput) -> None:
        if message.delta is not None:
            try:
                self._take_delta(message.delta)
            except InternalError as broken:  # the terminal results carry every token
                logger.warning("dropped a stream delta: %s", broken)
        for wire in message.finished:
            self._take_result(wire)

    def _take_result(self, wire: GenerateReqOutput) -> None:
        generation = self._by_rid.get(wire.rid)
        if not isinstance(generation, Generation):
            logger.debug("dropped a result for unknown rid %s", wire.rid)
        else:
            self._finish(generation, lambda: generation.complete(decode_output(wire)))

    def _finish(self, generation: AnyGeneration[WaiterT, QueueT], complete: Callable[[], bool]) -> None:
        try:
            has_ended = complete()
        except InternalError as error:
            generation.fail(error)
            has_ended = True
        if has_ended:
            self._forget(generation)

    def _take_unread(self, reply: UnreadReply, broken: msgspec.DecodeError) -> None:
        """End only what an unreadable message, perhaps of a newer minor version, is the answer to."""
        what = reply.type or "message without a type"
        error = InternalError(f"the engine sent a {what} that this client cannot read: {broken}", type=what)
        logger.warning("%s", error.message)
        if reply.id:
            self._take_error(reply.id, error)
        for result in reply.results():
            if isinstance(result, GenerateReqOutput):
                self._take_result(result)
            elif (generation := self._by_rid.get(result)) is not None:
                generation.fail(error)
                self._forget(generation)

    def _take_delta(self, delta: StreamDelta) -> None:
        indices, starts, counts = read_ints(delta.indices), read_ints(delta.starts), read_ints(delta.counts)
        tokens, logprobs = read_ints(delta.tokens), read_floats(delta.logprobs)
        rows = len(delta.rids)
        if not rows == len(indices) == len(starts) == len(counts):
            raise InternalError("a stream delta has columns of different lengths")
        if not sum(counts) == len(tokens) == len(logprobs):
            raise InternalError(
                f"a stream delta counts {sum(counts)} tokens "
                f"but holds {len(tokens)} and {len(logprobs)} logprobs"
            )
        top, token_ids = further_logprobs(delta.top, counts), further_logprobs(delta.token_ids, counts)
        details = token_details(delta.details, counts)
        offset = 0
        columns = zip(delta.rids, indices, starts, counts, top, token_ids, details, strict=True)
        for rid, index, start, count, its_top, its_token_ids, its_details in columns:
            end = offset + count
            generation = self._by_rid.get(rid)
            if isinstance(generation, Generation):
                generation.deliver(
                    TokenDelta(
                        index=index,
                        start=start,
                        output_ids=tokens[offset:end],
                        output_logprobs=known_logprobs(logprobs[offset:end]),
                        output_top_logprobs=its_top,
                        output_token_ids_logprobs=its_token_ids,
                        details=its_details,
                    )
                )
            offset = end

    def _take_error(self, message_id: str, error: EngineError) -> None:
        started = self._pending.get(message_id)
        if started is None:
            logger.warning("an error for message id %r, which no call waits for: %s", message_id, error)
            return
        started.fail(error)
        self._forget(started)

    def _forget(self, started: Started[WaiterT, QueueT]) -> None:
        del self._pending[started.message_id]
        if not isinstance(started, _Call):
            del self._by_rid[started.rid]


def _conflict(message_id: str) -> IdConflict:
    return IdConflict(f"message id {message_id!r} is pending with another body", id=message_id)


def resolve(waiter: Waiter, result: Any) -> None:
    if waiter.done():  # cancelled by its event loop
        return
    if isinstance(result, EngineError):
        waiter.set_exception(result)
    else:
        waiter.set_result(result)


def unencodable(request: Request, error: Exception) -> InvalidRequest:
    """Return the refusal of a request that cannot be encoded; it names an integer beyond 64 bits."""
    field = too_large(request) if isinstance(error, OverflowError) else None
    place, detail = ("", {}) if field is None else (f"{field}: ", {"field": field})
    return InvalidRequest(f"{place}{type(request).__name__} cannot be encoded: {error}", **detail)
