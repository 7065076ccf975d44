"""Routing by groups of experts.

DeepSeek-V2: arXiv:2405.04434, section 2.2.2; V3: arXiv:2412.19437, section 2.1.2. Invariants: logits and
scores are float32, products included, since a logit rounded to bf16 changes the choice. The bias, which
balances load without a loss, decides the choice and never an expert's weight.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import TORCH, TRITON, best, triton_for
from ..kernels import experts as kernel
from ..kernels.decoder_layers import GroupRouting, choosable
from .matrix import Matrix
from .parameters import Parameter, Placement, WeightSlot


class GroupedRouter:
    """The k best experts of the best groups."""

    def __init__(
        self,
        name: str,
        module: str,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: Literal["softmax", "sigmoid"],
        num_groups: int,
        top_groups: int,
        group_score: Literal["max", "top2"],
        normalize: bool,
        scale: float,
        bias: bool,
        place: Placement,
    ) -> None:
        """Args:
        module: the checkpoint's, which holds ``weight`` [experts, hidden] and, with ``bias``,
            ``e_score_correction_bias`` [experts], kept in float32.
        num_groups: groups of neighbouring experts, of which ``top_groups`` are chosen from.
        group_score: a group's score is that of its best expert, or the sum of its two best.
        normalize: weights are divided by their sum before they are multiplied by ``scale``.
        """
        self._module, self.top_k = module, top_k
        self._scoring, self.normalize, self._scale = scoring, normalize, scale
        self._num_groups, self._top_groups, self._group_score = num_groups, top_groups, group_score
        self._by = GroupRouting(
            groups=num_groups,
            top_groups=top_groups,
            sigmoid=scoring == "sigmoid",
            best_two=group_score == "top2",
            scale=scale,
        )
        self.in_groups: GroupRouting | None = self._by
        compiled = best("experts", place.device, place.dtype) not in (TORCH, TRITON)
        wanted = compiled and choosable(
            num_groups, top_groups, num_experts, top_k, best_two=group_score == "top2"
        )
        self._matrix = Matrix(f"{name}.weight", num_experts, hidden_size, place, packed=wanted)
        self._bias: Parameter | None = None
        if bias:
            self._bias = Parameter(f"{name}.bias", (num_experts,), torch.float32, place.device)
        self._triton = triton_for("experts", place.device, place.dtype)

    def forward(self, x: Tensor, record: Tensor) -> tuple[Tensor, Tensor]:
        """Map [T, hidden] to ids, int64 [T, k], and weights, float32 [T, k]; ids go to ``record``, too."""
        if self._matrix.packed is not None:
            logits = self._matrix.wide_product(x)
            bias = None if self._bias is None else self._bias.data
            ids, weights = kernel.route_in_groups(
                logits, bias, self.top_k, self._by, normalize=self.normalize
            )
            record.copy_(ids)
            return ids, weights
        logits = self._logits(x)
        if self._triton is None:
            ids, weights = self._choose(logits)
            record.copy_(ids)
            return ids, weights
        found: tuple[Tensor, Tensor] = self._triton.route(
            logits,
            self.top_k,
            normalize=self.normalize,
            scale=self._scale,
            scoring=self._scoring,
            bias=None if self._bias is None else self._bias.data,
            num_groups=self._num_groups,
            top_groups=self._top_groups,
            group_score=self._group_score,
            record=record,
        )
        return found

    def _logits(self, x: Tensor) -> Tensor:
        weight = self._matrix.parameter.data
        if x.device.type == "cuda" and x.dtype != torch.float32:  # products of bf16 are exact in float32
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return functional.linear(x.float(), weight.float())

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid() if self._scoring == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if self._bias is None else scores + self._bias.data
        if self._num_groups > 1:
            choice = self._in_top_groups(choice)
        ids = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.normalize:
            weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
        return ids, weights.mul_(self._scale)

    def _in_top_groups(self, choice: Tensor) -> Tensor:
        grouped = choice.unflatten(1, (self._num_groups, -1))
        best = grouped.amax(-1) if self._group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        chosen = best.topk(self._top_groups, dim=-1).indices
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
