"""Brings an engine that joins a fleet, for the first time or again, to the weights that the fleet serves.

Invariant: what returns from here has valid weights under the fleet's label, from where the fleet has its own: the checkpoint that
all started with, or were updated from, or another member. A member's copy is preferred: it is what the fleet serves, whatever has
become of the folder.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

from ...io_struct import GetStatusReqOutput
from ..connection.control_client import ControlClient
from ..exceptions import EngineError, MemoryReleased, WeightsInvalid
from .members import EngineAddress, Member
from .session import Verify
from .transports import own_address

RELOAD_S = 600.0
"""How long an engine may take for a whole reload."""
ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where the fleet's weights are from."""

    path: str | None = None
    """The folder of the last update, if it was from disk."""
    model_path: str | None = None
    """The folder that the engines started with."""
    updated: bool = False
    """Whether the fleet has been updated since it was opened."""

    @property
    def folder(self) -> str | None:
        """A folder with the fleet's weights; None if there is none."""
        return self.path if self.updated else self.model_path


Copy = Callable[[EngineAddress, EngineAddress, str | None], None]
"""Copies the weights and the label of the first engine, which serves on, to the second. Blocks."""


def copy_here(donor: EngineAddress, target: EngineAddress, owner: str | None) -> None:
    """A :data:`Copy` within this process, which then has torch."""
    from ..trainer import clone_weights

    with ExitStack() as stack:
        clients = [
            stack.enter_context(closing(ControlClient(each.endpoint, owner=owner, **each.keys)))
            for each in (donor, target)
        ]
        clone_weights(
            clients[0],
            clients[1:],
            master_address=own_address([donor.endpoint, target.endpoint]),
            timeout=RELOAD_S,
        )


async def catch_up(
    member: Member,
    donor: Member | None,
    source: Source,
    label: str,
    *,
    status: GetStatusReqOutput,
    verify: Verify,
    current: bool = False,
    copy: Copy = copy_here,
) -> GetStatusReqOutput:
    """Give ``member``, whose last answer is ``status``, the fleet's weights; its status afterwards.

    Args:
        donor: a member that serves them. None: there is none.
        current: it is known to have them still, if they are valid.
        copy: how the weights get from it to ``member``.

    Raises:
        MemoryReleased: the memory of ``member`` is. WeightsInvalid: nobody has them, or the engine has not got them.
        EngineError: of the engine.
    """
    if status.released_tags:  # whoever released it says when it is needed again
        raise MemoryReleased(f"{member.name} has released {', '.join(status.released_tags)}")
    labelled = status.weights == "valid" and status.weight_version == label
    as_started = not (source.updated or status.totals.updates) and status.model_path == source.model_path
    if not (
        labelled and (as_started or (status.session is None and (current or await _equal(member, donor))))
    ):
        await _bring(member, donor, source, label, copy)
        status = await member.client.status(owner="", timeout=ASK_S)
    if status.weights != "valid" or status.weight_version != label:
        raise WeightsInvalid(
            f"{member.name} has {status.weights} weights {status.weight_version!r} instead of {label!r}"
        )
    if verify == "checksums" and donor is not None and not await _equal(member, donor):
        raise WeightsInvalid(f"{member.name} has other weights than {donor.name} under the same label")
    return status


async def _equal(member: Member, donor: Member | None) -> bool:
    """Return True if ``member`` has the weights of ``donor``, as one that has restored them when it was restarted."""
    if donor is None:
        return False
    with suppress(EngineError):
        own = await member.client.check_weights("checksum", timeout=RELOAD_S)
        return own.total == (await donor.client.check_weights("checksum", timeout=RELOAD_S)).total
    return False


async def _bring(member: Member, donor: Member | None, source: Source, label: str, copy: Copy) -> None:
    with suppress(EngineError):  # what an update that failed has left open
        await member.client.end_weight_update(commit=False, force=True, timeout=ASK_S)
    await member.client.pause("abort", lease_s=member.lease_s, timeout=RELOAD_S)
    failure: EngineError = WeightsInvalid(
        f"the weights {label!r} are in no folder, and no member can send them: {member.name} waits for the next update"
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
