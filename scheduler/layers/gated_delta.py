"""The block of linear attention: projections, the gated delta rule over a sequence's state, a gated norm.

Qwen3-Next's (Qwen Team, 2025), after Gated DeltaNet (Yang et al., 2025, arXiv:2412.06464). Convolution and rule are the backend's
(``attention/delta_rule.py``), since they read and write states.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.delta_rule import HybridBackend
from ..cache.state_pool import StateShape
from ..forward import AttentionBackend
from .linear import Linear
from .norm import RMSNorm, normalize
from .parameters import CompositeLayer, Layer, Parameter, Placement, WeightSlot


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Sizes of a block, and how its checkpoint orders what the first product computes."""

    hidden_size: int
    state: StateShape
    eps: float
    """Of the norm."""
    by_key_head: bool
    """Queries, keys, values and gates of the norm lie together per key head, and so do b and a; else each lies by itself."""


class GatedDelta(CompositeLayer):
    """One layer's block; an :class:`~..models.decoder.AttentionBlock` without KV."""

    form = None

    def __init__(self, name: str, prefix: str, layer: int, shape: DeltaShape, *, place: Placement) -> None:
        """
        Args:
            prefix: the checkpoint's module (``model.layers.0.linear_attn``).
            layer: its number among those with states.
        """
        self._layer, self._shape, self._prefix = layer, shape, prefix
        state = shape.state
        self._in = Linear(f"{name}.in", shape.hidden_size, _projections(prefix, shape), place=place)
        self._out = Linear(
            f"{name}.out",
            state.value_heads * state.value_size,
            {f"{prefix}.out_proj": shape.hidden_size},
            place=place,
        )
        self._norm = RMSNorm(f"{name}.norm", f"{prefix}.norm", state.value_size, shape.eps, place=place)
        filters = (state.channels, 1, state.kernel)
        self._filters = Parameter(f"{name}.conv.weight", filters, place.dtype, place.device)
        self._log_rate, self._rate_bias = (
            Parameter(f"{name}.{each}", (state.value_heads,), place.dtype, place.device)
            for each in ("log_rate", "rate_bias")
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        """[T, hidden] to [T, hidden]; positions follow from the order of tokens, so nothing is rotated."""
        assert isinstance(backend, HybridBackend), (
            "a model with states is computed by a backend that has them"
        )
        mixed, gate, b, a = self._split(self._in.forward(x))
        rate = functional.softplus(a.float() + self._rate_bias.data.float())
        decay = -self._log_rate.data.float().exp() * rate
        found = backend.delta(mixed, self._filters.data.squeeze(1), decay, torch.sigmoid(b), self._layer)
        normalized = self._norm.scale_(normalize(found.float(), self._norm.eps).to(x.dtype))
        gated = (normalized * functional.silu(gate.float())).to(x.dtype)
        return self._out.forward(gated.flatten(1))

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution [T, channels], gates [T, value heads, value size], b and a [T, value heads]."""
        state = self._shape.state
        tokens, heads = projected.shape[0], state.key_heads
        keys, values = heads * state.key_size, state.value_heads * state.value_size
        if not self._shape.by_key_head:
            mixed, gate, b, a = projected.split(
                [state.channels, values, state.value_heads, state.value_heads], dim=1
            )
            return mixed, gate.view(tokens, -1, state.value_size), b, a
        group = state.value_heads // heads
        first, second = projected.split([2 * (keys + values), 2 * state.value_heads], dim=1)
        sizes = [state.key_size, state.key_size, values // heads, values // heads]
        q, k, v, gate = first.view(tokens, heads, -1).split(sizes, dim=2)
        b, a = second.view(tokens, heads, -1).split([group, group], dim=2)
        mixed = torch.cat([each.reshape(tokens, -1) for each in (q, k, v)], dim=1)
        gate = gate.reshape(tokens, state.value_heads, state.value_size)
        return mixed, gate, b.reshape(tokens, -1), a.reshape(tokens, -1)

    def parts(self) -> Iterator[Layer]:
        """The products and the norm."""
        yield self._in
        yield self._out
        yield self._norm

    def slots(self) -> Iterator[WeightSlot]:
        """Those of the parts, then of the convolution and of the rates of decay."""
        yield from super().slots()
        yield self._filters.slot(f"{self._prefix}.conv1d.weight")
        yield self._log_rate.slot(f"{self._prefix}.A_log")
        yield self._rate_bias.slot(f"{self._prefix}.dt_bias")

    def parameters(self) -> Iterator[Parameter]:
        """Those of the parts, then of the convolution and of the rates of decay."""
        yield from super().parameters()
        yield from (self._filters, self._log_rate, self._rate_bias)


def _projections(prefix: str, shape: DeltaShape) -> Mapping[str, int]:
    """The checkpoint's modules that read the block's input, by the order of their results."""
    state = shape.state
    values = state.value_heads * state.value_size
    if shape.by_key_head:
        return {
            f"{prefix}.in_proj_qkvz": state.channels + values,
            f"{prefix}.in_proj_ba": 2 * state.value_heads,
        }
    return {
        f"{prefix}.in_proj_qkv": state.channels,
        f"{prefix}.in_proj_z": values,
        f"{prefix}.in_proj_b": state.value_heads,
        f"{prefix}.in_proj_a": state.value_heads,
    }
