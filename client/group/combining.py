"""Replies of several engines as one reply: no sockets, no clocks.

Invariants:
- Counts and bytes of all replicas are added; times are the longest, since replicas work at the same time.
- Ranks are numbered through: rank ``r`` of replica ``i`` is ``i * tp + r``. Rank 0 of each replica is in the reply's own figures.
- What all replicas share (a mode, a label, a type) is the first one's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ...io_struct import (
    ContinueGenerationReqOutput,
    FlushCacheReqOutput,
    PauseGenerationReqOutput,
    ReleaseMemoryOccupationReqOutput,
    RenewPauseLeaseReqOutput,
    Reply,
    ResumeMemoryOccupationReqOutput,
    StartProfileReqOutput,
    StopProfileReqOutput,
    WeightsCheckerReqOutput,
    WeightUpdateReqOutput,
)
from ..exceptions import InternalError

Replies = Mapping[int, Any]
"""By position of the replica, at least one."""
ReplyT = TypeVar("ReplyT", bound=Reply)
PATHS = ", "
"""Between the files of several replicas."""


def added(values: Iterable[Any]) -> Any:
    """The sum of what is known; None: nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def added_by_key(parts: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Sums, key by key."""
    found: dict[Any, Any] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = found.get(key, 0) + value
    return found


def renumbered(ranks: Mapping[int, Sequence[Any]], tp: int) -> list[Any]:
    """Records with a ``rank``, by replica."""
    return [
        msgspec.structs.replace(each, rank=replica * tp + each.rank)
        for replica, of_one in ranks.items()
        for each in of_one
    ]


def combined(replies: Replies, tp: int) -> Any:
    """One reply for all of ``replies``, which are of one type."""
    first: Reply = next(iter(replies.values()))
    combine = _COMBINE.get(type(first))
    return first if combine is None else combine(replies, tp)


def _sums(reply: ReplyT, replies: Replies, *names: str, **others: Any) -> ReplyT:
    sums = {name: added(getattr(each, name) for each in replies.values()) for name in names}
    return msgspec.structs.replace(reply, **sums, **others)


def _paused(replies: Replies, _: int) -> PauseGenerationReqOutput:
    first: PauseGenerationReqOutput = next(iter(replies.values()))
    foreign = (each.owner for each in replies.values() if each.owner != first.owner)
    return _sums(
        first,
        replies,
        "step",
        "held_requests",
        "held_tokens",
        "waiting_requests",
        "aborted_requests",
        owner=next(foreign, first.owner),
    )


def _continued(replies: Replies, tp: int) -> ContinueGenerationReqOutput:
    first: ContinueGenerationReqOutput = next(iter(replies.values()))
    return _sums(
        first,
        replies,
        "reserved_before",
        "reserved_after",
        "freed",
        was_paused=any(each.was_paused for each in replies.values()),
        ranks=renumbered({at: each.ranks for at, each in replies.items()}, tp),
    )


def _flushed(replies: Replies, _: int) -> FlushCacheReqOutput:
    first: FlushCacheReqOutput = next(iter(replies.values()))
    return _sums(first, replies, "freed_tokens", "reserved_before", "reserved_after")


def _tags(replies: Replies) -> list[str]:
    return sorted({tag for each in replies.values() for tag in each.released_tags})


def _released(replies: Replies, _: int) -> ReleaseMemoryOccupationReqOutput:
    first: ReleaseMemoryOccupationReqOutput = next(iter(replies.values()))
    freed = added_by_key(each.freed_bytes for each in replies.values())
    return _sums(
        first, replies, "reserved_before", "reserved_after", released_tags=_tags(replies), freed_bytes=freed
    )


def _resumed(replies: Replies, _: int) -> ResumeMemoryOccupationReqOutput:
    first: ResumeMemoryOccupationReqOutput = next(iter(replies.values()))
    resumed = added_by_key(each.resumed_bytes for each in replies.values())
    return _sums(first, replies, released_tags=_tags(replies), resumed_bytes=resumed)


def _renewed(replies: Replies, _: int) -> RenewPauseLeaseReqOutput:
    first: RenewPauseLeaseReqOutput = next(iter(replies.values()))
    left = [each.lease_left_s for each in replies.values() if each.lease_left_s is not None]
    return msgspec.structs.replace(
        first, renewed=all(each.renewed for each in replies.values()), lease_left_s=min(left, default=None)
    )


def _checked(replies: Replies, _: int) -> WeightsCheckerReqOutput:
    """What all of them have; ``changed`` names a tensor that differs on any of them.

    Raises:
        InternalError: replicas have different weights.
    """
    first: WeightsCheckerReqOutput = next(iter(replies.values()))
    totals = {f"replica-{at}": each.total for at, each in replies.items()}
    if len(set(totals.values())) > 1:
        raise InternalError(f"the replicas have different weights: checksums {totals}", checksums=totals)
    changed = sorted({name for each in replies.values() for name in each.changed})
    return msgspec.structs.replace(first, changed=changed)


def _profiling(replies: Replies, _: int) -> StartProfileReqOutput:
    first: StartProfileReqOutput = next(iter(replies.values()))
    return msgspec.structs.replace(first, path=PATHS.join(each.path for each in replies.values()))


def _profiled(replies: Replies, _: int) -> StopProfileReqOutput:
    first: StopProfileReqOutput = next(iter(replies.values()))
    return _sums(first, replies, "steps", path=PATHS.join(each.path for each in replies.values()))


def _updated(replies: Replies, _: int) -> WeightUpdateReqOutput:
    """Counts are those of one replica: all have written the same."""
    first: WeightUpdateReqOutput = next(iter(replies.values()))
    stages = [each.stages for each in replies.values()]
    longest = {name: max(getattr(each, name) for each in stages) for name in first.stages.__struct_fields__}
    return msgspec.structs.replace(
        first,
        changed_tensors=max(each.changed_tensors for each in replies.values()),
        flushed=any(each.flushed for each in replies.values()),
        stages=msgspec.structs.replace(first.stages, **longest),
        relay_error=next((each.relay_error for each in replies.values() if each.relay_error), None),
    )


_COMBINE: dict[type, Callable[[Replies, int], Any]] = {
    PauseGenerationReqOutput: _paused,
    ContinueGenerationReqOutput: _continued,
    FlushCacheReqOutput: _flushed,
    ReleaseMemoryOccupationReqOutput: _released,
    ResumeMemoryOccupationReqOutput: _resumed,
    RenewPauseLeaseReqOutput: _renewed,
    WeightsCheckerReqOutput: _checked,
    StartProfileReqOutput: _profiling,
    StopProfileReqOutput: _profiled,
    WeightUpdateReqOutput: _updated,
}
"""Replies of other types (the ranks of a group, say) are the first replica's."""
