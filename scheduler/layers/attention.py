"""The attention block: projections, optional head norms, rotation; the attention proper is the backend's.

Invariant: of several ranks each computes its heads, and the sum over all of them is the block's result.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ..forward import AttentionBackend
from .linear import Linear, QKVLinear
from .norm import RMSNorm, normalize
from .parameters import CompositeLayer, Layer, Placement
from .rotary import rotate
from .sharding import head_windows


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes and variants of an attention block."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm_eps: float | None = None
    """Queries and keys are RMS-normalised per head with this epsilon. None: they are not."""


class Attention(CompositeLayer):
    """One layer's attention block."""

    def __init__(
        self,
        name: str,
        prefix: str,
        layer: int,
        shape: AttentionShape,
        *,
        place: Placement,
    ) -> None:
        """``prefix`` is the checkpoint's module (``model.layers.0.self_attn``).

        Raises:
            CaesuraError: UNSUPPORTED_MODEL, the ranks do not divide the heads.
        """
        heads, kv_heads = head_windows(shape.num_heads, shape.num_kv_heads, place.parallel)
        self.shape = replace(shape, num_heads=heads.length, num_kv_heads=kv_heads.length)
        """Of this rank's heads."""
        self._layer, self._parallel = layer, place.parallel
        self.qkv = QKVLinear(
            f"{name}.qkv",
            prefix,
            shape.hidden_size,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=shape.head_dim,
            bias=shape.qkv_bias,
            place=place,
        )
        self.o = Linear(
            f"{name}.o",
            heads.times(shape.head_dim),
            {f"{prefix}.o_proj": shape.hidden_size},
            bias=shape.o_bias,
            place=place,
        )
        self.qk_norms: tuple[RMSNorm, RMSNorm] | None = None
        if shape.qk_norm_eps is not None:
            self.qk_norms = (
                RMSNorm(
                    f"{name}.q_norm",
                    f"{prefix}.q_norm",
                    shape.head_dim,
                    shape.qk_norm_eps,
                    place=place,
                ),
                RMSNorm(
                    f"{name}.k_norm",
                    f"{prefix}.k_norm",
                    shape.head_dim,
                    shape.qk_norm_eps,
                    place=place,
                ),
            )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        """[T, hidden] to [T, hidden]; ``cos`` and ``sin`` are [T, 1, head_dim / 2]."""
        shape = self.shape
        heads = shape.num_heads + 2 * shape.num_kv_heads
        qkv = self.qkv.forward(x).view(-1, heads, shape.head_dim)
        if backend.fused is not None:
            norms = self.qk_norms
            weights = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
            return self._out(backend.fused(qkv, cos, sin, self._layer, weights))
        qk, v = qkv[:, : -shape.num_kv_heads], qkv[:, -shape.num_kv_heads :]
        if self.qk_norms is not None:
            q_norm, k_norm = self.qk_norms
            qk = normalize(qk, q_norm.eps)
            q_norm.scale_(qk[:, : shape.num_heads])
            k_norm.scale_(qk[:, shape.num_heads :])
        qk = rotate(qk, cos, sin)
        attended = backend.forward(qk[:, : shape.num_heads], qk[:, shape.num_heads :], v, self._layer)
        return self._out(attended)

    def _out(self, attended: Tensor) -> Tensor:
        out = self.o.forward(attended)
        if self._parallel.size > 1:
            self._parallel.all_reduce(out)
        return out

    def parts(self) -> Iterator[Layer]:
        """q, k and v, o, then the head norms where there are any."""
        yield self.qkv
        yield self.o
        yield from self.qk_norms or ()
