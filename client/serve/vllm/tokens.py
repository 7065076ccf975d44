"""vLLM's ``/inference/v1/generate``: token ids in, token ids out, as SkyRL's and prime-rl's clients do.

Invariants: ``sampling_params`` are read as the fields of ``/v1/completions``; without ``max_tokens`` a sample
may fill the context. Stop strings cut the tokens, since there is no text. Tokens have their id in logprobs,
also as ``token_id:17``. In ``routed_experts`` ``data`` comes first: prime-rl cuts it out of the raw answer.
"""

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from litestar import Response

from ....io_struct.generate import TokenId
from ...connection.results import GenerateOutput, TokenDelta
from ...exceptions import InvalidRequest, Unsupported
from ...text.tokenizer_manager import Chunk, GenerationRequest, Sample, TokenizerManager
from ..bodies import INLINE, UNREADABLE, HTTPRequest, decode_large, present, unreadable
from ..context import Front, FrontEnd
from ..middleware import generating
from ..openai.answers import Choice, Job, answer, token_fields
from ..openai.common import (
    EXCEPTION_HANDLERS,
    IGNORED_KEYS,
    NOTHING,
    StreamOptions,
    check_batch,
    choose_model,
    common_fields,
    kept_prompt,
    logprob_fields,
    rids_for,
    sampling_params,
)
from ..openai.completions import CompletionRequest, decode_completion
from ..openai.logprobs import LOWEST, TokenText, output_positions, prompt_logprobs

PATH = "/inference/v1/generate"
ALIAS = "/skyrl/v1/generate"
REFUSED = {
    "features": "there are no inputs but tokens",
    "content_parts": "there are no inputs but tokens",
    "kv_transfer_params": "prefill and decode run in one engine",
    "parse_context": "answers are tokens",
    "reasoning_ended": "answers are tokens",
}
if TYPE_CHECKING:
    _RefusedFields = msgspec.Struct
else:
    _RefusedFields = msgspec.defstruct("RefusedFields", [(name, Any, None) for name in REFUSED], kw_only=True)


class TokensBody(_RefusedFields, kw_only=True):
    token_ids: list[TokenId]
    sampling_params: dict[str, Any] = {}  # noqa: RUF012  (a struct copies it)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    """Name of the generation for an abort."""
    priority: Any = None
    return_token_ids: bool | None = None
    """Return those of the prompt, too."""
    output_mode: Literal["tokens"] | None = None


_DECODER = msgspec.json.Decoder(TokensBody, strict=False)


def _read(front: FrontEnd, path: str, raw: bytes) -> tuple[TokensBody, CompletionRequest]:
    try:
        large = len(raw) > INLINE
        body = decode_large(raw, _DECODER, {"token_ids": b"[]"}, 1) if large else _DECODER.decode(raw)
    except UNREADABLE as error:
        wrong = unreadable(error, raw, TokensBody)
        raise InvalidRequest(wrong.sentence, field=wrong.field) from error
    for name, why in REFUSED.items():
        if getattr(body, name) not in NOTHING:
            raise Unsupported(f"{name} is not supported: {why}", field=name)
    front.unknown_keys.note(path, raw, TokensBody, IGNORED_KEYS)
    given = dict(body.sampling_params)
    if (start := given.pop("routed_experts_prompt_start", None)) is not None:
        given["routed_experts_start_len"] = start
    given |= present({"model": body.model, "rid": body.request_id, "cache_salt": body.cache_salt})
    given |= {name: getattr(body, name) for name in ("stream", "stream_options", "return_token_ids")}
    given |= {"prompt": [], "echo": False}  # the prompt is decoded already
    parameters = msgspec.json.encode(given)
    asked = decode_completion(parameters)
    front.unknown_keys.note(path, parameters, CompletionRequest, IGNORED_KEYS)
    if asked.logprob_token_ids and asked.logprobs is None:
        asked.logprobs = 0
    return body, asked


def _request(front: FrontEnd, asked: CompletionRequest, token_ids: list[int]) -> GenerationRequest:
    limit = asked.max_tokens
    if limit == 0:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    fields = common_fields(asked)
    return GenerationRequest(
        prompt=token_ids,
        rid=rids_for(asked, 1, "generate-tokens")[0],
        sampling_params=sampling_params(asked, limit, front.manager.tokenizer),
        detokenize=bool(fields["stop"]),
        **logprob_fields(asked, asked.logprobs),
        **fields,
    )


class TokensForm:
    def __init__(self, manager: TokenizerManager, asked: CompletionRequest, prompt: Sequence[int]) -> None:
        self._asked = asked
        self._prompt = prompt
        self._tokens = TokenText(manager.tokenizer)
        self._begun: set[int] = set()

    def choice(self, index: int, position: int, sample: Sample) -> Choice:
        return {**self._new(index, sample.output), **_finish_fields(sample)}

    def fields(self, sample: Sample) -> dict[str, Any]:
        count = self._asked.prompt_logprobs
        scores = None
        if count is not None:
            scores = prompt_logprobs(sample.prompt_ids, sample.output, count, self._tokens)
        wanted = self._asked.return_token_ids
        return {"prompt_logprobs": scores, "prompt_token_ids": sample.prompt_ids if wanted else None}

    def chunk(self, index: int, position: int, chunk: Chunk) -> Choice | None:
        if chunk.delta is None and chunk.finished is None:
            return None
        prompt = None if self._begun else self._prompt
        self._begun.add(index)
        return {
            **self._new(index, chunk.delta),
            **token_fields(self._asked, prompt, [] if chunk.delta is None else chunk.delta.output_ids),
            **({} if chunk.finished is None else _finish_fields(chunk.finished)),
        }

    def _new(self, index: int, output: GenerateOutput | TokenDelta | None) -> Choice:
        count, content = self._asked.logprobs, None
        if output is not None and count is not None:
            content = {"content": _content(output, count)}
        return {
            "index": index,
            "token_ids": [] if output is None else output.output_ids,
            "logprobs": content,
            "finish_reason": None,
            "stop_reason": None,
            "routed_experts": None,
        }


def _content(output: GenerateOutput | TokenDelta, count: int) -> list[dict[str, Any]]:
    """Return each token with the ``count`` likeliest, whose ranks are known, and other wanted ones."""

    def named(token: int, logprob: float | None, rank: int | None) -> dict[str, Any]:
        value = LOWEST if logprob is None else max(logprob, LOWEST)
        return {"token": f"token_id:{token}", "token_id": token, "logprob": value, "rank": rank}

    content = []
    for token, logprob, top in output_positions(output, count):
        ranks = {other: rank for rank, (_, other) in enumerate(top[:count], 1)}
        others = [named(other, value, ranks.get(other)) for value, other in top]
        content.append({**named(token, logprob, ranks.get(token)), "top_logprobs": others})
    return content


def _finish_fields(sample: Sample) -> dict[str, Any]:
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
        "finish_reason": output.finish_reason.type,
        "stop_reason": sample.matched,
        "routed_experts": experts,
    }


@generating([PATH, ALIAS], TokensBody, exception_handlers=EXCEPTION_HANDLERS)
async def generate_tokens(request: HTTPRequest, front: Front) -> Response[Any]:
    raw = await request.body()

    def read() -> tuple[TokensBody, CompletionRequest]:
        return _read(front, request.scope["path"], raw)

    body, asked = await front.workers.run(read) if len(raw) > INLINE else read()
    choose_model(front, asked)
    check_batch(front, asked, 1)
    prompt = kept_prompt(front, asked, body.token_ids, asked.max_tokens or 1)
    job = Job(front, asked, None, [_request(front, asked, prompt)])
    return await answer(request, front, job, TokensForm(front.manager, asked, prompt))
