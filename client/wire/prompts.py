"""From the arguments of ``generate`` to the requests on the wire.

Invariants: one request per prompt, in order; ids of a list are derived from the caller's (``name-0``, ``name-1``, …), so
that repeating the call with the same ``message_id`` repeats the same messages. Values are checked by the engine, not
twice: only what decides between one prompt and many is looked at here.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...io_struct import GenerateReqInput, SamplingParams
from ..exceptions import InvalidRequest, TimedOut
from .options import GenerateOptions, id_of

_OPTIONS = frozenset(GenerateOptions.__annotations__)


class Finished(Protocol):
    """What a thread's and an event loop's futures have in common for reading."""

    def done(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of one ``generate`` call."""

    message_id: str
    """The caller's id; for a single prompt it is the request's own."""
    requests: list[GenerateReqInput]
    single: bool
    """The caller passed one prompt, not a list of prompts."""

    def collect(self, waiters: Sequence[Finished], timeout: float | None) -> Any:
        """Results in the caller's shape, one output or a flat prompt-major list, from what has ended by now.

        Raises:
            EngineError: of the first prompt that failed, with its position as a note.
            TimedOut: none failed, and not all have ended.
        """
        for position, waiter in enumerate(waiters):
            error = waiter.exception() if waiter.done() else None
            if error is not None:
                if not self.single:
                    error.add_note(f"prompt {position} of {len(self.requests)}")
                raise error
        if not all(waiter.done() for waiter in waiters):
            raise timed_out(self.message_id, timeout)
        flat = [output for waiter in waiters for output in waiter.result()]
        return flat[0] if self.single and len(flat) == 1 else flat


def timed_out(message_id: str, timeout: float | None) -> TimedOut:
    """The error of a call that had ``timeout`` seconds."""
    return TimedOut(f"no answer within {timeout} s to message {message_id}", id=message_id, timeout=timeout)


def plan(
    input_ids: Sequence[int] | Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    options: GenerateOptions,
    *,
    rid: str | Sequence[str] | None,
    message_id: str | None,
) -> Plan:
    """Lay out one ``generate`` call.

    Raises:
        InvalidRequest: token ids that are not integers, or lists of different lengths.
        TypeError: an option that there is not.
    """
    fields = _fields(options)
    single = is_single(input_ids)
    prompts: list[Any] = [input_ids] if single else list(input_ids)
    params = _per_prompt("sampling_params", sampling_params, SamplingParams, len(prompts))
    base = id_of(message_id)
    names = range(len(prompts))
    ids = [base] if single else [f"{base}-{i}" for i in names]
    if isinstance(rid, str) and not single:
        rid = [f"{rid}-{i}" for i in names]
    rids = _per_prompt("rid", rid, str, len(prompts))
    requests = [
        GenerateReqInput(
            id=ids[position],
            rid=rids[position],
            input_ids=token_ids(prompt),
            sampling_params=params[position] or SamplingParams(),
            **fields,
        )
        for position, prompt in enumerate(prompts)
    ]
    return Plan(base, requests, single)


def one_request(
    input_ids: Sequence[int],
    sampling_params: SamplingParams | None,
    options: GenerateOptions,
    *,
    rid: str | None,
    message_id: str | None,
    stream: bool,
) -> GenerateReqInput:
    """The request of one ``submit``; raises as :func:`plan`."""
    return GenerateReqInput(
        id=id_of(message_id),
        rid=rid,
        input_ids=token_ids(input_ids),
        sampling_params=sampling_params or SamplingParams(),
        stream=stream,
        **_fields(options),
    )


def token_ids(prompt: Sequence[int], field: str = "input_ids") -> list[int]:
    """``field`` of a request as plain integers; numpy's integers are taken too, booleans are not."""
    try:
        ids = list(map(operator.index, prompt))
    except TypeError as error:
        raise InvalidRequest(f"{field} must be integers: {error}", field=field) from error
    if bool in set(map(type, prompt)):
        raise InvalidRequest(f"{field} must be integers, not bool", field=field)
    return ids


def is_single(input_ids: Sequence[int] | Sequence[Sequence[int]]) -> bool:
    """Whether these are the ids of one sequence, rather than several sequences."""
    if len(input_ids) == 0:
        return True  # an empty prompt, which the engine refuses
    first = input_ids[0]
    if isinstance(first, (str, float)):
        raise InvalidRequest(f"input_ids must be integers, not {type(first).__name__}", field="input_ids")
    return not hasattr(first, "__len__")


def _fields(options: GenerateOptions) -> dict[str, Any]:
    if not _OPTIONS.issuperset(options):
        raise TypeError(f"unknown generation option {', '.join(sorted(options.keys() - _OPTIONS))}")
    if (wanted := options.get("token_ids_logprob")) is not None:
        return {**options, "token_ids_logprob": token_ids(wanted, "token_ids_logprob")}
    return {**options}


def _per_prompt(field: str, value: Any, kind: type, count: int) -> list[Any]:
    if value is None or isinstance(value, kind):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidRequest(f"{len(values)} {field} for {count} prompts", field=field, value=len(values))
    return values
