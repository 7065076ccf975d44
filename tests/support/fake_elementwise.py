"""The kernel that rotates and stores, by torch, as one operation that a recorded graph runs again."""

import torch
from torch import Tensor
from torch.nn import functional

from caesura.scheduler.kernels.attention_form import HeadNorms
from caesura.scheduler.layers.rotary import rotate

CALLS: list[int] = []
"""Tokens of each call; a recorded graph that runs again calls nothing."""


@torch.library.custom_op("fake_elementwise::rope_store", mutates_args=("qkv", "keys", "values"))
def _rope_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    kv_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
) -> None:
    kv_heads = keys.shape[1]
    qk = functional.rms_norm(qkv[:, :-kv_heads], qkv.shape[2:], None, eps)
    qk[:, :num_heads] *= q_weight
    qk[:, num_heads:] *= k_weight
    qk = rotate(qk, cos, sin)
    pages, offsets = kv_slots // keys.shape[2], kv_slots % keys.shape[2]
    keys[pages, :, offsets] = qk[:, num_heads:]
    values[pages, :, offsets] = qkv[:, -kv_heads:]
    qkv[:, :num_heads] = qk[:, :num_heads]


def rope_store(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor,
    sin: Tensor,
    kv_slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    out: Tensor,
    norm: HeadNorms | None = None,
) -> Tensor:
    assert out.data_ptr() == qkv.data_ptr()
    if norm is None:
        pages, offsets = kv_slots // keys.shape[2], kv_slots % keys.shape[2]
        rotated = rotate(qkv[:, : -keys.shape[1]], cos, sin)
        keys[pages, :, offsets] = rotated[:, num_heads:]
        values[pages, :, offsets] = qkv[:, -keys.shape[1] :]
        out.copy_(rotated[:, : out.shape[1]])
        return out
    CALLS.append(len(qkv))
    assert not norm.from_one, "as Qwen3's"
    _rope_store(qkv, num_heads, cos, sin, kv_slots, keys, values, *norm[:3])
    return out
