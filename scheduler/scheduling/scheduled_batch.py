"""A step as the scheduler sees it, from when it is built until its output has been recorded."""

from dataclasses import dataclass

import numpy as np

from ..execution.forward import ForwardBatch
from .request import Request
from .sampling_inputs import InputSpan


@dataclass(slots=True, kw_only=True)
class ScheduledBatch:
    """One step: the scheduler's view of it, and in ``forward`` the inputs of the model."""

    forward: ForwardBatch
    slots: np.ndarray
    """int64 [R]"""
    sample_slots: np.ndarray
    """int64 [S]: the slots that a token is sampled for."""
    completed: list[Request]
    """Requests whose prefill this step completes."""
    num_tokens: int
    inputs: list[InputSpan]
    """The prompt positions behind ``forward.inputs``, in its order."""

    @property
    def kind(self) -> str:
        """The stage that the step counts as; a step with any prompt tokens is a prefill."""
        return "decode" if self.forward.num_decode == len(self.slots) else "prefill"
