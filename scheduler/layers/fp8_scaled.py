"""Products of FP8 activations with FP8 weights in blocks of 128 x 128, by libraries for CUDA.

Invariants:
- Activations are quantised per token and 128 columns, as transformers and the training of such checkpoints
  do, so results differ from those of dequantised weights by that rounding.
- Each function takes weights and scales as they are stored, [.., out, in] and [.., out / 128, in / 128], and
  copies neither.
- Nothing waits for the device, and no shape depends on values there.
- Strides, padding and order are conventions of the library's version. Nothing here is used before a product
  with it agreed with the dequantised one (``fp8_products.py``).

Written against FlashInfer 0.7.2 and DeepGEMM 2; built and traced, not run on a GPU. Layouts are tested
against float64 by stand-ins that read memory as the libraries document it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..memory.workspace import Workspace

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


# Dense: ``x @ (weight * scales).T`` for bfloat16 ``x`` [T, in]


def torch_hopper(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply by torch's scaled matmul (cuBLASLt's block scaling): outputs in multiples of 128."""
    tokens = x.shape[0]
    quantized, factors = quantize_tokens(_padded(x))
    recipes = functional.ScalingType
    out: Tensor = functional.scaled_mm(
        quantized,
        weight.t(),
        factors.t().contiguous().t(),  # columns contiguous
        recipes.BlockWise1x128,
        functional.pad(scales, (0, -scales.shape[1] % 4)).t(),
        recipes.BlockWise128x128,
        output_dtype=x.dtype,
    )
    return out[:tokens]


def flashinfer_hopper(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply by FlashInfer, which quantises the activations itself: outputs in multiples of 64."""
    out: Tensor = import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90(
        x.contiguous(), weight, None, scales
    )
    return out


def flashinfer_blackwell(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Multiply by FlashInfer: outputs in multiples of 64."""
    tokens = x.shape[0]
    quantized, factors = quantize_tokens(_padded(x))
    out: Tensor = import_module("flashinfer.gemm").gemm_fp8_nt_groupwise(
        quantized, weight, factors, scales, scale_major_mode="K", out_dtype=x.dtype
    )
    return out[:tokens]


def _padded(x: Tensor) -> Tensor:
    added = -x.shape[0] % _ROWS
    return functional.pad(x, (0, 0, 0, added)) if added else x


# Grouped: rows [pairs, in] sorted by expert, times their expert's weight; weights [experts, out, in]

Grouped = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of rows, the end of each expert's rows (int32 [experts]), weights and scales."""


def flashinfer_grouped(x: Tensor, ends: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    rows, padded_ends, places = spread(x, ends, FLASHINFER_ROWS)
    quantized, factors = quantize_tokens(rows)
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
    rows, padded_ends, places = spread(x, ends, DEEP_GEMM_ROWS)
    quantized, factors = quantize_tokens(rows)
    row = torch.arange(len(rows), dtype=torch.int32, device=x.device)
    expert = torch.searchsorted(padded_ends, row, right=True, out_int32=True)
    expert.masked_fill_(expert == len(ends), -1)
    out = x.new_empty((len(rows), weight.shape[1]))
    import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous(
        (quantized, factors), (weight, scales), out, expert
    )
    return torch.index_select(out, 0, places)


def spread(x: Tensor, ends: Tensor, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Move rows of each expert to where a multiple of ``multiple`` begins, zeros between them.

    Returns:
        Rows, as many as there can be; the end of each expert's, int32 [experts]; the place of each row of
        ``x``, int64 [pairs].
    """
    pairs, experts = x.shape[0], len(ends)
    starts = functional.pad(ends[:-1], (1, 0))
    padding = (starts - ends).remainder_(multiple)
    added = torch.cumsum(padding, 0, dtype=torch.int32)
    pair = torch.arange(pairs, device=x.device)
    expert = torch.searchsorted(ends, pair, right=True)
    places = torch.index_select(added - padding, 0, expert) + pair
    room = pairs + min(experts, pairs) * (multiple - 1)
    rows = x.new_zeros((-(-room // multiple) * multiple, x.shape[1]))
    return rows.index_copy_(0, places, x), ends + added, places


# Whole blocks of experts: gate and up, their product, down, and each token's sum


class FlashInferExperts:
    """FlashInfer's fused experts on Hopper; ``gate_up`` has up before gate."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._sizes: dict[tuple[int, ...], int] = {}

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        gate_up: tuple[Tensor, Tensor],
        down: tuple[Tensor, Tensor],
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
            use_deepseek_fp8_block_scale=True,
            output=out,
            profile_ids=[-1, -1],  # the kernels follow from the shapes; nothing is looked up
            workspace_buffer=self._room(library, x, expert_ids.shape[1], down[0]),
        )
        return out

    def _room(self, library: Any, x: Tensor, top_k: int, down: Tensor) -> Tensor:
        tokens = _rounded(x.shape[0])
        key = (tokens, top_k, *down.shape)
        if key not in self._sizes:
            self._sizes[key] = library.cutlass_fused_moe_workspace_size(
                tokens,
                down.shape[1],
                down.shape[2],
                down.shape[0],
                top_k,
                x_dtype=x.dtype,
                weight_dtype=down.dtype,
                output_dtype=x.dtype,
                use_deepseek_fp8_block_scale=True,
                device=x.device,
            )
        return self._workspace.take("fp8 experts", (self._sizes[key],), torch.uint8, x.device)


def _rounded(tokens: int) -> int:
    """Round up to one of few numbers, by a quarter at most: each is asked for once."""
    step = max(16, 1 << max(0, tokens.bit_length() - 3))
    return -(-tokens // step) * step
