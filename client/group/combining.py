"""Replies and statuses of several engines as one, for a client that takes them for one engine.

Invariants:
- Counts and bytes are added; times are the longest, since engines work at the same time. A mode, label or
  type is the first engine's. An error names its replicas, unless all have the same one.
- Ranks are numbered through: rank ``r`` of replica ``i`` is ``i * tp + r``.
- Counters of a status include every engine that has run: they do not go back at a restart. Gauges are those
  of the engines that are there. State, label and epoch are those of the engines that serve and have answered,
  or of all if none does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ...io_struct import (
    ContinueGenerationReqOutput,
    Distribution,
    EngineTotals,
    FlushCacheReqOutput,
    GetStatusReqOutput,
    PauseGenerationReqOutput,
    ReleaseMemoryOccupationReqOutput,
    RenewPauseLeaseReqOutput,
    ResumeMemoryOccupationReqOutput,
    StartProfileReqOutput,
    StopProfileReqOutput,
    WeightsCheckerReqOutput,
    WeightUpdateReqOutput,
)
from ..exceptions import EngineError, EngineRestarting, InternalError, error_for
from .members import Member
from .session import Answers

Record = TypeVar("Record", bound=msgspec.Struct)
Replies = Mapping[int, Any]
"""Replies of one type, at least one, by position of the replica."""
PATHS = ", "
"""Separator of the files of several replicas."""
_SUMS: dict[type, tuple[str, ...]] = {
    PauseGenerationReqOutput: (
        "step",
        "held_requests",
        "held_tokens",
        "waiting_requests",
        "aborted_requests",
    ),
    ContinueGenerationReqOutput: ("reserved_before", "reserved_after", "freed"),
    FlushCacheReqOutput: ("freed_tokens", "reserved_before", "reserved_after"),
    ReleaseMemoryOccupationReqOutput: ("reserved_before", "reserved_after"),
    StopProfileReqOutput: ("steps",),
}
_COUNTERS = ("step", "generated_tokens", "num_retractions")
_GAUGES = (
    "running_requests",
    "prefilling_requests",
    "waiting_requests",
    "gen_throughput",
    "max_running_requests",
)
_WORST = ("valid", "updating", "invalid", "poisoned")
_RECORDS = ("images", "memory_by_tag", "prompt_cache")
"""Fields of a status with numbers that are added; None where an engine has none."""


def combined_answer(answers: Answers, position: Callable[[Member], int], tp: int) -> Any:
    """Return the one reply of all that have answered.

    Raises:
        EngineError: a replica has refused or failed, or none has answered.
    """
    if answers.failed:
        raise one_error(answers.failed, among=len(answers.failed) + len(answers.replies))
    if not answers.replies and not answers.out:
        raise EngineRestarting("no replica is there now")
    if not answers.replies:
        raise one_error(answers.out, among=len(answers.out))
    return combined({position(member): reply for member, reply in answers.replies.items()}, tp)


def uniform(errors: Mapping[Any, EngineError]) -> bool:
    return len({(str(error.code), error.message) for error in errors.values()}) == 1


def one_error(errors: Mapping[Member, EngineError], *, among: int) -> EngineError:
    """Return one error for those of some of ``among`` replicas."""
    first = next(iter(errors.values()))
    if len(errors) == among and uniform(errors):
        return first
    told = "; ".join(f"{member.name}: {error.message}" for member, error in errors.items())
    members = {member.name: error.message for member, error in errors.items()}
    return error_for(str(first.code), told, {**first.detail, "members": members})


def combined(replies: Replies, tp: int) -> Any:
    """Return one reply for all of ``replies``; a type without rules has the first replica's."""
    first = next(iter(replies.values()))
    every = list(replies.values())
    fields: dict[str, Any] = {
        name: added(getattr(each, name) for each in every) for name in _SUMS.get(type(first), ())
    }
    match first:
        case PauseGenerationReqOutput():
            fields["owner"] = next((each.owner for each in every if each.owner != first.owner), first.owner)
        case ContinueGenerationReqOutput():
            fields["was_paused"] = any(each.was_paused for each in every)
            fields["ranks"] = _renumbered({at: each.ranks for at, each in replies.items()}, tp)
        case ReleaseMemoryOccupationReqOutput():
            fields |= _tags(every)
            fields["freed_bytes"] = _added_by_key(each.freed_bytes for each in every)
        case ResumeMemoryOccupationReqOutput():
            fields |= _tags(every)
            fields["resumed_bytes"] = _added_by_key(each.resumed_bytes for each in every)
        case RenewPauseLeaseReqOutput():
            left = [each.lease_left_s for each in every if each.lease_left_s is not None]
            fields = {"renewed": all(each.renewed for each in every), "lease_left_s": min(left, default=None)}
        case WeightsCheckerReqOutput():
            totals = {f"replica-{at}": each.total for at, each in replies.items()}
            if len(set(totals.values())) > 1:
                raise InternalError(
                    f"the replicas have different weights: checksums {totals}", checksums=totals
                )
            fields["changed"] = sorted({name for each in every for name in each.changed})
        case StartProfileReqOutput() | StopProfileReqOutput():
            fields["path"] = PATHS.join(each.path for each in every)
        case WeightUpdateReqOutput():  # counts are those of one replica: all have written the same
            stages = [each.stages for each in every]
            names = first.stages.__struct_fields__
            longest = {name: max(getattr(each, name) for each in stages) for name in names}
            fields["changed_tensors"] = max(each.changed_tensors for each in every)
            fields["flushed"] = any(each.flushed for each in every)
            fields["stages"] = msgspec.structs.replace(first.stages, **longest)
            fields["relay_error"] = next((each.relay_error for each in every if each.relay_error), None)
    return msgspec.structs.replace(first, **fields)


class Counters:
    """Counters of engines over restarts."""

    def __init__(self) -> None:
        self.last: dict[str, GetStatusReqOutput] = {}
        """The latest status of each engine, by name."""
        self.restarts = 0
        """Number of engines that took the place of another."""
        self._ended: list[GetStatusReqOutput] = []

    def take(self, name: str, status: GetStatusReqOutput) -> None:
        before = self.last.get(name)
        if before is not None and before.incarnation != status.incarnation:
            self.restarts += 1
            counted = _counted([*self._ended, before])  # one record for all that have ended
            counted["step_failures"] = msgspec.structs.replace(counted["step_failures"], token_limit=None)
            self._ended = [msgspec.structs.replace(before, **counted)]
        self.last[name] = status

    def totals(self) -> dict[str, Any]:
        return _counted([*self._ended, *self.last.values()])


def combined_status(
    statuses: Mapping[int, GetStatusReqOutput],
    serving: Sequence[int],
    *,
    counters: Counters,
    tp: int,
    **of_group: Any,
) -> GetStatusReqOutput:
    """Return one status of all, by position; ``serving`` are those that serve and whose state is current."""
    every = list(statuses.values())
    judged = [statuses[at] for at in serving if at in statuses] or every
    paused = [each for each in judged if each.generation != "running"]
    ages = [each.last_step_age_s for each in every if each.last_step_age_s is not None]
    details = [
        f"replica-{at}: {each.weights_detail}"
        for at, each in statuses.items()
        if each.weights_detail is not None and any(each is one for one in judged)
    ]
    fields: dict[str, Any] = {name: added(getattr(each, name) for each in every) for name in _GAUGES}
    fields |= {name: _summed([getattr(each, name) for each in every]) for name in _RECORDS}
    fields |= counters.totals() | _tags(judged)
    fields |= {
        "generation": "running",
        "pause_mode": None,
        "pause_age_s": None,
        "pause_owner": None,
        "weights": max((each.weights for each in judged), key=_WORST.index),
        "weights_detail": "; ".join(details) or None,
        "memory": "released" if any(each.released_tags for each in judged) else "resident",
        "last_step_age_s": min(ages, default=None),
        "kv": _summed(
            [each.kv for each in every], keep=("page_size", "bytes_per_token", "routing_bytes_per_token")
        ),
        "device_memory": _device_memory(every),
        "ranks": _renumbered({at: each.ranks for at, each in statuses.items()}, tp),
        "components": _grouped([one for each in every for one in each.components], "name"),
        "device": ", ".join(dict.fromkeys(each.device for each in every)),
        "session": next((each.session for each in judged if each.session is not None), None),
        "update": next((each.update for each in judged if each.update is not None), None),
    }
    if len(paused) == len(judged):  # else one runs
        leases = [each.lease_left_s for each in paused if each.lease_left_s is not None]
        fields |= {
            "generation": "pausing" if any(each.generation == "pausing" for each in paused) else "paused",
            "pause_mode": paused[0].pause_mode,
            "pause_age_s": max(each.pause_age_s or 0.0 for each in paused),
            "pause_owner": paused[0].pause_owner,
            "lease_left_s": min(leases, default=None),
        }
    return msgspec.structs.replace(judged[0], **{**fields, **of_group})


def added(values: Iterable[Any]) -> Any:
    """Return the sum of the known values, or None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _added_by_key(parts: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for part in parts:
        for key, value in part.items():
            found[key] = found.get(key, 0) + value
    return found


def _renumbered(ranks: Mapping[int, Sequence[Any]], tp: int) -> list[Any]:
    return [
        msgspec.structs.replace(each, rank=replica * tp + each.rank)
        for replica, of_one in ranks.items()
        for each in of_one
    ]


def _tags(every: Iterable[Any]) -> dict[str, list[str]]:
    return {"released_tags": sorted({tag for each in every for tag in each.released_tags})}


def _device_memory(every: Sequence[GetStatusReqOutput]) -> Any:
    """Return the sums; engines on the CPU have the same memory available, so it counts once."""
    memory = _summed([each.device_memory for each in every])
    free = [each.device_memory.available for each in every if each.device_memory.available is not None]
    on_host = all(each.device == "cpu" for each in every)
    return msgspec.structs.replace(
        memory, available=None if not free else min(free) if on_host else sum(free)
    )


def _counted(every: Sequence[GetStatusReqOutput]) -> dict[str, Any]:
    if not every:
        return {}
    totals = [each.totals for each in every]
    limits = [each.step_failures.token_limit for each in every]
    failures = _summed([each.step_failures for each in every])
    stages: dict[str, list[Any]] = {}
    for status in every:
        for stage in status.stages:
            stages.setdefault(stage.name, []).append(stage)
    return {
        **{name: added(getattr(each, name) for each in every) for name in _COUNTERS},
        "step_failures": msgspec.structs.replace(
            failures, token_limit=min((each for each in limits if each is not None), default=None)
        ),
        "stages": [
            msgspec.structs.replace(
                _summed(records),
                median_s=max(each.median_s for each in records),
                longest_s=max(each.longest_s for each in records),
            )
            for records in stages.values()
        ],
        "totals": EngineTotals(
            prompt_tokens=added(each.prompt_tokens for each in totals),
            cached_tokens=added(each.cached_tokens for each in totals),
            finished_requests=_added_by_key(each.finished_requests for each in totals),
            pauses=_grouped([each for one in totals for each in one.pauses], "mode"),
            updates=_grouped([each for one in totals for each in one.updates], "source"),
            emptied=_grouped([each for one in totals for each in one.emptied], "place"),
            queue_time=_distribution([each.queue_time for each in totals]),
            latency_s=_distribution([each.latency_s for each in totals]),
            staleness=_distribution([each.staleness for each in totals]),
        ),
    }


def _distribution(each: Sequence[Distribution]) -> Distribution:
    counts = [added(column) for column in zip(*(one.counts for one in each if one.counts), strict=True)]
    return Distribution(counts=counts, sum=added(one.sum for one in each))


def _grouped(records: Iterable[Record], key: str) -> list[Record]:
    groups: dict[Any, list[Record]] = {}
    for each in records:
        groups.setdefault(getattr(each, key), []).append(each)
    return [_summed(group) for group in groups.values()]


def _summed(records: Sequence[Any], keep: Sequence[str] = ()) -> Any:
    """Return the first record with the sums of all numbers but those to ``keep``."""
    known = [each for each in records if each is not None]
    if not known:
        return None
    sums = {
        name: added(getattr(each, name) for each in known)
        for name in known[0].__struct_fields__
        if name not in keep and isinstance(getattr(known[0], name), int | float)
    }
    return msgspec.structs.replace(known[0], **sums)
