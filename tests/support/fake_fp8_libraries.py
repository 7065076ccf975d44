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

from .flashinfer_interface import takes

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


@takes("fp8_blockscale_gemm_sm90", input_scale=None, weight_scale=None)
def fp8_blockscale_gemm_sm90(given: Any) -> Tensor:
    x, weight = given.input, given.weight
    assert (x.dtype, given.input_scale) == (torch.bfloat16, None)
    assert weight.shape[0] % 64 == 0
    assert weight.shape[1] % BLOCK == 0
    return (_rounded(_packed(x, tuple(x.shape))) @ _weights(weight, given.weight_scale).t()).bfloat16()


@takes("gemm_fp8_nt_groupwise", scale_major_mode=None, out_dtype=None, backend="cutlass")
def gemm_fp8_nt_groupwise(given: Any) -> Tensor:
    assert given.scale_major_mode == "K"
    assert given.a.shape[0] % 4 == 0
    assert given.b.shape[0] % 8 == 0
    return (_values(given.a, given.a_scale) @ _weights(given.b, given.b_scale).t()).to(given.out_dtype)


@takes("group_gemm_fp8_nt_groupwise", scale_major_mode="MN", out_dtype=None)
def group_gemm_fp8_nt_groupwise(given: Any) -> Tensor:
    assert given.scale_major_mode == "K"
    assert given.m_indptr.dtype == torch.int32
    assert len(given.m_indptr) == len(given.b) + 1
    assert not (given.m_indptr % 4).any()
    starts = given.m_indptr.tolist()
    assert starts[0] == 0
    assert starts[-1] <= len(given.a)
    left, right = _values(given.a, given.a_scale), _weights(given.b, given.b_scale)
    found = left.new_full((len(given.a), given.b.shape[1]), torch.nan)
    for expert, (start, end) in enumerate(pairwise(starts)):
        found[start:end] = left[start:end] @ right[expert].t()
    return found.to(given.out_dtype)


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


@takes(
    "cutlass_fused_moe_workspace_size",
    output_dtype=torch.bfloat16,
    ep_size=1,
    ep_rank=0,
    use_deepseek_fp8_block_scale=False,
    device=None,
)
def cutlass_fused_moe_workspace_size(given: Any) -> int:
    assert given.use_deepseek_fp8_block_scale
    dtypes = given.x_dtype, given.weight_dtype, given.output_dtype
    assert dtypes == (torch.bfloat16, FP8, torch.bfloat16)
    assert given.num_experts_total % given.ep_size == 0
    row = given.hidden_size + given.intermediate_size
    return given.max_num_tokens * given.top_k * row + given.num_experts_total


@takes(
    "cutlass_fused_moe",
    ep_size=1,
    ep_rank=0,
    use_deepseek_fp8_block_scale=False,
    output=None,
    profile_ids=None,
    workspace_buffer=None,
)
def cutlass_fused_moe(given: Any) -> list[Tensor]:
    chosen, factors = given.token_selected_experts, given.token_final_scales
    assert given.use_deepseek_fp8_block_scale
    assert given.input.dtype == given.output_dtype == torch.bfloat16
    assert chosen.dtype == torch.int32
    assert factors.dtype == torch.float32
    assert factors.shape == chosen.shape
    tokens, top_k = chosen.shape
    experts, hidden, width = given.fc2_expert_weights.shape
    assert given.fc1_expert_weights.shape == (experts, 2 * width, hidden)
    assert given.workspace_buffer.dtype == torch.uint8
    assert given.workspace_buffer.numel() >= tokens * top_k * (hidden + width) + experts * given.ep_size
    weights = given.fc1_expert_weights, given.fc2_expert_weights
    assert len(given.quant_scales) == len(weights)
    first, second = map(_weights, weights, given.quant_scales)
    ids = _packed(chosen, (tokens, top_k)).long() - experts * given.ep_rank
    is_held = (ids >= 0) & (ids < experts)
    ids = ids.clamp(0, experts - 1)
    x = _rounded(_packed(given.input, (tokens, hidden)))
    up, gate = torch.einsum("th,tkwh->tkw", x, first[ids]).chunk(2, dim=-1)
    gated = _rounded((functional.silu(gate) * up).bfloat16().flatten(0, 1)).view(tokens, top_k, width)
    each = torch.einsum("tkw,tkhw->tkh", gated, second[ids])
    assert given.output.is_contiguous()
    held = _packed(factors, (tokens, top_k)).double().masked_fill(~is_held, 0)
    given.output.copy_((each * held[..., None]).sum(1))
    return [given.output]


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
        cutlass_fused_moe=cutlass_fused_moe, cutlass_fused_moe_workspace_size=cutlass_fused_moe_workspace_size
    ),
    "deep_gemm": SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=m_grouped_fp8_gemm_nt_contiguous),
}
