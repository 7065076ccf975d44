"""The table of commands: message type to the function that carries it out, which gets the engine, the message
and its sender. ``messaging/message_dispatcher.py`` answers the other message types directly.
"""

from typing import TYPE_CHECKING, Any

from ...io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    ControlRequest,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    InitWeightsUpdateGroupReqInput,
    LoadAdapterReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SendWeightsReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
    UnloadAdapterReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from .adapters import load_adapter, unload_adapter
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

COMMANDS: "dict[type[ControlRequest], Callable[[Engine, Any, Sender], Operation]]" = {
    PauseGenerationReqInput: pause,
    ContinueGenerationReqInput: continue_generation,
    FlushCacheReqInput: flush,
    ReleaseMemoryOccupationReqInput: release_memory,
    ResumeMemoryOccupationReqInput: resume_memory,
    WeightsCheckerReqInput: check_weights,
    UnloadAdapterReqInput: unload_adapter,
    StartProfileReqInput: start_profile,
    StopProfileReqInput: stop_profile,
    BeginWeightUpdateReqInput: lambda engine, request, sender: engine.updates.begin(request, sender),
    EndWeightUpdateReqInput: lambda engine, request, sender: engine.updates.end(request, sender),
    UpdateWeightFromDiskReqInput: lambda engine, request, sender: engine.updates.from_disk(request, sender),
    UpdateWeightsFromIPCReqInput: lambda engine, request, sender: engine.updates.from_ipc(request, sender),
    UpdateWeightsFromDistributedReqInput: lambda engine, request, sender: engine.updates.from_distributed(
        request, sender
    ),
    UpdateWeightsFromCheckpointEngineReqInput: lambda engine, request, sender: engine.parameter_server.update(
        request, sender
    ),
    SendWeightsReqInput: lambda engine, request, sender: engine.sending.send(request),
    InitWeightsUpdateGroupReqInput: init_group,
    DestroyWeightsUpdateGroupReqInput: destroy_group,
}


def operation(
    engine: "Engine", client: bytes, message: ControlRequest, buffers: list[memoryview]
) -> Operation:
    """Return the operation for ``message``; only destroying a group acts before it is advanced."""
    sender = Sender(client, message.owner)
    if isinstance(message, UpdateWeightsFromTensorReqInput):
        return engine.updates.from_tensor(message, sender, buffers)
    if isinstance(message, LoadAdapterReqInput):
        return load_adapter(engine, message, sender, buffers)
    return COMMANDS[type(message)](engine, message, sender)
