"""Commands that join and leave the process groups over which weights are broadcast.

Invariants: joining waits for other processes, so it steps aside and everything else goes on meanwhile. It ends with its
deadline; a group that could not be joined is forgotten, so that the next attempt starts afresh.
"""

import logging
from time import monotonic

from ...io_struct import (
    DestroyWeightsUpdateGroupReqInput,
    DestroyWeightsUpdateGroupReqOutput,
    InitWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqOutput,
)
from ..weights.transports.distributed import WeightsUpdateGroups
from .lifecycle import Operation, Wait

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Longest wait for a group to be gone; a dead one may hold a broadcast until its own timeout."""


class ProcessGroupCommands:
    """The handlers of init and destroy."""

    def __init__(self, groups: WeightsUpdateGroups) -> None:
        self._groups = groups

    def init(self, request: InitWeightsUpdateGroupReqInput) -> Operation:
        """Join a group; at once if this engine is in it already."""
        group = self._groups.join(request)
        try:
            while not group.joined():
                yield Wait.CHANGE
        except BaseException:
            self._groups.forget(group)
            raise
        member = group.membership
        logger.info(
            "joined weight update group %r at %s as rank %d of %d (%s)",
            member.group_name, member.address, member.rank, member.world_size, member.backend,
        )  # fmt: skip
        return InitWeightsUpdateGroupReqOutput(id=request.id, rank=member.rank, world_size=member.world_size)

    def destroy(self, request: DestroyWeightsUpdateGroupReqInput) -> Operation:
        """Leave a group, dead or alive; an init that waits for it ends."""
        group, limit = self._groups.leave(request.group_name), monotonic() + LEAVE_S
        while group.is_leaving and monotonic() < limit:
            yield Wait.CHANGE
        return DestroyWeightsUpdateGroupReqOutput(id=request.id)
