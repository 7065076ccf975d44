"""What the methods of both clients take and give beyond plain values."""

from dataclasses import dataclass
from typing import Literal, TypedDict

from ..io_struct import BeginWeightUpdateReqOutput, WeightUpdateReqOutput, new_id

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
    session_id: str | None
    """The open session that the update belongs to. Left out: that which this client began, if one is open."""


@dataclass(slots=True)
class WeightUpdate:
    """What ``weight_update(...)`` hands to its block."""

    opened: BeginWeightUpdateReqOutput
    result: WeightUpdateReqOutput | None = None
    """The reply to the commit; None until the block has ended well."""


def id_of(message_id: str | None) -> str:
    """``message_id``, or a fresh one."""
    return new_id() if message_id is None else message_id
