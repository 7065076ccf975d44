"""Maps each command to its handler.

Invariants: a handler gets the sender if its answer depends on who owns the pause or the weight session; the others do not. A
message type without an entry here is not a command; ``dispatcher.py`` answers it directly.
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
    SendWeightsReqInput,
    StartProfileReqInput,
    StopProfileReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqInput,
)
from .distributed_updates import DistributedUpdates
from .lifecycle import Lifecycle, Operation
from .memory_occupation import MemoryOccupation
from .parameter_server import ParameterServerUpdates
from .pause_ownership import Sender
from .process_groups import ProcessGroupCommands
from .profiling import ProfilingCommands
from .weight_sending import WeightSending
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
        distributed: DistributedUpdates,
        sending: WeightSending,
        parameter_server: ParameterServerUpdates,
        process_groups: ProcessGroupCommands,
        occupation: MemoryOccupation,
        checker: WeightsChecker,
        profiling: ProfilingCommands,
    ) -> None:
        self._sending = sending
        self._from_tensor = updates.from_tensor
        self._without_sender: dict[type, Callable[[Any], Operation]] = {
            InitWeightsUpdateGroupReqInput: process_groups.init,
            DestroyWeightsUpdateGroupReqInput: process_groups.destroy,
            ReleaseMemoryOccupationReqInput: occupation.release,
            ResumeMemoryOccupationReqInput: occupation.resume,
            SendWeightsReqInput: sending.send,
            WeightsCheckerReqInput: checker.check,
            StartProfileReqInput: profiling.start,
            StopProfileReqInput: profiling.stop,
        }
        self._with_sender: dict[type, Callable[[Any, Sender], Operation]] = {
            PauseGenerationReqInput: lifecycle.pause,
            ContinueGenerationReqInput: lifecycle.continue_generation,
            FlushCacheReqInput: lifecycle.flush,
            BeginWeightUpdateReqInput: updates.begin,
            EndWeightUpdateReqInput: updates.end,
            UpdateWeightFromDiskReqInput: updates.from_disk,
            UpdateWeightsFromIPCReqInput: updates.from_ipc,
            UpdateWeightsFromDistributedReqInput: distributed.update,
            UpdateWeightsFromCheckpointEngineReqInput: parameter_server.update,
        }

    def holds_back(self, message: ControlRequest) -> bool:
        """Whether ``message``, whose operation has not begun, must keep its place in the queue for now."""
        return self._sending.holds_back(message)

    def operation(self, client: bytes, message: ControlRequest, buffers: list[memoryview]) -> Operation:
        """The operation for ``message`` from the socket ``client``. Until it is first advanced it does nothing, but for a destroy of a
        group, which ends what waits there."""
        if (handler := self._without_sender.get(type(message))) is not None:
            return handler(message)
        sender = Sender(client, message.owner)
        if isinstance(message, UpdateWeightsFromTensorReqInput):
            return self._from_tensor(message, sender, buffers)
        return self._with_sender[type(message)](message, sender)
