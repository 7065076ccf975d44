"""Common part of requests to the OpenAI routes: fields, refusals, errors.

Invariants: ``null`` means "not given". Unknown keys are ignored, and each is logged once. An unsupported
field that would change the output is refused unless its value asks for nothing (:data:`REFUSED`); one that
changes no output is ignored (:data:`IGNORED`). docs/reference/openai.md has a row for every field (a test
compares). Errors have OpenAI's form: 400 (the request), 404 (unknown model), 503 (engine away or full).
"""

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from ....io_struct import CaesuraError, ErrorCode, SamplingParams, new_id
from ....io_struct.base import MAX_ID_LENGTH, Identifier
from ....io_struct.field_errors import shown
from ....io_struct.generate import MAX_SAMPLES, MAX_TOP_LOGPROBS, TokenId
from ...exceptions import RETRYABLE, InvalidRequest
from ...group.router import route_by
from ...text.tokenizer import TextTokenizer
from ...text.tokenizer_manager import characters, check_size
from ..bodies import INLINE, UNREADABLE, VISIBLE, HTTPRequest, nullable_fields, present, unreadable
from ..context import FrontEnd
from ..error_responses import json_response, openai_error, status_of
from ..generations import ClientLeft, client_left
from ..grammar_fields import OPENAI, grammar_of

Count = Annotated[int, msgspec.Meta(ge=0)]
TopCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
AnySeed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""OpenAI's clients may send negative seeds, which are folded into 63 bits."""
SessionId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH, pattern=VISIBLE)]
SESSION_HEADER = "X-Session-ID"
DEFAULT_MODEL = "default"
"""Name that clients of SGLang give to any model."""
MAX_STOP_STRINGS = 32
MAX_BAD_CHARACTERS = 8192
NOTHING: tuple[Any, ...] = (None, False, "", [], {})

REFUSED = {
    "stop_regex": "stop by strings or token ids",
    "custom_logit_processor": "code of clients is not run",
    "logits_processors": "code of clients is not run",
    "use_beam_search": "there is no beam search",
    "input_embeds": "prompts are text or token ids",
    "prompt_embeds": "prompts are text or token ids",
    "return_hidden_states": "hidden states are not kept",
    "session_params": "turns are found by their messages: give session_id",
    "bootstrap_host": "prefill and decode run in one engine",
    "bootstrap_room": "prefill and decode run in one engine",
}

IGNORED = {
    "user": "a label",
    "metadata": "a label",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "safety_identifier": "a label",
    "prompt_cache_key": "prefixes are cached by content; cache_salt keeps them apart",
    "prediction": "would only be faster",
    "verbosity": "hosted models only",
    "priority": "requests run in the order of their arrival",
    "request_id": "a label; rid names a generation",
    "length_penalty": "of beam search",
    "custom_params": "for processors of logits, which are refused",
}
IGNORED_KEYS = frozenset(IGNORED)
if TYPE_CHECKING:
    _OtherFields = msgspec.Struct
else:
    _OtherFields = msgspec.defstruct(
        "OtherFields",
        [*nullable_fields(SamplingParams, "max_new_tokens"), *((name, Any, None) for name in REFUSED)],
        kw_only=True,
    )


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class CommonRequest(_OtherFields, kw_only=True):
    """Fields of both generating routes: the engine's sampling parameters, and those below."""

    REFUSED: ClassVar[dict[str, str]] = REFUSED

    model: str | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] | None = None
    stop: str | list[str] | None = None
    seed: AnySeed | None = None
    logit_bias: dict[TokenId, float] | None = None
    """By token id (a string in JSON)."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None

    # Beyond OpenAI, with SGLang's and vLLM's names
    rid: Identifier | list[Identifier] | None = None
    """Name of the generations for an abort (``rid_0``, … of several prompts), and id of the response."""
    session_id: SessionId | None = None
    """Session that a conversation is a turn of, or the header ``X-Session-ID``; replicas are chosen by it."""
    min_tokens: Count | None = None
    trace_decode_token_ids: list[TokenId] | None = None
    """vLLM's name of ``forced_output_ids``."""
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    """Number of the prompt's tokens that are kept; -1 means as many as leave room for the output."""
    truncation_side: Literal["left", "right"] | None = None
    """``left``, the default, keeps the last tokens."""
    bad_words: list[str] | None = None
    """Words that are not sampled, in the middle of a text or at its beginning."""
    prompt_logprobs: TopCount | None = None
    """Number of the most likely tokens at each position of the prompt, beside its own."""
    logprob_token_ids: list[TokenId] | None = None
    """Tokens whose logprobs are wanted at each position of the output, with ``logprobs``."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    min_weights_epoch: int | None = None
    lora_path: str | None = None
    """Name of a loaded adapter, which ``model`` can be, too, alone or behind the model's name and a colon."""
    return_token_ids: bool | None = None
    """Return ``token_ids``, and ``prompt_token_ids`` in each choice, or in its first chunk."""
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Write tokens ``token_id:17`` in logprobs."""
    return_routed_experts: bool | None = None
    routed_experts_start_len: Count | None = None
    return_sampling_mask: bool | None = None
    """Return ``sampling_mask`` and ``sampling_logprobs`` in each finished choice."""
    return_meta_info: bool | None = None
    """Return the native route's ``meta_info`` in each finished choice."""
    response_format: dict[str, Any] | None = None
    """Types ``text``, ``json_object``, ``json_schema`` and ``structural_tag``."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's: one of ``json``, ``regex``, ``choice``, ``grammar``, ``json_object`` and ``structural_tag``."""
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    """Only ``["text"]``."""


RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def decode_request(decode: Callable[[bytes], RequestT], body: bytes, kind: Any) -> RequestT:
    """Decode a body with ``decode``; raise InvalidRequest for fields that ``kind`` refuses, too."""
    try:
        request = decode(body)
    except UNREADABLE as error:
        raise invalid_body(error, body, kind) from error
    for name, reason in kind.REFUSED.items():
        if getattr(request, name) not in NOTHING:
            raise InvalidRequest(f"{name} is not supported: {reason}", field=name)
    if isinstance(request, CommonRequest):
        if request.modalities and request.modalities != ["text"]:
            raise InvalidRequest("modalities is not supported: output is text only", field="modalities")
        if request.stream and request.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed", field="prompt_logprobs")
        forced = request.trace_decode_token_ids or getattr(request, "forced_output_ids", None)
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if forced and hasattr(request, name):
                setattr(request, name, len(forced))
    return request


def invalid_body(error: Exception, body: bytes, kind: type[msgspec.Struct]) -> InvalidRequest:
    """Return the error of an unreadable body; OpenAI's ``param`` is the field of the top level."""
    wrong = unreadable(error, body, kind)
    field = re.split(r"[.\[]", wrong.field, maxsplit=1)[0] or None
    return InvalidRequest(wrong.sentence, field=field)


def sampling_params(
    request: CommonRequest, max_new_tokens: int | None, tokenizer: TextTokenizer | None = None
) -> SamplingParams:
    given = present({name: getattr(request, name, None) for name in SamplingParams.__struct_fields__})
    if request.min_tokens is not None:
        given["min_new_tokens"] = request.min_tokens
    if request.trace_decode_token_ids is not None:
        given["forced_output_ids"] = request.trace_decode_token_ids
    if request.seed is not None:
        given["seed"] = request.seed & (2**63 - 1)
    given["grammar"] = grammar_of(request, OPENAI)
    words = _forbidden(request.bad_words or [], tokenizer)
    bias = {**(request.logit_bias or {}), **{word[0]: -math.inf for word in words if len(word) == 1}}
    longer = [word for word in words if len(word) > 1]
    given["bad_words_ids"] = [*given.get("bad_words_ids", ()), *longer] or None
    return SamplingParams(**{**given, "logit_bias": bias or None, "max_new_tokens": max_new_tokens})


def _forbidden(words: list[str], tokenizer: TextTokenizer | None) -> list[list[int]]:
    """Return the token ids of vLLM's ``bad_words``, which have two forms: with and without a space before."""
    check_size("bad_words", characters(words), MAX_BAD_CHARACTERS, "characters in all")
    found: list[list[int]] = []
    for word in words:
        if tokenizer is None:
            raise InvalidRequest("bad_words: this engine is served without a tokenizer", field="bad_words")
        plain, spaced = (
            tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False) for space in ("", " ")
        )
        if not plain:
            raise InvalidRequest(f"bad_words: {shown(word)} has no tokens", field="bad_words")
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return found


def kept_prompt(front: FrontEnd, request: CommonRequest, ids: list[int], limit: int | None) -> list[int]:
    """Return what ``truncate_prompt_tokens`` leaves of a prompt; ``limit`` new tokens need room."""
    count, room = request.truncate_prompt_tokens, front.options.context_length - (limit or 0)
    if count is None:
        return ids
    count = room if count == -1 else count
    if not 1 <= count <= room:
        raise InvalidRequest(
            f"truncate_prompt_tokens: a prompt of {count} tokens is not in [1, {room}], what the context has "
            "room for",
            field="truncate_prompt_tokens",
        )
    return ids[:count] if request.truncation_side == "right" else ids[-count:]


def common_fields(request: CommonRequest) -> dict[str, Any]:
    """Return fields of a :class:`GenerationRequest`, without prompt, rid and logprobs."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(stop)} stop strings; at most {MAX_STOP_STRINGS}", field="stop")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream", field="stream_options")
    salt = request.cache_salt or ""
    return {
        "stop": tuple(text for text in stop if text),
        "no_stop_trim": bool(request.no_stop_trim or request.include_stop_str_in_output),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "spaces_between_special_tokens": request.spaces_between_special_tokens is not False,
        "return_routed_experts": bool(request.return_routed_experts),
        "routed_experts_start_len": request.routed_experts_start_len or 0,
        "return_sampling_mask": bool(request.return_sampling_mask),
        "return_sampled_logprob": bool(request.return_sampling_mask),
        "cache_salt": f"{salt}\n{request.extra_key}" if request.extra_key else salt,
        "min_weights_epoch": request.min_weights_epoch,
        "adapter": request.lora_path or None,
    }


def logprob_fields(request: CommonRequest, top: int | None, *, prompt: bool = False) -> dict[str, Any]:
    """Return fields of a :class:`GenerationRequest`; ``top`` None means no logprobs of the output."""
    wanted = request.logprob_token_ids or None
    if wanted is not None and top is None:
        raise InvalidRequest("logprob_token_ids needs logprobs", field="logprob_token_ids")
    prompt |= request.prompt_logprobs is not None
    return {
        "return_logprob": top is not None or prompt,
        "top_logprobs_num": max(top or 0, request.prompt_logprobs or 0),
        "token_ids_logprob": wanted,
        "logprob_start_len": 0 if prompt else -1,
    }


def check_batch(front: FrontEnd, request: CommonRequest, prompts: int) -> None:
    samples = prompts * (request.n or 1)
    if samples > front.options.max_batch:
        raise InvalidRequest(
            f"{prompts} prompts of {request.n or 1} samples; at most {front.options.max_batch} samples at "
            "once",
            field="n",
        )


def rids_for(request: CommonRequest, prompts: int, prefix: str) -> list[str]:
    rid = f"{prefix}-{new_id()}" if request.rid is None else request.rid
    if isinstance(rid, str):
        return [rid] if prompts == 1 else [f"{rid}_{i}" for i in range(prompts)]
    if len(rid) != prompts:
        raise InvalidRequest(f"{len(rid)} rid for {prompts} prompts", field="rid")
    return rid


class ModelNotFound(HTTPException):
    status_code = 404


def adapter_of(front: FrontEnd, model: str | None) -> str | None:
    """Return the adapter that ``model`` names, alone or behind the served model and a colon, or None."""
    options = front.options
    names = options.model_name, options.model_path, DEFAULT_MODEL
    if not model or model in names:
        return None
    return next((model[len(name) + 1 :] for name in names if model.startswith(f"{name}:")), model)


def choose_model(front: FrontEnd, request: CommonRequest) -> None:
    """Note the adapter that ``model`` names, or refuse it as :func:`check_model`."""
    check_model(front, request.model)
    request.lora_path = request.lora_path or adapter_of(front, request.model)


def choose_session(request: HTTPRequest, asked: CommonRequest) -> None:
    """Note the session that path or header name, and have its engine chosen by it."""
    given = [request.path_params.get("session_id"), request.headers.get(SESSION_HEADER), asked.session_id]
    names = {str(name) for name in given if name}
    if len(names) > 1:
        raise InvalidRequest(f"{len(names)} different sessions are named", field="session_id")
    for name in names:
        if len(name) > MAX_ID_LENGTH or not re.match(VISIBLE, name):
            raise InvalidRequest(f"session_id is not 1 to {MAX_ID_LENGTH} characters", field="session_id")
        asked.session_id = name
        route_by(name)


def check_model(front: FrontEnd, name: str | None) -> None:
    """Refuse models other than the served one (null, its name, its folder or ``default``) and adapters."""
    if adapter_of(front, name) is not None and not front.options.max_loras:
        raise not_found(front, name)


def not_found(front: FrontEnd, name: str | None) -> ModelNotFound:
    return ModelNotFound(f"the model {shown(name)} does not exist; {front.options.model_name!r} is served")


async def read_request(
    front: FrontEnd,
    request: HTTPRequest,
    decode: Callable[[bytes], RequestT],
    ignored: frozenset[str] = IGNORED_KEYS,
) -> RequestT:
    """Return the body as ``decode`` reads it, in a thread if it is large; log its unknown keys."""
    body = await request.body()

    def read() -> RequestT:
        found = decode(body)
        front.unknown_keys.note(request.scope["path"], body, type(found), ignored)
        return found

    asked = read() if len(body) <= INLINE else await front.workers.run(read)
    if isinstance(asked, CommonRequest):
        choose_model(front, asked)
        choose_session(request, asked)
    else:
        check_model(front, getattr(asked, "model", None))
    return asked


_FIELDS = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "input_ids": "prompt"}


_CODES: dict[str, str] = {
    ErrorCode.PROMPT_TOO_LONG: "context_length_exceeded",
    ErrorCode.UNKNOWN_ADAPTER: "model_not_found",
}


def error_body(error: CaesuraError) -> dict[str, Any]:
    param = str(error.detail.get("field") or "").removeprefix("sampling_params.")
    code = _CODES.get(error.code, str(error.code))
    if error.code == ErrorCode.UNKNOWN_ADAPTER:
        param = "model"
    body = openai_error(error.message, status_of(error), param=_FIELDS.get(param, param) or None, code=code)
    if error.code in RETRYABLE:
        body["error"]["retryable"] = True
    return body


def _typed(request: HTTPRequest, error: CaesuraError) -> Response[bytes]:
    front: FrontEnd = request.app.state.front
    front.metrics.error(error.code)
    return json_response(error_body(error), status_of(error))


def _http(_: HTTPRequest, error: HTTPException) -> Response[bytes]:
    if isinstance(error, ModelNotFound):
        known = {"param": "model", "code": "model_not_found"}
    else:
        known = error.extra if isinstance(error.extra, dict) else {}
    return json_response(openai_error(error.detail, error.status_code, **known), error.status_code)


def _left(_: HTTPRequest, __: ClientLeft) -> Response[bytes]:
    return client_left()


EXCEPTION_HANDLERS: ExceptionHandlersMap = {CaesuraError: _typed, HTTPException: _http, ClientLeft: _left}
