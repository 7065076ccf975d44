"""The generations of one HTTP call, complete or as server-sent events, and clients that disconnect.

Invariants: every prompt is counted when it begins and once when it ends. Each message of the engine makes
an event at once, without a task, unless the reader is slow: then one is queued, and what comes meanwhile is
joined to the next. Closing a stream, or the client's connection, ends the generations that were not read.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from litestar import Response
from litestar.response import Stream

from ...io_struct import CaesuraError
from ..text.tokenizer_manager import Chunk, Flow, GenerationRequest, Sample
from .bodies import HTTPRequest
from .context import SLICE, FrontEnd, in_slices
from .pages.metrics import Metrics
from .server import CONNECTION, BoundedProtocol

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):  # noqa: N818  nothing went wrong here
    """The client closed its connection before it was answered."""


async def unless_left(request: HTTPRequest, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; if the client disconnects, cancel it and raise ClientLeft."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_departure(request))
    watcher.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if watcher.done() and not watcher.cancelled() and not (current and current.cancelling()):
            raise ClientLeft from None
        raise
    finally:
        watcher.cancel()


async def _departure(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_left() -> Response[bytes]:
    return Response(b"", status_code=499, media_type="text/plain")


def frame(encoded: bytes) -> bytes:
    return b"data: %b\n\n" % encoded


class Events(Protocol):
    """Makes the events of a stream; one that has nothing to show is empty."""

    async def begin(self) -> None:
        """Prepare for the first event, while the engine works on it."""

    def event(self, position: int, chunk: Chunk, label: str) -> bytes:
        """Return the event of a chunk of the prompt at ``position``; ``label`` as of :func:`label_for`."""

    def end(self) -> bytes:
        """Return what follows the last chunk."""


async def streamed(
    request: HTTPRequest,
    front: FrontEnd,
    requests: Sequence[GenerationRequest],
    events: Events,
    refusal: Callable[[CaesuraError], bytes],
    done: bytes = DONE,
) -> Stream:
    """Answer with events until ``done``; a refusal before the first is the answer, later an event."""
    extension: Any = (request.scope.get("extensions") or {}).get(CONNECTION, {})
    frames = EventStream(front, requests, events, extension.get("protocol")).frames()
    try:
        first = await unless_left(request, anext(frames))
    except BaseException:
        await frames.aclose()
        raise

    async def guarded() -> AsyncGenerator[bytes, None]:
        async with aclosing(frames):
            yield first
            try:
                async for each in frames:
                    yield each
            except CaesuraError as error:
                front.metrics.error(error.code)
                yield refusal(error)
            if done:
                yield done

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return Stream(guarded(), media_type="text/event-stream", headers=headers, status_code=200)


class EventStream:
    """The events of one call, of which the task that reads :meth:`frames` sends some.

    These are the first, with which the response begins, those that end a sample, which may have to ask the
    engine, and what a slow reader waits for. Between them :func:`serve` writes the others.
    """

    def __init__(
        self,
        front: FrontEnd,
        requests: Sequence[GenerationRequest],
        events: Events,
        connection: BoundedProtocol | None,
    ) -> None:
        self._front = front
        self._requests = requests
        self._events = events
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self._prompts: list[_Prompt] = []
        self._running = 0
        self._unread: dict[int, None] = {}
        self._finished: list[tuple[int, Chunk]] = []
        """Chunks that were read and are the task's to send."""
        self._failure: Exception | None = None
        self._serves = False
        self._changed = asyncio.Event()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the events that :func:`serve` does not write. If closed early, abort."""
        begun = False
        try:
            await self._start()
            await self._events.begin()
            while self._running:
                self._serves = begun
                await self._changed.wait()
                self._serves = False
                self._changed.clear()
                finished, self._finished = self._finished, []
                for position, chunk in chain(finished, self._read()):
                    label = "" if chunk.finished is None else await label_for(self._front, [chunk.finished])
                    if event := self._events.event(position, chunk, label):
                        yield event
                        begun = True
            if last := self._events.end():
                yield last
        finally:
            for prompt in self._prompts:
                prompt.close()

    def take(self) -> bytes:
        """Return the events of the engine's last messages, which must be written now, or wake the task."""
        if not self._serves or self.connection is None or not self.connection.writable:
            self._changed.set()
            return b""
        events = []
        try:
            for position, chunk in self._read():
                if chunk.finished is None:
                    events.append(self._events.event(position, chunk, ""))
                else:
                    self._finished.append((position, chunk))
        except Exception as error:  # noqa: BLE001  the task raises it
            self._failure = error
        if self._finished or self._failure is not None:
            self._changed.set()
        return b"".join(events)

    async def _start(self) -> None:
        await self._front.admission.check()
        self._running = len(self._requests)
        self._prompts = [_Prompt(self._front, request) for request in self._requests]
        try:
            async with asyncio.TaskGroup() as starting:
                async for position, prompt in in_slices(enumerate(self._prompts)):
                    starting.create_task(prompt.start(partial(self._wake, position)))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _wake(self, position: int) -> None:
        if not self._unread:
            woken = self._front.woken
            if not woken:  # once, after all messages that are there
                self._loop.call_soon(serve, woken)
            woken.append(self)
        self._unread[position] = None

    def _read(self) -> Iterator[tuple[int, Chunk]]:
        while self._unread:
            position = next(iter(self._unread))
            del self._unread[position]
            prompt = self._prompts[position]
            while (chunk := prompt.next_chunk()) is not None:
                yield position, chunk
            self._running -= prompt.ends()
        if self._failure is not None:
            raise self._failure


def serve(woken: list[EventStream]) -> None:
    """Write what is new in all streams that were woken, or wake their tasks."""
    streams = woken.copy()
    woken.clear()
    for at in range(0, len(streams), SLICE):  # writes together: the kernel's code and ours share a cache
        for connection, data in [(each.connection, each.take()) for each in streams[at : at + SLICE]]:
            if connection is not None and data:
                connection.write_chunk(data)


class _Prompt:
    """One prompt of a stream, counted when it begins and once when it ends."""

    def __init__(self, front: FrontEnd, request: GenerationRequest) -> None:
        self._manager = front.manager
        self._request = request
        self._interval = front.options.stream_interval
        self._count = _Count(front.metrics)
        self._samples: list[Sample] = []
        self._flow: Flow | None = None
        self._ended = False

    async def start(self, wake: Callable[[], None]) -> None:
        try:
            self._flow = await self._manager.follow(self._request, wake, self._interval)
        except BaseException as error:
            self.close(error)
            raise

    def next_chunk(self) -> Chunk | None:
        chunk = None if self._flow is None else self._flow.next_chunk()
        if chunk is not None:
            if self._count.first is None:
                self._count.heard()
            if chunk.finished is not None:
                self._samples.append(chunk.finished)
        return chunk

    def ends(self) -> bool:
        """Return True the first time that nothing more will come; raise the error of the generation."""
        if self._ended or self._flow is None or not self._flow.generation.waiter.done():
            return False
        try:
            self._ended = self._flow.ended()
        except CaesuraError as error:
            self.close(error)
            raise
        self._count.finished(self._samples)
        return True

    def close(self, error: BaseException | None = None) -> None:
        """Abort and count it, unless it has ended."""
        if not self._ended:
            self._ended = True
            self._count.failed(error)
            if self._flow is not None:
                self._flow.close()


async def whole(front: FrontEnd, requests: Sequence[GenerationRequest]) -> list[list[Sample]]:
    """Return all samples of each prompt; if one is refused or fails, the others are aborted."""
    await front.admission.check()
    counts = [_Count(front.metrics) for _ in requests]
    try:
        if len(requests) == 1:
            results = [await front.manager.generate(requests[0])]
        else:
            results = await front.manager.generate_batch(requests)
    except BaseException as error:
        for count in counts:
            count.failed(error)
        raise
    for count, samples in zip(counts, results, strict=True):
        count.finished(samples)
    return results


async def label_for(front: FrontEnd, samples: Sequence[Sample]) -> str:
    """Return the engine's last known weight version for samples without tokens; empty if all have some."""
    if all(sample.output.output_ids for sample in samples):
        return ""
    label = await engine_label(front)
    return "default" if label is None else label


async def engine_label(front: FrontEnd) -> str | None:
    """Return the engine's present weight version, or None if it has never answered."""
    status = (await front.metrics.engine.look(front.client)).status
    return None if status is None else status.weight_version


class _Count:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self.first: float | None = None
        """Seconds to the first token."""
        metrics.request_started()

    def heard(self) -> None:
        self.first = time.monotonic() - self._began

    def finished(self, samples: Sequence[Sample]) -> None:
        tokens = sum(len(sample.output.output_ids) for sample in samples)
        kinds = {sample.output.finish_reason.type for sample in samples}
        self._end(tokens, next((kind for kind in ("abort", "length") if kind in kinds), "stop"))

    def failed(self, error: BaseException | None) -> None:
        self._end(0, "error" if isinstance(error, CaesuraError) else "abort")

    def _end(self, tokens: int, kind: str) -> None:
        self._metrics.request_finished(tokens, time.monotonic() - self._began, self.first, kind)
