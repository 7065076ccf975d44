"""Requests and responses of ``/generate``, as SGLang's clients send and expect them.

Invariants:
- A field that would change the result and that this engine does not do is refused by name; what only hints is ignored. Keys
  that are no field are refused, at the top level (where SGLang ignores them, and ``max_new_tokens`` there would have no
  effect) as in ``sampling_params``.
- ``null`` means "left out" wherever that is not a value of its own (``max_new_tokens: null`` is "no limit").
- What goes to the engine with every prompt is bounded before it is copied for each of them.
- The structs' field groups are what ``docs/reference/http.md`` lists; a test compares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from ....io_struct import SamplingParams
from ....io_struct.base import MAX_ID_LENGTH
from ....io_struct.field_errors import FieldError, field_error, other_name
from ....io_struct.generate import GREEDY_BELOW, MAX_SAMPLES, Seed, TokenId
from ...connection.prompts import is_single
from ...connection.request_limits import MAX_SALT_CHARACTERS, MAX_STOP_CHARACTERS, characters, check_size
from ...exceptions import InvalidRequest
from ...text.tokenizer_manager import GenerationRequest
from ..bodies import INLINE, UNREADABLE, decode_large, unreadable
from .control_schema import VISIBLE

MAX_STOP_STRINGS = 32
"""SGLang's."""
MAX_STOP_CHARACTERS_IN_ALL = 32 * MAX_STOP_CHARACTERS
"""Of the different stop strings of one call, whose prompts may have each their own."""

Samples = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH, pattern=VISIBLE)]
Count = Annotated[int, msgspec.Meta(ge=0)]
ExpertsDtype = Literal["int32", "uint8"]
LogprobsMode = Literal["selected", "support"]


class SamplingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params``; names and defaults are SGLang's."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    n: Samples | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: Seed | None = None
    custom_params: dict[str, Any] | None = None
    # accepted and ignored
    stream_interval: int | None = None
    # refused unless null, false or empty
    stop_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    beam_width: Any = None
    watermark: Any = None


REFUSED_SAMPLING = (
    "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "beam_width", "watermark",
)  # fmt: skip
IGNORED_SAMPLING = ("stream_interval",)


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The top level. ``X | list`` fields take one value for all prompts, or a list of one each."""

    text: str | list[str] | None = None
    input_ids: list[TokenId | list[TokenId]] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: Name | list[Name] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[TokenId | list[TokenId]] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_sampling_mask: bool | list[bool] | None = None
    sampling_logprobs_mode: LogprobsMode | list[LogprobsMode | None] | None = None
    return_routed_experts: bool | list[bool] | None = None
    routed_experts_start_len: Count = 0
    routed_experts_dtype: ExpertsDtype | None = None
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    min_weights_epoch: int | None = None
    routing_key: Any = None
    session_id: Any = None
    # accepted and ignored
    log_metrics: Any = None
    no_logs: Any = None
    custom_labels: Any = None
    priority: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    bootstrap_pair_key: Any = None
    model: Any = None
    background: Any = None
    conversation_id: Any = None
    modalities: Any = None
    validation_time: Any = None
    return_bytes: Any = None
    # refused unless null, false or empty
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    lora_path: Any = None
    lora_id: Any = None
    custom_logit_processor: Any = None
    session_params: Any = None
    return_hidden_states: Any = None
    return_entropy: Any = None
    return_indexer_topk: Any = None
    require_reasoning: Any = None


REFUSED = (
    "routed_dp_rank", "data_parallel_rank", "input_embeds", "image_data", "video_data", "audio_data", "lora_path",
    "lora_id", "custom_logit_processor", "session_params", "return_hidden_states",
    "return_entropy", "return_indexer_topk", "require_reasoning",
)  # fmt: skip
IGNORED = (
    "log_metrics", "no_logs", "custom_labels", "priority", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "model", "background", "conversation_id", "modalities",
    "validation_time", "return_bytes",
)  # fmt: skip

_decoder = msgspec.json.Decoder(GenerateBody)
_PROMPTS = {"text": b'""', "input_ids": b"[]"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest(GenerationRequest):
    """A prompt of ``/generate``, and how its sampling mask is told."""

    top_p_token_ids: bool = False
    """As slime reads it: arrays in base64, and the logprobs of output tokens are of what the filters kept."""


class Job(msgspec.Struct, kw_only=True):
    """What one call of ``/generate`` asks for."""

    requests: list[NativeRequest]
    stream: bool
    as_list: bool
    """The answer is a list: a batch, or more than one sample."""
    text_in_logprobs: bool
    prompt_token_ids: bool
    experts_dtype: ExpertsDtype
    routing_key: Any
    """Requests of one key, a text or a number, go to one of several engines; what is neither is no key."""


def decode_body(raw: bytes, max_batch: int = 4096) -> GenerateBody:
    """The body of a request.

    Raises:
        InvalidRequest: it is not JSON or nested too deeply, a value is of the wrong type or range, a sampling parameter is
            unknown, or a field is refused.
    """
    try:
        if len(raw) <= INLINE:
            body = _decoder.decode(raw)
        else:
            body = decode_large(raw, _decoder, _PROMPTS, max_batch)
    except UNREADABLE as error:
        wrong = _misplaced(unreadable(error, raw, GenerateBody))
        raise InvalidRequest(wrong.sentence, **({"field": wrong.field} if wrong.field else {})) from error
    _refuse(body, REFUSED, "")
    return body


def _misplaced(wrong: FieldError) -> FieldError:
    """``wrong``, or where it belongs: sampling parameters at the top level are the commonest mistake."""
    names = SamplingBody.__struct_fields__
    name = wrong.field
    if name in GenerateBody.__struct_fields__ or "." in name or "[" in name:
        return wrong
    meant = name if name in names else other_name(name, names)
    if meant is None:
        return wrong
    return FieldError(name, f"{name} is not known here: give sampling_params.{meant}")


def _refuse(fields: msgspec.Struct, names: Sequence[str], prefix: str) -> None:
    for name in names:
        if getattr(fields, name):
            raise InvalidRequest(f"{prefix}{name} is not supported", field=name)


def plan_job(body: GenerateBody, *, max_batch: int, detokenize: bool) -> Job:
    """One request for each prompt.

    Raises:
        InvalidRequest: no prompt, lists of different lengths, duplicate rids, more than ``max_batch`` samples in all, a field
            over its size.
    """
    prompts, single = _prompts(body)
    count = len(prompts)
    if count > max_batch:
        raise InvalidRequest(f"{count} prompts are over the limit of {max_batch}", field="input_ids")
    params = _each("sampling_params", body.sampling_params, count)
    shared: dict[int, dict[str, Any]] = {}
    for each in params:
        if id(each) not in shared:
            shared[id(each)] = sampling_fields(each or SamplingBody())
    different = {tuple(fields["stop"]) for fields in shared.values()}
    size = sum(map(characters, different))
    check_size("stop", size, MAX_STOP_CHARACTERS_IN_ALL, "characters of different prompts' stop strings")
    sampling = [shared[id(each)] for each in params]
    samples = sum(fields["sampling_params"].n for fields in sampling)
    if samples > max_batch:
        raise InvalidRequest(f"n: {samples} samples are over the limit of {max_batch}", field="n")
    columns = _columns(body, count, single)
    masks = _each("return_sampling_mask", body.return_sampling_mask, count, False)
    _check_logprobs_mode(body, masks, count)
    requests = [
        NativeRequest(
            prompt=prompt,
            detokenize=detokenize,
            **{**sampling[i], **{name: column[i] for name, column in columns.items()}},
            **_mask_fields(bool(masks[i]), sampling[i]),
        )
        for i, prompt in enumerate(prompts)
    ]
    if body.stream and any(request.return_sampling_mask for request in requests):
        raise InvalidRequest("stream: sampling masks come with whole answers only", field="stream")
    return Job(
        requests=requests,
        stream=bool(body.stream),
        as_list=not single or samples > 1,
        text_in_logprobs=bool(body.return_text_in_logprobs),
        prompt_token_ids=bool(body.return_prompt_token_ids),
        experts_dtype=body.routed_experts_dtype or "int32",
        routing_key=body.routing_key or body.session_id,
    )


def _mask_fields(asked: bool, sampling: dict[str, Any]) -> dict[str, Any]:
    """What a request for a sampling mask asks of the engine, in SGLang's way (``asked``) or slime's."""
    wanted = asked or sampling.get("top_p_token_ids", False)
    return {"return_sampling_mask": wanted, "return_sampled_logprob": wanted}


def _check_logprobs_mode(body: GenerateBody, masks: list[bool], count: int) -> None:
    for asked, mode in zip(
        masks, _each("sampling_logprobs_mode", body.sampling_logprobs_mode, count), strict=True
    ):
        if mode == "support":
            raise InvalidRequest(
                'sampling_logprobs_mode "support" is not supported: logprobs are those of the sampled tokens, "selected"',
                field="sampling_logprobs_mode",
            )
        if mode is not None and not asked:
            raise InvalidRequest(
                "sampling_logprobs_mode needs return_sampling_mask", field="sampling_logprobs_mode"
            )


def _prompts(body: GenerateBody) -> tuple[list[Any], bool]:
    """The prompts, and whether the caller passed one rather than a list of them."""
    if body.input_ids is None:
        if body.text is None:
            raise InvalidRequest("either text or input_ids is needed", field="text")
        if body.text == []:
            raise InvalidRequest("text is an empty list: there is no prompt", field="text")
        return ([body.text], True) if isinstance(body.text, str) else (list(body.text), False)
    one = is_single(body.input_ids)
    kinds = set(map(type, body.input_ids))
    if len(kinds) > 1:
        raise InvalidRequest(
            "input_ids must be one list of integers, or a list of such lists", field="input_ids"
        )
    prompts = [body.input_ids] if one else list(body.input_ids)
    if body.text is None:
        return prompts, one
    texts = (
        1 if isinstance(body.text, str) else len(body.text)
    )  # text decides the shape, ids are what is taken
    if texts != len(prompts):
        raise InvalidRequest(f"{texts} texts beside {len(prompts)} input_ids", field="text")
    return prompts, isinstance(body.text, str)


def _columns(body: GenerateBody, count: int, single: bool) -> dict[str, list[Any]]:
    columns = {
        "rid": _rids(body.rid, count, single),
        "return_logprob": _each("return_logprob", body.return_logprob, count, False),
        "return_routed_experts": _each("return_routed_experts", body.return_routed_experts, count, False),
        "routed_experts_start_len": [body.routed_experts_start_len] * count,
        "cache_salt": _salts(body, count),
        "min_weights_epoch": [body.min_weights_epoch] * count,
    }
    if any(columns["return_logprob"]):
        ids = body.token_ids_logprob
        nested = bool(ids) and not isinstance(ids[0], int) if ids else False
        columns |= {
            "logprob_start_len": _each("logprob_start_len", body.logprob_start_len, count, -1),
            "top_logprobs_num": _each("top_logprobs_num", body.top_logprobs_num, count, 0),
            "token_ids_logprob": _each("token_ids_logprob", ids, count) if nested else [ids] * count,
        }
    return columns


def _each(name: str, value: Any, count: int, default: Any = None) -> list[Any]:
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise InvalidRequest(f"{len(value)} {name} for {count} prompts", field=name, value=len(value))
    return value


def _rids(rid: str | list[str] | None, count: int, single: bool) -> list[str | None]:
    """What names each prompt's generation; None: the engine's client finds a name."""
    if isinstance(rid, list):
        rids = [each or None for each in _each("rid", rid, count)]
    elif not rid:
        return [None] * count
    else:
        rids = [rid] if single else [f"{rid}_{i}" for i in range(count)]
    given = [each for each in rids if each is not None]
    if len(set(given)) < len(given):
        raise InvalidRequest("Duplicate request ID detected", field="rid")
    return rids


def _salts(body: GenerateBody, count: int) -> list[str]:
    """``cache_salt`` and ``extra_key`` both keep prefixes apart; their sizes count together."""
    salts = _each("cache_salt", body.cache_salt, count, "")
    if body.extra_key is None:
        return salts
    keys = _each("extra_key", body.extra_key, count, "")
    for field, values in (("cache_salt", salts), ("extra_key", keys)):
        check_size(field, max(map(len, values)), MAX_SALT_CHARACTERS, "characters")
    return [f"{salt}\n{key}" if key else salt for salt, key in zip(salts, keys, strict=True)]


def sampling_fields(body: SamplingBody) -> dict[str, Any]:
    """The fields of a :class:`GenerationRequest` that ``sampling_params`` decides.

    Raises:
        InvalidRequest: a refused parameter is given, or a value is not one of its kind.
    """
    _refuse(body, REFUSED_SAMPLING, "sampling_params.")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"{len(stop)} stop strings are over the limit of {MAX_STOP_STRINGS}", field="stop"
        )
    check_size("stop", characters(stop), MAX_STOP_CHARACTERS, "characters in all")
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "min_new_tokens": body.min_new_tokens,
        "stop_token_ids": body.stop_token_ids,
        "ignore_eos": body.ignore_eos,
        "seed": body.sampling_seed,
        "n": body.n,
        "logit_bias": None if not body.logit_bias else bias_of(body.logit_bias),
    }
    wire = {name: value for name, value in given.items() if value is not None}
    own = {
        "no_stop_trim": body.no_stop_trim,
        "skip_special_tokens": body.skip_special_tokens,
        "spaces_between_special_tokens": body.spaces_between_special_tokens,
    }
    scored = body.max_new_tokens == 0  # the engine samples at least one token
    return {
        "sampling_params": SamplingParams(max_new_tokens=1 if scored else body.max_new_tokens, **wire),
        "scored": scored,
        "top_p_token_ids": _wants_top_p_token_ids(body),
        "stop": [each for each in stop if each],
        **{name: value for name, value in own.items() if value is not None},
    }


def _wants_top_p_token_ids(body: SamplingBody) -> bool:
    """Whether slime asks what the filters keep; where there is none it gets nothing, as from its own engine."""
    filtered = (
        (body.top_p or 1.0) < 1.0
        or (body.top_k or -1) > 0
        or (body.min_p or 0.0) > 0.0
        or (body.temperature is not None and body.temperature < GREEDY_BELOW)
    )
    return filtered and bool((body.custom_params or {}).get("return_top_p_token_ids"))


def bias_of(given: dict[str, float]) -> dict[int, float]:
    """``logit_bias`` with its keys as token ids: JSON has text keys only."""
    try:
        return msgspec.convert(given, dict[TokenId, float], str_keys=True)
    except msgspec.ValidationError as error:
        said = field_error(error, dict[TokenId, float], prefix="logit_bias").sentence
        raise InvalidRequest(said, field="logit_bias") from error
