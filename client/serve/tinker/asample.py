"""Tinker's ``/api/v1/asample``, which promises samples, and the routes by which they are retrieved.

Invariants: a request is taken, or refused with 429, before its promise is given. Its id is made of the
client's own numbers, so that a repeated one starts nothing. A sample of an adapter that its sampler does not
have is never an answer.
"""

import asyncio
import functools
from typing import Annotated, Any

import msgspec
from litestar import Response, post
from litestar.exceptions import HTTPException

from ....io_struct import CaesuraError, SamplingParams
from ....io_struct.field_errors import shown
from ....io_struct.generate import MAX_SAMPLES, TokenId
from ...exceptions import RETRYABLE, EnginePaused, InvalidRequest, QueueFull, Unsupported
from ...text.tokenizer_manager import GenerationRequest, Sample
from ..bodies import INLINE, UNREADABLE, HTTPRequest, read_control
from ..context import Front, FrontEnd
from ..error_responses import RETRY_AFTER_S, json_response, status_of
from ..generations import unless_left, whole
from ..middleware import generating
from ..openai.common import MAX_STOP_STRINGS, AnySeed, TopCount, error_body, invalid_body
from .promises import GoneError, Promise, Sampler, TinkerError, other_version
from .sample_answers import PROTOBUF, Targets, Wanted, answer
from .samplers import sampler_of

INLINE_VALUES = 2048
"""Logprobs of a result above which it is encoded in a thread: a millisecond or two of work."""
HOLD_S = 30.0
"""Seconds that a question for a result waits; the SDK's own limit is 45 s."""


class ChunkBody(msgspec.Struct, kw_only=True):
    type: str = "encoded_text"
    tokens: list[TokenId] = []


class PromptBody(msgspec.Struct, kw_only=True):
    chunks: list[ChunkBody]


class SamplingParamsBody(msgspec.Struct, kw_only=True):
    max_tokens: int | None = None
    """Null: as many as the context has room for."""
    seed: AnySeed | None = None
    stop: str | list[str | int] | None = None
    """Texts or token ids, beside the model's own; an empty list: not even those."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(msgspec.Struct, kw_only=True):
    prompt: PromptBody
    sampling_params: SamplingParamsBody
    sampling_session_id: str
    seq_id: int
    """Number of the request; a repeated one is the same request."""
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: TopCount = 0
    topk_sample_logprobs: TopCount = 0
    target_prompt_logprobs: Targets | None = None
    prompt_logprobs_last_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prompt_alt_tokens_k: int = 0
    """Refused unless 0: prompts are scored, not sampled."""
    record_stability_info: bool | None = None
    """Refused: nothing is recorded for a trainer."""


_DECODER = msgspec.json.Decoder(SampleBody, strict=False)
_PATH = "/api/v1/asample"


def _read(front: FrontEnd, raw: bytes) -> SampleBody:
    try:
        body = _DECODER.decode(raw)
    except UNREADABLE as error:
        raise invalid_body(error, raw, SampleBody) from error
    front.unknown_keys.note(_PATH, raw, SampleBody, frozenset({"type"}))
    if body.prompt_alt_tokens_k:
        raise Unsupported("prompt_alt_tokens_k is not supported", field="prompt_alt_tokens_k")
    if body.record_stability_info:
        raise Unsupported("record_stability_info is not supported", field="record_stability_info")
    if body.num_samples > front.options.max_batch:
        reason = f"{body.num_samples} samples; at most {front.options.max_batch} at once"
        raise InvalidRequest(reason, field="num_samples")
    return body


def _prompt(body: SampleBody) -> list[int]:
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text":
            raise Unsupported(f"chunks of type {chunk.type!r} are not supported: only tokens", field="prompt")
    return [token for chunk in body.prompt.chunks for token in chunk.tokens]


def _wanted(body: SampleBody, prompt: list[int]) -> Wanted:
    last, targets = body.prompt_logprobs_last_n, body.target_prompt_logprobs
    if last is not None and (not body.prompt_logprobs or last >= len(prompt)):
        reason = f"prompt_logprobs_last_n needs prompt_logprobs, and must be below {len(prompt)}"
        raise InvalidRequest(reason, field="prompt_logprobs_last_n")
    if targets is not None:
        targets.check(len(prompt) - 1)
    return Wanted(
        prompt_logprobs=bool(body.prompt_logprobs),
        top_prompt=body.topk_prompt_logprobs,
        top_sample=body.topk_sample_logprobs,
        last=last,
        targets=targets,
    )


def _request(
    body: SampleBody, name: str, sampler: Sampler, prompt: list[int], wanted: Wanted
) -> GenerationRequest:
    params = body.sampling_params
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = [each for each in stop if isinstance(each, str) and each]
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(texts)} stop strings; at most {MAX_STOP_STRINGS}", field="stop")
    start = -1
    if wanted.prompt_logprobs or wanted.top_prompt or wanted.targets is not None:
        start = 0 if wanted.last is None or wanted.targets is not None else len(prompt) - wanted.last - 1
    return GenerationRequest(
        prompt=prompt,
        rid=name,
        adapter=sampler.adapter,
        sampling_params=SamplingParams(
            max_new_tokens=params.max_tokens,
            n=body.num_samples,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=None if params.seed is None else params.seed & (2**63 - 1),
            stop_token_ids=[each for each in stop if isinstance(each, int)],
            ignore_eos=params.stop == [],
        ),
        stop=texts,
        detokenize=bool(texts),
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=max(wanted.top_prompt, wanted.top_sample),
        token_ids_logprob=None if wanted.targets is None else wanted.targets.tokens(),
    )


@generating(_PATH, SampleBody, body="text")
async def asample(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Promise samples of a prompt, once the engine has taken them; 429 if it is full or paused."""
    raw = await request.body()
    read = functools.partial(_read, front, raw)
    body = await front.workers.run(read) if len(raw) > INLINE else read()
    sampler = sampler_of(front, body.sampling_session_id)
    name = f"{sampler.id}:{body.seq_id}"
    promise = front.tinker.promises.get(name)
    if promise is None:
        prompt = _prompt(body)
        wanted = _wanted(body, prompt)
        asked = _request(body, name, sampler, prompt, wanted)
        try:
            promise = await _taken(front, sampler, asked, wanted)
        except (QueueFull, EnginePaused) as error:
            front.metrics.error(error.code)
            response = json_response(error_body(error), 429)
            response.headers["retry-after"] = str(RETRY_AFTER_S)
            return response
    sequences = [f"{name}/{i}" for i in range(promise.samples)]  # a repeated request is the first one
    return json_response({"request_id": name, "sample_sequence_ids": sequences})


async def _taken(front: FrontEnd, sampler: Sampler, asked: GenerationRequest, wanted: Wanted) -> Promise:
    async def samples() -> list[Sample]:
        (found,) = await whole(front, [asked])
        for each in found:
            if each.output.finish_reason.type == "abort":
                raise GoneError(f"the sample was aborted: {each.output.finish_reason.message}")
            for span in each.output.weight_versions:
                if sampler.version is not None and span.adapter_epoch != sampler.version[0]:
                    raise other_version(sampler, span.adapter_epoch)
        return found

    async def answered(found: list[Sample], protobuf: bool) -> Response[bytes]:
        make = functools.partial(answer, found, wanted, protobuf=protobuf)
        return await front.workers.run(make) if wanted.values(found) > INLINE_VALUES else make()

    assert asked.rid is not None
    count = asked.sampling_params.n
    promise = front.tinker.promise(asked.rid, sampler.session, samples(), answered, samples=count)
    try:
        await front.tinker.admitted(promise, sampler)
    except BaseException:
        front.tinker.drop(promise.id)
        raise
    return promise


class PromiseBody(msgspec.Struct, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False
    """Ignored: results come whole."""


_OF_PROMISE: dict[str, Any] = {"opt": {"access": "user", "struct": PromiseBody}, "status_code": 200}


@post("/api/v1/retrieve_future", **_OF_PROMISE)
async def retrieve_future(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Return a result, or after :data:`HOLD_S` seconds that there is none yet; 410: ask for it anew."""
    body = await read_control(request, PromiseBody)
    promise = front.tinker.promises.get(body.request_id)
    if promise is None and front.trainer is not None:
        theirs = await front.trainer.pass_on(request)
        if theirs.status_code != 404:
            return theirs
    if promise is None:
        return _gone(f"there is no request {shown(body.request_id)}, or not any more")
    await unless_left(request, asyncio.wait({promise.task}, timeout=HOLD_S))
    if not promise.task.done():
        return json_response(await _try_again(front, promise))
    if promise.task.cancelled():
        return _gone(f"the request {shown(body.request_id)} was cancelled")
    front.tinker.retrieved(promise)
    error = promise.task.exception()
    if error is None:
        return await promise.answer(promise.task.result(), PROTOBUF in request.headers.get("accept", ""))
    if isinstance(error, GoneError) or (isinstance(error, CaesuraError) and error.code in RETRYABLE):
        return _gone(str(error))
    if isinstance(error, CaesuraError):
        error = TinkerError(error.message, "user" if status_of(error) < 500 else "server")
    if isinstance(error, HTTPException):
        error = TinkerError(error.detail)
    if not isinstance(error, TinkerError):
        raise error
    return json_response({"error": str(error), "category": error.category})


def _gone(reason: str) -> Response[bytes]:
    return json_response({"error": reason}, 410)


async def _try_again(front: FrontEnd, promise: Promise) -> dict[str, Any]:
    found = {"type": "try_again", "request_id": promise.id, "queue_state": "active"}
    state = (await front.health.status()).generation
    if state != "running":
        found |= {"queue_state": "paused_capacity", "queue_state_reason": f"the engine is {state}"}
    return found


@post("/api/v1/cancel_future", **_OF_PROMISE)
async def cancel_future(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Abort a request that nobody waits for."""
    front.tinker.drop((await read_control(request, PromiseBody)).request_id)
    return json_response({})
