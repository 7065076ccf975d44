"""vLLM's ``/inference/v1/generate``: token ids in, token ids out, as prime-rl's client sends and reads them.

Invariants: ``sampling_params`` are read as the fields of ``/v1/completions``, except ``prompt_logprobs`` and
``logprob_token_ids``; without ``max_tokens`` a sample may fill the context. Stop strings cut the tokens,
since there is no text. Tokens are named ``token_id:17`` in logprobs. In ``routed_experts`` ``data`` comes
first: the client cuts it out of the raw answer.
"""

import base64
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from litestar import Response

from ....io_struct.field_errors import field_error
from ....io_struct.generate import TokenId
from ...connection.results import GenerateOutput
from ...exceptions import InvalidRequest, Unsupported
from ...text.tokenizer_manager import GenerationRequest, Sample
from ..bodies import INLINE, UNREADABLE, HTTPRequest, decode_large, present, unreadable
from ..context import Front, FrontEnd
from ..errors import json_response
from ..generations import unless_left, whole
from ..middleware import generating
from ..openai.answers import usage_of
from ..openai.common import (
    EXCEPTION_HANDLERS,
    IGNORED_KEYS,
    NOTHING,
    TopCount,
    check_batch,
    check_model,
    common_fields,
    rids_for,
    sampling_params,
)
from ..openai.completions import CompletionRequest, decode_completion
from ..openai.logprobs import (
    LOWEST,
    ChatLogprobs,
    Position,
    TokenText,
    chat_logprobs,
    input_positions,
    output_positions,
)

PATH = "/inference/v1/generate"
REFUSED = {
    "features": "there are no inputs but tokens",
    "content_parts": "there are no inputs but tokens",
    "kv_transfer_params": "prefill and decode run in one engine",
    "stream": "the answer is sent as a whole",
    "parse_context": "answers are tokens",
    "reasoning_ended": "answers are tokens",
}
_BY_IDS = TokenText(None)
if TYPE_CHECKING:
    _RefusedFields = msgspec.Struct
else:
    _RefusedFields = msgspec.defstruct("RefusedFields", [(name, Any, None) for name in REFUSED], kw_only=True)


class TokensBody(_RefusedFields, kw_only=True):
    token_ids: list[TokenId]
    sampling_params: dict[str, Any] = {}  # noqa: RUF012  (a struct copies it)
    model: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: Any = None
    return_token_ids: Any = None
    """Ignored: they are always returned."""
    output_mode: Literal["tokens"] = "tokens"


class LogprobsAsked(msgspec.Struct, kw_only=True):
    """Fields of ``sampling_params`` that ``/v1/completions`` refuses or does not have."""

    prompt_logprobs: TopCount | None = None
    """Number of the most likely tokens at each position of the prompt."""
    logprob_token_ids: list[TokenId] = []
    """Tokens whose logprobs are wanted at each output position."""


_DECODER = msgspec.json.Decoder(TokensBody, strict=False)


def _read(front: FrontEnd, raw: bytes) -> tuple[TokensBody, CompletionRequest, LogprobsAsked]:
    """Decode the body, its sampling parameters, and those of them that only this route has."""
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
    logprobs = _logprobs_asked(given)
    if (start := given.pop("routed_experts_prompt_start", None)) is not None:
        given["routed_experts_start_len"] = start
    given |= present({"model": body.model, "rid": body.request_id, "cache_salt": body.cache_salt})
    given |= {"prompt": [], "stream": False, "echo": False}  # the prompt is decoded already
    parameters = msgspec.json.encode(given)
    asked = decode_completion(parameters)
    front.unknown_keys.note(PATH, parameters, CompletionRequest, IGNORED_KEYS)
    return body, asked, logprobs


def _logprobs_asked(given: dict[str, Any]) -> LogprobsAsked:
    taken = present({name: given.pop(name, None) for name in LogprobsAsked.__struct_fields__})
    try:
        return msgspec.convert(taken, LogprobsAsked, strict=False)
    except msgspec.ValidationError as error:
        wrong = field_error(error, LogprobsAsked, taken, prefix="sampling_params")
        raise InvalidRequest(wrong.sentence, field=wrong.field) from error


def _request(asked: CompletionRequest, token_ids: list[int], logprobs: LogprobsAsked) -> GenerationRequest:
    limit = asked.max_tokens
    if limit == 0:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    scores = logprobs.prompt_logprobs is not None
    fields = common_fields(asked)
    return GenerationRequest(
        prompt=token_ids,
        rid=rids_for(asked, 1, "generate-tokens")[0],
        sampling_params=sampling_params(asked, limit),
        detokenize=bool(fields["stop"]),
        return_logprob=asked.logprobs is not None or scores or bool(logprobs.logprob_token_ids),
        top_logprobs_num=max(asked.logprobs or 0, logprobs.prompt_logprobs or 0),
        token_ids_logprob=logprobs.logprob_token_ids or None,
        logprob_start_len=0 if scores else -1,
        **fields,
    )


def _output_logprobs(output: GenerateOutput, asked: CompletionRequest, given: bool) -> ChatLogprobs | None:
    """Return each token with the most likely ones and, if ``given``, ``logprob_token_ids``."""
    if asked.logprobs is None and not given:
        return None
    positions: list[Position] = []
    for position, (token, logprob, top) in enumerate(output_positions(output)):
        wanted = output.output_token_ids_logprobs
        shown = [*top[: asked.logprobs or 0], *([] if wanted is None else wanted.at(position))]
        values = {other: value for value, other in shown}  # each token once
        positions.append((token, logprob, [(value, other) for other, value in values.items()]))
    return chat_logprobs(positions, _BY_IDS)


def _choice(sample: Sample, logprobs: ChatLogprobs | None) -> dict[str, Any]:
    output = sample.output
    experts = None
    if output.routed_experts is not None and output.output_ids:
        routed = output.routed_experts
        experts = {
            "data": base64.b64encode(routed.data).decode(),
            "shape": list(routed.shape),
            "start": routed.start,
            "dtype": {"U8": "uint8", "U16": "uint16"}[routed.dtype],
        }
    return {
        "index": sample.index,
        "token_ids": output.output_ids,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason.type,
        "stop_reason": sample.matched,
        "routed_experts": experts,
    }


def _prompt_logprobs(sample: Sample, count: int) -> list[dict[str, Any] | None]:
    """Return the prompt's tokens, each before the ``count`` likeliest; ranks from 1, else null."""
    found: list[dict[str, Any] | None] = []
    for token, logprob, top in input_positions(sample.prompt_ids, sample.output):
        if logprob is None:
            found.append(None)
            continue
        entry: dict[str, Any] = {str(token): {"logprob": max(logprob, LOWEST), "rank": None}}
        for rank, (value, other) in enumerate(top[:count], 1):
            entry[str(other)] = {"logprob": max(value, LOWEST), "rank": rank}
        found.append(entry)
    return found


async def _generated(
    front: FrontEnd, request: GenerationRequest, asked: CompletionRequest, logprobs: LogprobsAsked
) -> Response[bytes]:
    (samples,) = await whole(front, [request])
    count = logprobs.prompt_logprobs
    choices = [
        _choice(sample, _output_logprobs(sample.output, asked, bool(logprobs.logprob_token_ids)))
        for sample in samples
    ]
    answer = {
        "request_id": request.rid,
        "choices": choices,
        "prompt_logprobs": None if count is None else _prompt_logprobs(samples[0], count),
        "usage": usage_of(samples),
    }
    return json_response(answer)


@generating(PATH, TokensBody, exception_handlers=EXCEPTION_HANDLERS)
async def generate_tokens(request: HTTPRequest, front: Front) -> Response[Any]:
    raw = await request.body()

    def read() -> tuple[TokensBody, CompletionRequest, LogprobsAsked]:
        return _read(front, raw)

    body, asked, logprobs = await front.workers.run(read) if len(raw) > INLINE else read()
    check_model(front, asked.model)
    check_batch(front, asked, 1)
    wanted = _request(asked, body.token_ids, logprobs)
    return await unless_left(request, _generated(front, wanted, asked, logprobs))
