"""Linear-attention block: projections, the gated delta rule over a sequence's state, a gated norm.

Qwen3-Next's (Qwen Team, 2025), after Gated DeltaNet (Yang et al., 2025, arXiv:2412.06464). Convolution and
rule are the backend's (``attention/delta_rule.py``), since they read and write states.

Invariant: each rank computes its key heads with their value heads; the sum over ranks is the block's result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from ..attention.delta_rule import HybridBackend
from ..cache.pool import StateShape
from ..execution.forward import AttentionBackend
from ..kernels.delta import DeltaPlaces, DeltaWeights, Segments, delta_for
from .fp8_products import Rows
from .linear import Linear, PackedTensors
from .norm import RMSNorm, normalize
from .parameters import CompositeLayer, Layer, Parameter, Placement, WeightSlot
from .sharding import Window, even, sharded, stacked

Parts = dict[str, Window | Sequence[Window]]
"""Checkpoint modules of one product, and the rows of each that this rank has."""


@dataclass(frozen=True, kw_only=True)
class DeltaShape:
    """Sizes of a block, and the order of its first product's outputs in the checkpoint."""

    hidden_size: int
    state: StateShape
    """State over all ranks."""
    eps: float
    by_key_head: bool
    """Queries, keys, values and gates lie together per key head, and so do b and a; else each by itself."""


class GatedDelta(CompositeLayer):
    """One layer's block; an :class:`~..models.decoder.AttentionBlock` without KV."""

    form = None

    def __init__(self, name: str, prefix: str, layer: int, shape: DeltaShape, *, place: Placement) -> None:
        """Refuse ranks that do not divide the heads. ``layer``: its number among those with states."""
        self._layer, self._prefix, self._parallel = layer, prefix, place.parallel
        self._heads = heads = _Heads.of(shape.state, place)
        self._state = state = heads.state
        self._places = places_of(state, by_key_head=shape.by_key_head)
        self.kernel = delta_for(place.device, place.dtype, state, self._places)
        self._in = [
            Linear(f"{name}.in{number or ''}", shape.hidden_size, parts, place=place)
            for number, parts in enumerate(heads.projections(prefix, shape, place))
        ]
        self._out = Linear(
            f"{name}.out",
            heads.values.times(state.value_size),
            {f"{prefix}.out_proj": shape.hidden_size},
            place=place,
        )
        self._norm = RMSNorm(f"{name}.norm", f"{prefix}.norm", state.value_size, shape.eps, place=place)
        filters = (state.channels, 1, state.kernel)
        self._filters = Parameter(f"{name}.conv.weight", filters, place.dtype, place.device)
        taps = (state.kernel, state.channels)
        self._taps = Parameter(f"{name}.conv.taps", taps, place.dtype, place.device) if self.kernel else None
        self._log_rate, self._rate_bias = (
            Parameter(f"{name}.{each}", (state.value_heads,), place.dtype, place.device)
            for each in ("log_rate", "rate_bias")
        )

    quantizer = None

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        """Map [T, hidden] to [T, hidden]; positions follow from the order of tokens: no rotation."""
        assert isinstance(x, Tensor), "it asks for no quantised rows"
        assert isinstance(backend, HybridBackend), (
            "a model with states is computed by a backend that has them"
        )
        parts = [product.forward(x) for product in self._in]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        compute = self._by_torch if self.kernel is None else self._compiled
        out = self._out.forward(compute(projected, backend))
        if self._parallel.size > 1:
            self._parallel.all_reduce(out)
        return out

    def _compiled(self, projected: Tensor, backend: HybridBackend) -> Tensor:
        kernel, state = self.kernel, self._state
        assert kernel is not None and self._taps is not None
        out = projected.new_empty((projected.shape[0], state.value_heads * state.value_size))
        weights = DeltaWeights(
            filters=self._taps.data,
            log_rate=self._log_rate.data,
            rate_bias=self._rate_bias.data,
            norm=self._norm.weight,
            eps=self._norm.eps,
        )

        def run(segments: Segments, past: Tensor, recurrent: Tensor) -> None:
            kernel.run(projected, weights, segments, past, recurrent, out)

        backend.compiled(self._layer, run)
        return out

    def _by_torch(self, projected: Tensor, backend: HybridBackend) -> Tensor:
        mixed, gate, b, a = self._split(projected)
        rate = functional.softplus(a.float() + self._rate_bias.data.float())
        decay = -self._log_rate.data.float().exp() * rate
        filters = self._filters.data.squeeze(1)
        found = backend.delta(mixed, filters, decay, torch.sigmoid(b), self._layer)
        normalized = self._norm.scale_(normalize(found.float(), self._norm.eps).to(found.dtype))
        return (normalized * functional.silu(gate.float())).to(found.dtype).flatten(1)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return [T, channels] to convolve, gates [T, value heads, value size], b and a [T, value heads]."""
        state, places = self._state, self._places
        group = state.value_heads // state.key_heads

        def of(place: tuple[int, int], size: int) -> Tensor:
            first, step = place
            strides = (projected.stride(0), step, 1)
            shape = (projected.shape[0], state.key_heads, size)
            return projected.as_strided(shape, strides, projected.storage_offset() + first).flatten(1)

        parts = (
            (places.query, state.key_size),
            (places.key, state.key_size),
            (places.value, group * state.value_size),
        )
        mixed = torch.cat([of(place, size) for place, size in parts], dim=1)
        gate = of(places.gate, group * state.value_size).view(projected.shape[0], -1, state.value_size)
        return mixed, gate, of(places.b, group), of(places.a, group)

    @property
    def packed(self) -> PackedTensors | None:
        """Return the weights for the fused decoder kernel, or None if they are stored otherwise."""
        first, o = self._in[0].packed_as("qkv", bias=True), self._out.packed_as("o", bias=True)
        if first is None or o is None or len(self._in) > 1 or self._taps is None:
            return None
        rates: PackedTensors = {"log_rate": self._log_rate.data, "rate_bias": self._rate_bias.data}
        others: PackedTensors = {"filters": self._taps.data, "delta_norm": self._norm.weight}
        return first | o | rates | others | {"q_norm": None, "k_norm": None}

    def parts(self) -> Iterator[Layer]:
        yield from self._in
        yield self._out
        yield self._norm

    def slots(self) -> Iterator[WeightSlot]:
        yield from super().slots()
        yield sharded(self._filters.slot(f"{self._prefix}.conv1d.weight"), stacked(self._heads.channels))
        yield sharded(self._log_rate.slot(f"{self._prefix}.A_log"), self._heads.values)
        yield sharded(self._rate_bias.slot(f"{self._prefix}.dt_bias"), self._heads.values)

    def parameters(self) -> Iterator[Parameter]:
        yield from super().parameters()
        yield from (self._filters, self._log_rate, self._rate_bias)

    def finalize(self) -> None:
        """Turn the filters into the kernel's order: channels lie beside each other."""
        if self._taps is not None:
            self._taps.data.copy_(self._filters.data.squeeze(1).t())

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        if self._taps is not None:
            yield self._taps.name, self._taps.data


@dataclass(frozen=True)
class _Heads:
    state: StateShape
    keys: Window
    values: Window

    @classmethod
    def of(cls, whole: StateShape, place: Placement) -> "_Heads":
        keys = even(whole.key_heads, place.parallel, "linear_num_key_heads")
        values = keys.times(whole.value_heads // whole.key_heads)
        return cls(whole.divided(place.parallel.size), keys, values)

    @property
    def channels(self) -> tuple[Window, Window, Window]:
        keys = self.keys.times(self.state.key_size)
        return keys, keys, self.values.times(self.state.value_size)

    def projections(self, prefix: str, shape: DeltaShape, place: Placement) -> list[Parts]:
        """Return the input's products, in the order of results; FP8 and other neighbours are not fused."""
        state, parts = self.state, Parts()
        if shape.by_key_head:
            group = state.value_heads // state.key_heads
            parts["in_proj_qkvz"] = self.keys.times(2 * (state.key_size + group * state.value_size))
            parts["in_proj_ba"] = self.keys.times(2 * group)
        else:
            parts["in_proj_qkv"] = self.channels
            parts["in_proj_z"] = self.values.times(state.value_size)
            parts["in_proj_b"] = parts["in_proj_a"] = self.values
        modules = {f"{prefix}.{name}": rows for name, rows in parts.items()}
        by_storage = groupby(
            modules, lambda module: place.blocks is not None and place.blocks.converts(module)
        )
        return [{module: modules[module] for module in group} for _, group in by_storage]


def places_of(state: StateShape, *, by_key_head: bool) -> DeltaPlaces:
    """Return the places of the first product's outputs, in the order of :meth:`_Heads.projections`."""
    heads, group = state.key_heads, state.value_heads // state.key_heads
    key, values = state.key_size, group * state.value_size
    width = heads * 2 * (key + values + group)
    if by_key_head:
        step, narrow = 2 * (key + values), heads * 2 * (key + values)
        return DeltaPlaces(
            width=width,
            query=(0, step),
            key=(key, step),
            value=(2 * key, step),
            gate=(2 * key + values, step),
            b=(narrow, 2 * group),
            a=(narrow + group, 2 * group),
        )
    gate = state.channels
    b = gate + heads * values
    return DeltaPlaces(
        width=width,
        query=(0, key),
        key=(heads * key, key),
        value=(2 * heads * key, values),
        gate=(gate, values),
        b=(b, group),
        a=(b + heads * group, group),
    )
