"""``/generate`` and ``/abort_request`` as SGLang's clients know them: bodies, routes, answers, streams.

Invariants:
- A field that would change the result and is not supported is refused by name; one that only hints is
  ignored, and unknown keys are refused (a test compares with ``docs/reference/http.md``). ``null`` means
  "left out" wherever it is not a value of its own (``max_new_tokens: null`` is "no limit").
- Everything that goes to the engine with every prompt is bounded before it is copied for each of them.
- An aborted sample is an ordinary answer with what it had. A client that leaves aborts its generations.
- Lists over tokens have one entry for each output id, also of aborted samples.
- A cumulative event is appended to, not encoded again, so the JSON of a stream costs what its tokens cost.
"""

import base64
import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from litestar import Response, post, route

from ....io_struct import CaesuraError, HiddenStates, RoutedExperts, SamplingMask, SamplingParams, new_id
from ....io_struct.base import MAX_ID_LENGTH
from ....io_struct.field_errors import FieldError, other_name
from ....io_struct.generate import GREEDY_BELOW, MAX_SAMPLES, Seed, TokenId, removes_tokens
from ...connection.prompts import is_single
from ...connection.results import GenerateOutput, TokenDelta, TokenLogprobs, read_floats
from ...exceptions import RETRYABLE, InvalidRequest
from ...group.router import routed_by
from ...text.sessions import Turn
from ...text.tokenizer_manager import (
    MAX_SALT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    Chunk,
    GenerationRequest,
    Sample,
    TokenizerManager,
    characters,
    check_size,
)
from ..bodies import (
    INLINE,
    UNREADABLE,
    VISIBLE,
    HTTPRequest,
    Strict,
    decode_large,
    nullable_fields,
    present,
    read_control,
    unreadable,
)
from ..commands import timed
from ..context import SLICE, Front, FrontEnd, in_slices
from ..error_responses import engine_error, json_bytes, native_error, status_of
from ..generations import (
    ClientLeft,
    client_left,
    engine_label,
    frame,
    label_for,
    streamed,
    unless_left,
    whole,
)
from ..grammar_fields import NATIVE, grammar_of
from ..middleware import makes_tokens, routing_key

MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS_IN_ALL = 32 * MAX_STOP_CHARACTERS

Samples = Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH, pattern=VISIBLE)]
Count = Annotated[int, msgspec.Meta(ge=0)]
ExpertsDtype = Literal["int32", "uint8"]
LogprobsMode = Literal["selected", "support"]
Texts = Callable[[int], str | None]
_encode = msgspec.json.Encoder().encode

REFUSED = (
    "routed_dp_rank", "data_parallel_rank", "input_embeds", "image_data", "video_data", "audio_data",
    "lora_id", "custom_logit_processor",
    "return_entropy", "return_indexer_topk", "require_reasoning",
)  # fmt: skip
IGNORED = (
    "log_metrics", "no_logs", "custom_labels", "priority", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "model", "background", "conversation_id",
    "modalities", "validation_time", "return_bytes",
)  # fmt: skip
REFUSED_SAMPLING = ("stop_regex", "beam_width", "watermark")


if TYPE_CHECKING:
    _Sampling = Strict
    _OtherFields = Strict
else:
    _Sampling, _OtherFields = (
        msgspec.defstruct("Fields", fields, bases=(Strict,), kw_only=True)
        for fields in (
            [*nullable_fields(SamplingParams, "seed"), *((name, Any, None) for name in REFUSED_SAMPLING)],
            [(name, Any, None) for name in (*REFUSED, *IGNORED)],
        )
    )


class SamplingBody(_Sampling, kw_only=True):
    """The engine's sampling parameters, whose ranges it checks, and SGLang's beside them."""

    max_new_tokens: int | None = 128
    stop: str | list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    sampling_seed: Seed | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: Annotated[int, msgspec.Meta(ge=1)] | None = None


class SessionParams(Strict, kw_only=True):
    id: Name
    """An open session."""
    rid: Name | None = None
    """Request that this one goes on from; without it, and without ``streaming``, a conversation begins."""
    offset: Count | None = None
    """Number of tokens that are kept of what was before; null or 0: all."""
    replace: bool | None = None
    """Forget what went on from that request, or all requests."""
    drop_previous_output: bool | None = None
    """Go on from that request's prompt."""


class GenerateBody(_OtherFields, kw_only=True):
    """``X | list`` fields take one value for all prompts, or a list of one each."""

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
    return_hidden_states: bool | list[bool] | None = None
    hidden_states_layers: list[int] | None = None
    hidden_states_start_len: Count | None = None
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    min_weights_epoch: int | None = None
    lora_path: str | list[str | None] | None = None
    """Names of loaded adapters; null: the model itself."""
    routing_key: Any = None
    session_id: Any = None
    session_params: SessionParams | None = None
    """For one prompt with one sample, which has logprobs."""


_decoder = msgspec.json.Decoder(GenerateBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest(GenerationRequest):
    """A prompt, and the form of its sampling mask."""

    top_p_token_ids: bool = False
    """slime's form: base64 arrays, and logprobs under the sampling distribution."""
    turn: Turn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    body: GenerateBody
    requests: list[NativeRequest]
    as_list: bool
    """A batch, or more than one sample."""


def decode_body(raw: bytes, max_batch: int = 4096) -> GenerateBody:
    """Decode a request; raise InvalidRequest for wrong values and refused fields."""
    try:
        if len(raw) <= INLINE:
            body = _decoder.decode(raw)
        else:
            body = decode_large(raw, _decoder, {"text": b'""', "input_ids": b"[]"}, max_batch)
    except UNREADABLE as error:
        wrong = _misplaced(unreadable(error, raw, GenerateBody))
        raise InvalidRequest(wrong.sentence, **({"field": wrong.field} if wrong.field else {})) from error
    _refuse(body, REFUSED, "")
    return body


def _misplaced(wrong: FieldError) -> FieldError:
    """Return ``wrong``, or where its field belongs: sampling parameters are often misplaced."""
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
    """Make one request of each prompt; raise InvalidRequest if the lists or sizes do not fit."""
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
    requests = []
    for i, prompt in enumerate(prompts):
        mask = bool(masks[i]) or sampling[i]["top_p_token_ids"]
        fields = {**sampling[i], **{name: column[i] for name, column in columns.items()}}
        requests.append(
            NativeRequest(
                prompt=prompt,
                detokenize=detokenize,
                return_sampling_mask=mask,
                return_sampled_logprob=mask,
                **fields,
            )
        )
    return Job(body=body, requests=requests, as_list=not single or samples > 1)


def _check_logprobs_mode(body: GenerateBody, masks: list[bool], count: int) -> None:
    modes = _each("sampling_logprobs_mode", body.sampling_logprobs_mode, count)
    for mask, mode in zip(masks, modes, strict=True):
        if mode == "support":
            raise InvalidRequest(
                'sampling_logprobs_mode "support" is not supported: logprobs are those of the sampled '
                'tokens, "selected"',
                field="sampling_logprobs_mode",
            )
        if mode is not None and not mask:
            raise InvalidRequest(
                "sampling_logprobs_mode needs return_sampling_mask", field="sampling_logprobs_mode"
            )


def _prompts(body: GenerateBody) -> tuple[list[Any], bool]:
    """Return the prompts, and True if the caller passed one rather than a list of them."""
    if body.input_ids is None:
        if body.text is None:
            raise InvalidRequest("either text or input_ids is needed", field="text")
        if body.text == []:
            raise InvalidRequest("text is an empty list: there is no prompt", field="text")
        return ([body.text], True) if isinstance(body.text, str) else (list(body.text), False)
    one = is_single(body.input_ids)
    if len(set(map(type, body.input_ids))) > 1:
        raise InvalidRequest(
            "input_ids must be one list of integers, or a list of such lists", field="input_ids"
        )
    prompts = [body.input_ids] if one else list(body.input_ids)
    if body.text is None:
        return prompts, one
    # The ids are taken, and the text decides the shape of the answer.
    texts = 1 if isinstance(body.text, str) else len(body.text)
    if texts != len(prompts):
        raise InvalidRequest(f"{texts} texts beside {len(prompts)} input_ids", field="text")
    return prompts, isinstance(body.text, str)


def _columns(body: GenerateBody, count: int, single: bool) -> dict[str, list[Any]]:
    columns = {
        "rid": _rids(body.rid, count, single),
        "return_logprob": _each("return_logprob", body.return_logprob, count, False),
        "return_routed_experts": _each("return_routed_experts", body.return_routed_experts, count, False),
        "routed_experts_start_len": [body.routed_experts_start_len] * count,
        "return_hidden_states": _each("return_hidden_states", body.return_hidden_states, count, False),
        "hidden_states_layers": [body.hidden_states_layers] * count,
        "hidden_states_start_len": [body.hidden_states_start_len or 0] * count,
        "cache_salt": _salts(body, count),
        "min_weights_epoch": [body.min_weights_epoch] * count,
        "adapter": [name or None for name in _each("lora_path", body.lora_path, count)],
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
    """Return the salt of each prompt: ``cache_salt`` and ``extra_key``, whose sizes count together."""
    salts = _each("cache_salt", body.cache_salt, count, "")
    if body.extra_key is None:
        return salts
    keys = _each("extra_key", body.extra_key, count, "")
    for name, values in (("cache_salt", salts), ("extra_key", keys)):
        check_size(name, max(map(len, values)), MAX_SALT_CHARACTERS, "characters")
    return [f"{salt}\n{key}" if key else salt for salt, key in zip(salts, keys, strict=True)]


def sampling_fields(body: SamplingBody) -> dict[str, Any]:
    """Return the fields of a :class:`GenerationRequest` that ``sampling_params`` decides."""
    _refuse(body, REFUSED_SAMPLING, "sampling_params.")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"{len(stop)} stop strings are over the limit of {MAX_STOP_STRINGS}", field="stop"
        )
    check_size("stop", characters(stop), MAX_STOP_CHARACTERS, "characters in all")
    wire = present({name: getattr(body, name, None) for name in SamplingParams.__struct_fields__})
    none = body.max_new_tokens == 0  # the engine samples at least one token
    if body.sampling_seed is not None:
        wire["seed"] = body.sampling_seed
    wire["grammar"] = grammar_of(body, {"grammar": str, **NATIVE})
    params = SamplingParams(**{**wire, "max_new_tokens": 1 if none else body.max_new_tokens})
    text = {
        "no_stop_trim": body.no_stop_trim,
        "skip_special_tokens": body.skip_special_tokens,
        "spaces_between_special_tokens": body.spaces_between_special_tokens,
        "stream_interval": body.stream_interval,
    }
    return {
        "sampling_params": params,
        "scored": none and params.forced_output_ids is None,
        "top_p_token_ids": bool((body.custom_params or {}).get("return_top_p_token_ids"))
        and (removes_tokens(params) or params.temperature < GREEDY_BELOW),
        "stop": [each for each in stop if each],
        **present(text),
    }


@route(
    "/generate",
    http_method=["POST", "PUT"],
    status_code=200,
    opt={"access": "user", "body": "prompts", "struct": GenerateBody},
    guards=[makes_tokens],
)
async def generate(request: HTTPRequest, front: Front) -> Response[Any]:
    try:
        job = await _planned(front, await request.body())
        body = job.body
        session = body.session_params.id if body.session_params is not None else body.session_id
        with routed_by(routing_key(body.routing_key or session)):
            if body.stream:
                return await streamed(request, front, job.requests, _Events(front, job), _stream_error)
            return await _whole(request, front, job)
    except ClientLeft:
        return client_left()
    except CaesuraError as error:
        return refused(front, error)


def _in_session(front: FrontEnd, job: Job, params: SessionParams) -> Job:
    """Return a job that is a turn of a session, in which its ids follow those before."""
    [request, *others] = job.requests
    if others or request.sampling_params.n > 1:
        raise InvalidRequest("session_params needs one prompt with one sample", field="session_params")

    def new(later: bool) -> list[int]:
        ids = request.prompt
        found = front.manager.tokenize(ids) if isinstance(ids, str) else list(ids)
        tokenizer = front.manager.tokenizer
        start = tokenizer.encode("")[:1] if later and tokenizer is not None else []
        return found[1:] if start and found[:1] == start else found

    turn = front.sessions.append(
        params.id,
        request.rid or new_id(),
        new,
        after=params.rid,
        offset=params.offset or 0,
        replace=bool(params.replace),
        drop_previous_output=bool(params.drop_previous_output),
    )
    fields = {"prompt": turn.prompt_ids, "rid": turn.rid, "return_logprob": True, **turn.lease()}
    return replace(job, requests=[replace(request, turn=turn, **fields)])


async def _planned(front: FrontEnd, raw: bytes) -> Job:
    job = await _planned_alone(front, raw)
    if (params := job.body.session_params) is None:
        return job
    return await front.workers.run(lambda: _in_session(front, job, params))


async def _planned_alone(front: FrontEnd, raw: bytes) -> Job:
    limit, detokenize = front.options.max_batch, front.manager.tokenizer is not None
    if len(raw) > INLINE:
        return await front.workers.run(
            lambda: plan_job(decode_body(raw, limit), max_batch=limit, detokenize=detokenize)
        )
    body = decode_body(raw, limit)

    def plan() -> Job:
        return plan_job(body, max_batch=limit, detokenize=detokenize)

    many = isinstance(body.text, list) and len(body.text) > SLICE
    rows = body.input_ids or []
    many |= len(rows) > SLICE and isinstance(rows[0], list)
    return await front.workers.run(plan) if many else plan()


def refused(front: FrontEnd, error: CaesuraError) -> Response[bytes]:
    front.metrics.error(error.code)
    status = status_of(error)
    return native_error(error) if status == 400 else engine_error(error, status)


def _answer(front: FrontEnd, job: Job) -> "Answer":
    return Answer(
        texts=token_texts(front.manager, bool(job.body.return_text_in_logprobs)),
        with_text=front.manager.tokenizer is not None,
        prompt_token_ids=bool(job.body.return_prompt_token_ids),
        experts_dtype=job.body.routed_experts_dtype or "int32",
    )


async def _whole(request: HTTPRequest, front: FrontEnd, job: Job) -> Response[bytes]:
    found = await unless_left(request, whole(front, job.requests))
    answer = _answer(front, job)
    answer.label = await label_for(front, [sample for samples in found for sample in samples])
    pairs = ((sample, each) for samples, each in zip(found, job.requests, strict=True) for sample in samples)
    body = [_encode(answer.of(sample, each)) async for sample, each in in_slices(pairs)]
    return json_bytes(b"[" + b",".join(body) + b"]" if job.as_list else body[0])


def _stream_error(error: CaesuraError) -> bytes:
    status, retryable = status_of(error), error.code in RETRYABLE
    kind = "invalid_request_error" if status < 500 else "server_error"
    fields = {"message": error.message, "type": kind, "code": status, "retryable": retryable}
    return frame(_encode({"error": fields}))


class _Events:
    def __init__(self, front: FrontEnd, job: Job) -> None:
        self._front = front
        self._job = job
        self._answer = _answer(front, job)
        sizes = (each.sampling_params.n for each in job.requests)
        self._offsets = list(itertools.accumulate(sizes, initial=0))
        self._writers: dict[int, EventWriter] = {}

    async def begin(self) -> None:
        self._answer.label_at_begin = await engine_label(self._front)

    def event(self, position: int, chunk: Chunk, label: str) -> bytes:
        sample = self._offsets[position] + chunk.index
        writer = self._writers.get(sample)
        if writer is None:
            writer = self._writers[sample] = EventWriter(
                self._answer,
                self._job.requests[position],
                sample if self._job.as_list else None,
                self._front.options.incremental_streaming,
            )
        self._answer.label = self._answer.label or label
        return writer.event(chunk)

    def end(self) -> bytes:
        return b""


def token_texts(manager: TokenizerManager, wanted: bool) -> Texts | None:
    """Return the function for the third entry of a logprob, or None for null."""
    if not wanted or manager.tokenizer is None:
        return None
    known: dict[int, str] = {}

    def text_of(token: int) -> str:
        if token not in known:
            known[token] = manager.detokenize([token], skip_special_tokens=False)
        return known[token]

    return text_of


def triples(logprobs: list[float] | list[float | None], ids: list[int], texts: Texts | None) -> list[Any]:
    if texts is None and len(logprobs) == len(ids) == 1:  # of a step, in a third of the time
        return [(logprobs[0], ids[0], None)]
    words = itertools.repeat(None) if texts is None else map(texts, ids)
    return list(zip(logprobs, ids, words, strict=False))


def rows(values: TokenLogprobs, texts: Texts | None) -> Iterator[list[Any]]:
    for position in range(len(values)):
        pairs = values.at(position)
        yield triples([value for value, _ in pairs], [token for _, token in pairs], texts)


def experts_of(output: GenerateOutput, dtype: ExpertsDtype = "int32") -> str | None:
    """Return :func:`routed_experts` of a sample; None if not asked for or no token was sampled."""
    if output.routed_experts is None or not output.output_ids:
        return None
    return routed_experts(output.routed_experts, dtype)


def routed_experts(routed: RoutedExperts, dtype: ExpertsDtype = "int32") -> str:
    """Return little-endian [rows, layers, experts per token] in base64; ``uint8`` has at most 256 experts."""
    if dtype == "uint8":
        if routed.dtype != "U8":
            raise InvalidRequest(
                "routed_experts_dtype uint8: the model has more than 256 experts",
                field="routed_experts_dtype",
            )
        return base64.b64encode(routed.data).decode()
    size = routed.itemsize
    wide = bytearray(len(routed.data) // size * 4)
    for place in range(size):  # the lowest bytes; the others are zero
        wide[place::4] = routed.data[place::size]
    return base64.b64encode(wide).decode()


def hidden_states(states: HiddenStates, prompt_tokens: int) -> Any:
    """Return one layer as SGLang does: the prompt's rows in a list, then each of the output; else base64."""
    count, layers, size = states.shape
    if layers > 1:
        data = base64.b64encode(states.data).decode()
        return {"data": data, "shape": states.shape, "dtype": states.dtype, "start": states.start}
    values: Sequence[float]
    if states.dtype == "F16":
        values = struct.unpack(f"<{count * size}e", states.data)
    else:
        wide = bytearray(4 * count * size)
        given = len(states.data) // max(count * size, 1)  # bfloat16 is the upper half of a float32
        for place in range(given):
            wide[4 - given + place :: 4] = states.data[place::given]
        values = read_floats(bytes(wide))
    rows = [values[size * row : size * (row + 1)] for row in range(count)]
    prompt = max(prompt_tokens - states.start, 0)
    return [rows[:prompt], *rows[prompt:]]


def finish_reason(sample: Sample) -> dict[str, Any]:
    reason = sample.output.finish_reason
    if reason.type == "stop":
        return {"type": "stop", "matched": sample.matched}
    if reason.type == "length":
        return {"type": "length", "length": reason.length}
    return {"type": "abort", "message": reason.message or "Aborted", "status_code": None, "err_type": None}


def meta_info(
    sample: Sample,
    request: GenerationRequest,
    label: str,
    texts: Texts | None,
    experts_dtype: ExpertsDtype = "int32",
) -> dict[str, Any]:
    """Return all but the tokens of a finished sample; ``label`` is the version of one without tokens."""
    output = sample.output
    spans = output.weight_versions
    meta: dict[str, Any] = {
        "id": sample.rid,
        "finish_reason": finish_reason(sample),
        "prompt_tokens": output.prompt_tokens,
        "weight_version": spans[-1].version if spans else label,
        "weight_versions": spans,
        "num_retractions": output.num_retractions,
        "reasoning_tokens": 0,
        "completion_tokens": len(output.output_ids),
        "cached_tokens": output.cached_tokens,
        "cached_tokens_details": None,
        "dp_rank": 0,
        "seed": output.seed,
        "queue_time": output.queue_time,
        "e2e_latency": output.e2e_latency,
        "response_sent_to_client_ts": time.time(),
    }
    if request.return_logprob:
        delta = output.as_delta()
        if _as_slime(request):
            delta = msgspec.structs.replace(delta, output_logprobs=output.sampled_logprobs)
        _add_output_logprobs(meta, delta, texts)
        _add_input_logprobs(meta, sample, request, texts)
    if output.drafted_tokens:
        meta |= _speculation(output)
    if output.sampling_mask is not None:
        _add_sampling_mask(meta, output, output.sampling_mask, request)
    if output.hidden_states is not None:
        meta["hidden_states"] = hidden_states(output.hidden_states, output.prompt_tokens)
    if output.routed_experts is not None:
        meta["routed_experts"] = experts_of(output, experts_dtype)
        meta["routed_experts_start_len"] = request.routed_experts_start_len
    return meta


def _speculation(output: GenerateOutput) -> dict[str, Any]:
    steps = len(output.output_ids) - output.accepted_tokens
    return {
        "spec_verify_ct": steps,
        "spec_accept_token_num": output.accepted_tokens,
        "spec_draft_token_num": output.drafted_tokens,
        "spec_accept_rate": output.accepted_tokens / output.drafted_tokens,
        "spec_accept_length": len(output.output_ids) / max(steps, 1),
    }


def _as_slime(request: GenerationRequest) -> bool:
    return isinstance(request, NativeRequest) and request.top_p_token_ids


def _add_sampling_mask(
    meta: dict[str, Any], output: GenerateOutput, mask: SamplingMask, request: GenerationRequest
) -> None:
    """Add the mask in slime's form or SGLang's; slime reads a missing key as "no tokens"."""
    if not _as_slime(request):
        meta["output_token_sampling_mask"] = [mask.at(position) for position in range(len(mask))]
        meta["output_token_sampling_logprobs"] = output.sampled_logprobs
        meta["output_token_sampling_mask_length"] = len(mask)
    elif len(mask):
        meta["top_p_token_ids"] = base64.b64encode(mask.ids).decode()
        meta["top_p_token_offsets"] = base64.b64encode(mask.offsets).decode()


def _add_output_logprobs(meta: dict[str, Any], delta: TokenDelta, texts: Texts | None) -> None:
    logprobs = delta.output_logprobs or []
    meta["output_token_logprobs"] = triples(logprobs, delta.output_ids, texts)
    meta["output_token_logprobs_length"] = len(logprobs)
    if delta.output_top_logprobs is not None:
        meta["output_top_logprobs"] = list(rows(delta.output_top_logprobs, texts))
    if delta.output_token_ids_logprobs is not None:
        meta["output_token_ids_logprobs"] = list(rows(delta.output_token_ids_logprobs, texts))


def _add_input_logprobs(
    meta: dict[str, Any], sample: Sample, request: GenerationRequest, texts: Texts | None
) -> None:
    output: GenerateOutput = sample.output
    values = output.input_logprobs or []
    ids = sample.prompt_ids[request.logprob_start_len :] if values else []
    meta["input_token_logprobs"] = triples(values, ids, texts)
    for name, further in (
        ("input_top_logprobs", output.input_top_logprobs),
        ("input_token_ids_logprobs", output.input_token_ids_logprobs),
    ):
        if further is not None:
            meta[name] = [None, *rows(further, texts)]


@dataclass(slots=True)
class Answer:
    texts: Texts | None
    with_text: bool
    prompt_token_ids: bool
    label: str = ""
    """The engine's weight version, for samples without tokens."""
    label_at_begin: str | None = None
    """The same when a stream began. None means unknown."""
    experts_dtype: ExpertsDtype = "int32"

    def of(self, sample: Sample, request: GenerationRequest) -> dict[str, Any]:
        answer: dict[str, Any] = {"text": sample.text} if self.with_text else {}
        answer["output_ids"] = sample.output.output_ids
        answer["meta_info"] = self.meta_of(sample, request)
        if self.prompt_token_ids:
            answer["prompt_token_ids"] = sample.prompt_ids
        return answer

    def meta_of(self, sample: Sample, request: GenerationRequest) -> dict[str, Any]:
        meta = meta_info(sample, request, self.label, self.texts, self.experts_dtype)
        if isinstance(request, NativeRequest) and (turn := request.turn) is not None:
            meta["session"] = turn.told(turn.store.record(turn, sample, {}))
        return meta


@dataclass(slots=True)
class EventWriter:
    answer: Answer
    request: GenerationRequest
    index: int | None
    """Position in the call, or None if it is the only sample."""
    incremental: bool
    text: bytearray = field(default_factory=bytearray)
    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    further: dict[str, bytearray] = field(default_factory=dict)
    count: int = 0
    digits: bytearray = field(default_factory=bytearray)
    """The same as text."""
    parts: list[bytes | bytearray] = field(default_factory=list)
    """Parts of an event before the last: the buffers above and what is between them."""

    def event(self, chunk: Chunk) -> bytes:
        sample = chunk.finished
        if sample is not None and not self.incremental:
            body = self.answer.of(sample, self.request)
            return frame(_encode(body if self.index is None else {**body, "index": self.index}))
        if self.incremental:
            for buffer in (self.text, self.ids, self.logprobs, *self.further.values()):
                buffer.clear()
        self._take(chunk)
        if sample is not None:
            return b"".join(self._around([self._ended(sample)]))
        if not self.parts:
            self.parts = self._around(self._begun(chunk))
        self.digits[:] = b"%d" % self.count
        return b"".join(self.parts)

    def _take(self, chunk: Chunk) -> None:
        if chunk.text:
            self.text += _encode(chunk.text)[1:-1]
        delta = chunk.delta
        if delta is None:
            return
        self.count += len(delta.output_ids)
        _append(self.ids, delta.output_ids)
        if self.request.return_logprob:
            texts = self.answer.texts
            _append(self.logprobs, triples(delta.output_logprobs or [], delta.output_ids, texts))
            self._take_further("output_top_logprobs", delta.output_top_logprobs)
            self._take_further("output_token_ids_logprobs", delta.output_token_ids_logprobs)

    def _take_further(self, name: str, values: TokenLogprobs | None) -> None:
        if values is None:
            return
        if name not in self.further:
            self.further[name] = bytearray()
            self.parts = []
        _append(self.further[name], list(rows(values, self.answer.texts)))

    def _around(self, meta: list[bytes]) -> list[bytes | bytearray]:
        """Return the parts of an event with ``meta``, metadata around the places of ``count``."""
        parts: list[bytes | bytearray] = [b"data: {"]
        if self.answer.with_text:
            parts += (b'"text":"', self.text, b'",')
        parts += (b'"output_ids":[', self.ids, b'],"meta_info":', meta[0])
        for part in meta[1:]:
            parts += (self.digits, part)
        parts[-1] = parts[-1][:-1]
        if self.request.return_logprob:
            parts += (b',"output_token_logprobs":[', self.logprobs, b"]")
            for name, buffer in self.further.items():
                parts += (f',"{name}":['.encode(), buffer, b"]")
        parts.append(b"}}\n\n" if self.index is None else b'},"index":%d}\n\n' % self.index)
        return parts

    def _begun(self, chunk: Chunk) -> list[bytes]:
        count = msgspec.Raw(b"\0")  # which no JSON contains
        meta = {
            "id": chunk.rid,
            "finish_reason": None,
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": count,
            "weight_version": self.answer.label_at_begin,
            "cached_tokens": None,
            **({"output_token_logprobs_length": count} if self.request.return_logprob else {}),
        }
        return _encode(meta).split(b"\0")

    def _ended(self, sample: Sample) -> bytes:
        meta = self.answer.meta_of(sample, self.request)
        for name in ("output_token_logprobs", *self.further):
            meta.pop(name, None)
        return _encode(meta)


def _append(buffer: bytearray, items: list[Any]) -> None:
    if items:
        if buffer:
            buffer += b","
        buffer += _encode(items)[1:-1]


class AbortBody(Strict, kw_only=True):
    rid: str = ""
    abort_all: bool = False
    # accepted and ignored
    abort_message: str = ""
    finished_reason: dict[str, Any] | None = None


@post("/abort_request", status_code=200, opt={"access": "user", "struct": AbortBody})
async def abort_request(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Abort one generation by its exact rid, or all. An empty or unknown rid is no error."""
    body = await read_control(request, AbortBody)
    if body.rid or body.abort_all:
        work = front.client.abort(None if body.abort_all else body.rid, abort_all=body.abort_all)
        await timed(front, "abort_request", work)
    return Response(b"", media_type="text/plain")
