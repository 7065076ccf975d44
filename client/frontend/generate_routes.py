"""``/generate`` and ``/abort_request``.

Invariants: an aborted sample is an ordinary answer with what it had; a client that leaves aborts its generations, streamed
or not; the samples of a stream share one bounded queue, so a slow reader holds back no memory.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self

import msgspec
from litestar import Response, post, route
from litestar.handlers import HTTPRouteHandler

from ...io_struct import CaesuraError
from ..tokenizer_manager import Chunk, Sample
from .context import Front, FrontEnd
from .errors import error_object, json_response, native_error, status_of
from .exchange import ClientLeft, HTTPRequest, command, events, nobody, read_control, unless_left
from .generate_answer import DONE, Answer, EventWriter, error_frame, token_texts
from .generate_schema import Job, decode_body, plan_job


class AbortBody(msgspec.Struct, kw_only=True):
    """``/abort_request``."""

    rid: str = ""
    abort_all: bool = False


@route("/generate", http_method=["POST", "PUT"], status_code=200, opt={"access": "user"})
async def generate(request: HTTPRequest, front: Front) -> Response[Any]:
    """One or many prompts, as one answer or as a stream of events."""
    try:
        job = plan_job(
            decode_body(await request.body()),
            max_batch=front.options.max_batch,
            detokenize=front.manager.tokenizer is not None,
        )
        return await (_streamed if job.stream else _whole)(request, front, job)
    except ClientLeft:
        return nobody()
    except CaesuraError as error:
        return refused(front, error)


def refused(front: FrontEnd, error: CaesuraError) -> Response[bytes]:
    """A generation that failed, in the two shapes that SGLang has for it."""
    front.metrics.error(error.code)
    status = status_of(error)
    if status == 400:
        return native_error(error.message, 400, error.code)
    return json_response(error_object(error.message, status), status)


def _answer(front: FrontEnd, job: Job) -> Answer:
    tokenizer = front.manager.tokenizer
    texts = token_texts(front.manager, job.text_in_logprobs)
    return Answer(texts=texts, with_text=tokenizer is not None, prompt_token_ids=job.prompt_token_ids)


async def _whole(request: HTTPRequest, front: FrontEnd, job: Job) -> Response[bytes]:
    requests = job.requests
    with _Counted(front, len(requests)) as counted:
        if len(requests) == 1:
            found = [await unless_left(request, front.manager.generate(requests[0]))]
        else:
            found = await unless_left(request, front.manager.generate_batch(requests))
        counted.finished(found)
    answer = _answer(front, job)
    if any(not sample.output.output_ids for samples in found for sample in samples):
        answer.label = await _label(front)
    body = [
        answer.of(sample, each) for samples, each in zip(found, requests, strict=True) for sample in samples
    ]
    return json_response(body if job.as_list else body[0])


async def _label(front: FrontEnd) -> str:
    """The engine's weight version, for samples without a token; the last one known where the engine has gone meanwhile."""
    status = (await front.metrics.engine.look(front.client)).status
    return "default" if status is None else status.weight_version


class _Counted:
    """Tells the metrics of the generations of one call, however they end."""

    def __init__(self, front: FrontEnd, count: int) -> None:
        self._metrics = front.metrics
        self._left = count
        self._began = time.monotonic()
        self._first: float | None = None

    def __enter__(self) -> Self:
        for _ in range(self._left):
            self._metrics.request_started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = kind is not None and issubclass(kind, (ClientLeft, asyncio.CancelledError, GeneratorExit))
        for _ in range(self._left):
            self._end(0, "abort" if left or kind is None else "error")

    def token(self) -> None:
        """The first one has come, if it has not before."""
        if self._first is None:
            self._first = time.monotonic() - self._began

    def finished(self, found: list[list[Sample]]) -> None:
        """All samples of some prompts have ended."""
        for samples in found:
            self._left -= 1
            tokens = sum(len(sample.output.output_ids) for sample in samples)
            self._end(tokens, samples[-1].output.finish_reason.type)

    def _end(self, tokens: int, kind: str) -> None:
        self._metrics.request_finished(tokens, time.monotonic() - self._began, self._first, kind)


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
            yield error_frame(error.message, status_of(error))
        yield DONE


async def _frames(front: FrontEnd, job: Job) -> AsyncGenerator[bytes, None]:
    answer = _answer(front, job)
    offsets = [0]
    for each in job.requests:
        offsets.append(offsets[-1] + each.sampling_params.n)
    writers: dict[int, EventWriter] = {}
    ended: dict[int, list[Sample]] = {}
    with _Counted(front, len(job.requests)) as counted:
        async with contextlib.aclosing(_chunks(front, job)) as chunks:
            async for prompt, chunk in chunks:
                counted.token()
                sample = offsets[prompt] + chunk.index
                writer = writers.get(sample)
                if writer is None:
                    index = sample if job.as_list else None
                    writer = EventWriter(
                        answer, job.requests[prompt], index, front.options.incremental_streaming
                    )
                    writers[sample] = writer
                if chunk.finished is not None:
                    if not chunk.finished.output.output_ids and not answer.label:
                        answer.label = await _label(front)
                    samples = ended.setdefault(prompt, [])
                    samples.append(chunk.finished)
                    if len(samples) == job.requests[prompt].sampling_params.n:
                        counted.finished([samples])
                yield writer.event(chunk)


async def _chunks(front: FrontEnd, job: Job) -> AsyncGenerator[tuple[int, Chunk], None]:
    """The chunks of all prompts as they come, with the prompt's number."""
    if len(job.requests) == 1:
        async with contextlib.aclosing(front.manager.stream(job.requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue(maxsize=1)

    async def pump(prompt: int) -> None:
        try:
            async with contextlib.aclosing(front.manager.stream(job.requests[prompt])) as chunks:
                async for chunk in chunks:
                    await queue.put((prompt, chunk))
            await queue.put((prompt, None))
        except Exception as error:  # noqa: BLE001  raised again by whoever reads the queue
            await queue.put((prompt, error))

    pumps = [asyncio.create_task(pump(i)) for i in range(len(job.requests))]
    left = len(pumps)
    try:
        while left:
            prompt, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield prompt, item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@post("/abort_request", status_code=200, opt={"access": "user"})
async def abort_request(request: HTTPRequest, front: Front) -> Response[bytes]:
    """End one generation by its exact rid, or all. An empty rid alone means nobody; an unknown one is no error."""
    body = await read_control(request, AbortBody)
    if body.rid or body.abort_all:
        work = front.client.abort(None if body.abort_all else body.rid, abort_all=body.abort_all)
        try:
            await command(front, "abort_request", work)
        except CaesuraError as error:
            return native_error(error.message, status_of(error), error.code)
    return Response(b"", media_type="text/plain")


ROUTES: list[HTTPRouteHandler] = [generate, abort_request]
