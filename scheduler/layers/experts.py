"""Routed experts: gated feed-forward blocks of which every token passes a few.

Shazeer et al., 2017, arXiv:1701.06538. Invariants:
- One parameter for each projection holds all experts, written in place from per-expert checkpoint tensors.
- Pairs of a token and an expert are sorted by expert; one product goes over all experts: no loop over tokens,
  and none over experts where there is a grouped product for the shape. In Triton few tokens' pairs stay in
  their order (``kernels/triton_experts.py``).
- Ranks are ``Placement.ep`` groups. Each holds whole experts, and its ranks divide their width, in whole
  blocks if weights are FP8. A rank computes the pairs of its experts alone, sorted in front of all others:
  rows behind them are not computed, may be NaN, and count in no sum.
- A token's sum over a rank's experts is taken in float32 in the order of its ``expert_ids`` and rounded once.
  With compiled kernels its bits depend on the token alone, unless weights are FP8 that cannot be packed.
  Sums over ranks are rounded once more, so bits depend on ``tp`` and ``ep``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import TORCH, TRITON, best, elementwise, elementwise_for, triton_for
from ..kernels import experts as kernel
from ..kernels.attention_form import Bend
from ..kernels.linear import packable
from ..parallel.group import TensorParallel
from .fp8_products import experts_for, multiplies_experts
from .linear import PackedTensors, divided, scale_blocks
from .matrix import Stored, packs
from .mlp import bent
from .parameters import Parameter, Placement, ScaleBlocks, WeightSlot
from .scaled_blocks import ScaledExpertMatrix
from .sharding import BesideSlot, ScatteredSlot, Window, even, require_borders, sharded
from .stacked_experts import StackedBiasSlot, StackedSlot

if TYPE_CHECKING:
    from .fp8_products import FlashInferExperts
    from .lora import AdaptedPairs

COMBINED_ELEMENTS = 1 << 24
"""Elements that are weighted at a time: bounds the float32 transient of torch's way to 64 MB."""


class ExpertMatrix(Stored):
    """One weight [out, in] of each expert: packed, or plain."""

    def __init__(
        self,
        name: str,
        count: int,
        out_features: int,
        in_features: int,
        place: Placement,
        *,
        packed: bool,
        blocks: ScaleBlocks | None = None,
    ) -> None:
        super().__init__(name, out_features, in_features, place, packed=packed, blocks=blocks, count=count)
        self.outputs = out_features
        self._product: kernel.GroupedProduct | None = None
        if packed:
            data = self.parameter.data
            sizes = *self._shape, self._scales, place.dtype
            self._product = kernel.GroupedProduct(data, *sizes, count=count)

    @property
    def operands(self) -> tuple[Tensor, None]:
        """Return the plain weight [experts, out, in], without scales."""
        return self.parameter.data, None

    def packed_product(
        self, x: Tensor, groups: kernel.Groups, out: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Write each row of ``x`` [pairs, in] times its expert's weight, plus bias, to ``out``."""
        assert self._product is not None, "a plain weight"
        return self._product(x, groups, out, bias)

    def plain_product(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the same in fresh memory; ``ends``: :func:`sort_by_expert`."""
        return grouped_linear(x, self.parameter.data, ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Checkpoint names of a layer's experts."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    """Names inside an expert's module; the module's name is its number."""
    stacked: bool = False
    """All experts are one tensor, as :mod:`.stacked_experts` describes."""


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Experts that every token passes, stored behind those that are chosen."""

    module: str
    """Checkpoint module of all, as one feed-forward block."""
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertModules:
    """Checkpoint modules of a layer's experts, which PEFT may adapt as two parameters of all."""

    prefix: str
    count: int
    held: range
    """Experts that this rank holds, of ``count``."""
    names: ExpertNames
    """If stacked, a parameter has rows of gate and up by turns, else those of gate first."""
    hidden: int
    width: int

    def name(self, expert: int, part: str) -> str:
        return f"{self.prefix}.{expert}.{part}"

    @property
    def gate_up(self) -> str:
        return f"{self.prefix}.gate_up_proj"

    def parameter(self, shapes: Sequence[Sequence[int]]) -> tuple[str, tuple[int, int]]:
        """Return the parameter that factors A and B of ``shapes`` belong to, with its (outputs, inputs)."""
        size = 2 * self.width, self.hidden
        if [*shapes[0][1:], *shapes[-1][:1]] == [size[1], size[0]]:
            return self.gate_up, size
        return f"{self.prefix}.down_proj", (self.hidden, self.width)


class Experts:
    """Sums of ``weights[t, i] * down_e(bend(gate_e(x[t])) * up_e(x[t]))``, e being ``expert_ids[t, i]``."""

    def __init__(
        self,
        name: str,
        prefix: str,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        names: ExpertNames = ExpertNames(),
        bias: bool = False,
        bend: Bend = "silu",
        shared: SharedExperts | None = None,
        place: Placement,
    ) -> None:
        """Refuse ranks that do not divide experts or width, or cut a block of FP8 (UNSUPPORTED_MODEL).

        ``prefix``: the checkpoint's module, which holds the projections of ``names`` for each expert.
        ``shared``: as :func:`among_experts` returns them; they are numbered from ``num_experts`` on.
        """
        self._prefix, self.count, self._shared = prefix, num_experts, shared
        self._names, self.bend = names, bend
        ranks = place.parallel.size // place.ep
        group, rank = divmod(place.parallel.rank, ranks)
        self._experts = even(num_experts, TensorParallel(group, place.ep), "num_experts")
        self.held = range(self._experts.start, self._experts.stop)
        self._computed = self.held if shared is None else range(num_experts + shared.count)
        self._window = even(intermediate_size, TensorParallel(rank, ranks), "moe_intermediate_size")
        self._first_rank, self._adds_bias = group * ranks, rank == 0
        intermediate_size = self._window.length
        self._hidden, self.width = hidden_size, intermediate_size
        self._blocks: ScaleBlocks | None = None
        self._workspace = place.workspace
        self._compiled = best("experts", place.device, place.dtype) not in (TORCH, TRITON) and all(
            packable(size, place.dtype) for size in (hidden_size, intermediate_size)
        )
        self._fused_fp8: FlashInferExperts | None = None
        self._triton = triton_for("experts", place.device, place.dtype)
        self._elementwise = elementwise_for(place.device, place.dtype)
        gate_up, down = [intermediate_size] * 2, [hidden_size]
        self._gate_up = self._matrix(f"{name}.gate_up", gate_up, hidden_size, place)
        self._down = self._matrix(f"{name}.down", down, intermediate_size, place)
        self._biases: tuple[Parameter, Parameter] | None = None
        if bias:
            sizes = {"gate_up": 2 * intermediate_size, "down": hidden_size}
            gate_up_bias, down_bias = (
                Parameter(f"{name}.{part}_bias", (len(self.held), size), place.dtype, place.device)
                for part, size in sizes.items()
            )
            self._biases = gate_up_bias, down_bias
        self._in_order = self._triton is not None and (
            isinstance(self._gate_up, ExpertMatrix) or multiplies_experts(place.device)
        )
        """Products of few tokens leave the pairs in their order."""
        self._slots, self._adapters = place.adapters, None
        if self._slots is not None and self._fused_fp8 is None:
            self._adapters = self._slots.of_experts(
                name,
                ExpertModules(
                    prefix=prefix,
                    count=num_experts,
                    held=self.held,
                    names=names,
                    hidden=hidden_size,
                    width=self._window.total,
                ),
                self._window,
                place,
                packed=self._compiled,
            )

    def _matrix(
        self, name: str, part_rows: list[int], in_features: int, place: Placement
    ) -> ExpertMatrix | ScaledExpertMatrix:
        projections = self._names.gate, self._names.up, self._names.down
        prefixes = [f"{self._prefix}.{e}" for e in range(self.count)]
        if self._shared is not None:
            prefixes.append(self._shared.module)
        modules = (f"{prefix}.{part}" for prefix in prefixes for part in projections)
        self._blocks = blocks = scale_blocks(modules, place)
        if blocks is not None:
            for block in (blocks.rows, blocks.columns):  # rows of gate and up, columns of down
                require_borders(self._prefix, "moe_intermediate_size", self._window, block)
            found = experts_for(place.device)
            if found is not None and found.fused is not None and self._fused_fp8 is None:
                group = self.held.start // len(self.held)
                self._fused_fp8 = found.fused(place.workspace, place.ep, group)
            if not (self._compiled and packs(in_features, place, blocks)):
                return ScaledExpertMatrix(name, len(self._computed), part_rows, in_features, blocks, place)
        shape = len(self._computed), sum(part_rows), in_features
        return ExpertMatrix(name, *shape, place, packed=self._compiled, blocks=blocks)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, addend: Tensor | None = None) -> Tensor:
        """Map [T, hidden] to [T, hidden], in fresh memory; the sum over all ranks is the result.

        ``expert_ids``: int64 [T, k]. ``weights``: [T, k]. ``addend`` [T, hidden] is added to the rounded
        result.
        """
        if self._fused_fp8 is not None:
            out = self._fused_fp8(x, expert_ids, weights, *self._operands)
            return out if addend is None else out.add_(addend)
        if self._triton is not None:
            y, places = self._pairs(x, expert_ids, self._triton)
            summed: Tensor = self._triton.combine(y, expert_ids, self._computed, weights, addend, places)
            return summed
        if self._compiled:
            out = self._forward_compiled(x, expert_ids, weights)
        else:
            tokens, places, ends = sort_by_expert(self._numbered(expert_ids), len(self._computed))
            y = self._plain(x.index_select(0, tokens), places, ends)
            if not self._experts.is_whole:
                pairs = torch.arange(len(y), device=y.device)
                y.masked_fill_((pairs >= ends[-1]).unsqueeze(1), 0)
            out = combine(y, places, weights)
        return out if addend is None else out.add_(addend)

    @property
    def _operands(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        return self._gate_up.operands, self._down.operands

    def _numbered(self, expert_ids: Tensor) -> Tensor:
        """Count experts from the first one held; all others have the number behind the last one."""
        if self._experts.is_whole:
            return expert_ids
        numbers, count = expert_ids - self.held.start, len(self.held)
        return numbers.where((numbers >= 0) & (numbers < count), count)

    def _pairs(self, x: Tensor, ids: Tensor, triton: ModuleType) -> tuple[Tensor, Tensor | None]:
        """Return each pair's result, and their places if these are not in order."""
        if not self._in_order or self._adapts or len(x) > triton.MAX_TOKENS:
            tokens, places, ends = sort_by_expert(self._numbered(ids), len(self._computed))
            return self._plain(x.index_select(0, tokens), places, ends), places
        (gate_up, down), (first, second) = self._operands, self._added_biases
        gated = triton.product(x, ids, self._computed, *gate_up, first, bend=self.bend)
        y: Tensor = triton.product(gated, ids, self._computed, *down, second)
        return y, None

    @property
    def _adapts(self) -> bool:
        return self._slots is not None and self._adapters is not None and self._slots.rows is not None

    def _adapted(self, tokens: Tensor, experts: Tensor) -> "AdaptedPairs | None":
        """Return which of the sorted pairs adapters change; ``experts`` are counted as :meth:`_numbered`."""
        assert self._slots is not None and self._adapters is not None
        return self._slots.pairs(tokens, experts, len(self.held), self._adapters, packed=self._compiled)

    def _adapt(self, product: int, x: Tensor, y: Tensor, pairs: "AdaptedPairs | None") -> Tensor:
        if pairs is not None and self._adapters is not None:
            self._adapters[product].add(x, y, pairs)
        return y

    def _plain(self, rows: Tensor, places: Tensor, ends: Tensor) -> Tensor:
        adapted = None
        if self._adapts:
            pairs = torch.arange(len(rows), device=rows.device)
            tokens = torch.empty_like(pairs).index_copy_(0, places.flatten(), pairs // places.shape[1])
            adapted = self._adapted(tokens, _of_rows(ends, len(rows)))
        gate_up = self._biased(self._gate_up.plain_product(rows, ends), ends, 0)
        gated = self._gate(self._adapt(0, rows, gate_up, adapted))
        y = self._biased(self._down.plain_product(gated, ends), ends, 1)
        return self._adapt(1, gated, y, adapted)

    def _biased(self, y: Tensor, ends: Tensor, product: int) -> Tensor:
        """Add the bias of each row's expert to ``y`` in place; that of sums over ranks on one of them."""
        bias = self._added_biases[product]
        if bias is None:
            return y
        return y.add_(bias.index_select(0, _of_rows(ends, len(y)).clamp_max(len(bias) - 1)))

    def _gate(self, gate_up: Tensor) -> Tensor:
        if self._triton is not None and self._elementwise is not None:
            return self._elementwise.gate_mul(gate_up, bend=self.bend)
        gate, up = gate_up.chunk(2, dim=-1)
        return bent(gate, up, self.bend)

    @property
    def _added_biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases of both products, or None where this rank adds none."""
        if self._biases is None:
            return None, None
        gate_up, down = (bias.data for bias in self._biases)
        return gate_up, down if self._adds_bias else None

    @property
    def packed(self) -> PackedTensors | None:
        """Return the weights for the fused decoder kernel, or None if they are stored otherwise."""
        parts, found = (("gate_up", self._gate_up), ("down", self._down)), PackedTensors()
        for (name, matrix), bias in zip(parts, self._added_biases, strict=True):
            if matrix.packed is None:
                return None
            tensors = {"": matrix.packed, "_scales": matrix.scales, "_bias": bias}
            found |= {f"experts_{name}{suffix}": tensor for suffix, tensor in tensors.items()}
        return found

    def _forward_compiled(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        groups = kernel.group(expert_ids.contiguous(), self.count, self.held)
        pairs = len(groups.tokens)
        rows = torch.index_select(x, 0, groups.tokens, out=self._take("rows", pairs, self._hidden, x))
        gate_up = self._take("gate_up", pairs, 2 * self.width, x)
        biases = self._added_biases
        self._gate_up.packed_product(rows, groups, gate_up, biases[0])
        adapted = self._adapted(groups.tokens, groups.of_rows) if self._adapts else None
        self._adapt(0, rows, gate_up, adapted)
        gated = elementwise.gate_mul(gate_up, self._take("gated", pairs, self.width, x), bend=self.bend)
        y = self._down.packed_product(gated, groups, rows, biases[1])  # whose inputs are no longer needed
        self._adapt(1, gated, y, adapted)
        return kernel.combine(y, groups, weights.float().contiguous())

    def _take(self, purpose: str, pairs: int, width: int, x: Tensor) -> Tensor:
        return self._workspace.take(f"experts.{purpose}", (pairs, width), x.dtype, x.device)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the slots of all experts; of those that are not held they keep nothing."""
        if not self._names.stacked:
            for expert in range(self.count):
                yield from chain.from_iterable(self._expert_slots(expert))
            if self._shared is not None:
                yield from self._shared_slots(self._shared)
            return
        experts = [self._expert_slots(expert) for expert in self.held]
        gate_up, down = [gate + up for gate, up, _ in experts], [down for _, _, down in experts]
        for number, (part, slots) in enumerate((("gate_up", gate_up), ("down", down))):
            name = f"{self._prefix}.{part}_proj"
            weight = StackedSlot(name, slots[0][0].parameter, slots, self._experts)
            yield sharded(weight, self._experts, first_rank=self._first_rank)
            if self._biases is not None:
                bias = self._biases[number]
                held = Window.whole(self._hidden) if number else self._window
                of_held = StackedBiasSlot(f"{name}_bias", bias.name, bias.data, len(slots[0]), held)
                yield sharded(of_held, self._experts, first_rank=self._first_rank)

    def _expert_slots(self, expert: int) -> tuple[list[WeightSlot], list[WeightSlot], list[WeightSlot]]:
        number, width, outputs = expert - self.held.start, self._window, Window.whole(self._hidden)
        if expert not in self.held:
            number, width, outputs = 0, Window(0, 0, width.total), Window(0, 0, self._hidden)
        return self._slots_of(f"{self._prefix}.{expert}", number, width, outputs)

    def _slots_of(
        self, module: str, number: int, width: Window, outputs: Window
    ) -> tuple[list[WeightSlot], list[WeightSlot], list[WeightSlot]]:
        """Return the slots of gate, up and down of ``module``, the weights ``number`` of those stored."""
        gate, up = (0, self.width) if self._fused_fp8 is None else (self.width, 0)
        names, hidden = self._names, Window.whole(self._hidden)
        gates = self._gate_up.slots(f"{module}.{names.gate}", gate, width.length, number)
        ups = self._gate_up.slots(f"{module}.{names.up}", up, width.length, number)
        downs = self._down.slots(f"{module}.{names.down}", 0, outputs.length, number)
        blocks, first_rank = self._blocks, self._first_rank
        return (
            list(divided(gates, width, hidden, blocks, first_rank)),
            list(divided(ups, width, hidden, blocks, first_rank)),
            list(divided(downs, outputs, self._window, blocks, first_rank)),
        )

    def _shared_slots(self, shared: SharedExperts) -> Iterator[WeightSlot]:
        outputs = Window.whole(self._hidden)
        each = [
            self._slots_of(shared.module, number, self._window, outputs)
            for number in range(self.count, self._computed.stop)
        ]
        if shared.count == 1:
            yield from chain.from_iterable(each[0])
            return
        gates, ups, downs = ([slot for (slot,) in slots] for slots in zip(*each, strict=True))
        yield ScatteredSlot(gates[0].name, gates)
        yield ScatteredSlot(ups[0].name, ups)
        yield BesideSlot(downs[0].name, downs)

    def parameters(self) -> Iterator[Parameter]:
        yield from self._gate_up.parameters()
        yield from self._down.parameters()
        yield from self._biases or ()


def among_experts(
    module: str, size: int, prefix: str, width: int, names: ExpertNames, place: Placement
) -> SharedExperts | None:
    """Return shared experts of ``size`` in all as some more experts of ``width``, or None if they stay apart.

    Triton's router chooses them for every token. Several are no more than one rank's, unquantised: ranks
    divide the width of all of them, which is another division than that of each.
    """
    count, rest = divmod(size, width)
    blocks, parts = place.blocks, (names.gate, names.up, names.down)
    formats = {
        blocks is not None and blocks.converts(f"{each}.{part}")
        for each in (module, f"{prefix}.0")
        for part in parts
    }
    if (
        triton_for("experts", place.device, place.dtype) is None
        or names.stacked
        or rest
        or place.ep > 1
        or place.adapters is not None
        or len(formats) > 1
        or (count > 1 and (place.parallel.size > 1 or True in formats))
    ):
        return None
    return SharedExperts(module, count)


def _of_rows(ends: Tensor, rows: int) -> Tensor:
    """Return the expert of each of ``rows`` rows, int64; behind all ``ends`` it is their number."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the pairs of ``expert_ids`` int64 [T, k] by expert, then by token; never waits for a device.

    Return each sorted pair's token and each pair's place, int64 [T * k] and [T, k], and experts' ends, int32.
    """
    device = expert_ids.device
    ids, order = expert_ids.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(num_experts, device=device), right=True, out_int32=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    return order // expert_ids.shape[1], places.view_as(expert_ids), ends


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return ``x[t] @ weight[e].T`` for rows [pairs, in] by expert and ``weight`` [experts, out, in]."""
    if _groupable(x, weight):
        return functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    out = x.new_empty((x.shape[0], weight.shape[1]))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
        start = end
    return out


def _groupable(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch has a grouped product: strides in units of 16 bytes, bfloat16 on accelerators."""
    return (
        hasattr(functional, "grouped_mm")  # older torch lacks it
        and (x.device.type == "cpu" or x.dtype == torch.bfloat16)
        and all(size * x.itemsize % 16 == 0 for size in weight.shape[1:])
    )


def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return each token's sum of ``weights`` [T, k] times its rows ``places`` [T, k] of ``y``: [T, size]."""
    tokens = max(1, COMBINED_ELEMENTS // (places.shape[1] * y.shape[1]))
    parts = [
        (y.index_select(0, rows.flatten()).view(*rows.shape, -1) * factors.float().unsqueeze(-1)).sum(1)
        for rows, factors in zip(places.split(tokens), weights.split(tokens))
    ]
    return torch.cat(parts).to(y.dtype)
