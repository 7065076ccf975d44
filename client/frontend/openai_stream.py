"""The answer to a generating request: at once, or as server-sent events.

Invariants:
- A stream's first event is made before its answer begins: what is refused at once has its HTTP status, what fails later is an
  event with OpenAI's error object. Either way the stream ends with ``[DONE]``.
- A client that leaves ends its generations.
- Nothing is queued here for a slow reader but one chunk: the tokenizer manager joins what is new.
- Every prompt is counted when it begins and when it ends, however it ends.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from litestar import Response

from ...io_struct import CaesuraError
from ..tokenizer_manager import Chunk, GenerationRequest, Sample
from .context import FrontEnd
from .exchange import HTTPRequest, events, unless_left
from .generate_answer import meta_info
from .metrics import Metrics
from .openai_common import Job, error_body, finished_fields, usage_of
from .openai_schema import Choice

DONE = b"data: [DONE]\n\n"
Merged = asyncio.Queue[tuple[int, Chunk | CaesuraError | None]]


class Form(Protocol):
    """Turns samples into choices. ``index``: the choice; ``position``: its prompt."""

    def choice(self, index: int, position: int, sample: Sample) -> Choice:
        """A finished sample."""

    def chunk(self, index: int, position: int, chunk: Chunk) -> Choice | None:
        """What is new of a sample; None where that cannot be seen, but never for its last chunk."""


async def answer(request: HTTPRequest, front: FrontEnd, job: Job, form: Form) -> Response[Any]:
    """Generate, and answer in full or as a stream.

    Raises:
        EngineError: refused, or failed before the answer began.
        ClientLeft: nobody waits for it any more.
    """
    if not job.stream:
        return await unless_left(request, _whole(front, job, form))
    frames = _frames(front, job, form)
    try:
        first = await unless_left(request, anext(frames))
    except BaseException:
        await frames.aclose()
        raise
    return events(_guarded(front, first, frames))


async def _whole(front: FrontEnd, job: Job, form: Form) -> Response[bytes]:
    counts = [_Count(front.metrics) for _ in job.requests]
    try:
        if len(job.requests) == 1:
            results = [await front.manager.generate(job.requests[0])]
        else:
            results = await front.manager.generate_batch(job.requests)
    except BaseException as error:
        for count in counts:
            count.failed(error)
        raise
    for count, samples in zip(counts, results, strict=True):
        count.finished(samples)
    flat = [sample for samples in results for sample in samples]
    label = await _label(front, flat)
    choices = [
        _finished(
            job, form.choice(job.index(position, sample.index), position, sample), position, sample, label
        )
        for position, samples in enumerate(results)
        for sample in samples
    ]
    body = job.body(choices, usage=usage_of(flat, scored=job.scored), **finished_fields(flat, label))
    return Response(body, media_type="application/json", status_code=200)


async def _guarded(
    front: FrontEnd, first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(rest):
            yield first
            async for frame in rest:
                yield frame
    except CaesuraError as error:
        front.metrics.error(error.code)
        yield _frame(msgspec.json.encode(error_body(error)))
        yield DONE


async def _frames(front: FrontEnd, job: Job, form: Form) -> AsyncGenerator[bytes, None]:
    finished: list[Sample] = []
    async with aclosing(_merged(front, job.requests)) as chunks:
        async for position, chunk in chunks:
            choice = form.chunk(job.index(position, chunk.index), position, chunk)
            if chunk.finished is not None and choice is not None:
                finished.append(chunk.finished)
                label = await _label(front, [chunk.finished])
                _finished(job, choice, position, chunk.finished, label)
                yield _frame(job.body([choice], **finished_fields([chunk.finished], label)))
            elif choice is not None:
                yield _frame(job.body([choice]))
    if job.include_usage:
        yield _frame(job.body([], usage=usage_of(finished)))
    yield DONE


async def _label(front: FrontEnd, samples: list[Sample]) -> str:
    """The engine's weight version, for samples that ended without a token of their own to say it."""
    if all(sample.output.output_ids for sample in samples):
        return ""
    return (await front.client.status()).weight_version


def _finished(job: Job, choice: Choice, position: int, sample: Sample, label: str) -> Choice:
    if job.meta_info:
        choice.meta_info = meta_info(sample, job.requests[position], label, None)
    return choice


def _frame(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _merged(
    front: FrontEnd, requests: list[GenerationRequest]
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """The chunks of all prompts as they come, with the prompt's position."""
    if len(requests) == 1:
        async with aclosing(_counted(front, requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: Merged = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_pump(front, i, request, queue)) for i, request in enumerate(requests)]
    try:
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


async def _pump(front: FrontEnd, position: int, request: GenerationRequest, queue: Merged) -> None:
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
    """One generation in the metrics, from now until it has ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self._first: float | None = None
        metrics.request_started()

    def heard(self) -> None:
        """Something was generated."""
        if self._first is None:
            self._first = time.monotonic() - self._began

    def finished(self, samples: list[Sample]) -> None:
        """All samples have ended."""
        tokens = sum(len(sample.output.output_ids) for sample in samples)
        kinds = {sample.output.finish_reason.type for sample in samples}
        self._end(tokens, next((kind for kind in ("abort", "length") if kind in kinds), "stop"))

    def failed(self, error: BaseException) -> None:
        """It was refused, it failed, or its client left."""
        self._end(0, "error" if isinstance(error, CaesuraError) else "abort")

    def _end(self, tokens: int, kind: str) -> None:
        self._metrics.request_finished(tokens, time.monotonic() - self._began, self._first, kind)
