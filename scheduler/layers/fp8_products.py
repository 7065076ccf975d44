"""Products of FP8 activations with FP8 weights in blocks of 128 x 128, by libraries for CUDA.

Invariants:
- A library serves only after small real products on this device, of every kind, agreed with those of the
  dequantised weight: strides, padding and order are conventions of its version.
- If no library serves on an accelerator, the engine refuses at start. The CPU dequantises
  (``scaled_blocks.py``).
- Activations are quantised per token and 128 columns, as transformers and the training of such checkpoints
  do, so results differ from those of dequantised weights by that rounding.
- Weights and scales are taken as they are stored, [.., out, in] and [.., out / 128, in / 128], without
  copies. Nothing waits for the device, and no shape depends on values there.

Written against FlashInfer 0.7.2 and DeepGEMM 2; not run on a GPU. Layouts are tested against float64.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ...io_struct import CaesuraError, ErrorCode
from ..kernels import TRITON, best, self_test
from ..kernels.attention_form import Bend
from ..memory.device_module import nvidia_generation
from ..memory.workspace import Workspace

logger = logging.getLogger(__name__)

BLOCK = 128
_MAX = torch.finfo(torch.float8_e4m3fn).max
_TINY = 1e-12  # tokens of zeros
_ROWS = 4
"""Divisor of the number of tokens in dense products of torch, and of FlashInfer on Blackwell."""
FLASHINFER_ROWS, DEEP_GEMM_ROWS = 4, 128
"""Grouped products: rows of an expert begin at multiples."""


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 [T, in], and float32 scales [T, in / 128], of ``x`` [T, in]."""
    tiles = x.unflatten(1, (-1, BLOCK))
    largest: Tensor = tiles.norm(torch.inf, dim=2, keepdim=True, dtype=torch.float32)
    factors = largest.clamp_min_(_TINY).div_(_MAX)
    return (tiles / factors).to(torch.float8_e4m3fn).flatten(1), factors.squeeze(2)


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows in FP8 as a library takes them."""

    values: Tensor
    """[rows, in], of which the first ``tokens`` count."""
    factors: Tensor
    """float32 [rows, in / 128]"""
    tokens: int
    dtype: torch.dtype
    """Type of the rows before, and of products with them."""


Rows = Tensor | Quantized


class Quantizer:
    """Norms and gates whose results are quantised in the same launch, for one library."""

    def __init__(self, kernels: ModuleType, *, columns_contiguous: bool) -> None:
        self._kernels, self._layout = kernels, {"columns_contiguous": columns_contiguous}

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, *, from_one: bool
    ) -> Quantized:
        rows = _multiple_of(_ROWS, len(x))
        found = self._kernels.rms_norm(
            x, weight, eps, rows, residual=residual, from_one=from_one, **self._layout
        )
        return Quantized(found[0], found[1], len(x), x.dtype)

    def gate_mul(self, gate_up: Tensor, bend: Bend) -> Quantized:
        rows = _multiple_of(_ROWS, len(gate_up))
        found = self._kernels.quantize(gate_up, rows, bend=bend, **self._layout)
        return Quantized(found[0], found[1], len(gate_up), gate_up.dtype)


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """Return ``kernels/triton_fp8.py`` if it serves on ``device``: there its values are torch's."""
    if best("elementwise", device, torch.bfloat16) != TRITON:
        return None
    found = import_module("..kernels.triton_fp8", __package__)

    def attempt() -> Iterator[float]:
        x = torch.linspace(-9, 9, 15 * BLOCK, device=device).bfloat16().view(5, -1)
        for ours, theirs in zip(found.quantize(x, 5), quantize_tokens(x), strict=True):
            yield float((ours.float() - theirs.float()).abs().max())

    failure = self_test.failure(attempt, 0.0, "quantising in Triton")
    if failure is not None:
        logger.warning("activations are quantised by torch, in more launches: %s", failure)
    return found if failure is None else None


def _quantized(x: Rows, *, columns_contiguous: bool = False) -> Quantized:
    """Return :func:`quantize_tokens` of ``x``, padded to a multiple of :data:`_ROWS`."""
    if isinstance(x, Quantized):
        return x
    tokens, kernels = x.shape[0], _kernels(x.device)
    rows = _multiple_of(_ROWS, tokens)
    if kernels is not None:
        values, factors = kernels.quantize(x, rows, columns_contiguous=columns_contiguous)
        return Quantized(values, factors, tokens, x.dtype)
    values, factors = quantize_tokens(functional.pad(x, (0, 0, 0, rows - tokens)) if rows > tokens else x)
    factors = factors.t().contiguous().t() if columns_contiguous else factors
    return Quantized(values, factors, tokens, x.dtype)


# Dense: ``x @ (weight * scales).T`` for bfloat16 ``x`` [T, in]


def torch_hopper(x: Rows, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply by torch's scaled matmul (cuBLASLt's block scaling): outputs in multiples of 128."""
    rows = _quantized(x, columns_contiguous=True)
    added = -scales.shape[1] % 4
    recipes = functional.ScalingType
    out: Tensor = functional.scaled_mm(
        rows.values,
        weight.t(),
        rows.factors,
        recipes.BlockWise1x128,
        (functional.pad(scales, (0, added)) if added else scales).t(),
        recipes.BlockWise128x128,
        output_dtype=rows.dtype,
    )
    return out[: rows.tokens]


def flashinfer_hopper(x: Rows, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply by FlashInfer, which quantises the activations itself: outputs in multiples of 64."""
    assert isinstance(x, Tensor), "it takes no quantised rows"
    out: Tensor = import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90(
        x.contiguous(), weight, None, scales
    )
    return out


def flashinfer_blackwell(x: Rows, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply by FlashInfer: outputs in multiples of 64."""
    rows = _quantized(x)
    out: Tensor = import_module("flashinfer.gemm").gemm_fp8_nt_groupwise(
        rows.values, weight, rows.factors, scales, scale_major_mode="K", out_dtype=rows.dtype
    )
    return out[: rows.tokens]


def _multiple_of(divisor: int, count: int) -> int:
    return -(-count // divisor) * divisor


# Grouped: rows [pairs, in] sorted by expert, times their expert's weight; weights [experts, out, in]

Grouped = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of rows, the end of each expert's rows (int32 [experts]), weights and scales."""


def flashinfer_grouped(x: Tensor, ends: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    (quantized, factors), padded_ends, _, places = _spread_quantized(x, ends, FLASHINFER_ROWS)
    out = import_module("flashinfer.gemm").group_gemm_fp8_nt_groupwise(
        quantized,
        weight,
        factors,
        scales,
        functional.pad(padded_ends, (1, 0)),
        scale_major_mode="K",
        out_dtype=x.dtype,
    )
    return torch.index_select(out, 0, places)


def deep_gemm_grouped(x: Tensor, ends: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    quantized, _, owners, places = _spread_quantized(x, ends, DEEP_GEMM_ROWS)
    out = x.new_empty((len(owners), weight.shape[1]))
    import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous(quantized, (weight, scales), out, owners)
    return torch.index_select(out, 0, places)


def _spread_quantized(
    x: Tensor, ends: Tensor, multiple: int
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """Return quantised rows of :func:`spread`, ends, each row's expert (int32, -1 without), and places."""
    kernels = _kernels(x.device)
    if kernels is not None:
        found: tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]
        found = kernels.spread(x, ends, multiple, _most_rows(x.shape[0], len(ends), multiple))
        return found
    rows, padded_ends, places = spread(x, ends, multiple)
    row = torch.arange(len(rows), dtype=torch.int32, device=x.device)
    owners = torch.searchsorted(padded_ends, row, right=True, out_int32=True)
    owners.masked_fill_(owners == len(ends), -1)
    return quantize_tokens(rows), padded_ends, owners, places


def _most_rows(pairs: int, experts: int, multiple: int) -> int:
    return _multiple_of(multiple, pairs + min(experts, pairs) * (multiple - 1))


def spread(x: Tensor, ends: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Move rows of each expert to where a multiple of ``multiple`` begins, zeros between them.

    Return as many rows as there can be, each expert's end, int32 [experts], and each pair's place, int64;
    those of no expert are behind all ends.
    """
    pairs, experts = x.shape[0], len(ends)
    edges = torch.cat([ends.new_zeros(1), ends, ends[-1:]])
    padding = (edges[:-1] - edges[1:]).remainder_(multiple)
    added = torch.cumsum(padding, 0, dtype=torch.int32)
    pair = torch.arange(pairs, device=x.device)
    expert = torch.searchsorted(ends, pair, right=True)
    places = torch.index_select(added - padding, 0, expert) + pair
    rows = x.new_zeros((_most_rows(pairs, experts, multiple), x.shape[1]))
    return rows.index_copy_(0, places, x), ends + added[:-1], places


# Whole blocks of experts: gate and up, their product, down, and each token's sum


class FlashInferExperts:
    """FlashInfer's fused experts on Hopper; ``gate_up`` has up before gate."""

    def __init__(self, workspace: Workspace, ep: int = 1, group: int = 0) -> None:
        """Take the weights of the experts of one ``group`` of ``ep``."""
        self._workspace = workspace
        self._groups = {"ep_size": ep, "ep_rank": group}
        self._sizes: dict[tuple[int, ...], int] = {}

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        gate_up: tuple[Tensor, Tensor | None],
        down: tuple[Tensor, Tensor | None],
    ) -> Tensor:
        """Map [T, hidden] to [T, hidden]; ``expert_ids`` and ``weights`` [T, k]; matrices, scales."""
        library: Any = import_module("flashinfer.fused_moe")
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        library.cutlass_fused_moe(
            x.contiguous(),
            expert_ids.to(torch.int32),
            weights.float().contiguous(),
            gate_up[0],
            down[0],
            x.dtype,
            quant_scales=[gate_up[1], down[1]],
            **self._groups,
            use_deepseek_fp8_block_scale=True,
            output=out,
            profile_ids=[-1, -1],  # the kernels follow from the shapes; nothing is looked up
            workspace_buffer=self._room(library, x, expert_ids.shape[1], down[0]),
        )
        return out

    def _room(self, library: Any, x: Tensor, top_k: int, down: Tensor) -> Tensor:
        tokens = rounded(x.shape[0])
        key = (tokens, top_k, *down.shape)
        if key not in self._sizes:
            self._sizes[key] = library.cutlass_fused_moe_workspace_size(
                tokens,
                down.shape[1],
                down.shape[2],
                down.shape[0] * self._groups["ep_size"],
                top_k,
                x_dtype=x.dtype,
                weight_dtype=down.dtype,
                output_dtype=x.dtype,
                **self._groups,
                use_deepseek_fp8_block_scale=True,
                device=x.device,
            )
        return self._workspace.take("fp8 experts", (self._sizes[key],), torch.uint8, x.device)


def rounded(tokens: int) -> int:
    """Round up to one of few numbers, by a quarter at most: each is asked for once."""
    step = max(16, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step


# The choice

AGREEMENT = 0.06
"""Largest relative norm of the difference; rounding activations to 4 bits gives about 0.03."""
_HOPPER, _BLACKWELL, _SMALL_BLACKWELL = (9,), (10,), (12,)


@dataclass(frozen=True, slots=True)
class Dense:
    """``x @ (weight * scales).T`` in bfloat16."""

    by: str
    rows: int
    """Divisor of the number of output features."""
    compute: Callable[[Rows, Tensor, Tensor], Tensor]
    columns_contiguous: bool | None = None
    """Layout of the scales of quantised rows; None: the library quantises."""

    def quantizer(self, device: torch.device) -> Quantizer | None:
        """Return what quantises where rows come from, or None if this library, or torch, does."""
        kernels = _kernels(device)
        if kernels is None or self.columns_contiguous is None:
            return None
        return Quantizer(kernels, columns_contiguous=self.columns_contiguous)


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: a grouped product for each projection, or the whole block at once."""

    by: str
    grouped: Grouped | None = None
    fused: type[FlashInferExperts] | None = None
    """Whole block; its ``gate_up`` has up before gate."""


DENSE = (
    (_HOPPER, Dense("flashinfer", 64, flashinfer_hopper)),
    (_HOPPER, Dense("torch", BLOCK, torch_hopper, columns_contiguous=True)),
    (_BLACKWELL + _SMALL_BLACKWELL, Dense("flashinfer", 64, flashinfer_blackwell, columns_contiguous=False)),
)
# FlashInfer refuses its grouped product on the small Blackwells, as wrong for several groups.
EXPERTS = (
    (_HOPPER, Experts("flashinfer", fused=FlashInferExperts)),
    (_HOPPER, Experts("deep_gemm", grouped=deep_gemm_grouped)),
    (_BLACKWELL, Experts("flashinfer", grouped=flashinfer_grouped)),
)

_Kind = TypeVar("_Kind", Dense, Experts)


@cache
def dense_for(device: torch.device) -> Dense | None:
    """Return the library for dense products, None on the CPU; ``unsupported`` if none serves here."""
    return None if device.type in ("cpu", "meta") else _first(device, "weights", DENSE, try_dense)


@cache
def experts_for(device: torch.device) -> Experts | None:
    """Return the library for routed experts; None on the CPU. Raises as :func:`dense_for`."""
    return None if device.type in ("cpu", "meta") else _first(device, "experts", EXPERTS, try_experts)


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
        failure = self_test.failure(partial(attempt, kind, device), AGREEMENT, "a product with it")
        if failure is None:
            logger.info("FP8 %s are multiplied by %s", what, kind.by)
            return kind
        logger.warning("FP8 %s are not multiplied by %s: %s", what, kind.by, failure)
        reasons.append(f"{kind.by}: {failure}")
    known = "; ".join(reasons) or "there are kernels for Hopper and Blackwell only"
    reason = f"FP8 {what} need FlashInfer or another library with products by block on {device}: {known}"
    raise CaesuraError(ErrorCode.UNSUPPORTED, reason, field="quantization_config", device=str(device))


def try_dense(kind: Dense, device: torch.device) -> Iterator[float]:
    """Yield the errors of products of few and of many tokens, with the least convenient number of outputs."""
    for tokens in (1, 5, 70):
        outputs = 2 * BLOCK if kind.rows == BLOCK else 2 * BLOCK + kind.rows
        x, weight, scales = _operands(device, tokens, 1, outputs, 3 * BLOCK)
        expected = x.float() @ dequantized(weight, scales)[0].t()
        yield _off(kind.compute(x, weight[0], scales[0]), expected)


def try_experts(kind: Experts, device: torch.device) -> Iterator[float]:
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
        for tokens, held in ((1, slice(0, 5)), (40, slice(0, 5)), (40, slice(2, 4))):
            ep = 1 if held.start == 0 else 2
            compute = kind.fused(Workspace(), ep, ep - 1)
            x, *gate_up = _operands(device, tokens, 5, 2 * width, hidden)
            _, *down = _operands(device, 1, 5, hidden, width)
            ids = torch.arange(tokens, device=device)[:, None].add(torch.tensor([0, 2], device=device)) % 4
            weights = torch.tensor([0.75, 0.25], device=device).repeat(tokens, 1)
            up, gate = torch.einsum("th,tkwh->tkw", x.float(), dequantized(*gate_up)[ids]).chunk(2, dim=-1)
            gated = functional.silu(gate).mul_(up)
            each = torch.einsum("tkw,tkhw->tkh", gated, dequantized(*down)[ids])
            of_group = ((weight[held], scales[held]) for weight, scales in (gate_up, down))
            found = compute(x, ids, weights, *of_group)
            counted = weights.masked_fill(ids < held.start, 0)
            yield _off(found, (each * counted[..., None]).sum(1))


@cache
def multiplies_experts(device: torch.device) -> bool:
    """Return True if ``kernels/triton_experts.py`` serves FP8 weights on ``device``."""
    if _kernels(device) is None:
        return False
    found = import_module("..kernels.triton_experts", __package__)

    def product(x: Tensor, ends: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        experts = torch.searchsorted(ends, torch.arange(len(x), device=device), right=True, out_int32=True)
        y: Tensor = found.product(x, experts[:, None], range(len(ends)), weight, scales)
        return y

    kind = Experts("triton", grouped=product)
    failure = self_test.failure(partial(try_experts, kind, device), AGREEMENT, "a product in Triton")
    if failure is not None:
        logger.warning("FP8 experts of few tokens are sorted by torch, in more launches: %s", failure)
    return failure is None


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
