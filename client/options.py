"""What the methods of both clients take and give beyond plain values."""

from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict

from ..io_struct import BeginWeightUpdateReqOutput, WeightUpdateReqOutput, new_id
from .exceptions import InvalidRequest

DEFAULT_KEEPALIVE_TIMEOUT_S = 120.0
"""Sixty keepalives: the engine sends none while it is inside of one C call, such as a step or a large copy."""

LONGEST_S = 1e9
"""Thirty years: beyond it is for ever."""

CheckerAction = Literal["checksum", "snapshot", "compare", "reset_tensors"]


class UpdateOptions(TypedDict, total=False):
    """Keywords of every weight update, with the engine's defaults where left out."""

    weight_version: str | None
    """The new public label, at commit. None, the default: unchanged."""
    flush_cache: bool
    """True, the default: requests that run are retracted and the prefix cache is cleared. False: they are frozen in place."""
    torch_empty_cache: bool
    """Also return the allocator's unused blocks; default False."""
    abort_all_requests: bool
    """End every request first; default False."""


@dataclass(slots=True)
class WeightUpdate:
    """What ``weight_update(...)`` hands to its block."""

    opened: BeginWeightUpdateReqOutput
    result: WeightUpdateReqOutput | None = None
    """The reply to the commit; None until the block has ended well."""


def seconds(name: str, value: Any) -> float | None:
    """A time to wait as clocks take it: None for ever, which is what infinity and what no clock can count mean too; 0 for
    what has passed already.

    Raises:
        InvalidRequest: it is not a number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise InvalidRequest(
            f"{name} = {value!r} must be a number of seconds, or None", field=name, value=str(value)
        )
    number: Any = value  # integers may be larger than floats
    return None if number > LONGEST_S else max(0.0, float(number))


def id_of(message_id: str | None) -> str:
    """``message_id``, or a fresh one."""
    return new_id() if message_id is None else message_id
