"""From the arguments of ``generate`` and ``score`` to the requests on the wire.

Invariants: one request per prompt, in order, with ids derived from the caller's (``name-0``, …), so repeating
the call with its ``message_id`` repeats the messages. The engine checks values; here only what the wire
cannot carry, and what decides between one prompt and many. Arrays and tensors are whatever has a ``tolist``.
"""

import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ...io_struct import (
    CheckDriftReqInput,
    DriftSample,
    GenerateReqInput,
    SamplingParams,
    ScoreReqInput,
    ScoreReqOutput,
)
from ...io_struct.field_errors import advice, field_error, nearest, one_of, other_name, shown
from ..exceptions import InternalError, InvalidRequest, TimedOut
from .client_options import GenerateOptions, id_of, must_be
from .results import read_floats

_SAMPLING: dict[type, str] = {SamplingParams: "a SamplingParams", Mapping: "a dict"}
RequestT = TypeVar("RequestT")
StructT = TypeVar("StructT", bound=msgspec.Struct)
_TOKENIZES = "tokenize it first, or give text to caesura.client.text.TextClient or `caesura serve`"


class Array(Protocol):
    def tolist(self) -> Any: ...


Ids = Sequence[int] | Array
Prompts = Ids | Sequence[Ids]
"""One prompt or several; an array of two dimensions is several."""
Sampling = SamplingParams | Mapping[str, Any]
"""A mapping has the fields of :class:`SamplingParams`; None means left out, except in ``max_new_tokens``."""


class Finished(Protocol):
    def done(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Plan(Generic[RequestT]):
    """The requests of one call with several prompts."""

    message_id: str
    """The caller's id; a single prompt's request has it too."""
    requests: list[RequestT]
    single: bool
    """True if the caller passed one prompt, not a list."""
    buffers: Sequence[bytes] = ()

    def collect(self, waiters: Sequence[Finished], timeout: float | None) -> Any:
        """Return one output or a flat prompt-major list, or raise the first prompt's error, else TimedOut."""
        for position, waiter in enumerate(waiters):
            error = waiter.exception() if waiter.done() else None
            if error is not None:
                if not self.single:
                    error.add_note(f"prompt {position} of {len(waiters)}")
                raise error
        if not all(waiter.done() for waiter in waiters):
            raise timed_out(self.message_id, timeout)
        flat = [output for waiter in waiters for output in waiter.result()]
        return flat[0] if self.single and len(flat) == 1 else flat


def timed_out(message_id: str, timeout: float | None) -> TimedOut:
    return TimedOut(f"no answer within {timeout} s to message {message_id}", id=message_id, timeout=timeout)


def plan(
    input_ids: Prompts,
    sampling_params: Sampling | Sequence[Sampling] | None,
    options: GenerateOptions,
    *,
    rid: str | Sequence[str] | None,
    message_id: str | None,
) -> Plan[GenerateReqInput]:
    """Return the requests of one ``generate`` call; InvalidRequest for wrong prompts or parameters."""
    fields = _fields(options)
    prompts, single = sequences(input_ids)
    params = per_prompt_sampling(sampling_params, len(prompts))
    base = id_of(message_id)
    names = range(len(prompts))
    ids = [base] if single else [f"{base}-{i}" for i in names]
    if isinstance(rid, str) and not single:
        rid = [f"{rid}-{i}" for i in names]
    rids = _per_prompt("rid", rid, {str: "a string"}, len(prompts))
    requests = [
        GenerateReqInput(
            id=ids[position],
            rid=rids[position],
            input_ids=token_ids(prompt),
            sampling_params=sampling(params[position]),
            **fields,
        )
        for position, prompt in enumerate(prompts)
    ]
    return Plan(base, requests, single)


def one_request(
    input_ids: Ids,
    sampling_params: Sampling | None,
    options: GenerateOptions,
    *,
    rid: str | None,
    message_id: str | None,
    stream: bool,
) -> GenerateReqInput:
    work = plan(input_ids, sampling_params, options, rid=rid, message_id=message_id)
    if not work.single:
        reason = f"submit takes one prompt, not a list of {len(work.requests)}: generate takes several"
        raise InvalidRequest(reason, field="input_ids")
    work.requests[0].stream = stream
    return work.requests[0]


def per_prompt_sampling(given: Sampling | Sequence[Sampling] | None, count: int) -> list[Any]:
    return _per_prompt("sampling_params", given, _SAMPLING, count)


def sampling(given: Any) -> SamplingParams:
    if isinstance(given, Mapping):
        given = {key: value for key, value in given.items() if value is not None or key == "max_new_tokens"}
    return struct_of("sampling_params", given, SamplingParams, GenerateReqInput.__struct_fields__)


def struct_of(field: str, given: Any, kind: type[StructT], beside: Sequence[str] = ()) -> StructT:
    """Return ``given`` as a ``kind``, None as its defaults, or InvalidRequest; ``beside`` belongs there."""
    if isinstance(given, kind):
        return given
    if given is None:
        return kind()
    if not isinstance(given, Mapping):
        raise must_be(field, given, f"a {kind.__name__} or a dict")
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        name, sentence = field_error(error, kind, dict(given), prefix=field, beside=beside)
        raise InvalidRequest(sentence, field=name) from error


def token_ids(prompt: Any, field: str = "input_ids") -> list[int]:
    """Return plain integers; arrays and numpy's integers are taken, booleans are not."""
    prompt = _plain(prompt)
    if isinstance(prompt, list) and set(map(type, prompt)) == {int}:
        return prompt.copy()  # what a JSON decoder gave, in half the time
    try:
        ids = list(map(operator.index, prompt))
    except TypeError as error:
        raise InvalidRequest(_no_ids(prompt, field), field=field) from error
    if bool in set(map(type, prompt)):
        raise InvalidRequest(f"{field} must be integers, not bool", field=field)
    return ids


def sequences(input_ids: Any) -> tuple[list[Any], bool]:
    """Return the prompts, and True if the caller passed one rather than several."""
    input_ids = _plain(input_ids)
    if not isinstance(input_ids, Sequence) or isinstance(input_ids, (str, bytes)):
        raise InvalidRequest(_no_ids(input_ids, "input_ids"), field="input_ids")
    return ([input_ids], True) if is_single(input_ids) else (list(input_ids), False)


def is_single(input_ids: Sequence[Any]) -> bool:
    if len(input_ids) == 0:
        return True  # an empty prompt, which the engine refuses
    first = _plain(input_ids[0])
    if isinstance(first, (str, float)):
        raise InvalidRequest(_no_ids(input_ids, "input_ids"), field="input_ids")
    return not hasattr(first, "__len__")


def _plain(given: Any) -> Any:
    return given.tolist() if hasattr(given, "tolist") else given


def _no_ids(given: Any, field: str) -> str:
    if isinstance(given, str):
        return f"{field} = {shown(given)} is text, and the scheduler takes token ids: {_TOKENIZES}"
    if isinstance(given, Mapping):
        inside = f": pass its [{field!r}]" if field in given else ""
        return f"{field} must be a list of token ids, not a {type(given).__name__}{inside}"
    if not isinstance(given, Sequence):
        return f"{field} = {shown(given)} must be a list of token ids"
    for position, each in enumerate(given):
        if isinstance(each, str):
            return (
                f"{field}[{position}] = {shown(each)} is text, and the scheduler takes token ids: "
                f"{_TOKENIZES}"
            )
        if not hasattr(each, "__index__"):
            return f"{field}[{position}] = {shown(each)} must be an integer"
    return f"{field} must be a list of integers"


def require_known_options(options: Mapping[str, Any], kind: type) -> None:
    """Raise a TypeError that says what was meant by keywords that ``kind``, a TypedDict, has not."""
    if unknown := sorted(options.keys() - kind.__annotations__.keys()):
        reason = f"unknown generation option {_unknown_option(unknown[0], sorted(kind.__annotations__))}"
        raise TypeError(reason)


def _fields(options: GenerateOptions) -> dict[str, Any]:
    require_known_options(options, GenerateOptions)
    fields: dict[str, Any] = {**options}
    for name in ("token_ids_logprob", "hidden_states_layers"):
        if (wanted := fields.get(name)) is not None:
            fields[name] = token_ids(wanted, name)
    return fields


def _unknown_option(name: str, known: Sequence[str]) -> str:
    of_sampling = SamplingParams.__struct_fields__
    if name in of_sampling:
        return f"{name}: it is a field of sampling_params"
    if (instead := advice(name, of_sampling)) is not None:
        return f"{name}: {instead}"
    near = (
        other_name(name, known)
        or other_name(name, of_sampling)
        or nearest(name, known)
        or nearest(name, of_sampling)
    )
    place = ", a field of sampling_params" if near in of_sampling else ""
    hint = "" if near is None else f" (did you mean {near}{place}?)"
    return f"{name}{hint}; options are {one_of(known)}"


def _per_prompt(field: str, value: Any, kinds: dict[type, str], count: int) -> list[Any]:
    if value is None or isinstance(value, tuple(kinds)):
        return [value] * count
    if not isinstance(value, Sequence) or isinstance(value, str):
        wanted = one_of(list(kinds.values()))
        raise must_be(field, value, f"{wanted}, or a list of one for each prompt")
    values = list(value)
    if len(values) != count:
        raise InvalidRequest(f"{len(values)} {field} for {count} prompts", field=field, value=len(values))
    return values


def drift_request(samples: Sequence[Mapping[str, Any]] | None) -> CheckDriftReqInput:
    """Return the request of a drift check; InvalidRequest names a sample that is none."""
    if samples is None:
        return CheckDriftReqInput()
    return CheckDriftReqInput(
        samples=[_drift_sample(f"samples[{i}]", each) for i, each in enumerate(samples)]
    )


def _drift_sample(name: str, given: Mapping[str, Any]) -> DriftSample:
    fields = dict(given)
    try:
        fields["token_ids"] = token_ids(fields["token_ids"], f"{name}.token_ids")
        values = fields["logprobs"]
        values = values.tolist() if hasattr(values, "tolist") else list(values)
        fields["logprobs"] = struct.pack(f"<{len(values)}f", *values)
        return DriftSample(**fields)
    except KeyError as error:
        raise InvalidRequest(f"{name} has no {error.args[0]}", field=f"{name}.{error.args[0]}") from None
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from error


class Scores:
    def __init__(self, input_ids: Prompts, start: int | Sequence[int], temperature: float) -> None:
        each, self._single = sequences(input_ids)
        ids = [token_ids(sequence) for sequence in each]
        starts = [start] * len(ids) if isinstance(start, int) else token_ids(start, "start")
        if len(starts) != len(ids):
            reason = f"{len(starts)} start for {len(ids)} sequences"
            raise InvalidRequest(reason, field="start", value=len(starts))
        self.request = ScoreReqInput(input_ids=ids, start=starts, temperature=temperature)

    def decode(self, reply: ScoreReqOutput) -> Any:
        """Return ``list[float]``, or a list of them for several sequences; InternalError if broken."""
        logprobs = [read_floats(data) for data in reply.logprobs]
        wanted = [
            len(ids) - start for ids, start in zip(self.request.input_ids, self.request.start, strict=True)
        ]
        got = [len(values) for values in logprobs]
        if got != wanted:
            raise InternalError(f"{got} log-probabilities for {wanted} tokens")
        return logprobs[0] if self._single else logprobs
