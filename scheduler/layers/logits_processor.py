"""From hidden states to logits.

Invariant: logits live in one grow-only workspace. A call overwrites the result of the call before it, which is safe
because sampling follows on the same stream; whoever keeps logits longer copies them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .parameters import Placement


class LogitsProcessor:
    """Applies the output head to the sampled tokens."""

    def __init__(
        self,
        project: Callable[[Tensor, Tensor], Tensor],
        vocab_size: int,
        *,
        place: Placement,
    ) -> None:
        """``project(hidden, out)`` writes the head's product to ``out`` and returns it."""
        self._project = project
        self._workspace = torch.empty((0, vocab_size), dtype=place.dtype, device=place.device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[S, hidden] to logits [S, vocab] in the model's dtype, valid until the next call."""
        rows, vocab_size = hidden.shape[0], self._workspace.shape[1]
        if rows > self._workspace.shape[0]:
            # Freed first, so that the peak is the larger of the two and not their sum.
            dtype, device = self._workspace.dtype, self._workspace.device
            self._workspace = torch.empty((0, vocab_size), dtype=dtype, device=device)
            self._workspace = torch.empty((rows, vocab_size), dtype=dtype, device=device)
        return self._project(hidden, self._workspace[:rows])
