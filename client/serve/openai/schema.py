"""Requests and responses of the OpenAI routes as msgspec structs.

Invariants:
- ``null`` means "not given" for every optional field. Keys that no struct names are ignored, as the servers that these
  clients know do; the log names each of them once (``unknown_keys.py``).
- A known field that would change the output and is not supported is listed in :data:`REFUSED` with the reason, and refused by
  name unless its value asks for nothing (null, false, empty). What changes no output is in :data:`IGNORED`.
- docs/reference/openai.md has a row for every field of the request structs (a test compares them).
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ....io_struct import WeightVersionSpan
from ....io_struct.base import Identifier
from ....io_struct.generate import MAX_SAMPLES, MAX_TOP_LOGPROBS, TokenId
from ...exceptions import InvalidRequest
from ..bodies import INLINE, UNREADABLE, decode_large, unreadable

Count = Annotated[int, msgspec.Meta(ge=0)]
TopCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
AnySeed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""OpenAI's clients may send negative seeds."""

REFUSED = {
    "suffix": "insertion is not supported",
    "functions": "superseded by tools",
    "function_call": "superseded by tools",
    "audio": "output is text only",
    "web_search_options": "there is no web search",
    "json_schema": "constrained decoding is not supported",
    "regex": "constrained decoding is not supported",
    "ebnf": "constrained decoding is not supported",
    "structural_tag": "constrained decoding is not supported",
    "structured_outputs": "constrained decoding is not supported",
    "guided_json": "constrained decoding is not supported",
    "guided_regex": "constrained decoding is not supported",
    "guided_choice": "constrained decoding is not supported",
    "guided_grammar": "constrained decoding is not supported",
    "prompt_logprobs": "echo with logprobs has those of the prompt",
    "truncate_prompt_tokens": "a prompt that is too long is refused",
    "allowed_token_ids": "logit_bias raises and lowers tokens",
    "bad_words": "logit_bias lowers tokens",
    "stop_regex": "stop by strings or token ids",
    "custom_logit_processor": "code of clients is not run",
    "logits_processors": "code of clients is not run",
    "chat_template": "the template is the served model's",
    "continue_final_message": "the final message is always complete",
    "use_beam_search": "there is no beam search",
    "lora_path": "there are no adapters",
    "input_embeds": "prompts are text or token ids",
    "prompt_embeds": "prompts are text or token ids",
    "return_hidden_states": "hidden states are not kept",
    "session_params": "there are no sessions; prefixes are cached by content",
    "bootstrap_host": "prefill and decode run in one engine",
    "bootstrap_room": "prefill and decode run in one engine",
}
"""Field → why a value in it is refused."""

IGNORED = {
    "user": "a label",
    "metadata": "a label",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "safety_identifier": "a label",
    "prompt_cache_key": "prefixes are cached by content; cache_salt keeps them apart",
    "prediction": "would only be faster",
    "verbosity": "hosted models only",
    "parallel_tool_calls": "tool calls are not parsed",
    "separate_reasoning": "reasoning stays in the text",
    "stream_reasoning": "reasoning stays in the text",
    "priority": "requests run in the order of their arrival",
    "session_id": "there is one engine",
    "request_id": "a label; rid names a generation",
    "length_penalty": "of beam search",
    "include_reasoning": "reasoning stays in the text",
    "custom_params": "for processors of logits, which are refused",
}
"""Field → why it may be ignored."""
IGNORED_KEYS = frozenset(IGNORED)


class StreamOptions(msgspec.Struct, kw_only=True):
    """``stream_options``."""

    include_usage: bool | None = None
    """One more chunk before the end, without choices, with the usage of the whole request."""


class CommonRequest(msgspec.Struct, kw_only=True):
    """Fields that both generating routes share."""

    model: str | None = None
    """None or empty: the one that is served."""
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: AnySeed | None = None
    """Negative ones are folded into 63 bits."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    """Token id (a string in JSON) → what is added to its logit."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None

    # Beyond OpenAI, with SGLang's and vLLM's names
    rid: Identifier | list[Identifier] | None = None
    """Names the generations, for an abort; of several prompts: ``rid_0``, ``rid_1``, … Also the id of the response."""
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    min_new_tokens: Count | None = None
    """The same as ``min_tokens``."""
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    """The same as ``no_stop_trim``."""
    cache_salt: str | None = None
    extra_key: str | None = None
    """Joined to ``cache_salt``."""
    min_weights_epoch: int | None = None
    """Refuse on an engine whose weights are older."""
    return_token_ids: bool | None = None
    """``token_ids`` in each choice and chunk, ``prompt_token_ids`` in each choice, in a stream with its first chunk."""
    return_prompt_token_ids: bool | None = None
    """Only the latter."""
    return_tokens_as_token_ids: bool | None = None
    """In logprobs, tokens are written ``token_id:17``."""
    return_routed_experts: bool | None = None
    routed_experts_start_len: Count | None = None
    return_meta_info: bool | None = None
    """``meta_info`` of the native route in each finished choice."""
    response_format: dict[str, Any] | None = None
    """Only ``{"type": "text"}``."""
    modalities: list[str] | None = None
    """Only ``["text"]``."""

    # Refused unless they ask for nothing
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    stop_regex: Any = None
    custom_logit_processor: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    lora_path: Any = None
    input_embeds: Any = None
    prompt_embeds: Any = None
    return_hidden_states: Any = None
    session_params: Any = None
    bootstrap_host: Any = None
    bootstrap_room: Any = None


class CompletionRequest(CommonRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | TokenId | list[TokenId]]
    """Text, texts, token ids, or several lists of them."""
    echo: bool | None = None
    """The prompt, with its logprobs if asked for, before each completion. ``max_tokens`` may then be 0."""
    logprobs: TopCount | None = None
    """That many of the most likely tokens at each position, and the sampled one. 0: the sampled one alone."""
    add_special_tokens: bool | None = None
    """Where the prompt is text."""

    best_of: Count | None = None
    """Up to ``n``: then nothing is chosen."""
    suffix: Any = None


class ChatRequest(CommonRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    """``content``: a string or text parts."""
    max_completion_tokens: Count | None = None
    """Takes precedence over ``max_tokens``. Neither: up to the context length."""
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tools: list[dict[str, Any]] | None = None
    """Handed to the template; what the model answers stays text."""
    tool_choice: str | dict[str, Any] | None = None
    """``auto`` or ``none``, alike: the template sees the tools, and no calls are parsed."""
    reasoning_effort: str | None = None
    """Handed to the template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the template."""
    add_generation_prompt: bool | None = None
    """True unless said otherwise: the prompt ends where the assistant's answer begins."""

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    continue_final_message: Any = None


RequestT = TypeVar("RequestT", bound=CommonRequest)
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Values that ask for nothing."""

_COMPLETION = msgspec.json.Decoder(CompletionRequest, strict=False)
_CHAT = msgspec.json.Decoder(ChatRequest, strict=False)
_REFUSED_OF: dict[type[CommonRequest], tuple[str, ...]] = {
    kind: tuple(name for name in kind.__struct_fields__ if name in REFUSED)
    for kind in (CompletionRequest, ChatRequest)
}


def decode_completion(body: bytes, max_batch: int = 4096) -> CompletionRequest:
    """Raises :class:`InvalidRequest` for what is malformed or refused by name, and for more prompts than ``max_batch``."""
    if len(body) <= INLINE:
        return _decode(_COMPLETION.decode, body, CompletionRequest)
    return _decode(
        lambda raw: decode_large(raw, _COMPLETION, {"prompt": b"[]"}, max_batch), body, CompletionRequest
    )


def decode_chat(body: bytes) -> ChatRequest:
    """Raises :class:`InvalidRequest` for what is malformed or refused by name."""
    return _decode(_CHAT.decode, body, ChatRequest)


def _decode(decode: Callable[[bytes], RequestT], body: bytes, kind: type[RequestT]) -> RequestT:
    try:
        request = decode(body)
    except UNREADABLE as error:
        wrong = unreadable(error, body, kind)
        field = re.split(r"[.\[]", wrong.field, maxsplit=1)[0] or None  # OpenAI's param is the top level's
        raise InvalidRequest(wrong.sentence, field=field) from error
    for name in _REFUSED_OF[type(request)]:
        value = getattr(request, name)
        if value not in NOTHING:
            raise InvalidRequest(f"{name} is not supported: {REFUSED[name]}", field=name)
    _check_values(request)
    return request


def _check_values(request: CommonRequest) -> None:
    if request.response_format and request.response_format.get("type") != "text":
        raise InvalidRequest(
            "response_format is not supported: constrained decoding is not, only text",
            field="response_format",
        )
    if request.modalities and request.modalities != ["text"]:
        raise InvalidRequest("modalities is not supported: output is text only", field="modalities")
    if isinstance(request, CompletionRequest) and (request.best_of or 0) > (request.n or 1):
        raise InvalidRequest(
            "best_of above n is not supported: samples are not ranked; ask for all of them with n",
            field="best_of",
        )


class TokenDetails(msgspec.Struct, kw_only=True):
    """``prompt_tokens_details``."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a whole request; a prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class Logprobs(msgspec.Struct, kw_only=True):
    """Of a completion: columns over its tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters before each token, counted from the beginning of the choice's text."""


class TokenLogprob(msgspec.Struct, kw_only=True):
    """Of a chat: one token of several possible ones."""

    token: str
    """U+FFFD stands for bytes that are no whole character; ``bytes`` is exact."""
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, kw_only=True):
    """Of a chat: one position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """``logprobs`` of a chat's choice."""

    content: list[ContentLogprob]


class Choice(msgspec.Struct, kw_only=True):
    """What all choices and chunks carry beyond OpenAI; absent unless asked for, ``matched_stop`` unless finished."""

    matched_stop: int | str | UnsetType | None = UNSET
    """The token id or the stop string that ended the choice; null where it ended otherwise."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    weight_versions: list[WeightVersionSpan] | UnsetType = UNSET
    """Spans of tokens by the weights that sampled them, of a finished choice."""
    meta_info: dict[str, Any] | UnsetType = UNSET


class CompletionChoice(Choice, kw_only=True):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort``."""


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's answer."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Choice, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of an answer; empty in its last chunk if nothing is."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(Choice, kw_only=True):
    """One answer in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Body(msgspec.Struct, kw_only=True):
    """A response, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None = None
    metadata: dict[str, Any] | UnsetType = UNSET
    """``weight_version`` of finished choices, and with ``return_meta_info`` SGLang's ``weight_versions``."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Those of the choices, where there is one prompt."""
    sglext: dict[str, Any] | UnsetType = UNSET
    """``routed_experts``."""
