"""The statuses of several engines as one status, whose counters do not go back when an engine is restarted.

Invariants:
- Counters are those of every engine that has run, the ended ones included; an engine that does not answer now counts as it was.
- Gauges (requests, tokens, memory) are those of the engines that are there.
- State, label and epoch are the fleet's: those of the replicas that serve and have answered now; of the others only where none does.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ...io_struct import Distribution, EngineTotals, GetStatusReqOutput
from .combining import added, added_by_key, renumbered

Record = TypeVar("Record", bound=msgspec.Struct)
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
"""Of numbers that are added; None where an engine has none."""


class Counters:
    """What engines have counted, over restarts."""

    def __init__(self) -> None:
        self._last: dict[str, GetStatusReqOutput] = {}
        self._ended: list[GetStatusReqOutput] = []
        self.restarts = 0
        """Number of engines that took the place of another."""

    def take(self, name: str, status: GetStatusReqOutput) -> None:
        """The latest status of the engine ``name``."""
        before = self._last.get(name)
        if before is not None and before.incarnation != status.incarnation:
            self.restarts += 1
            ended = [*self._ended, before]
            counted = _counted(ended)  # one is enough for all; a limit ended with the engine
            counted["step_failures"] = msgspec.structs.replace(counted["step_failures"], token_limit=None)
            self._ended = [msgspec.structs.replace(before, **counted)]
        self._last[name] = status

    def last(self, name: str) -> GetStatusReqOutput | None:
        """The latest status of the engine ``name``; None before the first."""
        return self._last.get(name)

    def totals(self) -> dict[str, Any]:
        """The counters as fields of a status."""
        return _counted([*self._ended, *self._last.values()])


def combined_status(
    statuses: Mapping[int, GetStatusReqOutput],
    serving: Sequence[int],
    *,
    counters: Counters,
    tp: int,
    **of_fleet: Any,
) -> GetStatusReqOutput:
    """One status of the replicas that have answered, at least one, by position.

    Args:
        serving: the positions of those that serve, and whose state is that of now.
        of_fleet: fields that are the fleet's own.
    """
    every = list(statuses.values())
    judged = [statuses[at] for at in serving if at in statuses] or every
    first = judged[0]
    fields: dict[str, Any] = {name: added(getattr(each, name) for each in every) for name in _GAUGES}
    fields |= {name: _summed([getattr(each, name) for each in every]) for name in _RECORDS}
    fields |= _generation(judged) | _weights(statuses, judged) | counters.totals()
    tags = sorted({tag for each in judged for tag in each.released_tags})
    ages = [each.last_step_age_s for each in every if each.last_step_age_s is not None]
    devices = list(dict.fromkeys(each.device for each in every))
    fields |= {
        "memory": "released" if tags else "resident",
        "released_tags": tags,
        "last_step_age_s": min(ages, default=None),
        "kv": _summed(
            [each.kv for each in every], keep=("page_size", "bytes_per_token", "routing_bytes_per_token")
        ),
        "device_memory": _device_memory(every),
        "ranks": renumbered({at: each.ranks for at, each in statuses.items()}, tp),
        "components": _components(every),
        "device": ", ".join(devices),
        "session": next((each.session for each in judged if each.session is not None), None),
        "update": next((each.update for each in judged if each.update is not None), None),
    }
    return msgspec.structs.replace(first, **{**fields, **of_fleet})


def _generation(judged: Sequence[GetStatusReqOutput]) -> dict[str, Any]:
    """Running as long as one runs."""
    states = {each.generation for each in judged}
    paused = [each for each in judged if each.generation != "running"]
    if "running" in states or not paused:
        return {"generation": "running", "pause_mode": None, "pause_age_s": None, "pause_owner": None}
    leases = [each.lease_left_s for each in paused if each.lease_left_s is not None]
    return {
        "generation": "pausing" if "pausing" in states else "paused",
        "pause_mode": paused[0].pause_mode,
        "pause_age_s": max((each.pause_age_s or 0.0 for each in paused), default=None),
        "pause_owner": paused[0].pause_owner,
        "lease_left_s": min(leases, default=None),
    }


def _weights(
    statuses: Mapping[int, GetStatusReqOutput], judged: Sequence[GetStatusReqOutput]
) -> dict[str, Any]:
    worst = max(judged, key=lambda each: _WORST.index(each.weights)).weights
    told = [
        f"replica-{at}: {each.weights_detail}"
        for at, each in statuses.items()
        if each.weights_detail is not None and any(each is one for one in judged)
    ]
    return {"weights": worst, "weights_detail": "; ".join(told) or None}


def _device_memory(every: Sequence[GetStatusReqOutput]) -> Any:
    """Sums; engines on the CPU have the same memory available, so it counts once."""
    memory = _summed([each.device_memory for each in every])
    free = [each.device_memory.available for each in every if each.device_memory.available is not None]
    on_host = all(each.device == "cpu" for each in every)
    return msgspec.structs.replace(
        memory, available=None if not free else min(free) if on_host else sum(free)
    )


def _components(every: Sequence[GetStatusReqOutput]) -> list[Any]:
    by_name: dict[str, list[Any]] = {}
    for status in every:
        for each in status.components:
            by_name.setdefault(each.name, []).append(each)
    return [_summed(records) for records in by_name.values()]


def _counted(statuses: Iterable[GetStatusReqOutput]) -> dict[str, Any]:
    every = list(statuses)
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
        "stages": [_stage(records) for records in stages.values()],
        "totals": EngineTotals(
            prompt_tokens=added(each.prompt_tokens for each in totals),
            cached_tokens=added(each.cached_tokens for each in totals),
            finished_requests=added_by_key(each.finished_requests for each in totals),
            pauses=_grouped([each for one in totals for each in one.pauses], "mode"),
            updates=_grouped([each for one in totals for each in one.updates], "source"),
            emptied=_grouped([each for one in totals for each in one.emptied], "place"),
            queue_time=_distribution([each.queue_time for each in totals]),
            latency_s=_distribution([each.latency_s for each in totals]),
            staleness=_distribution([each.staleness for each in totals]),
        ),
    }


def _stage(records: list[Any]) -> Any:
    return msgspec.structs.replace(
        _summed(records),
        median_s=max(each.median_s for each in records),
        longest_s=max(each.longest_s for each in records),
    )


def _distribution(each: Sequence[Distribution]) -> Distribution:
    counts = [added(column) for column in zip(*(one.counts for one in each if one.counts), strict=True)]
    return Distribution(counts=counts, sum=added(one.sum for one in each))


def _grouped(records: Iterable[Record], key: str) -> list[Record]:
    groups: dict[Any, list[Record]] = {}
    for each in records:
        groups.setdefault(getattr(each, key), []).append(each)
    return [_summed(group) for group in groups.values()]


def _summed(records: Sequence[Any], keep: Sequence[str] = ()) -> Any:
    """One record with the sums of all numbers but those to ``keep``; what is no number is the first one's."""
    known = [each for each in records if each is not None]
    if not known:
        return None
    sums = {
        name: added(getattr(each, name) for each in known)
        for name in known[0].__struct_fields__
        if name not in keep and isinstance(getattr(known[0], name), int | float)
    }
    return msgspec.structs.replace(known[0], **sums)
