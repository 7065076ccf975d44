"""Feed-forward block of a layer with experts: a router, routed experts, and shared experts.

Invariants:
- A router records its choice before it is used, for those who replay the routing; every rank has the choices
  of all tokens.
- Every rank routes every token that it has, alike; results of routed and shared experts are summed over ranks
  at once. Where rows go to the ranks of their experts (``Placement.sends_rows``), each rank routes its own
  tokens, and has the shared experts whole, for these.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import TORCH, TRITON, best, elementwise, triton_for
from ..kernels import experts as kernel
from ..kernels.decoder_layers import NO_GROUPS, GroupRouting
from ..memory import moves
from .experts import Experts
from .fp8_products import Quantizer, Rows
from .linear import Linear, PackedTensors
from .matrix import Matrix
from .mlp import GatedMLP
from .parameters import CompositeLayer, Layer, Parameter, Placement, WeightSlot
from .rank_rows import RankRows


class Router:
    """Chooses a token's experts: the k of the highest probability, or the k best ones of the best groups.

    Without groups the softmax is float32, over logits of the model's dtype, to which weights are rounded.
    With groups (DeepSeek-V2: arXiv:2405.04434, 2.2.2; V3: arXiv:2412.19437, 2.1.2) all is float32: a logit
    rounded to bf16 changes the choice. The bias decides the choice and never an expert's weight.
    """

    def __init__(
        self,
        name: str,
        module: str,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        by: GroupRouting | None = None,
        normalize: bool,
        bias: bool = False,
        shared: int = 0,
        place: Placement,
    ) -> None:
        """Name the checkpoint's ``module``: ``weight`` [experts, hidden], ``bias`` [experts] if asked for.

        Among groups it is ``e_score_correction_bias`` (float32). ``normalize``: weights are divided by their
        sum; then they are multiplied by the groups' scale. ``shared``: experts behind all others that Triton
        chooses for every token, with weight 1, behind its own.
        """
        self._shared = shared
        self._module, self.top_k, self.normalize, self.in_groups = module, top_k, normalize, by
        self._compiled = best("experts", place.device, place.dtype) not in (TORCH, TRITON) and (
            by is None or by.serves(num_experts, top_k)
        )
        packed = by is None or self._compiled
        self._matrix = Matrix(f"{name}.weight", num_experts, hidden_size, place, packed=packed)
        self._bias: Parameter | None = None
        if bias:
            dtype = place.dtype if by is None else torch.float32
            self._bias = Parameter(f"{name}.bias", (num_experts,), dtype, place.device)
        self._triton = triton_for("experts", place.device, place.dtype)

    def forward(self, x: Tensor, record: Tensor) -> tuple[Tensor, Tensor]:
        """Map [T, hidden] to expert ids [T, k], also in ``record``, and float32 weights [T, k]."""
        bias, by, k = None if self._bias is None else self._bias.data, self.in_groups, self.top_k
        if by is None:
            logits = self._matrix.product(x, bias)
        else:
            logits = self._matrix.wide_product(x) if self._matrix.packed is not None else self._wide(x)
        if self._triton is not None:
            found: tuple[Tensor, Tensor] = self._triton.route(
                logits,
                k,
                normalize=self.normalize,
                by=by or NO_GROUPS,
                bias=None if by is None else bias,
                record=record,
                shared=self._shared,
            )
            return found
        if by is None:
            ids, weights = (kernel.route if self._compiled else _best)(logits, k, normalize=self.normalize)
        elif self._matrix.packed is not None:
            ids, weights = kernel.route_in_groups(logits, bias, k, by, normalize=self.normalize)
        else:
            ids, weights = best_in_groups(logits, bias, k, by, normalize=self.normalize)
        record.copy_(ids)
        return ids, weights

    def _wide(self, x: Tensor) -> Tensor:
        weight = self._matrix.parameter.data
        if x.device.type == "cuda" and x.dtype != torch.float32:  # products of bf16 are exact in float32
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return functional.linear(x.float(), weight.float())

    @property
    def packed(self) -> PackedTensors | None:
        """Weight and bias for compiled kernels, or None if they do not serve this choice."""
        weight, bias = self._matrix.packed, None if self._bias is None else self._bias.data
        return {"router": weight, "router_bias": bias} if self._compiled and weight is not None else None

    def slots(self) -> Iterator[WeightSlot]:
        yield self._matrix.slot(f"{self._module}.weight")
        if self._bias is not None:
            bias = "bias" if self.in_groups is None else "e_score_correction_bias"
            yield self._bias.slot(f"{self._module}.{bias}")

    def parameters(self) -> Iterator[Parameter]:
        yield self._matrix.parameter
        if self._bias is not None:
            yield self._bias


def _best(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights.to(logits.dtype).float()


def best_in_groups(
    logits: Tensor, bias: Tensor | None, top_k: int, by: GroupRouting, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Do as :func:`~..kernels.experts.route_in_groups`, by torch."""
    scores = logits.sigmoid() if by.sigmoid else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if by.groups > 1:
        grouped = choice.unflatten(1, (by.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1) if by.best_two else grouped.amax(-1)
        chosen = best.topk(by.top_groups, dim=-1).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        choice = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalize:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return ids, weights.mul_(by.scale)


class RoutedExperts:
    """Expert ids of the step that ran last, for all layers; layers without experts keep zeros."""

    def __init__(self, num_layers: int, top_k: int, num_experts: int, *, place: Placement) -> None:
        self.num_layers, self.top_k = num_layers, top_k
        self.dtype = torch.uint8 if num_experts <= 256 else torch.int16
        self._device = place.device
        self._rows = self._allocate(0)

    def of_layer(self, layer: int, num_tokens: int) -> Tensor:
        """Return the record of ``layer``'s choice, [num_tokens, top_k], a view until the next call."""
        return self.of_layers(num_tokens)[layer]

    def of_layers(self, num_tokens: int) -> Tensor:
        if num_tokens > self._rows.shape[0]:
            self._rows = self._allocate(num_tokens)
        return self._rows[:num_tokens].transpose(0, 1)

    def rows(self, num_tokens: int) -> Tensor:
        """Return the last step's record in the order of its tokens: [num_tokens, layers, top_k], a view."""
        return self._rows[:num_tokens]

    def _allocate(self, tokens: int) -> Tensor:
        moves.count += 1
        return torch.zeros((tokens, self.num_layers, self.top_k), dtype=self.dtype, device=self._device)


class FeedForward(Layer, Protocol):
    """A feed-forward block, or the shared experts of one, which every token passes."""

    @property
    def quantizer(self) -> Quantizer | None:
        """Quantizer for the rows of :meth:`forward`, or None if it takes them as they are."""
        ...

    def forward(self, x: Rows) -> Tensor:
        """Map [T, hidden] to [T, hidden], in fresh memory."""
        ...


class GatedShared(CompositeLayer):
    """``sigmoid(gate(x)) * mlp(x)``, one gate (Qwen2-MoE: Yang et al., 2024, arXiv:2407.10671)."""

    def __init__(self, name: str, gate: str, hidden_size: int, mlp: GatedMLP, *, place: Placement) -> None:
        self.gate = Linear(name, hidden_size, {gate: 1}, place=place)
        self.mlp = mlp
        self._compiled = best("elementwise", place.device, place.dtype) not in (TORCH, TRITON)

    quantizer = None

    def forward(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor), "it asks for no quantised rows"
        gate = self.gate.forward(x)
        if self._compiled:
            return elementwise.sigmoid_mul(self.mlp.forward(x), gate)
        # As a softmax of two, which goes row by row: torch's sigmoid rounds the last elements of an array
        # differently.
        weight = torch.softmax(torch.cat((gate, torch.zeros_like(gate)), dim=1), dim=1)[:, :1]
        return self.mlp.forward(x).mul_(weight)

    def parts(self) -> Iterator[Layer]:
        yield self.mlp
        yield self.gate


class MoeBlock(CompositeLayer):
    """``experts(x) + shared(x)``."""

    def __init__(
        self,
        layer: int,
        router: Router,
        experts: Experts,
        routing: RoutedExperts,
        *,
        shared: FeedForward | None = None,
        place: Placement,
    ) -> None:
        """Record the choice in ``routing`` as ``layer``'s; ``shared`` has this rank's width, or is whole."""
        self._parallel, self._rows = place.parallel, place.rank_rows
        self._sends, self._ranks_of_group = place.sends_rows(router.top_k), place.parallel.size // place.ep
        self._layer = layer
        self.router, self.experts, self.shared = router, experts, shared
        self._routing = routing

    quantizer = None

    def forward(self, x: Rows) -> Tensor:
        assert isinstance(x, Tensor), "it asks for no quantised rows"
        rows = self._rows
        if rows is None:
            out = self._sum(x, self.shared)
            if self._parallel.size > 1:
                self._parallel.all_reduce(out)
            return out
        if not self._sends:
            return rows.reduce_scatter(self._sum(rows.gather(x), self.shared))
        if rows.may_exchange:
            out = self._exchanged(x, rows)
        else:
            out = rows.reduce_scatter(self._sum(rows.gather(x), None))
        return out if self.shared is None or not len(x) else out.add_(self.shared.forward(x))

    def _sum(self, x: Tensor, shared: FeedForward | None) -> Tensor:
        ids, weights = self.router.forward(x, self._routing.of_layer(self._layer, len(x)))
        return self.experts.forward(x, ids, weights, None if shared is None else shared.forward(x))

    def _exchanged(self, x: Tensor, rows: RankRows) -> Tensor:
        """Return the results of routed experts for own rows ``x``, which go to these experts' ranks."""
        k, ranks = self.router.top_k, self._ranks_of_group
        record = self._routing.of_layer(self._layer, sum(rows.counts))
        chosen = torch.empty((len(x), 2 * k), dtype=torch.float32, device=x.device)  # exact for ids, too
        if len(x):
            chosen[:, :k], chosen[:, k:] = self.router.forward(x, rows.part(record))
        chosen = rows.gather(chosen)
        ids, weights = chosen[:, :k].long(), chosen[:, k:]
        record.copy_(ids)
        groups = torch.zeros((len(ids), self._parallel.size // ranks), dtype=torch.bool, device=x.device)
        goes = groups.scatter_(1, ids // len(self.experts.held), True).repeat_interleave(ranks, 1)
        exchange = rows.exchange(goes)
        received = exchange.send(x)
        here = goes[:, self._parallel.rank].nonzero_static(size=len(received)).squeeze(1)
        if len(received):
            received = self.experts.forward(received, ids[here], weights[here])
        return exchange.sums(received, len(x))

    def parts(self) -> Iterator[Layer]:
        yield self.router
        yield self.experts
        if self.shared is not None:
            yield self.shared
