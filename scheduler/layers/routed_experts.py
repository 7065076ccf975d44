"""Which experts a step's tokens were sent to, for whoever replays the routing.

Invariant: rows belong to the step that ran last; they are read before the next one starts.
"""

import torch
from torch import Tensor

from .parameters import Placement


class RoutedExperts:
    """Expert ids of one step's tokens, for all layers of a model; layers without experts keep zeros."""

    def __init__(self, num_layers: int, top_k: int, num_experts: int, *, place: Placement) -> None:
        self.num_layers, self.top_k = num_layers, top_k
        self.dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._device = place.device
        self._rows = self._allocate(0)

    def record(self, layer: int, expert_ids: Tensor) -> None:
        """Note the choice of ``layer``: integers [T, top_k], T the tokens of the step."""
        if expert_ids.shape[0] > self._rows.shape[0]:
            self._rows = self._allocate(expert_ids.shape[0])
        self._rows[: expert_ids.shape[0], layer] = expert_ids.to(self.dtype)

    def rows(self, num_tokens: int) -> Tensor:
        """Of the last step, in the order of its tokens: [num_tokens, layers, top_k], a view."""
        return self._rows[:num_tokens]

    def _allocate(self, tokens: int) -> Tensor:
        return torch.zeros((tokens, self.num_layers, self.top_k), dtype=self.dtype, device=self._device)
