"""Multi-head latent attention with absorbed up-projections.

DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1. Keys and values of all heads follow from one normalised
latent by ``kv_b_proj``; the latent is stored. Scores are ``(q_nope @ w_kc) @ latent``, the output ``(weights
@ latent) @ w_vc``, so keys and values of earlier tokens are never computed.

Invariants:
- ``w_kc`` [heads, nope, latent] and ``w_vc`` [heads, value, latent] are the rows of ``kv_b_proj``, written
  straight to where they are used. Only if it is FP8 are they derived, at commit, into existing storage.
- Each rank has its heads; latents, their projections and their norms are the same on all.
- Latents are normalised, and keys rotated, before they are stored.
- Compiled kernels have both packed, ``w_kc`` as [latent, nope]; a head's matrices then begin at a panel of
  their own. Elsewhere both are contiguous, because torch copies a batch of matrices that is not.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..execution.forward import AttentionBackend, LatentAttentionBackend
from ..kernels import TORCH, TRITON, best, elementwise, triton_for
from ..kernels import linear as kernel
from ..kernels.attention_form import PLAIN
from ..kernels.decoder_layers import LatentShape
from .fp8_products import Quantizer, Rows
from .linear import Linear, PackedTensors, divided, scale_blocks
from .matrix import Stored
from .norm import RMSNorm
from .parameters import CompositeLayer, Layer, Parameter, Place, Placement, WeightSlot
from .rotary import rotate
from .scaled_blocks import CHUNK, ScaledMatrix
from .sharding import ScatteredSlot, Window, as_window, even, require_borders, sharded

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents: fixed by the architecture, whatever the config says of the others."""


class TurnedSlot(WeightSlot):
    """Rows of a checkpoint tensor [rows, outputs] that are the columns of a packed matrix [outputs, rows]."""

    __slots__ = ("_matrix",)

    def __init__(self, matrix: WeightSlot) -> None:
        super().__init__("", matrix.parameter, (matrix.shape[1], matrix.shape[0]), matrix.dtype)
        self._matrix = matrix

    def write(self, rows: Tensor, start: int) -> None:
        turned = rows.to(self.dtype).t()
        if turned.shape[1] < self.shape[0]:  # some of the columns: the others stay
            whole = self._matrix.read()
            whole[:, start : start + len(rows)] = turned
            turned = whole
        self._matrix.write(turned.contiguous(), 0)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        return self._matrix.read()[:, start:stop].t().contiguous()

    def places(self, positions: Tensor) -> Iterator[Place]:
        rows = positions // self.shape[1]
        columns = positions - rows * self.shape[1]
        return self._matrix.places(columns * self.shape[0] + rows)


class HeadsSlot(ScatteredSlot):
    """``kv_b_proj``, whose heads are written at once where rows are whole ones."""

    __slots__ = ("_keys", "_nope", "_turned", "_values")

    def __init__(
        self, name: str, parts: Sequence[WeightSlot], keys: WeightSlot, values: WeightSlot, *, turned: bool
    ) -> None:
        """Join ``parts``, the keys and values of each head; ``keys`` and ``values``: those of all heads."""
        super().__init__(name, parts)
        self._nope, self._turned, self._keys, self._values = parts[0].shape[0], turned, keys, values

    def targets(self, rows: Tensor, start: int) -> Iterator[tuple[WeightSlot, Tensor, int]]:
        height = self._nope + self._parts[1].shape[0]
        if start % height or len(rows) % height:
            yield from super().targets(rows, start)
            return
        head, (keys, values) = start // height, rows.unflatten(0, (-1, height)).tensor_split([self._nope], 1)
        keys = keys.transpose(1, 2) if self._turned else keys
        yield self._keys, keys.flatten(0, 1), head * keys.shape[1]
        yield self._values, values.flatten(0, 1), head * values.shape[1]


class UpProjection:
    """``kv_b_proj`` as two batches of matrices, one matrix to a head: latents to keys, and to values."""

    def __init__(
        self,
        name: str,
        module: str,
        heads: int | Window,
        sizes: tuple[int, int],
        latent: int,
        place: Placement,
    ) -> None:
        """Refuse ``heads`` that cut a block of an FP8 weight.

        ``sizes``: of a head's unrotated key, and value.
        """
        heads = as_window(heads)
        self._module, self._heads = module, heads.length
        self._rows, self._latent = heads.times(sum(sizes)), Window.whole(latent)
        self._blocks = scale_blocks([module], place)
        self._workspace = place.workspace
        nope, value = sizes
        packed = best("linear", place.device, place.dtype) not in (TORCH, TRITON) and all(
            kernel.packable(inputs, place.dtype) for inputs in (nope, latent)
        )
        shapes = {"w_kc": (latent, nope) if packed else (nope, latent), "w_vc": (value, latent)}
        self._stored = [
            Stored(f"{name}.{part}", *shape, place, packed=packed, count=heads.length)
            for part, shape in shapes.items()
        ]
        self._weights = [stored.parameter for stored in self._stored]
        self._products: list[kernel.BatchedProduct] | None = None
        if packed:
            self._products = [
                kernel.BatchedProduct(weight.data, *shape, count=heads.length)
                for weight, shape in zip(self._weights, shapes.values(), strict=True)
            ]
        self._quantized: ScaledMatrix | None = None
        if (blocks := self._blocks) is not None:
            require_borders(module, "rows", self._rows, blocks.rows)
            self._quantized = ScaledMatrix(
                f"{name}.kv_up.weight", [self._rows.length], latent, blocks, place, multiplies=False
            )

    @property
    def packed(self) -> PackedTensors | None:
        """Return ``w_kc`` and ``w_vc`` for compiled kernels, or None if they are plain."""
        w_kc, w_vc = self._weights
        return None if self._products is None else {"w_kc": w_kc.data, "w_vc": w_vc.data}

    @property
    def w_kc(self) -> Tensor:
        """Plain matrices of the keys, [heads, nope, latent]."""
        return self._weights[0].data

    def absorb(self, q_nope: Tensor, out: Tensor) -> None:
        """Write [T, heads, nope] times ``w_kc`` to ``out`` [T, heads, latent]."""
        if self._products is not None:
            self._products[0](q_nope, out)
        else:
            torch.bmm(q_nope.transpose(0, 1), self.w_kc, out=out.transpose(0, 1))

    def raise_(self, attended: Tensor, out: Tensor) -> None:
        """Write [T, heads, latent] times ``w_vc`` to ``out`` [T, heads, value]."""
        if self._products is not None:
            self._products[1](attended, out)
        else:
            w_vc = self._weights[1].data
            torch.bmm(attended.transpose(0, 1), w_vc.transpose(1, 2), out=out.transpose(0, 1))

    def slots(self) -> Iterator[WeightSlot]:
        if self._quantized is None:
            yield sharded(self._slot, self._rows)
        else:
            slots = self._quantized.slots(self._module, 0, self._rows.length)
            yield from divided(slots, self._rows, self._latent, self._blocks)

    def parameters(self) -> Iterator[Parameter]:
        """Yield the written parameters: both matrices, or the FP8 weight and its scales."""
        yield from self._weights if self._quantized is None else self._quantized.parameters()

    def finalize(self) -> None:
        if self._quantized is None:
            return
        slot = self._slot
        total, latent = slot.shape
        step = total // self._heads * max(1, CHUNK * self._heads // (total * latent))
        for start in range(0, total, step):
            shape = min(step, total - start), latent
            rows = self._workspace.take("kv_up rows", shape, slot.dtype, self._weights[0].data.device)
            slot.write(self._quantized.dequantize(rows, start), start)

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        if self._quantized is not None:
            yield from ((weight.name, weight.data) for weight in self._weights)

    @cached_property
    def _slot(self) -> WeightSlot:
        name, turned, parts = f"{self._module}.weight", self._products is not None, []
        for head in range(self._heads):
            keys, values = (stored.slot("", number=head) for stored in self._stored)
            parts += [TurnedSlot(keys) if turned else keys, values]
        keys_of_all, values_of_all = (stored.slot_of_all() for stored in self._stored)
        if keys_of_all is None or values_of_all is None:
            return ScatteredSlot(name, parts)
        return HeadsSlot(name, parts, keys_of_all, values_of_all, turned=turned)


class LatentAttention(CompositeLayer):
    def __init__(
        self,
        name: str,
        prefix: str,
        layer: int,
        shape: LatentShape,
        *,
        hidden_size: int,
        num_heads: int,
        bias: bool,
        place: Placement,
    ) -> None:
        """Refuse ranks that do not divide the heads (UNSUPPORTED_MODEL).

        ``bias``: the projections down to latents have one, and the output's; needs ``q_lora_rank``.
        """
        heads = even(num_heads, place.parallel, "num_attention_heads")
        self._layer, self.shape, self.heads = layer, shape, heads.length
        self._parallel = place.parallel
        self.form = PLAIN
        latent = shape.kv_lora_rank
        q_rows = heads.times(shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        q_part: dict[str, int | Window] = {f"{prefix}.q_proj": q_rows}
        self._q_norm: RMSNorm | None = None
        self._q_up: Linear | None = None
        if shape.q_lora_rank is not None:
            q_part = {f"{prefix}.q_a_proj": shape.q_lora_rank}
            self._q_norm = RMSNorm(
                f"{name}.q_norm", f"{prefix}.q_a_layernorm", shape.q_lora_rank, LATENT_EPS, place=place
            )
            self._q_up = Linear(
                f"{name}.q_up", shape.q_lora_rank, {f"{prefix}.q_b_proj": q_rows}, place=place
            )
        down = {**q_part, f"{prefix}.kv_a_proj_with_mqa": latent + shape.qk_rope_head_dim}
        self._down = Linear(f"{name}.down", hidden_size, down, bias=bias, place=place)
        self._kv_norm = RMSNorm(
            f"{name}.kv_norm", f"{prefix}.kv_a_layernorm", latent, LATENT_EPS, place=place
        )
        sizes = shape.qk_nope_head_dim, shape.v_head_dim
        self._kv_up = UpProjection(name, f"{prefix}.kv_b_proj", heads, sizes, latent, place)
        self._o = Linear(
            f"{name}.o",
            heads.times(shape.v_head_dim),
            {f"{prefix}.o_proj": hidden_size},
            bias=bias,
            place=place,
        )
        self._compiled = best("elementwise", place.device, place.dtype) not in (TORCH, TRITON)
        self._triton = triton_for("elementwise", place.device, place.dtype)

    @property
    def quantizer(self) -> Quantizer | None:
        return self._down.quantizer

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        """Map [T, hidden] to [T, hidden]; ``cos`` and ``sin`` are [T, 1, qk_rope_head_dim / 2]."""
        shape = self.shape
        latent, heads, interleaved = shape.kv_lora_rank, self.heads, shape.rope_interleave
        down = self._down.forward(x)
        q, kv = down.tensor_split([down.shape[-1] - latent - shape.qk_rope_head_dim], dim=-1)
        if self._q_up is not None and self._q_norm is not None:
            q = self._q_up.forward(self._q_norm.rows(q, self._q_up.quantizer))
        q = q.unflatten(-1, (heads, -1))
        norm = self._kv_norm.weight, self._kv_norm.eps
        if self._triton is not None:
            assert isinstance(backend, LatentAttentionBackend)
            cells, w_kc = backend.latent_cells(self._layer), self._kv_up.w_kc
            queries = self._triton.store_latents(q, w_kc, kv, cos, sin, norm, *cells, interleaved=interleaved)
            return self._out(backend.attend_latents(queries, self._layer))
        q_nope, q_rope = q.split([shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1)
        if self._compiled:  # products are written where they are read next
            queries, keys = (kv.new_empty((len(kv), count, kv.shape[1])) for count in (heads, 1))
            self._kv_up.absorb(q_nope, queries[..., :latent])
            elementwise.rotate_latents(
                q_rope, kv, cos, sin, norm, queries, keys.squeeze(1), interleaved=interleaved
            )
            return self._attend(queries, keys, backend)
        absorbed = kv.new_empty((len(kv), heads, latent))
        self._kv_up.absorb(q_nope, absorbed)
        queries = torch.cat((absorbed, rotate(q_rope, cos, sin, interleaved=interleaved)), dim=-1)
        k_rope = rotate(kv[:, latent:].unsqueeze(1), cos, sin, interleaved=interleaved)
        keys = torch.cat((self._kv_norm.forward(kv[:, :latent]).unsqueeze(1), k_rope), dim=-1)
        return self._attend(queries, keys, backend)

    def _attend(self, queries: Tensor, keys: Tensor, backend: AttentionBackend) -> Tensor:
        """Attend with queries [T, heads, width] and keys [T, 1, width]; return [T, hidden]."""
        values = keys[..., : self.shape.kv_lora_rank]
        return self._out(backend.forward(queries, keys, values, self._layer))

    def _out(self, attended: Tensor) -> Tensor:
        attended = attended.unflatten(-1, (self.heads, -1))
        values = attended.new_empty((len(attended), self.heads, self.shape.v_head_dim))
        self._kv_up.raise_(attended, values)
        out = self._o.forward(values.flatten(1))
        if self._parallel.size > 1:
            self._parallel.all_reduce(out)
        return out

    @property
    def packed(self) -> PackedTensors | None:
        """Return the weights for the fused decoder kernel, or None if they are stored otherwise."""
        down, o = self._down.packed_as("qkv", bias=True), self._o.packed_as("o", bias=True)
        up = self._kv_up.packed
        q_up: PackedTensors | None = {}
        if self._q_up is not None and self._q_norm is not None:
            q_up = self._q_up.packed_as("q_up")
        if down is None or o is None or up is None or q_up is None:
            return None
        q_norm = None if self._q_norm is None else self._q_norm.weight
        return down | o | up | q_up | {"q_norm": q_norm, "k_norm": self._kv_norm.weight}

    def parts(self) -> Iterator[Layer]:
        yield self._down
        if self._q_up is not None and self._q_norm is not None:
            yield self._q_norm
            yield self._q_up
        yield self._kv_norm
        yield self._kv_up
        yield self._o

    def finalize(self) -> None:
        self._kv_up.finalize()

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._kv_up.derived()
