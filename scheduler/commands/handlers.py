"""Which handler a command goes to, and what it is told of its sender.

Invariants: handlers whose answer depends on whose the pause or the session is get the sender, the others do not; a message
without a handler here is no command (``dispatcher.py`` answers it by itself).
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
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from .lifecycle import Lifecycle, Operation
from .memory_occupation import MemoryOccupation
from .parameter_server import ParameterServerUpdates
from .pause_ownership import Sender
from .process_groups import ProcessGroupCommands
from .weight_updates import WeightUpdates
from .weights_checker import WeightsChecker

if TYPE_CHECKING:
    from collections.abc import Callable


class Commands:
    """The table of handlers."""

    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        updates: WeightUpdates,
        parameter_server: ParameterServerUpdates,
        process_groups: ProcessGroupCommands,
        occupation: MemoryOccupation,
        checker: WeightsChecker,
    ) -> None:
        self._from_tensor = updates.from_tensor
        self._of_anybody: dict[type, Callable[[Any], Operation]] = {
            InitWeightsUpdateGroupReqInput: process_groups.init,
            DestroyWeightsUpdateGroupReqInput: process_groups.destroy,
            ReleaseMemoryOccupationReqInput: occupation.release,
            ResumeMemoryOccupationReqInput: occupation.resume,
            WeightsCheckerReqInput: checker.check,
        }
        self._of_sender: dict[type, Callable[[Any, Sender], Operation]] = {
            PauseGenerationReqInput: lifecycle.pause,
            ContinueGenerationReqInput: lifecycle.continue_generation,
            FlushCacheReqInput: lifecycle.flush,
            BeginWeightUpdateReqInput: updates.begin,
            EndWeightUpdateReqInput: updates.end,
            UpdateWeightFromDiskReqInput: updates.from_disk,
            UpdateWeightsFromIPCReqInput: updates.from_ipc,
            UpdateWeightsFromDistributedReqInput: updates.from_distributed,
            UpdateWeightsFromCheckpointEngineReqInput: parameter_server.update,
        }

    def operation(self, client: bytes, message: ControlRequest, buffers: list[memoryview]) -> Operation:
        """What ``message`` from the socket ``client`` asks for; nothing is done before its first step."""
        if (handler := self._of_anybody.get(type(message))) is not None:
            return handler(message)
        sender = Sender(client, message.owner)
        if isinstance(message, UpdateWeightsFromTensorReqInput):
            return self._from_tensor(message, sender, buffers)
        return self._of_sender[type(message)](message, sender)
