"""The first members of a fleet: engines that agree, or those left behind by a fleet whose process has died.

Invariant: members that serve when a fleet is open have the same bytes under the same label. Engines that were
left behind are compared by checksums of their parameters, since one label may stand for two weights there.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from ...io_struct import GetStatusReqOutput
from ..exceptions import EngineError, InvalidRequest, NoSession, WeightsInvalid
from .members import Member
from .recovery import ASK_S, RELOAD_S, Source
from .session import ABORT_S, everywhere

if TYPE_CHECKING:
    from .fleet import Fleet

Adopt = bool | Literal["any"]
"""Whether a fleet takes over engines that were left behind; ``any``: also if none has complete weights."""


async def agree(fleet: "Fleet", members: Sequence[Member]) -> None:
    """Have ``members`` serve, which must have one label and valid weights.

    Raises:
        EngineError: one cannot be reached.
        InvalidRequest: one has other weights than the first, or none that are valid.
    """
    answers = await everywhere(members, fleet.ask, ASK_S)
    answers.raise_first()
    statuses: dict[Member, GetStatusReqOutput] = answers.replies
    if not statuses:
        return
    first = next(iter(statuses.values()))
    for member, status in statuses.items():
        if status.weights != "valid" or status.weight_version != first.weight_version:
            raise InvalidRequest(
                f"{member.name} has {status.weights} weights {status.weight_version!r}, the fleet "
                f"{first.weight_version!r}: update it before it joins, or open the fleet with adopt=True if "
                "its former owner has died",
                field="members",
            )
    _begin(fleet, statuses, statuses, Source(model_path=first.model_path))


async def take_over(fleet: "Fleet", members: Sequence[Member], adopt: Adopt) -> None:
    """End what a former fleet has begun on ``members``; those with the newest complete weights then serve.

    The others are fenced: :meth:`Fleet.heal` gives them the weights of those that serve.

    Raises:
        WeightsInvalid: none has complete weights, and ``adopt`` is not ``any``; or none answers.
    """

    async def ended(member: Member) -> GetStatusReqOutput:
        if (await fleet.ask(member)).session is not None:
            with suppress(NoSession):  # the engine has ended it itself meanwhile
                await member.client.end_weight_update(commit=False, force=True)
        return await fleet.ask(member)

    answers = await everywhere(members, ended, ABORT_S)
    statuses: dict[Member, GetStatusReqOutput] = answers.replies
    for member, error in (answers.failed | answers.out).items():
        fleet.drop(member, error, "it does not answer")
    valid = [member for member, status in statuses.items() if status.weights == "valid"]
    checks = await everywhere(valid, lambda member: member.client.check_weights("checksum"), RELOAD_S)
    lost = answers.failed | answers.out | checks.failed | checks.out
    for member, error in (checks.failed | checks.out).items():
        fleet.drop(member, error, "its weights cannot be compared")
        del statuses[member]
    whole = list(checks.replies)
    if not whole and not (statuses and adopt == "any"):
        raise _nobody(statuses, lost)
    newest = max(whole, key=lambda member: statuses[member].weights_epoch, default=None)
    found = {member: (statuses[member].weight_version, checks.replies[member].total) for member in whole}
    same = {member: statuses[member] for member in whole if newest and found[member] == found[newest]}
    for member, status in statuses.items():
        if member not in same:
            fleet.dispatcher.fence(member, f"it has {status.weights} weights {status.weight_version!r}")
    _begin(fleet, same, statuses, Source(updated=True))
    await fleet.continue_members(ABORT_S, torch_empty_cache=True)


def _begin(
    fleet: "Fleet",
    serving: Mapping[Member, GetStatusReqOutput],
    all_of_them: Mapping[Member, GetStatusReqOutput],
    source: Source,
) -> None:
    """Have ``serving``, which have the same weights, serve under an epoch that none of all exceeds."""
    fleet.source = source
    fleet.dispatcher.epoch = max(status.weights_epoch for status in all_of_them.values())
    for member, status in serving.items():
        fleet.weight_version = status.weight_version
        member.admit(status.weights_epoch, fleet.dispatcher.epoch)


def _nobody(
    statuses: Mapping[Member, GetStatusReqOutput], lost: Mapping[Member, EngineError]
) -> WeightsInvalid:
    reasons = {
        member.name: f"{status.weights} ({status.weights_detail})" for member, status in statuses.items()
    } | {member.name: error.message for member, error in lost.items()}
    told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return WeightsInvalid(
        f"no engine has complete weights ({told}). Send one of them a complete update with a SchedulerClient "
        "of its endpoint and open the fleet again, or open it with adopt='any' and update it",
        members=reasons,
    )
