"""The generations of one HTTP call, complete or as server-sent events, and clients that disconnect.

Invariants: every prompt is counted when it begins and once when it ends; one chunk is queued for a slow
reader; closing a stream, or the client's connection, ends the generations that were not read.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.response import Stream

from ...io_struct import CaesuraError
from ..text.tokenizer_manager import Chunk, GenerationRequest, Sample
from .bodies import HTTPRequest
from .context import FrontEnd, in_slices
from .pages.metrics import Metrics

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_Queue = asyncio.Queue[tuple[int, Chunk | CaesuraError | None]]


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


async def streamed(
    request: HTTPRequest,
    front: FrontEnd,
    frames: AsyncGenerator[bytes, None],
    refusal: Callable[[CaesuraError], Any],
) -> Stream:
    """Answer with events until ``[DONE]``; a refusal before the first is the answer, later an event."""
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
                yield frame(msgspec.json.encode(refusal(error)))
            yield DONE

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return Stream(guarded(), media_type="text/event-stream", headers=headers, status_code=200)


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


async def merged(
    front: FrontEnd, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks of all prompts as they come, each with the position of its prompt."""
    await front.admission.check()
    if len(requests) == 1:
        async with aclosing(_counted(front, requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: _Queue = asyncio.Queue(maxsize=1)
    tasks: list[asyncio.Task[None]] = []
    try:
        async for position, request in in_slices(enumerate(requests)):
            tasks.append(asyncio.create_task(_pump(front, position, request, queue)))
        running = len(tasks)
        while running:
            position, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, CaesuraError):
                raise item
            else:
                yield position, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def label_for(front: FrontEnd, samples: Sequence[Sample]) -> str:
    """Return the engine's last known weight version for samples without tokens; empty if all have some."""
    if all(sample.output.output_ids for sample in samples):
        return ""
    label = await _engine_label(front)
    return "default" if label is None else label


@contextmanager
def asking_label(front: FrontEnd) -> Iterator[Awaitable[str | None]]:
    """Ask for the present weight version beside a generation; None if the engine has never answered."""
    task = asyncio.ensure_future(_engine_label(front))
    try:
        yield task
    finally:
        task.cancel()


async def _engine_label(front: FrontEnd) -> str | None:
    status = (await front.metrics.engine.look(front.client)).status
    return None if status is None else status.weight_version


async def _pump(front: FrontEnd, position: int, request: GenerationRequest, queue: _Queue) -> None:
    try:
        async with aclosing(_counted(front, request)) as chunks:
            async for chunk in chunks:
                await queue.put((position, chunk))
    except CaesuraError as error:
        await queue.put((position, error))
    else:
        await queue.put((position, None))


async def _counted(front: FrontEnd, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
    count = _Count(front.metrics)
    samples: list[Sample] = []
    try:
        async with aclosing(front.manager.stream(request)) as chunks:
            async for chunk in chunks:
                count.heard()
                if chunk.finished is not None:
                    samples.append(chunk.finished)
                yield chunk
    except BaseException as error:
        count.failed(error)
        raise
    count.finished(samples)


class _Count:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self._first: float | None = None
        metrics.request_started()

    def heard(self) -> None:
        if self._first is None:
            self._first = time.monotonic() - self._began

    def finished(self, samples: Sequence[Sample]) -> None:
        tokens = sum(len(sample.output.output_ids) for sample in samples)
        kinds = {sample.output.finish_reason.type for sample in samples}
        self._end(tokens, next((kind for kind in ("abort", "length") if kind in kinds), "stop"))

    def failed(self, error: BaseException) -> None:
        self._end(0, "error" if isinstance(error, CaesuraError) else "abort")

    def _end(self, tokens: int, kind: str) -> None:
        self._metrics.request_finished(tokens, time.monotonic() - self._began, self._first, kind)
