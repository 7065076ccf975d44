"""``/generate`` and ``/abort_request``.

Invariants: an aborted sample is an ordinary answer with what it had; a client that leaves aborts its generations, streamed
or not; the samples of a stream share one bounded queue, so a slow reader holds back no memory.
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Response, post, route
from litestar.handlers import HTTPRouteHandler

from ....io_struct import CaesuraError
from ...exceptions import RETRYABLE
from ...group.router import routed_by
from ..bodies import INLINE
from ..context import Front, FrontEnd
from ..errors import engine_error, json_bytes, native_error, status_of
from ..exchange import ClientLeft, HTTPRequest, command, events, nobody, read_control, unless_left
from ..generations import asking_label, label_for, merged, whole
from ..modality import makes_tokens
from ..routing import key_of
from ..workers import SLICE, in_slices
from .control_schema import Strict
from .generate_answer import DONE, Answer, EventWriter, error_frame, token_texts
from .generate_schema import Job, decode_body, plan_job


class AbortBody(Strict, kw_only=True):
    """``/abort_request``."""

    rid: str = ""
    abort_all: bool = False
    # accepted and ignored
    abort_message: str = ""
    finished_reason: dict[str, Any] | None = None


@route(
    "/generate",
    http_method=["POST", "PUT"],
    status_code=200,
    opt={"access": "user", "body": "prompts"},
    guards=[makes_tokens],
)
async def generate(request: HTTPRequest, front: Front) -> Response[Any]:
    """One or many prompts, as one answer or as a stream of events."""
    try:
        job = await _planned(front, await request.body())
        with routed_by(key_of(job.routing_key)):
            return await (_streamed if job.stream else _whole)(request, front, job)
    except ClientLeft:
        return nobody()
    except CaesuraError as error:
        return refused(front, error)


async def _planned(front: FrontEnd, raw: bytes) -> Job:
    """What ``raw`` asks for; large bodies and batches by a worker."""
    most, detokenize = front.options.max_batch, front.manager.tokenizer is not None
    if len(raw) > INLINE:
        return await front.workers.run(
            lambda: plan_job(decode_body(raw, most), max_batch=most, detokenize=detokenize)
        )
    body = decode_body(raw, most)

    def plan() -> Job:
        return plan_job(body, max_batch=most, detokenize=detokenize)

    many = isinstance(body.text, list) and len(body.text) > SLICE
    rows = body.input_ids or []
    many |= len(rows) > SLICE and isinstance(rows[0], list)
    return await front.workers.run(plan) if many else plan()


def refused(front: FrontEnd, error: CaesuraError) -> Response[bytes]:
    """A generation that failed, in the two shapes that SGLang has for it."""
    front.metrics.error(error.code)
    status = status_of(error)
    if status == 400:
        return native_error(error.message, 400, error.code)
    return engine_error(error, status)


def _answer(front: FrontEnd, job: Job) -> Answer:
    tokenizer = front.manager.tokenizer
    texts = token_texts(front.manager, job.text_in_logprobs)
    return Answer(
        texts=texts,
        with_text=tokenizer is not None,
        prompt_token_ids=job.prompt_token_ids,
        experts_dtype=job.experts_dtype,
    )


async def _whole(request: HTTPRequest, front: FrontEnd, job: Job) -> Response[bytes]:
    found = await unless_left(request, whole(front, job.requests))
    answer = _answer(front, job)
    answer.label = await label_for(front, [sample for samples in found for sample in samples])
    pairs = ((sample, each) for samples, each in zip(found, job.requests, strict=True) for sample in samples)
    body = [msgspec.json.encode(answer.of(sample, each)) async for sample, each in in_slices(pairs)]
    return json_bytes(b"[" + b",".join(body) + b"]" if job.as_list else body[0])


async def _streamed(request: HTTPRequest, front: FrontEnd, job: Job) -> Response[Any]:
    frames = _frames(front, job)
    try:
        first = await unless_left(request, anext(frames))  # a refusal is an answer of its own, not an event
    except BaseException:
        await frames.aclose()
        raise
    return events(_all_of(front, first, frames))


async def _all_of(
    front: FrontEnd, first: bytes, frames: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(frames):
        yield first
        try:
            async for frame in frames:
                yield frame
        except CaesuraError as error:
            front.metrics.error(error.code)
            yield error_frame(error.message, status_of(error), retryable=error.code in RETRYABLE)
        yield DONE


async def _frames(front: FrontEnd, job: Job) -> AsyncGenerator[bytes, None]:
    answer = _answer(front, job)
    offsets = [0]
    for each in job.requests:
        offsets.append(offsets[-1] + each.sampling_params.n)
    writers: dict[int, EventWriter] = {}
    with asking_label(front) as label:
        async with contextlib.aclosing(merged(front, job.requests)) as chunks:
            async for prompt, chunk in chunks:
                sample = offsets[prompt] + chunk.index
                writer = writers.get(sample)
                if writer is None:
                    index = sample if job.as_list else None
                    writer = EventWriter(
                        answer, job.requests[prompt], index, front.options.incremental_streaming
                    )
                    writers[sample] = writer
                if chunk.finished is None:
                    answer.label_at_begin = await label
                else:
                    answer.label = answer.label or await label_for(front, [chunk.finished])
                yield writer.event(chunk)


@post("/abort_request", status_code=200, opt={"access": "user"})
async def abort_request(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Abort one generation by its exact rid, or all. An empty or unknown rid aborts none and is not an error."""
    body = await read_control(request, AbortBody)
    if body.rid or body.abort_all:
        work = front.client.abort(None if body.abort_all else body.rid, abort_all=body.abort_all)
        try:
            await command(front, "abort_request", work)
        except CaesuraError as error:
            return native_error(error.message, status_of(error), error.code)
    return Response(b"", media_type="text/plain")


ROUTES: list[HTTPRouteHandler] = [generate, abort_request]
