"""The table of commands: message type to the function that carries it out, which gets the engine, the message
and its sender. ``messaging/message_dispatcher.py`` answers the other message types directly.
"""

from typing import TYPE_CHECKING, Any

from ... import io_struct as wire
from .adapter_loading import load_adapter, unload_adapter
from .engine_state import Sender
from .memory_occupation import release_memory, resume_memory
from .operations import Operation
from .pause import continue_generation, flush, pause
from .profiling import start_profile, stop_profile
from .update_groups import destroy_group, init_group
from .weights_checker import check_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..runtime.engine import Engine

COMMANDS: "dict[type[wire.ControlRequest], Callable[[Engine, Any, Sender], Operation]]" = {
    wire.PauseGenerationReqInput: pause,
    wire.ContinueGenerationReqInput: continue_generation,
    wire.FlushCacheReqInput: flush,
    wire.ReleaseMemoryOccupationReqInput: release_memory,
    wire.ResumeMemoryOccupationReqInput: resume_memory,
    wire.WeightsCheckerReqInput: check_weights,
    wire.UnloadAdapterReqInput: unload_adapter,
    wire.StartProfileReqInput: start_profile,
    wire.StopProfileReqInput: stop_profile,
    wire.BeginWeightUpdateReqInput: lambda engine, *call: engine.updates.begin(*call),
    wire.EndWeightUpdateReqInput: lambda engine, *call: engine.updates.end(*call),
    wire.RollbackWeightsReqInput: lambda engine, *call: engine.updates.rollback(*call),
    wire.UpdateWeightFromDiskReqInput: lambda engine, *call: engine.updates.from_disk(*call),
    wire.UpdateWeightsFromIPCReqInput: lambda engine, *call: engine.updates.from_ipc(*call),
    wire.UpdateWeightsFromDistributedReqInput: lambda engine, *call: engine.updates.from_distributed(*call),
    wire.UpdateWeightsFromCheckpointEngineReqInput: lambda engine, *call: engine.parameter_server.update(
        *call
    ),
    wire.SendWeightsReqInput: lambda engine, request, sender: engine.sending.send(request),
    wire.InitWeightsUpdateGroupReqInput: init_group,
    wire.DestroyWeightsUpdateGroupReqInput: destroy_group,
}


def operation(
    engine: "Engine", client: bytes, message: wire.ControlRequest, buffers: list[memoryview]
) -> Operation:
    """Return the operation for ``message``; only destroying a group acts before it is advanced."""
    sender = Sender(client, message.owner)
    if isinstance(message, wire.UpdateWeightsFromTensorReqInput):
        return engine.updates.from_tensor(message, sender, buffers)
    if isinstance(message, wire.LoadAdapterReqInput):
        return load_adapter(engine, message, sender, buffers)
    return COMMANDS[type(message)](engine, message, sender)
