"""Feed-forward block of a layer with experts: a router, routed experts, and shared experts.

Invariants: a router records its choice before it is used, for those who replay the routing. Every rank routes
every token, alike; results of routed and shared experts are summed over ranks at once.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import TORCH, TRITON, best, elementwise, triton_for
from ..kernels import experts as kernel
from ..kernels.decoder_layers import GroupRouting, choosable
from .experts import Experts
from .linear import Linear
from .matrix import Matrix
from .mlp import GatedMLP
from .parameters import CompositeLayer, Layer, Parameter, Placement, WeightSlot


class Router(Layer, Protocol):
    """Chooses the experts of a token."""

    top_k: int
    normalize: bool

    @property
    def in_groups(self) -> GroupRouting | None:
        """Choice by groups that compiled kernels can make, too; or None."""
        ...

    @property
    def packed(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight for compiled kernels, and the bias; or None if kernels do not serve this choice."""
        ...

    def forward(self, x: Tensor, record: Tensor) -> tuple[Tensor, Tensor]:
        """Map [T, hidden] to expert ids, int64 [T, k], also in ``record``, and float32 weights [T, k]."""
        ...


class TopKRouter(CompositeLayer):
    """The k experts of the highest probability, softmax in float32 over all of them."""

    def __init__(
        self,
        name: str,
        module: str,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool,
        bias: bool = False,
        place: Placement,
    ) -> None:
        """Args:
        module: the checkpoint's, which holds ``weight`` [experts, hidden], and with ``bias`` that [experts].
        normalize: weights are divided by their sum.
        """
        self._logits = Linear(name, hidden_size, {module: num_experts}, bias=bias, place=place)
        self.top_k, self.normalize = top_k, normalize
        self.in_groups: GroupRouting | None = None
        self._compiled = best("experts", place.device, place.dtype) not in (TORCH, TRITON)
        self._triton = triton_for("experts", place.device, place.dtype)

    def forward(self, x: Tensor, record: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids, best first, and float32 weights that have been rounded to ``x``'s dtype."""
        logits = self._logits.forward(x)
        if self._triton is not None:
            found: tuple[Tensor, Tensor] = self._triton.route(
                logits, self.top_k, normalize=self.normalize, record=record
            )
            return found
        if self._compiled:
            ids, weights = kernel.route(logits, self.top_k, normalize=self.normalize)
        else:
            ids, weights = self._choose(logits)
        record.copy_(ids)
        return ids, weights

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        weights, ids = scores.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights.to(logits.dtype).float()

    @property
    def packed(self) -> tuple[Tensor, Tensor | None] | None:
        weight = self._logits.packed
        return None if weight is None or not self._compiled else (weight, self._logits.bias)

    def parts(self) -> Iterator[Layer]:
        yield self._logits


class GroupedRouter:
    """The k best experts of the best groups of neighbouring ones.

    DeepSeek-V2: arXiv:2405.04434, section 2.2.2; V3: arXiv:2412.19437, section 2.1.2. Invariants: logits and
    scores are float32, products included, since a logit rounded to bf16 changes the choice. The bias, which
    balances load without a loss, decides the choice and never an expert's weight.
    """

    def __init__(
        self,
        name: str,
        module: str,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        by: GroupRouting,
        *,
        normalize: bool,
        bias: bool,
        place: Placement,
    ) -> None:
        """Args:
        module: the checkpoint's, which holds ``weight`` [experts, hidden] and, with ``bias``,
            ``e_score_correction_bias`` [experts], kept in float32.
        normalize: weights are divided by their sum before they are multiplied by the scale.
        """
        self._module, self.top_k, self.normalize = module, top_k, normalize
        self.in_groups = by
        compiled = best("experts", place.device, place.dtype) not in (TORCH, TRITON)
        wanted = compiled and choosable(by.groups, by.top_groups, num_experts, top_k, best_two=by.best_two)
        self._matrix = Matrix(f"{name}.weight", num_experts, hidden_size, place, packed=wanted)
        self._bias: Parameter | None = None
        if bias:
            self._bias = Parameter(f"{name}.bias", (num_experts,), torch.float32, place.device)
        self._triton = triton_for("experts", place.device, place.dtype)

    def forward(self, x: Tensor, record: Tensor) -> tuple[Tensor, Tensor]:
        bias, by = None if self._bias is None else self._bias.data, self.in_groups
        if self._matrix.packed is not None:
            logits = self._matrix.wide_product(x)
            ids, weights = kernel.route_in_groups(logits, bias, self.top_k, by, normalize=self.normalize)
        elif self._triton is None:
            ids, weights = self._choose(self._logits(x), bias)
        else:
            found: tuple[Tensor, Tensor] = self._triton.route(
                self._logits(x),
                self.top_k,
                normalize=self.normalize,
                scale=by.scale,
                scoring="sigmoid" if by.sigmoid else "softmax",
                bias=bias,
                num_groups=by.groups,
                top_groups=by.top_groups,
                group_score="top2" if by.best_two else "max",
                record=record,
            )
            return found
        record.copy_(ids)
        return ids, weights

    def _logits(self, x: Tensor) -> Tensor:
        weight = self._matrix.parameter.data
        if x.device.type == "cuda" and x.dtype != torch.float32:  # products of bf16 are exact in float32
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return functional.linear(x.float(), weight.float())

    def _choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid() if self.in_groups.sigmoid else logits.softmax(dim=-1)
        choice = scores if bias is None else scores + bias
        if self.in_groups.groups > 1:
            choice = self._in_top_groups(choice)
        ids = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.normalize:
            weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
        return ids, weights.mul_(self.in_groups.scale)

    def _in_top_groups(self, choice: Tensor) -> Tensor:
        by, grouped = self.in_groups, choice.unflatten(1, (self.in_groups.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1) if by.best_two else grouped.amax(-1)
        chosen = best.topk(by.top_groups, dim=-1).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        masked: Tensor = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf)
        return masked.flatten(1)

    @property
    def packed(self) -> tuple[Tensor, Tensor | None] | None:
        weight = self._matrix.packed
        return None if weight is None else (weight, None if self._bias is None else self._bias.data)

    def slots(self) -> Iterator[WeightSlot]:
        yield self._matrix.slot(f"{self._module}.weight")
        if self._bias is not None:
            yield self._bias.slot(f"{self._module}.e_score_correction_bias")

    def parameters(self) -> Iterator[Parameter]:
        yield self._matrix.parameter
        if self._bias is not None:
            yield self._bias


class RoutedExperts:
    """Expert ids of one step's tokens, for all layers of a model; layers without experts keep zeros.

    Rows belong to the step that ran last; they are read before the next one starts.
    """

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
        return torch.zeros((tokens, self.num_layers, self.top_k), dtype=self.dtype, device=self._device)


class Shared(Layer, Protocol):
    """Shared experts, which every token passes."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden], in fresh memory."""
        ...


class GatedShared(CompositeLayer):
    """``sigmoid(gate(x)) * mlp(x)``, one gate (Qwen2-MoE: Yang et al., 2024, arXiv:2407.10671)."""

    def __init__(self, name: str, gate: str, hidden_size: int, mlp: GatedMLP, *, place: Placement) -> None:
        self.gate = Linear(name, hidden_size, {gate: 1}, place=place)
        self.mlp = mlp
        self._compiled = best("elementwise", place.device, place.dtype) not in (TORCH, TRITON)

    def forward(self, x: Tensor) -> Tensor:
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
        shared: Shared | None = None,
        place: Placement,
    ) -> None:
        """Record the choice in ``routing`` as ``layer``'s; ``shared`` has this rank's width."""
        self._parallel = place.parallel
        self._layer = layer
        self.router, self.experts, self.shared = router, experts, shared
        self._routing = routing

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.router.forward(x, self._routing.of_layer(self._layer, x.shape[0]))
        shared = None if self.shared is None else self.shared.forward(x)
        out = self.experts.forward(x, ids, weights, shared)
        if self._parallel.size > 1:
            self._parallel.all_reduce(out)
        return out

    def parts(self) -> Iterator[Layer]:
        yield self.router
        yield self.experts
        if self.shared is not None:
            yield self.shared
