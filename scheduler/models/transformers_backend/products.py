"""Modules that stand in a transformers model for linear layers and embeddings, over the engine's matrices.

Invariants:
- A module's ``weight`` here is an empty tensor, for code that asks a weight for its dtype or device.
  Weights are the engine's, packed where kernels are compiled.
- Parts of one product are told by the tensor that they are called with: whoever comes first computes all of
  them, the others take theirs. A part that is called with another tensor is computed with it, so the result
  never depends on the grouping.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from ...layers.embedding import Embedding
from ...layers.linear import Linear
from ...layers.parameters import Placement


class Product(nn.Module):
    def __init__(self, linear: Linear, place: Placement) -> None:
        super().__init__()
        self.linear = linear
        self.weight, self.bias = _nothing(place), None
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.forward(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class SharedProduct:
    def __init__(self, linear: Linear, parts: list[int]) -> None:
        self.linear = linear
        self.parts = parts
        self._x: Tensor | None = None
        self._parts_left: dict[int, Tensor] = {}

    def part(self, number: int, x: Tensor) -> Tensor:
        left = self._parts_left
        if self._x is not x or number not in left:
            y = self.linear.forward(x.reshape(-1, self.linear.in_features))
            y = y.view(*x.shape[:-1], self.linear.out_features)
            self._x = x
            left.update(enumerate(torch.split_with_sizes(y, self.parts, dim=-1)))
        part = left.pop(number)
        if not left:
            self._x = None  # and its memory with it
        return part


class PartOfProduct(nn.Module):
    def __init__(
        self, shared: SharedProduct, number: int, in_features: int, out_features: int, place: Placement
    ) -> None:
        super().__init__()
        self.weight, self.bias = _nothing(place), None
        self.shared, self.number = shared, number
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.part(self.number, x)


class GatheredEmbedding(nn.Embedding):
    """A token embedding over the engine's table; :func:`gather_by` puts it below a class that does more."""

    table: Embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.forward(ids.reshape(-1)).view(*ids.shape, self.embedding_dim)


def gather_by(module: nn.Embedding, table: Embedding, place: Placement) -> None:
    """Have ``module`` gather from ``table``, whatever else its class does; drop its own weight."""
    kind = type(module)
    bases = (GatheredEmbedding,) if kind is nn.Embedding else (kind, GatheredEmbedding)
    del module.weight
    module.__class__ = type(f"Gathered{kind.__name__}", bases, {})
    module.__dict__.update(table=table, weight=_nothing(place))


def _nothing(place: Placement) -> Tensor:
    return torch.empty(0, dtype=place.dtype, device=place.device)


class Head(nn.Module):
    def __init__(
        self, project: Callable[[Tensor, Tensor], Tensor], vocab_size: int, place: Placement
    ) -> None:
        """``project(hidden, out)`` writes the product to ``out`` [S, vocab] and returns it."""
        super().__init__()
        self.weight, self.bias = _nothing(place), None
        self.project = project
        self.out_features = vocab_size
        self.out: Tensor | None = None
        """Memory for the logits of the next call, [S, vocab]."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.out is not None, "called outside of logits()"
        return self.project(x[0], self.out).unsqueeze(0)


@dataclass
class _DecoderOutput(ModelOutput):
    last_hidden_state: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None
    cross_attentions: Any = None
    router_logits: Any = None


class Given(nn.Module):
    """Stands for a decoder whose output is known: a model's own code then goes on from it."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **options: Any) -> _DecoderOutput:
        assert self.hidden is not None
        return _DecoderOutput(last_hidden_state=self.hidden)
