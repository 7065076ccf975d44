"""Sends the response of a generating request: at once, or as server-sent events.

Invariants:
- A stream's first event is made before its answer begins: what is refused at once has its HTTP status, what fails later is an
  event with OpenAI's error object. Either way the stream ends with ``[DONE]``.
- A client that leaves ends its generations.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from litestar import Response

from ....io_struct import CaesuraError
from ...text.tokenizer_manager import Chunk, Sample
from ..context import FrontEnd
from ..exchange import HTTPRequest, events, unless_left
from ..generations import label_for, merged, whole
from ..sglang.generate_answer import DONE, meta_info
from ..workers import in_slices
from .common import Job, error_body, finished_fields, usage_of
from .schema import Choice


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
    results = await whole(front, job.requests)
    flat = [sample for samples in results for sample in samples]
    label = await label_for(front, flat)
    pairs = ((position, sample) for position, samples in enumerate(results) for sample in samples)
    choices = [
        _finished(
            job, form.choice(job.index(position, sample.index), position, sample), position, sample, label
        )
        async for position, sample in in_slices(pairs)
    ]
    body = job.body(
        choices,
        usage=usage_of(flat, scored=job.scored),
        **finished_fields(flat, label, with_spans=job.meta_info),
    )
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
    async with aclosing(merged(front, job.requests)) as chunks:
        async for position, chunk in chunks:
            choice = form.chunk(job.index(position, chunk.index), position, chunk)
            if chunk.finished is not None and choice is not None:
                finished.append(chunk.finished)
                label = await label_for(front, [chunk.finished])
                _finished(job, choice, position, chunk.finished, label)
                yield _frame(
                    job.body([choice], **finished_fields([chunk.finished], label, with_spans=job.meta_info))
                )
            elif choice is not None:
                yield _frame(job.body([choice]))
    if job.include_usage:
        yield _frame(job.body([], usage=usage_of(finished)))
    yield DONE


def _finished(job: Job, choice: Choice, position: int, sample: Sample, label: str) -> Choice:
    choice.weight_versions = sample.output.weight_versions
    if job.meta_info:
        choice.meta_info = meta_info(sample, job.requests[position], label, None)
    return choice


def _frame(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
