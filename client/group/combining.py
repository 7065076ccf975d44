"""Replies and statuses of several engines as one, for a client that takes them for one engine.

Invariants:
- Counts and bytes are added; times are the longest, since engines work at the same time. A mode, label or
  type is the first engine's. An error names its replicas, unless all have the same one.
- Ranks are numbered through: rank ``r`` of replica ``i`` is ``i * tp + r``.
- Counters include every engine that has run, so no restart sets them back; gauges those that are there;
  state, label and epoch those that serve and have answered, or all if none does.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, get_args

import msgspec

from ... import io_struct as wire
from ..exceptions import EngineError, EngineRestarting, InternalError, error_for
from .members import Member
from .session import Answers

_COUNTERS = ("step", "generated_tokens", "num_retractions", "step_failures", "stages", "totals")
_GAUGES = (
    *("running_requests", "prefilling_requests", "waiting_requests", "gen_throughput"),
    *("max_running_requests", "images", "memory_by_tag", "prompt_cache", "kv", "components", "grammars"),
)
_LEAST_RATIO = 1e-12
_WORST = ("valid", "updating", "invalid", "poisoned")


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _least(values: Iterable[Any]) -> Any:
    return min((value for value in values if value is not None), default=None)


def _united(lists: Iterable[Iterable[str]]) -> list[str]:
    return sorted({each for one in lists for each in one})


def _one_figures(figures: Sequence[wire.DriftFigures]) -> dict[str, Any]:
    """Return figures of all tokens: exactly, but for ``p99``, which is at most the one returned."""
    known = [each for each in figures if each.tokens]
    tokens = sum(each.tokens for each in known)
    if not known:
        return {"tokens": 0}

    def mean(of: Callable[[wire.DriftFigures], float]) -> float:
        return sum(each.tokens * of(each) for each in known) / tokens

    # The mean of r, which is rounded to 0 or below if all of them are small.
    ratio = {id(each): max(each.k3 + 1.0 - each.k1, _LEAST_RATIO) for each in known}
    squares = mean(lambda each: ratio[id(each)] ** 2 / each.ess)
    return {
        "tokens": tokens,
        "p99": max(each.p99 for each in known),
        "max_abs": max(each.max_abs for each in known),
        "ess": mean(lambda each: ratio[id(each)]) ** 2 / squares,
        **{name: mean(attrgetter(name)) for name in ("mean_abs", "k1", "k3", "clip_share")},
    }


def combined_drift(reports: Sequence[wire.DriftReport | None]) -> wire.DriftReport | None:
    """Return one report of several engines; its state is the worst."""
    known = [each for each in reports if each is not None]
    if not known:
        return None
    parts: dict[tuple[Any, str], list[wire.DriftFigures]] = {}
    for part in (part for each in known for part in each.parts):
        parts.setdefault((part.by, part.name), []).append(part)
    updates = [each.update for each in known if each.update is not None]
    worst = sorted(
        (token for each in known for token in each.worst), key=lambda token: -abs(token.scored - token.given)
    )
    return wire.DriftReport(
        **_one_figures(known),
        weights_epoch=known[0].weights_epoch,
        weight_version=known[0].weight_version,
        samples=sum(each.samples for each in known),
        dropped=sum(each.dropped for each in known),
        state=max((each.state for each in known), key=get_args(wire.DriftState).index),
        parts=[wire.DriftPart(by=by, name=name, **_one_figures(each)) for (by, name), each in parts.items()],
        worst=worst[: max(len(each.worst) for each in known)],
        update=wire.DriftUpdate(**_one_figures(updates)) if updates else None,
    )


_RULES: dict[wire.GroupRule, Callable[[list[Any]], Any]] = {
    "first": _first,
    "differing": lambda values: next((each for each in values if each != values[0]), values[0]),
    "least": _least,
    "any": any,
    "all": all,
    "joined": ", ".join,
    "united": _united,
    "drift": combined_drift,
}
_RECORDS: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("page_size", "bytes_per_token", "routing_bytes_per_token"), _first),
    **dict.fromkeys(("median_s", "longest_s"), max),
    "token_limit": _least,
}
"""How fields of these names are combined in the records of a status; others are added."""


def added(values: Iterable[Any]) -> Any:
    """Return sums of numbers, tables by key, records by field, lists by first field; else the first value."""
    known = [value for value in values if value is not None]
    match known[0] if known else None:
        case bool() | str():
            return known[0]
        case int() | float():
            return sum(known)
        case dict():
            keys = dict.fromkeys(key for each in known for key in each)
            return {key: added(each.get(key) for each in known) for key in keys}
        case list():
            items = [item for each in known for item in each]
            if not items or not isinstance(items[0], msgspec.Struct):
                return [added(column) for column in zip(*filter(None, known), strict=True)]
            groups: dict[Any, list[Any]] = {}
            for item in items:
                groups.setdefault(getattr(item, item.__struct_fields__[0]), []).append(item)
            return [added(group) for group in groups.values()]
        case msgspec.Struct() as first:
            return type(first)(**_by_field(known, _RECORDS))
    return None


def _by_field(structs: Sequence[Any], rules: Mapping[str, Callable[[list[Any]], Any]]) -> dict[str, Any]:
    return {
        name: rules.get(name, added)([getattr(each, name) for each in structs])
        for name in structs[0].__struct_fields__
    }


def combined_answer(answers: Answers, positions: Mapping[Member, int], tp: int) -> Any:
    """Return the one reply of all, or raise EngineError for those that refuse or are gone."""
    if answers.failed:
        raise one_error(answers.failed, among=len(answers.failed) + len(answers.replies))
    if not answers.replies and not answers.out:
        raise EngineRestarting("no replica is there now")
    if not answers.replies:
        raise one_error(answers.out, among=len(answers.out))
    return combined({positions[member]: reply for member, reply in answers.replies.items()}, tp)


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


def combined(replies: Mapping[int, Any], tp: int) -> Any:
    """Return one reply for those of one type, by position, as its ``OF_GROUP`` says."""
    every = list(replies.values())
    first = every[0]
    if isinstance(first, wire.WeightsCheckerReqOutput):
        totals = {f"replica-{at}": each.total for at, each in replies.items()}
        if len(set(totals.values())) > 1:
            raise InternalError(f"the replicas have different weights: checksums {totals}", checksums=totals)
    if isinstance(first, wire.WeightUpdateReqOutput):  # counts are one replica's: all have written the same
        stages = [each.stages for each in every]
        longest = {name: max(getattr(each, name) for each in stages) for name in stages[0].__struct_fields__}
        return msgspec.structs.replace(
            first,
            changed_tensors=max(each.changed_tensors for each in every),
            flushed=any(each.flushed for each in every),
            stages=msgspec.structs.replace(first.stages, **longest),
            relay_error=next((each.relay_error for each in every if each.relay_error), None),
        )
    if first.OF_GROUP is None:
        return first
    rules = {name: _RULES[rule] for name, rule in first.OF_GROUP.items()}
    whole = type(first)(**_by_field(every, rules))
    if isinstance(first, wire.ContinueGenerationReqOutput):
        whole.ranks = _renumbered({at: each.ranks for at, each in replies.items()}, tp)
    return whole


class Counters:
    """Counters of engines over restarts."""

    def __init__(self) -> None:
        self.last: dict[str, wire.GetStatusReqOutput] = {}
        """The latest status of each engine, by name."""
        self.restarts = 0
        """Number of engines that took the place of another."""
        self._ended: list[wire.GetStatusReqOutput] = []

    def take(self, name: str, status: wire.GetStatusReqOutput) -> None:
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
    statuses: Mapping[int, wire.GetStatusReqOutput],
    serving: Sequence[int],
    *,
    counters: Counters,
    tp: int,
    **of_group: Any,
) -> wire.GetStatusReqOutput:
    """Return one status of all, by position; ``serving`` are those that serve and whose state is current."""
    every = list(statuses.values())
    judged = [statuses[at] for at in serving if at in statuses] or every
    paused = [each for each in judged if each.generation != "running"]
    details = [
        f"replica-{at}: {each.weights_detail}"
        for at, each in statuses.items()
        if each.weights_detail is not None and any(each is one for one in judged)
    ]
    fields: dict[str, Any] = {name: added(getattr(each, name) for each in every) for name in _GAUGES}
    fields |= counters.totals() | {
        "released_tags": _united(each.released_tags for each in judged),
        "generation": "running",
        "pause_mode": None,
        "pause_age_s": None,
        "pause_owner": None,
        "weights": max((each.weights for each in judged), key=_WORST.index),
        "weights_detail": "; ".join(details) or None,
        "memory": "released" if any(each.released_tags for each in judged) else "resident",
        "last_step_age_s": _least(each.last_step_age_s for each in every),
        "device_memory": _device_memory(every),
        "ranks": _renumbered({at: each.ranks for at, each in statuses.items()}, tp),
        "drift": combined_drift([each.drift for each in judged]),
        "device": ", ".join(dict.fromkeys(each.device for each in every)),
        "session": next((each.session for each in judged if each.session is not None), None),
        "update": next((each.update for each in judged if each.update is not None), None),
    }
    if len(paused) == len(judged):  # else one runs
        fields |= {
            "generation": "pausing" if any(each.generation == "pausing" for each in paused) else "paused",
            "pause_mode": paused[0].pause_mode,
            "pause_age_s": max(each.pause_age_s or 0.0 for each in paused),
            "pause_owner": paused[0].pause_owner,
            "lease_left_s": _least(each.lease_left_s for each in paused),
        }
    running = Counter[tuple[str, int]]()
    for each in (each for status in every for each in status.adapters):
        running[each.name, each.adapter_epoch] += each.running
    fields["adapters"] = [
        msgspec.structs.replace(each, running=running[each.name, each.adapter_epoch])
        for each in judged[0].adapters
    ]
    return msgspec.structs.replace(judged[0], **{**fields, **of_group})


def _renumbered(ranks: Mapping[int, Sequence[Any]], tp: int) -> list[Any]:
    return [
        msgspec.structs.replace(each, rank=replica * tp + each.rank)
        for replica, of_one in ranks.items()
        for each in of_one
    ]


def _device_memory(every: Sequence[wire.GetStatusReqOutput]) -> Any:
    """Return the sums; engines on the CPU have the same memory available, so it counts once."""
    memory = added(each.device_memory for each in every)
    if all(each.device == "cpu" for each in every):
        memory = msgspec.structs.replace(
            memory, available=_least(each.device_memory.available for each in every)
        )
    return memory


def _counted(every: Sequence[wire.GetStatusReqOutput]) -> dict[str, Any]:
    return {name: added(getattr(each, name) for each in every) for name in _COUNTERS} if every else {}
