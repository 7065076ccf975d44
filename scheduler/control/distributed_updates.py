"""Weight updates by broadcast: from rank 0 of a process group, and on to the engines behind this one.

Invariants:
- Rank 0 broadcasts even if this engine refuses, and the engines behind it wait for what it relays: a failed call ends both groups,
  except a foreign call while the group serves another sender's session.
- A relay that fails does not fail the call: this engine has its weights, and the reply says who has not.
"""

from typing import TYPE_CHECKING

from ...io_struct import UpdateWeightsFromDistributedReqInput, WeightUpdateReqOutput
from ..weights.transports.distributed import DistributedSource
from .operations import Operation
from .pause_ownership import Sender

if TYPE_CHECKING:
    from ..runtime.engine import Engine


def update_from_distributed(
    engine: "Engine", request: UpdateWeightsFromDistributedReqInput, sender: Sender
) -> Operation:
    """Receive what rank 0 of the group broadcasts, and relay it where the call says so."""
    route, opened = ("distributed", request.group_name), list[DistributedSource]()

    def open_source() -> DistributedSource:
        opened.append(engine.process_groups.open(request))
        return opened[-1]

    try:
        reply = yield from engine.updates.call(request, sender, route, open_source)
    except BaseException as error:
        if not engine.sessions.protects(route, error):
            for name in (request.group_name, *filter(None, [request.relay_to])):
                engine.process_groups.out_of_step(name, f"an update failed: {error}")
            engine.executor.call("leave_group", request.group_name, f"an update failed: {error}")
        raise
    assert isinstance(reply, WeightUpdateReqOutput)
    reply.relay_error = opened[-1].relay_error
    return reply
