"""Members that get the group's weights: the first ones, those of a dead group, and later ones.

Invariants:
- Members that serve have the same bytes under the same label. Engines that were left behind are compared by
  checksums, since one label may name two weights there.
- A member that is brought up to date gets the group's weights from another member (which has what the group
  serves, whatever has become of the folder), or else from the checkpoint folder.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ...io_struct import GetStatusReqOutput
from ..connection.blocking import ControlClient
from ..exceptions import EngineError, InvalidRequest, MemoryReleased, NoSession, WeightsInvalid
from .members import EngineAddress, Member
from .session import ABORT_S, Verify, everywhere
from .transports import own_address

if TYPE_CHECKING:
    from .fleet import Fleet

RELOAD_S = 600.0
"""Seconds of a whole reload."""
ASK_S = 10.0
"""Seconds of a status request."""
Adopt = bool | Literal["any"]
"""True takes over engines that were left behind; ``any`` does even if none has complete weights."""
Copy = Callable[[EngineAddress, EngineAddress, str | None], None]
"""Copies weights and label of the first engine, which serves on, to the second. Blocks."""


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of the group's weights."""

    path: str | None = None
    """Folder of the last update, if it was from disk."""
    model_path: str | None = None
    """Folder that the engines started with."""
    updated: bool = False
    """True if the group has been updated since it was opened."""

    @property
    def folder(self) -> str | None:
        return self.path if self.updated else self.model_path


async def agree(fleet: "Fleet", members: Sequence[Member]) -> None:
    """Admit ``members``, which must have valid weights under one label.

    Raises:
        InvalidRequest: a member has other weights than the first, or none that are valid.
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
    _admit_first(fleet, statuses, statuses, Source(model_path=first.model_path))


async def take_over(fleet: "Fleet", members: Sequence[Member], adopt: Adopt) -> None:
    """End what a former group has begun on ``members``, and admit those with the newest complete weights.

    The others are fenced. Raises WeightsInvalid if none has complete weights and ``adopt`` is not ``any``.
    """

    async def ended(member: Member) -> GetStatusReqOutput:
        if (await fleet.ask(member)).session is not None:
            with suppress(NoSession):  # the engine has ended it itself meanwhile
                await member.client.end_weight_update(commit=False, force=True)
        return await fleet.ask(member)

    answers = await everywhere(members, ended, ABORT_S)
    statuses: dict[Member, GetStatusReqOutput] = answers.replies
    lost = answers.failed | answers.out
    for member, error in lost.items():
        fleet.dispatcher.drop(member, error, "it does not answer")
    valid = [member for member, status in statuses.items() if status.weights == "valid"]
    checks = await everywhere(valid, lambda member: member.client.check_weights("checksum"), RELOAD_S)
    for member, error in (checks.failed | checks.out).items():
        fleet.dispatcher.drop(member, error, "its weights cannot be compared")
        del statuses[member]
        lost[member] = error
    complete = {member: statuses[member] for member in checks.replies}
    if not complete and not (statuses and adopt == "any"):
        raise _no_complete_weights(statuses, lost)
    newest = max(complete, key=lambda member: complete[member].weights_epoch, default=None)
    found = {each: (status.weight_version, checks.replies[each].total) for each, status in complete.items()}
    same = {each: status for each, status in complete.items() if newest and found[each] == found[newest]}
    for member, status in statuses.items():
        if member not in same:
            fleet.dispatcher.fence(member, f"it has {status.weights} weights {status.weight_version!r}")
    _admit_first(fleet, same, statuses, Source(updated=True))
    await fleet.continue_members(ABORT_S, torch_empty_cache=True)


async def catch_up(
    member: Member,
    donor: Member | None,
    source: Source,
    label: str,
    *,
    status: GetStatusReqOutput,
    verify: Verify,
    current: bool,
    copy: Copy,
) -> GetStatusReqOutput:
    """Give ``member``, whose last reply is ``status``, the group's weights, and return its status afterwards.

    Args:
        donor: a member that serves them, or None.
        current: True if it is known to have them still, provided that they are valid.

    Raises:
        MemoryReleased: the memory of ``member`` is released.
        WeightsInvalid: no engine and no folder has the weights, or the engine has not received them.
    """
    if status.released_tags:  # whoever released it says when it is needed again
        raise MemoryReleased(f"{member.name} has released {', '.join(status.released_tags)}")
    labelled = status.weights == "valid" and status.weight_version == label
    as_started = not (source.updated or status.totals.updates) and status.model_path == source.model_path
    if not (
        labelled and (as_started or (status.session is None and (current or await _equal(member, donor))))
    ):
        await _reload(member, donor, source, label, copy)
        status = await member.client.status(owner="", timeout=ASK_S)
    if status.weights != "valid" or status.weight_version != label:
        raise WeightsInvalid(
            f"{member.name} has {status.weights} weights {status.weight_version!r} instead of {label!r}"
        )
    if verify == "checksums" and donor is not None and not await _equal(member, donor):
        raise WeightsInvalid(f"{member.name} has other weights than {donor.name} under the same label")
    return status


def copy_here(donor: EngineAddress, target: EngineAddress, owner: str | None) -> None:
    """Copy weights from this process, which needs torch; a :data:`Copy`."""
    from ..trainer import clone_weights

    with ExitStack() as stack:
        source, *targets = [
            stack.enter_context(closing(ControlClient(each.endpoint, owner=owner, **each.keys)))
            for each in (donor, target)
        ]
        address = own_address([donor.endpoint, target.endpoint])
        clone_weights(source, targets, master_address=address, timeout=RELOAD_S)


def _admit_first(
    fleet: "Fleet",
    serving: Mapping[Member, GetStatusReqOutput],
    every: Mapping[Member, GetStatusReqOutput],
    source: Source,
) -> None:
    """Admit ``serving``, which have the same weights, under an epoch that none of ``every`` exceeds."""
    fleet.source = source
    fleet.dispatcher.epoch = max(status.weights_epoch for status in every.values())
    for member, status in serving.items():
        fleet.weight_version = status.weight_version
        member.admit(status.weights_epoch, fleet.dispatcher.epoch)


def _no_complete_weights(
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


async def _equal(member: Member, donor: Member | None) -> bool:
    """Return True if ``member`` has the bytes of ``donor``, as one that has restored them at its restart."""
    if donor is None:
        return False
    with suppress(EngineError):
        own = await member.client.check_weights("checksum", timeout=RELOAD_S)
        return own.total == (await donor.client.check_weights("checksum", timeout=RELOAD_S)).total
    return False


async def _reload(member: Member, donor: Member | None, source: Source, label: str, copy: Copy) -> None:
    with suppress(EngineError):  # a failed update may have left a session open
        await member.client.end_weight_update(commit=False, force=True, timeout=ASK_S)
    await member.client.pause("abort", lease_s=member.lease_s, timeout=RELOAD_S)
    failure: EngineError = WeightsInvalid(
        f"the weights {label!r} are in no folder, and no member can send them: {member.name} waits for "
        "the next update"
    )
    if donor is not None:
        try:
            await asyncio.to_thread(copy, donor.address, member.address, member.client.owner)
        except EngineError as error:
            failure = error
        else:
            return
    if source.folder is None:
        raise failure
    await member.client.update_weights_from_disk(source.folder, weight_version=label, timeout=RELOAD_S)
