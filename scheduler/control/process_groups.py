"""Commands that join and leave the process groups over which weights are broadcast.

Each rank of the engine is in a group that it receives from. Where the engine is rank 0, it sends, and is
there by its own rank 0 alone. Joining waits for other processes, so the command steps aside and other work
goes on, until its deadline at the latest. A process group that could not be joined is removed.
"""

import contextlib
import logging
from time import monotonic
from typing import TYPE_CHECKING

from ...io_struct import (
    CaesuraError,
    DestroyWeightsUpdateGroupReqInput,
    DestroyWeightsUpdateGroupReqOutput,
    InitWeightsUpdateGroupReqInput,
    InitWeightsUpdateGroupReqOutput,
)
from .engine_state import Sender
from .operations import Operation, Wait, waiting

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
"""Longest wait until a process group is destroyed; a broken one may block in a broadcast until its own
timeout.
"""


def init_group(engine: "Engine", request: InitWeightsUpdateGroupReqInput, sender: Sender) -> Operation:
    """Join a process group; answered at once if this engine has joined it already."""
    group = engine.process_groups.join(request)
    elsewhere = engine.executor.call("join_group", request) if request.rank_offset else None
    try:
        while not group.joined():
            yield Wait.CHANGE
        if elsewhere is not None:
            yield from waiting(elsewhere, Wait.CHANGE)
    except CaesuraError:
        engine.process_groups.forget(group)
        engine.executor.call("leave_group", request.group_name, None)
        raise
    except BaseException:
        engine.process_groups.forget(group)
        raise
    finally:
        if elsewhere is not None:
            elsewhere.close()  # its failure keeps this frame, and would keep what the other ranks answer
    member = group.membership
    logger.info(
        "joined weight update group %r at %s as rank %d of %d (%s)",
        member.group_name, member.address, member.rank, member.world_size, member.backend,
    )  # fmt: skip
    return InitWeightsUpdateGroupReqOutput(id=request.id, rank=member.rank, world_size=member.world_size)


def destroy_group(engine: "Engine", request: DestroyWeightsUpdateGroupReqInput, sender: Sender) -> Operation:
    """Leave a process group, broken or not.

    An init that is still joining it fails, and so does, at once, an update that waits for a broadcast:
    commands queue behind it, and the broadcast may never come.
    """
    with contextlib.suppress(CaesuraError):  # there is none: said in its turn
        group = engine.process_groups.find(request.group_name)
        if group.has_joined and group.membership.rank != 0:  # what this engine sends goes on
            group.kill("the group was destroyed")
    return _left(engine, request)


def _left(engine: "Engine", request: DestroyWeightsUpdateGroupReqInput) -> Operation:
    group, limit = engine.process_groups.leave(request.group_name), monotonic() + LEAVE_S
    elsewhere = engine.executor.call("leave_group", request.group_name, None)
    while group.is_leaving and monotonic() < limit:
        yield Wait.CHANGE
    yield from waiting(elsewhere, Wait.CHANGE)
    return DestroyWeightsUpdateGroupReqOutput(id=request.id)
