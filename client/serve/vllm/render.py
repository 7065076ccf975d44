"""vLLM's render and derender: a request as the body of ``/inference/v1/generate``, its answer as one of ours.

Invariants: render, generate and derender give what the route itself gives; nothing is generated here.
``sampling_params`` are fields of ``/v1/completions``, as ``/inference/v1/generate`` reads them.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from litestar import Response

from ....io_struct import FinishReason, new_id
from ....io_struct.generate import TokenId
from ...connection.results import GenerateOutput, TokenLogprobs
from ...exceptions import InvalidRequest
from ...text.sample_text import SampleText
from ...text.stop_strings import shared_stop_strings
from ...text.tokenizer_manager import GenerationRequest, Sample
from ..anthropic.messages import (
    HANDLERS,
    IGNORED_MESSAGES,
    MessagesRequest,
    decode_messages,
    planned_messages,
)
from ..bodies import HTTPRequest, present
from ..context import Front, FrontEnd
from ..error_responses import json_bytes, json_response
from ..grammar_fields import OPENAI as GRAMMAR_FIELDS
from ..middleware import generating, owner_of
from ..openai.answers import Form, Job, usage_of
from ..openai.chat import ChatForm, ChatRequest, decode_chat, planned_chat
from ..openai.common import (
    EXCEPTION_HANDLERS,
    CommonRequest,
    common_fields,
    decode_request,
    read_request,
    rids_for,
    sampling_params,
)
from ..openai.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionForm,
    CompletionRequest,
    decode_completion,
    prompt_ids,
    prompts_of,
)
from ..openai.conversation import Exchange
from ..openai.responses import IGNORED_RESPONSES, ResponsesRequest, decode_responses, planned_response

_BESIDE = frozenset(
    (
        *("model", "stream", "stream_options", "rid", "cache_salt", "extra_key", "lora_path", "modalities"),
        *("return_token_ids", "truncate_prompt_tokens", "truncation_side", "max_tokens", "max_new_tokens"),
        *GRAMMAR_FIELDS,
    )
)
"""Common fields that are not among ``sampling_params``, or there as one ``grammar``."""


@generating("/v1/chat/completions/render", ChatRequest, body="text", exception_handlers=EXCEPTION_HANDLERS)
async def render_chat(request: HTTPRequest, front: Front) -> Response[bytes]:
    asked = await read_request(front, request, decode_chat)
    generation, exchange = await front.workers.run(lambda: planned_chat(front, asked, counts=False))
    return json_response(_of_exchange(front, generation, exchange))


@generating("/v1/responses/render", ResponsesRequest, body="text", exception_handlers=EXCEPTION_HANDLERS)
async def render_response(request: HTTPRequest, front: Front) -> Response[bytes]:
    asked = await read_request(front, request, decode_responses, IGNORED_RESPONSES)
    made = await front.workers.run(lambda: planned_response(front, asked, owner_of(request), counts=False))
    return json_response(_of_exchange(front, made.generation, made.exchange))


@generating("/v1/messages/render", MessagesRequest, body="text", exception_handlers=HANDLERS)
async def render_messages(request: HTTPRequest, front: Front) -> Response[bytes]:
    asked = await read_request(front, request, decode_messages, IGNORED_MESSAGES)
    generation, exchange = await front.workers.run(lambda: planned_messages(front, asked, counts=False))
    return json_response(_of_exchange(front, generation, exchange))


@generating("/v1/completions/render", CompletionRequest, exception_handlers=EXCEPTION_HANDLERS)
async def render_completions(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Return a list, one for each prompt."""
    asked = await read_request(front, request, lambda body: decode_completion(body, front.options.max_batch))
    limit = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    rows = await front.workers.run(lambda: prompt_ids(front, asked, prompts_of(asked), limit))
    rids = rids_for(asked, len(rows), "cmpl")
    grammar = sampling_params(asked, limit, front.manager.tokenizer).grammar
    return json_response(
        [
            _rendered(front, asked, rid, ids, limit, asked.logprobs, grammar)
            for rid, ids in zip(rids, rows, strict=True)
        ]
    )


def _of_exchange(front: FrontEnd, generation: GenerationRequest, exchange: Exchange) -> dict[str, Any]:
    asked, params = exchange.request, generation.sampling_params
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    rid, ids = str(generation.rid), exchange.prompt_ids
    return _rendered(front, asked, rid, ids, params.max_new_tokens, logprobs, params.grammar)


def _rendered(
    front: FrontEnd,
    asked: CommonRequest,
    rid: str,
    ids: list[int],
    limit: int | None,
    logprobs: int | None,
    grammar: str | None,
) -> dict[str, Any]:
    names = (name for name in CommonRequest.__struct_fields__ if name not in _BESIDE)
    given = present({name: getattr(asked, name) for name in names})
    given["max_tokens"] = front.options.context_length - len(ids) if limit is None else limit
    body = {
        "request_id": rid,
        "token_ids": ids,
        "sampling_params": given | present({"logprobs": logprobs, "grammar": grammar}),
        "model": asked.model,
        "stream": bool(asked.stream),
        "stream_options": asked.stream_options,
        "cache_salt": common_fields(asked)["cache_salt"] or None,
    }
    return present(body)


class GeneratedLogprob(msgspec.Struct, kw_only=True):
    token_id: TokenId
    logprob: float
    top_logprobs: list["GeneratedLogprob"] = []


class GeneratedLogprobs(msgspec.Struct, kw_only=True):
    content: list[GeneratedLogprob] | None = None


class GeneratedChoice(msgspec.Struct, kw_only=True):
    token_ids: list[TokenId]
    index: int = 0
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: int | str | None = None
    logprobs: GeneratedLogprobs | None = None
    weight_versions: Any = None


class Generated(msgspec.Struct, kw_only=True):
    """Answer of ``/inference/v1/generate``, as far as it is read."""

    choices: list[GeneratedChoice]
    request_id: str | None = None
    prompt_token_ids: list[TokenId] | None = None


class DerenderBody(msgspec.Struct, kw_only=True):
    REFUSED: ClassVar[dict[str, str]] = {"stream": "derender the whole answer"}

    model: str | None = None
    stream: bool | None = None


class DerenderChatBody(DerenderBody, kw_only=True):
    generate_response: Generated
    prompt_tokens: int | None = None
    """Length of the prompt, for ``usage``: by default that of ``prompt_token_ids``."""
    prompt_token_ids: list[TokenId] | None = None
    """The prompt, after which SentencePiece keeps the first token's space."""
    chat_request: dict[str, Any] | None = None
    """The body that was rendered. Without it the answer is text."""


class DerenderCompletionsBody(DerenderBody, kw_only=True):
    generate_responses: list[Generated]
    prompt_tokens: list[int] | None = None
    prompt_token_ids: list[list[TokenId] | None] | None = None
    completion_request: dict[str, Any] | None = None


@generating("/v1/chat/completions/derender", DerenderChatBody, exception_handlers=EXCEPTION_HANDLERS)
async def derender_chat(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_request(front, request, _derender_decoder(DerenderChatBody), frozenset())
    return json_bytes(await front.workers.run(lambda: _chat(front, body)))


@generating("/v1/completions/derender", DerenderCompletionsBody, exception_handlers=EXCEPTION_HANDLERS)
async def derender_completions(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Return the answer to all prompts, which have an answer of ``/inference/v1/generate`` each."""
    body = await read_request(front, request, _derender_decoder(DerenderCompletionsBody), frozenset())
    return json_bytes(await front.workers.run(lambda: _completions(front, body)))


DerenderT = TypeVar("DerenderT", bound=DerenderBody)


def _derender_decoder(kind: type[DerenderT]) -> Callable[[bytes], DerenderT]:
    decode = msgspec.json.Decoder(kind, strict=False).decode
    return lambda body: decode_request(decode, body, kind)


def _chat(front: FrontEnd, body: DerenderChatBody) -> bytes:
    nothing = {"messages": [{"role": "user", "content": ""}]}
    asked = decode_chat(msgspec.json.encode(body.chat_request or nothing))
    ids = body.prompt_token_ids or body.generate_response.prompt_token_ids or []
    exchange = Exchange(front, asked, ids)
    if exchange.parses:
        asked.skip_special_tokens = False
    form = ChatForm(exchange)
    counts = None if body.prompt_tokens is None else [body.prompt_tokens]
    return _derendered(front, asked, form, "chat.completion", [body.generate_response], [ids], counts)


def _completions(front: FrontEnd, body: DerenderCompletionsBody) -> bytes:
    answers = body.generate_responses
    for name in ("prompt_tokens", "prompt_token_ids"):
        given = getattr(body, name)
        if given is not None and len(given) != len(answers):
            reason = f"{name} has {len(given)} entries for {len(answers)} generate_responses"
            raise InvalidRequest(reason, field=name)
    prompts = body.prompt_token_ids or [None] * len(answers)
    rows = [ids or one.prompt_token_ids or [] for ids, one in zip(prompts, answers, strict=True)]
    asked = decode_completion(msgspec.json.encode(body.completion_request or {"prompt": [[]]}))
    form = CompletionForm(front.manager, asked, rows)
    return _derendered(front, asked, form, "text_completion", answers, rows, body.prompt_tokens)


def _derendered(
    front: FrontEnd,
    asked: CommonRequest,
    form: Form,
    kind: str,
    answers: Sequence[Generated],
    rows: Sequence[list[int]],
    counts: Sequence[int] | None,
) -> bytes:
    """Return the answer of choices, of which ``form`` makes each; ``counts`` are lengths of prompts."""
    if not answers:
        raise InvalidRequest("generate_responses is empty", field="generate_responses")
    rids = [one.request_id or new_id() for one in answers]
    job = Job(front, asked, kind, [GenerationRequest(prompt=ids, rid=rid) for ids, rid in zip(rows, rids)])
    choices, samples = [], []
    for position, (one, ids) in enumerate(zip(answers, rows, strict=True)):
        count = len(ids) if counts is None else counts[position]
        for each in one.choices:
            sample = _sample(front, asked, each, rids[position], ids, count)
            samples.append(sample)
            choice = form.choice(job.index(position, each.index), position, sample)
            choices.append(choice | {"weight_versions": each.weight_versions})
    return job.body(choices, usage=usage_of(samples))


def _sample(
    front: FrontEnd, asked: CommonRequest, choice: GeneratedChoice, rid: str, prompt: list[int], count: int
) -> Sample:
    """Return the sample of a choice, with its text; its prompt has ``count`` tokens."""
    fields, ids, matched = common_fields(asked), choice.token_ids, choice.stop_reason
    if front.manager.tokenizer is None:
        raise InvalidRequest("this engine is served without a tokenizer", field="generate_response")
    text = SampleText(
        front.manager.tokenizer,
        prompt,
        shared_stop_strings(fields["stop"]) if fields["stop"] else None,
        skip_special_tokens=fields["skip_special_tokens"],
        min_new_tokens=asked.min_tokens or 0,
    )
    ends = isinstance(matched, int) and ids[-1:] == [matched]
    shown = text.feed(ids[:-1] if ends else ids)
    shown += text.finish(ids[-1:] if ends and fields["no_stop_trim"] else ())
    if text.stop is not None and fields["no_stop_trim"]:
        shown += text.stop
    content = None if choice.logprobs is None else choice.logprobs.content
    if content is not None and len(content) != len(ids):
        reason = f"logprobs has {len(content)} entries for {len(ids)} token_ids"
        raise InvalidRequest(reason, field="generate_response")
    output = GenerateOutput(
        rid=rid,
        index=choice.index,
        output_ids=ids,
        output_logprobs=None if content is None else [each.logprob for each in content],
        raw_logprobs=None,
        sampled_logprobs=None,
        output_top_logprobs=_top_logprobs(content or []),
        routed_experts=None,
        finish_reason=FinishReason(type=choice.finish_reason or "stop"),
        weight_versions=[],
        prompt_tokens=count,
        cached_tokens=0,
        seed=0,
        num_retractions=0,
        queue_time=0.0,
        e2e_latency=0.0,
    )
    return Sample(index=choice.index, rid=rid, prompt_ids=prompt, text=shown, output=output, matched=matched)


def _top_logprobs(content: Sequence[GeneratedLogprob]) -> TokenLogprobs | None:
    """Return as many of the likeliest tokens as every position has."""
    count = min((len(each.top_logprobs) for each in content), default=0)
    rows = [sorted(each.top_logprobs, key=lambda top: -top.logprob)[:count] for each in content]
    flat = [top for row in rows for top in row]
    if not flat:
        return None
    return TokenLogprobs(k=count, ids=[top.token_id for top in flat], logprobs=[top.logprob for top in flat])
