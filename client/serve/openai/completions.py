"""``/v1/completions``: choice ``i * n + j`` is sample ``j`` of prompt ``i``; ``echo`` prepends the prompt."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from litestar import Response

from ....io_struct.generate import TokenId
from ...exceptions import InvalidRequest
from ...text.tokenizer_manager import Chunk, GenerationRequest, Sample, TokenizerManager
from ..bodies import INLINE, HTTPRequest, decode_large
from ..context import Front, FrontEnd
from ..middleware import generating
from .answers import Choice, Job, answer, finish_fields, planned, token_fields
from .common import (
    EXCEPTION_HANDLERS,
    REFUSED,
    CommonRequest,
    Count,
    TopCount,
    check_batch,
    common_fields,
    decode_request,
    kept_prompt,
    logprob_fields,
    read_request,
    rids_for,
    sampling_params,
)
from .logprobs import (
    Logprobs,
    Offsets,
    TokenText,
    completion_logprobs,
    input_positions,
    output_positions,
    prompt_logprobs,
)

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(CommonRequest, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {**REFUSED, "suffix": "insertion is not supported"}

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    """Begin with the prompt and its logprobs; ``max_tokens`` may then be 0."""
    logprobs: TopCount | None = None
    """Number of the most likely tokens at each position, beside the sampled one."""
    add_special_tokens: bool | None = None
    best_of: Count | None = None
    """At most ``n``: samples are not ranked."""
    suffix: Any = None


_decoder = msgspec.json.Decoder(CompletionRequest, strict=False)


def decode_completion(body: bytes, max_batch: int = 4096) -> CompletionRequest:
    if len(body) <= INLINE:
        request = decode_request(_decoder.decode, body, CompletionRequest)
    else:
        request = decode_request(
            lambda raw: decode_large(raw, _decoder, {"prompt": b"[]"}, max_batch), body, CompletionRequest
        )
    if (request.best_of or 0) > (request.n or 1):
        raise InvalidRequest(
            "best_of above n is not supported: samples are not ranked; ask for all of them with n",
            field="best_of",
        )
    if request.echo and request.prompt_logprobs is None:
        request.prompt_logprobs = request.logprobs
    return request


@generating("/v1/completions", CompletionRequest, exception_handlers=EXCEPTION_HANDLERS)
async def completions(request: HTTPRequest, front: Front) -> Response[Any]:
    limit = front.options.max_batch
    asked = await read_request(front, request, lambda body: decode_completion(body, limit))
    size = len(await request.body())
    if asked.echo and asked.stream and (asked.logprobs is not None or asked.max_tokens == 0):
        raise InvalidRequest("echo with logprobs or without max_tokens cannot be streamed", field="echo")
    if asked.max_tokens == 0 and not asked.echo:
        raise InvalidRequest("max_tokens must be at least 1, unless echo is set", field="max_tokens")
    tokenizes = size > INLINE or asked.echo or _needs_ids(asked)
    job, form = await planned(front, size if tokenizes else 0, lambda: _plan(front, asked))
    return await answer(request, front, job, form)


def _needs_ids(request: CompletionRequest) -> bool:
    """Return True if a prompt is cut, or if the first chunk has its ids, before the engine has them."""
    told = request.return_token_ids or request.return_prompt_token_ids
    return bool(request.stream and told) or request.truncate_prompt_tokens is not None


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    prompt: Any = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if len(kinds) != 1:
        problem = "is empty" if not prompt else "mixes texts, token ids and lists"
        raise InvalidRequest(f"prompt {problem}", field="prompt")
    if kinds == {int}:
        return [prompt]
    if kinds == {list} and not all(isinstance(token, int) for item in prompt for token in item):
        raise InvalidRequest("prompt: a list of lists must contain token ids", field="prompt")
    return list(prompt)


def prompt_ids(
    front: FrontEnd, request: CompletionRequest, prompts: Sequence[str | list[int]], limit: int
) -> list[list[int]]:
    """Return prompts as token ids, as far as ``truncate_prompt_tokens`` keeps them."""
    special = request.add_special_tokens is not False
    ids = (
        front.manager.tokenize(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
        for prompt in prompts
    )
    return [kept_prompt(front, request, prompt, max(limit, 1)) for prompt in ids]


def _plan(front: FrontEnd, request: CompletionRequest) -> tuple[Job, "CompletionForm"]:
    manager = front.manager
    prompts = prompts_of(request)
    check_batch(front, request, len(prompts))
    special = request.add_special_tokens is not False
    limit = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if _needs_ids(request):
        prompts = [*prompt_ids(front, request, prompts, limit)]
    common = {
        "sampling_params": sampling_params(request, max(limit, 1), manager.tokenizer),
        "add_special_tokens": special,
        "detokenize": manager.tokenizer is not None,
        **logprob_fields(request, request.logprobs),
        **common_fields(request),
    }
    rids = rids_for(request, len(prompts), "cmpl")
    requests = [GenerationRequest(prompt=prompt, rid=rid, **common) for prompt, rid in zip(prompts, rids)]
    job = Job(front, request, "text_completion", requests, scored=limit == 0)
    return job, CompletionForm(manager, request, prompts)


class CompletionForm:
    def __init__(
        self, manager: TokenizerManager, request: CompletionRequest, prompts: Sequence[str | Sequence[int]]
    ) -> None:
        self._request = request
        self._tokens = TokenText(manager.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._plain = TokenText(manager.tokenizer)
        self._skip_special = request.skip_special_tokens is not False
        self._prompts = prompts
        self._echo = [""] * len(prompts)
        if request.echo:
            self._echo = [
                prompt
                if isinstance(prompt, str)
                else manager.detokenize(prompt, skip_special_tokens=self._skip_special)
                for prompt in prompts
            ]
        self._offsets: dict[int, Offsets] = {}  # of the choices that have begun

    def choice(self, index: int, position: int, sample: Sample) -> Choice:
        scored = self._request.max_tokens == 0  # the token that was sampled all the same is left out
        echo = self._echo[position]
        scores = {}
        if (count := self._request.prompt_logprobs) is not None:
            scores["prompt_logprobs"] = prompt_logprobs(sample.prompt_ids, sample.output, count, self._plain)
        return {
            "index": index,
            "text": echo if scored else echo + sample.text,
            "logprobs": self._logprobs(echo, sample, scored),
            **({"finish_reason": "length", "matched_stop": None} if scored else finish_fields(sample)),
            **token_fields(self._request, sample.prompt_ids, [] if scored else sample.output.output_ids),
            **scores,
        }

    def fields(self, sample: Sample) -> dict[str, Any]:
        return {}

    def chunk(self, index: int, position: int, chunk: Chunk) -> Choice | None:
        first = index not in self._offsets
        text = self._echo[position] + chunk.text if first else chunk.text
        wants_tokens = self._request.logprobs is not None or self._request.return_token_ids
        if not text and chunk.finished is None and not (wants_tokens and chunk.delta is not None):
            return None
        if first:
            self._offsets[index] = Offsets(self._tokens, skip_special_tokens=self._skip_special)
        logprobs, count = None, self._request.logprobs
        if count is not None and chunk.delta is not None:
            positions = output_positions(chunk.delta, count)
            logprobs = completion_logprobs(positions, self._tokens, self._offsets[index])
        prompt = self._prompts[position]
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
            **(finish_fields(chunk.finished) if chunk.finished is not None else {}),
            **token_fields(
                self._request,
                prompt if first and not isinstance(prompt, str) else None,
                [] if chunk.delta is None else chunk.delta.output_ids,
            ),
        }

    def _logprobs(self, echo: str, sample: Sample, scored: bool) -> Logprobs | None:
        if (count := self._request.logprobs) is None:
            return None
        positions = [] if scored else output_positions(sample.output, count)
        cut = False
        if self._request.echo:
            positions = [*input_positions(sample.prompt_ids, sample.output, count), *positions]
            skipped = self._tokens.skipped if self._skip_special else frozenset()
            ids = (token for token in sample.prompt_ids if token not in skipped)
            first = next(map(self._tokens.data, ids), b"")
            cut = first.startswith(b" ") and not echo.startswith(" ")
        offsets = Offsets(self._tokens, skip_special_tokens=self._skip_special, leading_space_cut=cut)
        return completion_logprobs(positions, self._tokens, offsets)
