"""Products with FP8 weights by block as libraries for GPUs take them, computed in float64 from what memory
holds.

A library is given addresses and sizes: so is this, and a tensor with other strides than it documents is read
wrongly here, too. What it promises nothing about is NaN.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
FP8 = torch.float8_e4m3fn


def _packed(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return torch.as_strided(tensor, shape, strides[::-1], tensor.storage_offset())


def _values(quantized: Tensor, scales: Tensor) -> Tensor:
    assert quantized.dtype == FP8
    assert scales.dtype == torch.float32
    rows, inputs = quantized.shape
    grid = _packed(scales, (rows, inputs // BLOCK)).double()
    return _packed(quantized, (rows, inputs)).double() * grid.repeat_interleave(BLOCK, 1)


def _weights(weight: Tensor, scales: Tensor) -> Tensor:
    assert weight.dtype == FP8
    assert scales.dtype == torch.float32
    outputs, inputs = weight.shape[-2:]
    shape = (*weight.shape[:-2], -(-outputs // BLOCK), inputs // BLOCK)
    assert scales.shape == shape
    grid = _packed(scales, shape).double().repeat_interleave(BLOCK, -2)[..., :outputs, :]
    return _packed(weight, tuple(weight.shape)).double() * grid.repeat_interleave(BLOCK, -1)


def _rounded(x: Tensor) -> Tensor:
    tiles = x.double().unflatten(1, (-1, BLOCK))
    factors = tiles.abs().amax(2, keepdim=True).clamp_min(1e-12) / 448
    return ((tiles / factors).float().to(FP8).double() * factors).flatten(1)


def fp8_blockscale_gemm_sm90(
    input: Tensor,
    weight: Tensor,
    input_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    assert (input.dtype, input_scale, out) == (torch.bfloat16, None, None)
    assert weight_scale is not None
    assert weight.shape[0] % 64 == 0
    assert weight.shape[1] % BLOCK == 0
    return (_rounded(_packed(input, tuple(input.shape))) @ _weights(weight, weight_scale).t()).bfloat16()


def gemm_fp8_nt_groupwise(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    scale_major_mode: str | None = None,
    mma_sm: int = 1,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "cutlass",
) -> Tensor:
    assert scale_major_mode == "K"
    assert a.shape[0] % 4 == 0
    assert b.shape[0] % 8 == 0
    return (_values(a, a_scale) @ _weights(b, b_scale).t()).to(out_dtype)


def group_gemm_fp8_nt_groupwise(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    m_indptr: Tensor,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    scale_major_mode: str = "MN",
    mma_sm: int = 1,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "trtllm",
    segment_alignment: int = 1,
) -> Tensor:
    assert scale_major_mode == "K"
    assert m_indptr.dtype == torch.int32
    assert len(m_indptr) == len(b) + 1
    assert not (m_indptr % 4).any()
    starts = m_indptr.tolist()
    assert starts[0] == 0
    assert starts[-1] <= len(a)
    left, right = _values(a, a_scale), _weights(b, b_scale)
    found = left.new_full((len(a), b.shape[1]), torch.nan)
    for expert, (start, end) in enumerate(pairwise(starts)):
        found[start:end] = left[start:end] @ right[expert].t()
    return found.to(out_dtype)


def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor
) -> None:
    assert grouped_layout.dtype == torch.int32
    assert len(grouped_layout) == len(a[0]) == len(d)
    assert len(d) % BLOCK == 0
    assert d.is_contiguous()
    left, right = _values(*a), _weights(*b)
    d.fill_(torch.nan)
    for block, indices in zip(range(0, len(d), BLOCK), grouped_layout.split(BLOCK)):
        assert (indices == indices[0]).all(), "a block of rows is of one expert"
        if indices[0] >= 0:
            rows = slice(block, block + BLOCK)
            d[rows] = (left[rows] @ right[int(indices[0])].t()).to(d.dtype)


def cutlass_fused_moe_workspace_size(
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    *,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.bfloat16,
    use_deepseek_fp8_block_scale: bool = False,
    device: torch.device | None = None,
) -> int:
    assert use_deepseek_fp8_block_scale
    assert (x_dtype, weight_dtype, output_dtype) == (torch.bfloat16, FP8, torch.bfloat16)
    return max_num_tokens * top_k * (hidden_size + intermediate_size) + num_experts_total


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    *,
    use_deepseek_fp8_block_scale: bool = False,
    output: Tensor | None = None,
    profile_ids: list[int] | None = None,
    workspace_buffer: Tensor | None = None,
) -> list[Tensor]:
    assert use_deepseek_fp8_block_scale
    assert input.dtype == output_dtype == torch.bfloat16
    assert token_selected_experts.dtype == torch.int32
    assert token_final_scales.dtype == torch.float32
    assert token_final_scales.shape == token_selected_experts.shape
    tokens, top_k = token_selected_experts.shape
    experts, hidden, width = fc2_expert_weights.shape
    assert fc1_expert_weights.shape == (experts, 2 * width, hidden)
    needed = tokens * top_k * (hidden + width) + experts
    assert workspace_buffer is not None
    assert workspace_buffer.dtype == torch.uint8
    assert workspace_buffer.numel() >= needed
    first, second = (
        _weights(weight, scales)
        for weight, scales in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True)
    )
    ids = _packed(token_selected_experts, (tokens, top_k)).long()
    x = _rounded(_packed(input, (tokens, hidden)))
    up, gate = torch.einsum("th,tkwh->tkw", x, first[ids]).chunk(2, dim=-1)
    gated = _rounded((functional.silu(gate) * up).bfloat16().flatten(0, 1)).view(tokens, top_k, width)
    each = torch.einsum("tkw,tkhw->tkh", gated, second[ids])
    factors = _packed(token_final_scales, (tokens, top_k)).double()
    assert output is not None
    assert output.is_contiguous()
    output.copy_((each * factors[..., None]).sum(1))
    return [output]


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: Any,
    scale_b: Tensor,
    recipe_b: Any,
    *,
    output_dtype: torch.dtype,
) -> Tensor:
    """Multiply by torch's block-scaled product as cuBLASLt takes it: strides, and b's scales padded to 4."""
    recipes = functional.ScalingType
    assert (recipe_a, recipe_b) == (recipes.BlockWise1x128, recipes.BlockWise128x128)
    assert a.dtype == b.dtype == FP8
    assert a.shape[0] % 4 == 0
    assert b.shape[1] % BLOCK == 0
    assert (a.stride(1), b.stride(0)) == (1, 1)
    assert scale_a.stride() == (1, a.shape[0])
    assert scale_b.stride(0) == 1
    assert scale_b.shape[0] % 4 == 0
    left = a.double() * scale_a.double().repeat_interleave(BLOCK, 1)
    right = b.double() * scale_b.double().repeat_interleave(BLOCK, 0)[: a.shape[1]].repeat_interleave(
        BLOCK, 1
    )
    return (left @ right).to(output_dtype)


MODULES = {
    "flashinfer.gemm": SimpleNamespace(
        fp8_blockscale_gemm_sm90=fp8_blockscale_gemm_sm90,
        gemm_fp8_nt_groupwise=gemm_fp8_nt_groupwise,
        group_gemm_fp8_nt_groupwise=group_gemm_fp8_nt_groupwise,
    ),
    "flashinfer.fused_moe": SimpleNamespace(
        cutlass_fused_moe=cutlass_fused_moe,
        cutlass_fused_moe_workspace_size=cutlass_fused_moe_workspace_size,
    ),
    "deep_gemm": SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous),
}
