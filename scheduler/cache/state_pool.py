"""Storage of layers that keep one state per sequence instead of KV per token: the gated delta rule.

Invariants:
- A row is one sequence's state at one position, over all of these layers: the recurrent state, and the inputs
  that the short convolution in front of it still needs. Row 0 is scratch, for warm-up and padding.
- A row is overwritten in place by each step of its sequence. The ledger (``linear_states.py``) knows the
  owners.
- The recurrent state is float32 whatever the model's dtype: rounding it would add up over all tokens.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..memory import residency


@dataclass(frozen=True, kw_only=True)
class StateShape:
    key_heads: int
    """Heads of keys and of queries; each serves ``value_heads / key_heads`` neighbouring value heads."""
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    """Positions that the convolution sees, its own included."""

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def recurrent(self) -> tuple[int, int, int]:
        """Shape of a row's recurrent state: what each value head has stored under each element of a key."""
        return self.value_heads, self.key_size, self.value_size

    @property
    def past(self) -> tuple[int, int]:
        """Shape of the inputs of the convolution that a row keeps, oldest first."""
        return self.kernel - 1, self.channels

    def divided(self, ranks: int) -> "StateShape":
        """Return the shape on each of several ranks: a share of the key heads, with their value heads."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def row_bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.past) * dtype.itemsize + math.prod(self.recurrent) * torch.float32.itemsize


class StatePool:
    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        shape: StateShape,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """``num_rows`` counts the scratch row 0."""
        if min(num_layers, num_rows) < 1:
            raise ValueError(
                f"every size of a state pool is at least 1, got {num_layers} layers of {num_rows} rows"
            )
        self.num_rows, self.shape = num_rows, shape
        self._layers = [
            (
                residency.allocate((num_rows, *shape.past), dtype, device),
                residency.allocate((num_rows, *shape.recurrent), torch.float32, device),
            )
            for _ in range(num_layers)
        ]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the storage of ``layer``, counted among those that have a state.

        The convolution's past [rows, kernel - 1, channels], and the states [rows, value heads, key size,
        value size].
        """
        return self._layers[layer]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self._layers for tensor in pair)
