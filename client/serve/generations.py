"""The generations of one HTTP call, complete or streamed.

Invariants: every prompt is counted when it begins and once when it ends; one chunk is queued for a slow
reader, as the tokenizer manager joins what is new; closing a stream ends the generations that were not read.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from ...io_struct import CaesuraError
from ..text.tokenizer_manager import Chunk, GenerationRequest, Sample
from .context import FrontEnd, in_slices
from .pages.metrics import Metrics

_Queue = asyncio.Queue[tuple[int, Chunk | CaesuraError | None]]


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
    """One generation in the metrics, from now to its end."""

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
