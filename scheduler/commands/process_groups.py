"""Commands that join and leave the process groups over which weights are broadcast.

Invariants: joining waits for other processes, so the command steps aside and all other work goes on. It ends at its deadline
at the latest. A process group that could not be joined is removed, so that it can be joined again.
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
"""Longest wait until a process group is destroyed; a broken one may block in a broadcast until its own timeout."""


class ProcessGroupCommands:
    """The handlers of init and destroy."""

    def __init__(self, groups: WeightsUpdateGroups) -> None:
        self._groups = groups

    def init(self, request: InitWeightsUpdateGroupReqInput) -> Operation:
        """Join a process group; answered at once if this engine has joined it already."""
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
        """Leave a process group, broken or not. An init that is still joining it fails."""
        group, limit = self._groups.leave(request.group_name), monotonic() + LEAVE_S
        while group.is_leaving and monotonic() < limit:
            yield Wait.CHANGE
        return DestroyWeightsUpdateGroupReqOutput(id=request.id)
