"""vLLM's ``/inference/v1/generate``: token ids in, token ids out.

Request and answer are as prime-rl's client (``renderers.client``, 0.1.12) sends and reads them.

Invariants:
- ``sampling_params`` are read as the fields of ``/v1/completions``, which has vLLM's names; they are honoured, ignored and refused
  as there. Without ``max_tokens`` a sample may fill the context.
- Tokens are named ``token_id:17`` in logprobs, and each output token has one.
- In ``routed_experts`` the key ``data`` comes first: the client cuts it out of the raw answer.
"""

import base64
from typing import Any

import msgspec
from litestar import Response, post
from litestar.handlers import HTTPRouteHandler

from ....io_struct.generate import TokenId
from ...exceptions import InvalidRequest, Unsupported
from ...text.tokenizer_manager import GenerationRequest, Sample
from ..bodies import INLINE, UNREADABLE, decode_large, unreadable
from ..context import Front, FrontEnd
from ..exchange import HTTPRequest, unless_left
from ..generations import whole
from ..modality import makes_tokens
from ..openai.common import (
    EXCEPTION_HANDLERS,
    check_batch,
    check_model,
    common_fields,
    rids_for,
    sampling_params,
    usage_of,
)
from ..openai.logprobs import LOWEST, TokenText, chat_logprobs, input_positions, output_positions
from ..openai.schema import (
    IGNORED_KEYS,
    NOTHING,
    ChatLogprobs,
    CompletionRequest,
    TopCount,
    Usage,
    decode_completion,
)

PATH = "/inference/v1/generate"
REFUSED = {
    "features": "there are no inputs but tokens",
    "content_parts": "there are no inputs but tokens",
    "kv_transfer_params": "prefill and decode run in one engine",
    "stream": "the answer is sent as a whole",
}
_BY_IDS = TokenText(None)


class TokensBody(msgspec.Struct, kw_only=True):
    """``/inference/v1/generate``."""

    token_ids: list[TokenId]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    """Names the generation, for an abort."""
    priority: Any = None
    """Ignored: requests run in the order of their arrival."""
    return_token_ids: Any = None
    """Ignored: they always are."""
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    stream: Any = None


class RoutedExpertsOf(msgspec.Struct, kw_only=True):
    """Experts of the tokens from ``start`` on, [rows, layers, experts per token]."""

    data: str
    shape: list[int]
    start: int
    dtype: str


class TokenChoice(msgspec.Struct, kw_only=True):
    """One sample."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: str
    routed_experts: RoutedExpertsOf | None


class TokensAnswer(msgspec.Struct, kw_only=True):
    """All samples of one prompt."""

    request_id: str
    choices: list[TokenChoice]
    prompt_logprobs: list[dict[str, dict[str, float]] | None] | None
    usage: Usage


_DECODER = msgspec.json.Decoder(TokensBody, strict=False)


def _read(front: FrontEnd, raw: bytes) -> tuple[TokensBody, CompletionRequest, bool]:
    """The body, its sampling parameters, and whether the prompt's logprobs are wanted.

    Raises:
        InvalidRequest: malformed, or refused by name.
    """
    try:
        large = len(raw) > INLINE
        body = decode_large(raw, _DECODER, {"token_ids": b"[]"}, 1) if large else _DECODER.decode(raw)
    except UNREADABLE as error:
        wrong = unreadable(error, raw, TokensBody)
        raise InvalidRequest(wrong.sentence, field=wrong.field) from error
    for name, why in REFUSED.items():
        if getattr(body, name) not in NOTHING:
            raise Unsupported(f"{name} is not supported: {why}", field=name)
    front.unknown_keys.note(PATH, raw, TokensBody, IGNORED_KEYS)
    given = dict(body.sampling_params)
    scores = _count(given.pop("prompt_logprobs", None))
    if (start := given.pop("routed_experts_prompt_start", None)) is not None:
        given["routed_experts_start_len"] = start
    named = {"model": body.model, "rid": body.request_id, "cache_salt": body.cache_salt}
    given |= {name: value for name, value in named.items() if value is not None}
    given |= {"prompt": [], "stream": False, "echo": False}  # the prompt stays where it has been decoded
    parameters = msgspec.json.encode(given)
    asked = decode_completion(parameters)
    front.unknown_keys.note(PATH, parameters, CompletionRequest, IGNORED_KEYS)
    return body, asked, scores is not None


def _count(value: Any) -> int | None:
    try:
        return msgspec.convert(value, TopCount | None, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"prompt_logprobs: {error}", field="prompt_logprobs") from error


def _request(asked: CompletionRequest, token_ids: list[int], scores: bool) -> GenerationRequest:
    limit = asked.max_tokens
    if limit == 0:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    return GenerationRequest(
        prompt=token_ids,
        rid=rids_for(asked, 1, "generate-tokens")[0],
        sampling_params=sampling_params(asked, limit),
        detokenize=False,
        return_logprob=asked.logprobs is not None or scores,
        top_logprobs_num=asked.logprobs or 0,
        logprob_start_len=0 if scores else -1,
        **common_fields(asked),
    )


def _choice(sample: Sample, with_logprobs: bool) -> TokenChoice:
    output = sample.output
    routed = output.routed_experts if output.output_ids else None
    return TokenChoice(
        index=sample.index,
        token_ids=output.output_ids,
        logprobs=chat_logprobs(output_positions(output), _BY_IDS) if with_logprobs else None,
        finish_reason=output.finish_reason.type,
        routed_experts=None
        if routed is None
        else RoutedExpertsOf(
            data=base64.b64encode(routed.data).decode(),
            shape=list(routed.shape),
            start=routed.start,
            dtype={"U8": "uint8", "U16": "uint16"}[routed.dtype],
        ),
    )


def _of_prompt(sample: Sample) -> list[dict[str, dict[str, float]] | None]:
    return [
        None if logprob is None else {str(token): {"logprob": max(logprob, LOWEST)}}
        for token, logprob, _ in input_positions(sample.prompt_ids, sample.output)
    ]


async def _generated(
    front: FrontEnd, request: GenerationRequest, asked: CompletionRequest, scores: bool
) -> Response[bytes]:
    (samples,) = await whole(front, [request])
    answer = TokensAnswer(
        request_id=str(request.rid),
        choices=[_choice(sample, asked.logprobs is not None) for sample in samples],
        prompt_logprobs=_of_prompt(samples[0]) if scores else None,
        usage=usage_of(samples),
    )
    return Response(msgspec.json.encode(answer), media_type="application/json", status_code=200)


@post(
    PATH,
    status_code=200,
    opt={"access": "user", "body": "prompts"},
    guards=[makes_tokens],
    exception_handlers=EXCEPTION_HANDLERS,
)
async def generate_tokens(request: HTTPRequest, front: Front) -> Response[Any]:
    """Continue one prompt of token ids."""
    raw = await request.body()

    def read() -> tuple[TokensBody, CompletionRequest, bool]:
        return _read(front, raw)

    body, asked, scores = await front.workers.run(read) if len(raw) > INLINE else read()
    check_model(front, asked.model)
    check_batch(front, asked, 1)
    wanted = _request(asked, body.token_ids, scores)
    return await unless_left(request, _generated(front, wanted, asked, scores))


ROUTES: list[HTTPRouteHandler] = [generate_tokens]
