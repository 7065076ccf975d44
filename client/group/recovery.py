"""Members that get the group's weights: the first ones, those of a dead group, and later ones.

Invariants:
- Members that serve have the same bytes under the same label. Engines that were left behind are compared by
  checksums, since one label may name two weights there.
- A member that is brought up to date gets the group's weights from another member (which has what the group
  serves, whatever has become of the folder), or else from the checkpoint folder.
"""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from ...io_struct import CaesuraError, GetStatusReqOutput
from ..connection.blocking import ControlClient
from ..exceptions import EngineError, InternalError, InvalidRequest, NoSession, WeightsInvalid
from ..launch.launcher import how_it_ended
from .members import EngineAddress, Member
from .session import ABORT_S, Source, everywhere, own_address

if TYPE_CHECKING:
    from .fleet import Fleet

RELOAD_S = 600.0
"""Seconds of a whole reload."""
ASK_S = 10.0
"""Seconds of a status request."""
Adopt = bool | Literal["any"]
"""True takes over engines that were left behind; ``any`` does even if none has complete weights."""


async def agree(fleet: "Fleet", members: Sequence[Member]) -> None:
    """Admit ``members``, or raise InvalidRequest unless all have valid weights under one label."""
    answers = await everywhere(members, fleet.ask, ASK_S)
    answers.raise_first()
    statuses: dict[Member, GetStatusReqOutput] = answers.replies
    for member in statuses:
        _require_other(fleet, member)
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
    _admit_first(fleet, statuses, statuses, Source(first.model_path))


async def take_over(fleet: "Fleet", members: Sequence[Member], adopt: Adopt) -> None:
    """End what a former group began, admit the newest weights, fence the rest; else WeightsInvalid."""

    async def ended(member: Member) -> GetStatusReqOutput:
        if (await fleet.ask(member)).session is not None:
            with suppress(NoSession):  # the engine has ended it itself meanwhile
                await member.client.end_weight_update(commit=False, force=True)
        return await fleet.ask(member)

    answers = await everywhere(members, ended, ABORT_S)
    statuses: dict[Member, GetStatusReqOutput] = answers.replies
    lost = answers.failed | answers.out
    fleet.dispatcher.drop(lost, "it does not answer")
    for member in statuses:
        _require_other(fleet, member)
    valid = [member for member, status in statuses.items() if status.weights == "valid"]
    checks = await everywhere(valid, lambda member: member.client.check_weights("checksum"), RELOAD_S)
    uncompared = checks.failed | checks.out
    fleet.dispatcher.drop(uncompared, "its weights cannot be compared")
    statuses = {member: status for member, status in statuses.items() if member not in uncompared}
    lost |= uncompared
    if not checks.replies and not (statuses and adopt == "any"):
        reasons = {
            each.name: f"{status.weights} ({status.weights_detail})" for each, status in statuses.items()
        }
        reasons |= {member.name: error.message for member, error in lost.items()}
        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise WeightsInvalid(
            f"no engine has complete weights ({told}). Send one of them a complete update with a "
            "SchedulerClient of its endpoint and open the fleet again, or open it with adopt='any' and "
            "update it",
            members=reasons,
        )
    newest = max(checks.replies, key=lambda member: statuses[member].weights_epoch, default=None)
    found = {each: (statuses[each].weight_version, reply.total) for each, reply in checks.replies.items()}
    same = [each for each in found if newest and found[each] == found[newest]]
    for member, status in statuses.items():
        if member not in same:
            fleet.dispatcher.fence(member, f"it has {status.weights} weights {status.weight_version!r}")
    _admit_first(fleet, same, statuses, Source(updated=True))
    await fleet.continue_members(ABORT_S, torch_empty_cache=True)


def _admit_first(
    fleet: "Fleet", serving: Collection[Member], every: Mapping[Member, GetStatusReqOutput], source: Source
) -> None:
    """Admit ``serving``, which have the same weights, under an epoch that none of ``every`` exceeds."""
    fleet.source = source
    fleet.dispatcher.epoch = max(status.weights_epoch for status in every.values())
    fleet.adapters.adopt({member: every[member] for member in serving})
    for member in serving:
        fleet.weight_version = every[member].weight_version
        fleet.dispatcher.admit(member, every[member].weights_epoch)


async def catch_up(fleet: "Fleet", member: Member) -> GetStatusReqOutput:
    """Give ``member`` weights and adapters; return its status then. MemoryReleased or WeightsInvalid."""
    status = await fleet.ask(member)
    _require_other(fleet, member)
    serving = fleet.dispatcher.serving
    if not serving and not fleet.source.updated and not fleet.weight_version:  # it is the first one
        fleet.weight_version, fleet.source = status.weight_version, Source(status.model_path)
        fleet.dispatcher.epoch = max(fleet.dispatcher.epoch, status.weights_epoch)
    donor = fleet.donor()
    source, label = fleet.source, fleet.weight_version
    current = member.own_epoch(fleet.weights_epoch) == status.weights_epoch
    if status.released_tags:
        await fleet.resume(member, status.released_tags)
        status = await fleet.ask(member)
    labelled = status.weights == "valid" and status.weight_version == label
    as_started = not (source.updated or status.totals.updates) and status.model_path == source.folder
    if not (
        labelled and (as_started or (status.session is None and (current or await _equal(member, donor))))
    ):
        await _reload(fleet, member, donor)
        status = await member.client.status(owner="", timeout=ASK_S)
    if status.weights != "valid" or status.weight_version != label:
        raise WeightsInvalid(
            f"{member.name} has {status.weights} weights {status.weight_version!r} instead of {label!r}"
        )
    if fleet.verify == "checksums" and donor is not None and not await _equal(member, donor):
        raise WeightsInvalid(f"{member.name} has other weights than {donor.name} under the same label")
    await fleet.adapters.give(member, status)
    return status


def _require_other(fleet: "Fleet", member: Member) -> None:
    """Raise InvalidRequest if ``member`` is an engine that the fleet has under another address."""
    assert member.status is not None
    for other in fleet.members:
        if other is member or other.status is None or other.state == "gone":
            continue
        if other.status.incarnation == member.status.incarnation:
            raise InvalidRequest(
                f"{member.name} is the engine that the fleet has as {other.name}",
                field="members",
                value=member.address.endpoint,
            )


async def _equal(member: Member, donor: Member | None) -> bool:
    if donor is None:
        return False
    with suppress(EngineError):
        own = await member.client.check_weights("checksum", timeout=RELOAD_S)
        return own.total == (await donor.client.check_weights("checksum", timeout=RELOAD_S)).total
    return False


async def _reload(fleet: "Fleet", member: Member, donor: Member | None) -> None:
    label, folder = fleet.weight_version, fleet.source.folder
    with suppress(EngineError):  # a failed update may have left a session open
        await member.client.end_weight_update(commit=False, force=True, timeout=ASK_S)
    await member.client.pause("abort", lease_s=member.lease_s, timeout=RELOAD_S)
    failure: EngineError = WeightsInvalid(
        f"the weights {label!r} are in no folder, and no member can send them: {member.name} waits for "
        "the next update"
    )
    if donor is not None:
        donor.copies += 1
        try:
            await fleet.copy(donor.address, member.address)
        except EngineError as error:
            failure = error
        else:
            return
        finally:
            donor.copies -= 1
    if folder is None:
        raise failure
    await member.client.update_weights_from_disk(folder, weight_version=label, timeout=RELOAD_S)


def copy_here(donor: EngineAddress, target: EngineAddress, owner: str | None) -> None:
    """Copy weights and label of ``donor``, which serves on. Blocks; needs torch."""
    from ..trainer import clone_weights

    with ExitStack() as stack:
        source, *targets = [
            stack.enter_context(closing(ControlClient(each.endpoint, owner=owner, **each.keys)))
            for each in (donor, target)
        ]
        address = own_address([donor.endpoint, target.endpoint])
        clone_weights(source, targets, master_address=address, timeout=RELOAD_S)


async def copy_beside(donor: EngineAddress, target: EngineAddress, owner: str | None) -> None:
    """Copy weights as :func:`copy_here` does, in a process of its own, or raise InternalError.

    The server needs no torch then, and answers meanwhile. A cancelled copy ends at once.
    """
    told = json.dumps({"donor": asdict(donor), "target": asdict(target), "owner": owner}, default=str)
    work = f"import sys; from {__name__} import main; sys.exit(main())"
    copied = f"the weights of {donor.name} could not be copied"
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", work),
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise InternalError(f"{copied}: no process for it: {error}") from error
    try:
        _, said = await asyncio.wait_for(process.communicate(told.encode()), RELOAD_S)
    except TimeoutError:
        raise InternalError(f"the weights of {donor.name} were not copied within {RELOAD_S:g} s") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        lines = said.decode(errors="replace").strip().splitlines()
        raise InternalError(f"{copied}: {lines[-1] if lines else how_it_ended(process.returncode)}")


def main() -> int:
    """Copy as stdin says, in JSON; the last line of stderr tells why not, and the status is 1 then."""
    told = json.load(sys.stdin)
    try:
        copy_here(EngineAddress(**told["donor"]), EngineAddress(**told["target"]), told["owner"])
    except CaesuraError as error:
        print(error, file=sys.stderr)  # noqa: T201 (the waiting process reads it)
        return 1
    return 0
