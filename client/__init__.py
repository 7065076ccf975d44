"""The Python client: blocking and asyncio clients, the launcher, typed results and errors."""

from ..io_struct import (
    CaesuraError,
    ErrorCode,
    FinishReason,
    SamplingParams,
    SdeParams,
    TensorSpec,
    WeightVersionSpan,
)
from . import exceptions
from .connection.async_client import AsyncGenerationHandle, AsyncSchedulerClient
from .connection.async_control_client import AsyncControlClient
from .connection.blocking import ControlClient, GenerationHandle, SchedulerClient
from .connection.client_options import WeightUpdate
from .connection.image_generation import ImageOutput, ImageTensor
from .connection.results import GenerateOutput, TokenDelta, TokenLogprobs
from .drift_reference import check_reference, reference_logprobs
from .exceptions import *
from .importance import importance_weights, oldest_epoch
from .launch.launcher import LaunchedScheduler, launch_scheduler
from .rollout_records import ImageRecord, RolloutRecord, read_rollouts, save_rollouts

__all__ = [
    "AsyncControlClient",
    "AsyncGenerationHandle",
    "AsyncSchedulerClient",
    "CaesuraError",
    "ControlClient",
    "ErrorCode",
    "FinishReason",
    "GenerateOutput",
    "GenerationHandle",
    "ImageOutput",
    "ImageRecord",
    "ImageTensor",
    "LaunchedScheduler",
    "RolloutRecord",
    "SamplingParams",
    "SchedulerClient",
    "SdeParams",
    "TensorSpec",
    "TokenDelta",
    "TokenLogprobs",
    "WeightUpdate",
    "WeightVersionSpan",
    "check_reference",
    "importance_weights",
    "launch_scheduler",
    "oldest_epoch",
    "read_rollouts",
    "reference_logprobs",
    "save_rollouts",
]
__all__ += exceptions.__all__
