"""Choice of the library that multiplies by FP8 weights on an accelerator.

Invariants:
- A library serves only after real products on this device, small ones of every kind that it will be asked
  for, agreed with those of the dequantised weight.
- There is no slow way on an accelerator: if no library serves, the engine refuses at start. On the CPU
  weights are dequantised (``fp8_block.py``), and nothing here is called.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ...io_struct import CaesuraError, ErrorCode
from ..kernels import self_test
from ..memory.device_module import nvidia_generation
from ..memory.workspace import Workspace
from . import fp8_scaled
from .fp8_scaled import BLOCK, FlashInferExperts, Grouped

logger = logging.getLogger(__name__)

_AGREEMENT = 0.06
"""Largest relative norm of the difference; rounding activations to 4 bits gives about 0.03."""
_HOPPER, _BLACKWELL, _SMALL_BLACKWELL = (9,), (10,), (12,)


@dataclass(frozen=True, slots=True)
class Dense:
    """``x @ (weight * scales).T`` in bfloat16."""

    by: str
    rows: int
    """Divisor of the number of output features."""
    compute: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: a grouped product for each projection, or the whole block at once."""

    by: str
    grouped: Grouped | None = None
    fused: Callable[[Workspace], FlashInferExperts] | None = None
    """Whole block; its ``gate_up`` has up before gate."""


_DENSE = (
    (_HOPPER, Dense("flashinfer", 64, fp8_scaled.flashinfer_hopper)),
    (_HOPPER, Dense("torch", BLOCK, fp8_scaled.torch_hopper)),
    (_BLACKWELL + _SMALL_BLACKWELL, Dense("flashinfer", 64, fp8_scaled.flashinfer_blackwell)),
)
# FlashInfer refuses its grouped product on the small Blackwells, as wrong for several groups.
_EXPERTS = (
    (_HOPPER, Experts("flashinfer", fused=FlashInferExperts)),
    (_HOPPER, Experts("deep_gemm", grouped=fp8_scaled.deep_gemm_grouped)),
    (_BLACKWELL, Experts("flashinfer", grouped=fp8_scaled.flashinfer_grouped)),
)

_Kind = TypeVar("_Kind", Dense, Experts)


def dense_for(device: torch.device) -> Dense | None:
    """Return the library for dense products; None on the CPU.

    Raises:
        CaesuraError: ``unsupported``, no library serves on this accelerator.
    """
    return None if device.type == "cpu" else _dense(device)


def experts_for(device: torch.device) -> Experts | None:
    """Return the library for routed experts; None on the CPU. Raises as :func:`dense_for`."""
    return None if device.type == "cpu" else _experts(device)


@cache
def _dense(device: torch.device) -> Dense:
    return _first(device, "weights", _DENSE, _try_dense)


@cache
def _experts(device: torch.device) -> Experts:
    return _first(device, "experts", _EXPERTS, _try_experts)


def _first(
    device: torch.device,
    what: str,
    kinds: tuple[tuple[tuple[int, ...], _Kind], ...],
    attempt: Callable[[_Kind, torch.device], Iterator[float]],
) -> _Kind:
    reasons = []
    major = nvidia_generation(device)
    for capabilities, kind in kinds:
        if major not in capabilities:
            continue
        failure = self_test.failure(partial(attempt, kind, device), _AGREEMENT, "a product with it")
        if failure is None:
            logger.info("FP8 %s are multiplied by %s", what, kind.by)
            return kind
        logger.warning("FP8 %s are not multiplied by %s: %s", what, kind.by, failure)
        reasons.append(f"{kind.by}: {failure}")
    known = "; ".join(reasons) or "there are kernels for Hopper and Blackwell only"
    raise CaesuraError(
        ErrorCode.UNSUPPORTED,
        f"FP8 {what} need FlashInfer or another library with products by block on {device}: {known}",
        field="quantization_config",
        device=str(device),
    )


def _try_dense(kind: Dense, device: torch.device) -> Iterator[float]:
    """Yield the errors of products of few and of many tokens, with the least convenient number of outputs."""
    for tokens in (1, 5, 70):
        outputs = 2 * BLOCK if kind.rows == BLOCK else 2 * BLOCK + kind.rows
        x, weight, scales = _operands(device, tokens, 1, outputs, 3 * BLOCK)
        expected = x.float() @ dequantized(weight, scales)[0].t()
        yield _off(kind.compute(x, weight[0], scales[0]), expected)


def _try_experts(kind: Experts, device: torch.device) -> Iterator[float]:
    """Yield the errors of blocks in which some experts have no token."""
    hidden, width = 3 * BLOCK, 2 * BLOCK
    if kind.grouped is not None:
        for sizes in ((1, 0, 2, 0, 5), (40, 0, 3, 130, 1)):
            x, weight, scales = _operands(device, sum(sizes), len(sizes), width, hidden)
            matrices = dequantized(weight, scales)
            parts = [part.float() @ matrices[e].t() for e, part in enumerate(x.split(list(sizes)))]
            ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
            yield _off(kind.grouped(x, ends, weight, scales), torch.cat(parts))
    if kind.fused is not None:
        compute = kind.fused(Workspace())
        for tokens in (1, 40):
            x, *gate_up = _operands(device, tokens, 5, 2 * width, hidden)
            _, *down = _operands(device, 1, 5, hidden, width)
            ids = torch.arange(tokens, device=device)[:, None].add(torch.tensor([0, 2], device=device)) % 4
            weights = torch.tensor([0.75, 0.25], device=device).repeat(tokens, 1)
            up, gate = torch.einsum("th,tkwh->tkw", x.float(), dequantized(*gate_up)[ids]).chunk(2, dim=-1)
            gated = functional.silu(gate).mul_(up)
            each = torch.einsum("tkw,tkhw->tkh", gated, dequantized(*down)[ids])
            found = compute(x, ids, weights, (gate_up[0], gate_up[1]), (down[0], down[1]))
            yield _off(found, (each * weights[..., None]).sum(1))


def _operands(
    device: torch.device, tokens: int, matrices: int, outputs: int, inputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bfloat16 [tokens, inputs], FP8 [matrices, outputs, inputs], and their scales, no two alike."""
    generator = torch.Generator(device).manual_seed(tokens + outputs)
    x = torch.randn((tokens, inputs), device=device, generator=generator).bfloat16()
    weight = torch.randn((matrices, outputs, inputs), device=device, generator=generator)
    grid = matrices, -(-outputs // BLOCK), -(-inputs // BLOCK)
    scales = torch.rand(grid, device=device, generator=generator) + 0.5
    return x, weight.to(torch.float8_e4m3fn), scales


def dequantized(weight: Tensor, scales: Tensor) -> Tensor:
    rows = scales.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return weight.float() * rows.repeat_interleave(BLOCK, 2)[..., : weight.shape[2]]


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())
