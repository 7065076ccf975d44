"""Gated feed-forward block (SwiGLU: Shazeer, 2020, arXiv:2002.05202)."""

from collections.abc import Iterator
from math import lcm

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import elementwise_for
from ..kernels.attention_form import Bend
from .fp8_products import Quantizer, Rows
from .linear import Linear
from .parameters import CompositeLayer, Layer, Placement
from .sharding import Window, first_with_pieces, in_pieces

_CUT, _SLOPE = 7.0, 1.702
"""Constants of a clamped gate."""


def bent(gate: Tensor, up: Tensor, bend: Bend) -> Tensor:
    if bend == "silu":
        return functional.silu(gate).mul_(up)
    if bend == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh").mul_(up)
    gate = gate.clamp(max=_CUT)
    return up.clamp(-_CUT, _CUT).add_(1).mul_(gate * torch.sigmoid(gate * _SLOPE))


class GatedMLP(CompositeLayer):
    """``down(bend(gate(x)) * up(x))`` with gate and up in one product."""

    def __init__(
        self,
        name: str,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bend: Bend = "silu",
        place: Placement,
        partial: bool = False,
        field: str = "intermediate_size",
    ) -> None:
        """Refuse ranks that do not divide the width, whose name in the config is ``field``.

        If it is quantised, ranks have whole blocks of it, and those without a block hold and add nothing.
        ``partial``: the caller sums over the ranks, each of which has a part of the width, and has gathered
        rows that ranks have of their own.
        """
        self.bend = bend
        piece = _piece(prefix, place)
        width = in_pieces(intermediate_size, place.parallel, field, piece)
        self.is_empty = width.length == 0
        first = first_with_pieces(intermediate_size, place.parallel, piece)
        self.on_all_ranks = first == 0
        """True if no rank is empty."""
        inputs, outputs = width, Window.whole(hidden_size)
        if self.is_empty:
            inputs, outputs = Window.whole(intermediate_size), Window(0, 0, hidden_size)
        self._summing = None if partial or place.parallel.size == 1 else place.parallel
        self._rows = None if partial else place.rank_rows
        self._kernels = elementwise_for(place.device, place.dtype)
        gate_up = {f"{prefix}.gate_proj": width, f"{prefix}.up_proj": width}
        self.gate_up = Linear(f"{name}.gate_up", hidden_size, gate_up, place=place, first_rank=first)
        self.down = Linear(
            f"{name}.down", inputs, {f"{prefix}.down_proj": outputs}, place=place, first_rank=first
        )

    @property
    def quantizer(self) -> Quantizer | None:
        return None if self.is_empty or self._rows is not None else self.gate_up.quantizer

    def forward(self, x: Rows) -> Tensor:
        if self._rows is not None:
            assert isinstance(x, Tensor), "it asks for no quantised rows"
            x = self._rows.gather(x)
        out = torch.zeros_like(x) if self.is_empty and isinstance(x, Tensor) else self._product(x)
        if self._rows is not None:
            return self._rows.reduce_scatter(out)
        if self._summing is not None:
            self._summing.all_reduce(out)
        return out

    def _product(self, x: Rows) -> Tensor:
        gate_up, quantizer = self.gate_up.forward(x), self.down.quantizer
        gated: Rows
        if quantizer is not None:
            gated = quantizer.gate_mul(gate_up, self.bend)
        elif self._kernels is not None:
            gated = self._kernels.gate_mul(gate_up, bend=self.bend)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            gated = bent(gate, up, self.bend)
        return self.down.forward(gated)

    def parts(self) -> Iterator[Layer]:
        yield self.gate_up
        yield self.down


def _piece(prefix: str, place: Placement) -> int:
    """Return how much of the width must stay together: blocks of rows of gate and up, of columns of down."""
    blocks = place.blocks
    if blocks is None:
        return 1
    sizes = {"gate_proj": blocks.rows, "down_proj": blocks.columns}
    return lcm(*(size for part, size in sizes.items() if blocks.converts(f"{prefix}.{part}")))
