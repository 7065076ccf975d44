"""Attention block: projections, optional head norms and rotation around the backend's attention.

Invariant: with several ranks each computes its heads, and the sum over all of them is the block's result.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..execution.forward import AttentionBackend
from ..kernels import TORCH, TRITON, best
from ..kernels.attention_form import PLAIN, AttentionForm, HeadNorms
from ..kernels.elementwise import gate_heads
from .fp8_products import Quantizer, Rows
from .linear import Linear
from .norm import RMSNorm, normalize
from .parameters import CompositeLayer, Layer, Parameter, Placement, WeightSlot
from .rotary import rotate
from .sharding import head_windows, sharded


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm_eps: float | None = None
    """Epsilon of the RMS norm of queries and keys per head, or None without one."""
    norm_from_one: bool = False
    sinks: bool = False
    """Each query head has a learnt score that takes weight and has no value."""
    gated: bool = False
    """A gate's sigmoid weights each query head's output; its rows follow the head's."""


class Attention(CompositeLayer):
    def __init__(
        self,
        name: str,
        prefix: str,
        layer: int,
        shape: AttentionShape,
        *,
        form: AttentionForm = PLAIN,
        place: Placement,
    ) -> None:
        """Refuse ranks that do not divide the heads (UNSUPPORTED_MODEL).

        ``prefix``: the checkpoint's module.
        """
        heads, kv_heads = head_windows(shape.num_heads, shape.num_kv_heads, place.parallel)
        self.shape = replace(shape, num_heads=heads.length, num_kv_heads=kv_heads.length)
        self._heads, self._parallel = heads, place.parallel
        self._sinks: Parameter | None = None
        if shape.sinks:
            self._sinks = Parameter(f"{name}.sinks", (heads.length,), place.dtype, place.device)
            form = replace(form, sinks=self._sinks.data)
        self.form, self._prefix = form, prefix
        self._layer = layer
        self._compiled = best("elementwise", place.device, place.dtype) not in (TORCH, TRITON)
        kv_rows = kv_heads.times(shape.head_dim)
        parts = {
            f"{prefix}.q_proj": heads.times(2 * shape.head_dim if shape.gated else shape.head_dim),
            f"{prefix}.k_proj": kv_rows,
            f"{prefix}.v_proj": kv_rows,
        }
        self.qkv = Linear(f"{name}.qkv", shape.hidden_size, parts, bias=shape.qkv_bias, place=place)
        self.o = Linear(
            f"{name}.o",
            heads.times(shape.head_dim),
            {f"{prefix}.o_proj": shape.hidden_size},
            bias=shape.o_bias,
            place=place,
        )
        self.qk_norms: tuple[RMSNorm, RMSNorm] | None = None
        if shape.qk_norm_eps is not None:
            q_norm, k_norm = (
                RMSNorm(
                    f"{name}.{norm}",
                    f"{prefix}.{norm}",
                    shape.head_dim,
                    shape.qk_norm_eps,
                    from_one=shape.norm_from_one,
                    place=place,
                )
                for norm in ("q_norm", "k_norm")
            )
            self.qk_norms = (q_norm, k_norm)

    @property
    def quantizer(self) -> Quantizer | None:
        return self.qkv.quantizer

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        """Map [T, hidden] to [T, hidden]; ``cos`` and ``sin`` are [T, 1, rotated size / 2]."""
        shape = self.shape
        heads = shape.num_heads + 2 * shape.num_kv_heads
        qkv, gate = self.qkv.forward(x), None
        if shape.gated:
            qkv, gate = self._without_gates(qkv)
        qkv = qkv.view(-1, heads, shape.head_dim)
        if backend.fused is not None:
            norms, weights = self.qk_norms, None
            if norms is not None:
                q_norm, k_norm = norms
                weights = HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.from_one)
            return self._out(backend.fused(qkv, cos, sin, self._layer, weights, self.form), gate)
        qk, v = qkv[:, : -shape.num_kv_heads], qkv[:, -shape.num_kv_heads :]
        if self.qk_norms is not None:
            q_norm, k_norm = self.qk_norms
            if shape.norm_from_one:
                q, k = qk.split([shape.num_heads, shape.num_kv_heads], dim=1)
                qk = torch.cat((q_norm.by_torch(q), k_norm.by_torch(k)), dim=1)
            else:
                qk = normalize(qk, q_norm.eps)
                q_norm.scale_(qk[:, : shape.num_heads])
                k_norm.scale_(qk[:, shape.num_heads :])
        qk = rotate(qk, cos, sin)
        q, k = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
        return self._out(backend.forward(q, k, v, self._layer, self.form), gate)

    def _without_gates(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values as without gates, and gates [T, query heads, head size]."""
        heads, size = self.shape.num_heads, self.shape.head_dim
        queries, rest = projected[:, : 2 * heads * size], projected[:, 2 * heads * size :]
        queries = queries.view(-1, heads, 2, size)
        return torch.cat((queries[:, :, 0].flatten(1), rest), dim=1), queries[:, :, 1]

    def _out(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            if self._compiled:
                attended = gate_heads(attended.contiguous(), gate)
            else:
                attended = attended * torch.sigmoid(gate.flatten(1))
        out = self.o.forward(attended)
        if self._parallel.size > 1:
            self._parallel.all_reduce(out)
        return out

    def parts(self) -> Iterator[Layer]:
        yield self.qkv
        yield self.o
        yield from self.qk_norms or ()

    def slots(self) -> Iterator[WeightSlot]:
        yield from super().slots()
        if self._sinks is not None:
            yield sharded(self._sinks.slot(f"{self._prefix}.sinks"), self._heads)

    def parameters(self) -> Iterator[Parameter]:
        yield from super().parameters()
        if self._sinks is not None:
            yield self._sinks
