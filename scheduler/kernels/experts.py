"""Routed experts on the CPU, compiled (``cpu/experts.cpp``, and the grouped product of ``cpu/linear.cpp``).

Invariants:
- A token's experts, weights, rows and sum have the same bits whatever the other tokens and the threads.
- Ids that are not of an expert are refused before anything is read by them.
- All is of one dtype of :data:`~.native.FLOATS`; ValueError for whatever a kernel would misread.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import native
from .decoder_layers import GroupRouting
from .linear import Packed, address
from .native import FLOAT, INT, POINTER, SIZE

_ROUTE = native.by_dtype("caesura_route", *[POINTER] * 3, *[SIZE] * 3, INT, INT)
_PRODUCTS = native.by_dtype(
    "caesura_grouped_linear", *[POINTER] * 3, SIZE, *[POINTER] * 5, *[SIZE] * 3, POINTER, INT
)
_COMBINE = native.by_dtype("caesura_combine", *[POINTER] * 4, *[SIZE] * 3, INT)
_ROUTE_IN_GROUPS = native.function(
    "caesura_route_in_groups", *[POINTER] * 4, *[SIZE] * 5, INT, INT, INT, FLOAT, INT
)
_group = native.function("caesura_group", POINTER, *[SIZE] * 5, *[POINTER] * 5, result=SIZE)


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the experts of the largest logits [T, experts], best first, the lower id first among equals.

    Return ids int64 and float32 weights [T, top_k]: softmax over all experts, divided by their sum if
    ``normalize``, rounded to the logits' dtype. NaN if a logit is.
    """
    tokens, experts = logits.shape
    if not (0 < top_k <= experts and logits.dtype in _ROUTE and logits.is_contiguous()):
        raise native.misfit(f"no choice of {top_k}", logits)
    ids = torch.empty((tokens, top_k), dtype=torch.int64)
    weights = torch.empty((tokens, top_k), dtype=torch.float32)
    threads = torch.get_num_threads()
    _ROUTE[logits.dtype](
        logits.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, experts, top_k, normalize, threads
    )
    return ids, weights


def route_in_groups(
    logits: Tensor, bias: Tensor | None, top_k: int, by: GroupRouting, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """Choose the best experts of the best groups by float32 logits [T, experts], which become scores.

    ``bias``, float32 [experts], only decides the choice. Weights are not rounded; ``by.serves`` is unchecked.
    """
    tokens, experts = logits.shape
    tensors = [logits] if bias is None else [logits, bias]
    if not all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors) or (
        bias is not None and bias.shape != (experts,)
    ):
        raise native.misfit(f"no choice of {top_k} by {by}", logits)
    ids = torch.empty((tokens, top_k), dtype=torch.int64)
    weights = torch.empty((tokens, top_k), dtype=torch.float32)
    _ROUTE_IN_GROUPS(
        logits.data_ptr(), None if bias is None else bias.data_ptr(), ids.data_ptr(), weights.data_ptr(),
        tokens, experts, top_k, by.groups, by.top_groups,
        by.sigmoid, by.best_two, normalize, by.scale, torch.get_num_threads(),
    )  # fmt: skip
    return ids, weights


@dataclass(frozen=True, slots=True)
class Groups:
    """Pairs of a token and one of its experts that is held, sorted by expert."""

    tokens: Tensor
    """int64 [pairs]: the token of each sorted pair."""
    places: Tensor
    """int64 [T, k]: the place of each pair; -1 for experts that are not held."""
    experts: Tensor
    """int64 [experts]: expert of each group, counted from the first held; only ``count`` are valid."""
    starts: Tensor
    """int64 [experts + 1]: the first sorted pair of each group, and the end of the last."""
    count: int

    @property
    def of_rows(self) -> Tensor:
        """int64 [pairs]: the expert of each sorted pair, counted as in ``experts``."""
        return self.experts[: self.count].repeat_interleave(self.starts[: self.count + 1].diff())


def group(ids: Tensor, num_experts: int, held: range | None = None) -> Groups:
    """Sort the pairs of ``ids`` int64 [T, k], those of experts ``held`` (None: all) alone.

    IndexError: an id outside [0, num_experts).
    """
    if ids.dtype != torch.int64 or ids.dim() != 2 or not ids.is_contiguous():
        raise native.misfit("ids are", ids)
    held = range(num_experts) if held is None else held
    tokens, places = torch.empty(ids.numel(), dtype=torch.int64), torch.empty_like(ids)
    experts, starts, scratch = torch.empty((3, len(held) + 1), dtype=torch.int64)
    count = _group(
        ids.data_ptr(), ids.numel(), ids.shape[1], num_experts, held.start, len(held), tokens.data_ptr(),
        places.data_ptr(), experts.data_ptr(), starts.data_ptr(), scratch.data_ptr(),
    )  # fmt: skip
    if count < 0:
        raise IndexError(f"expert ids beyond [0, {num_experts})")
    if len(held) < num_experts:
        tokens = tokens[: int(starts[count])]
    return Groups(tokens, places, experts, starts, count)


class GroupedProduct(Packed):
    """``x @ w[e].T + b[e]`` for packed ``w`` [experts, N, K], e the expert of a row."""

    _kernels = _PRODUCTS

    def __call__(
        self, x: Tensor, groups: Groups, out: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Map [pairs, K], sorted as ``groups``, to [pairs, N], both contiguous; ``bias``: [experts, N]."""
        pairs = len(groups.tokens)
        out = torch.empty((pairs, self._outputs), dtype=x.dtype) if out is None else out
        if not (
            x.shape == (pairs, self._inputs)
            and out.shape == (pairs, self._outputs)
            and x.dtype == out.dtype == self._dtype
            and x.is_contiguous()
            and out.is_contiguous()
            and len(groups.starts) == self._count + 1
            and (bias is None or (bias.shape, bias.dtype) == ((self._count, self._outputs), x.dtype))
            and (bias is None or bias.is_contiguous())
        ):
            raise native.misfit(f"no product with packed rows of {self._inputs}", x, out)
        narrow = self._narrow(pairs)
        self._compute(
            x.data_ptr(), self._weight.data_ptr(), *address(self._scales),
            None if bias is None else bias.data_ptr(), out.data_ptr(), groups.experts.data_ptr(),
            groups.starts.data_ptr(), groups.count, self._outputs, self._inputs,
            None if narrow is None else narrow.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


def combine(y: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """Return [T, size], each token's sum of ``weights`` (float32 [T, k]) times its rows of ``y``."""
    tokens, k = groups.places.shape
    if not (
        weights.shape == (tokens, k)
        and weights.dtype == torch.float32
        and weights.is_contiguous()
        and y.dim() == 2
        and y.shape[0] == len(groups.tokens)
        and y.dtype in _COMBINE
        and y.is_contiguous()
    ):
        raise native.misfit(f"no sum for {(tokens, k)}", y, weights)
    out = torch.empty((tokens, y.shape[1]), dtype=y.dtype)
    _COMBINE[y.dtype](
        y.data_ptr(), groups.places.data_ptr(), weights.data_ptr(), out.data_ptr(), tokens, k, y.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip
    return out
