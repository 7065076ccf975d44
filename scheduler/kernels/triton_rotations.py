"""Rotation on CUDA, in Triton: a step's angles, and latent attention's queries and keys.

Invariant: results are those of ``layers/`` by torch but for the order of the sum inside a norm and the last
bit of a cosine: they are rounded to the dtype wherever torch's sequence of operations rounds.

Imported only where Triton is installed. Traced, compiled for sm_90 and tested in Triton's interpreter; not
run on a GPU.
"""

# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_elementwise import rounded
from .triton_launch import Launcher

_HEADS = 16


@triton.jit
def _rotate(source, target, cosine, sine, column, inside, half: tl.constexpr, interleaved: tl.constexpr):
    """Rotate rows [n, 2 half] from pointers [n, 1] to pointers [n, 1]; the result has first halves first."""
    step: tl.constexpr = 2 if interleaved else 1
    apart: tl.constexpr = 1 if interleaved else half
    first = tl.load(source + step * column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + step * column + apart, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + column, rounded(first * cosine, target) - second * sine, mask=inside)
    tl.store(target + half + column, rounded(second * cosine, target) + first * sine, mask=inside)


@triton.jit
def _latents_kernel(
    q,
    kv,
    cos,
    sin,
    weight,
    queries,
    keys,
    q_row,
    q_head,
    kv_row,
    angle_row,
    eps,
    heads: tl.constexpr,
    latent: tl.constexpr,
    rope: tl.constexpr,
    latent_width: tl.constexpr,
    half_width: tl.constexpr,
    block: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Rotate some query heads of one token, or, behind these, its key."""
    half: tl.constexpr = rope // 2
    width: tl.constexpr = latent + rope
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, half_width)[None, :]
    known = column < half
    cosine = tl.load(cos + token * angle_row + column, mask=known, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * angle_row + column, mask=known, other=0.0).to(tl.float32)
    first_head = tl.program_id(1) * block
    if first_head < heads:
        head = (first_head + tl.arange(0, block))[:, None]
        source = q + token * q_row + head * q_head
        target = queries + (token * heads + head) * width + latent
        _rotate(source, target, cosine, sine, column, known & (head < heads), half, interleaved)
    else:
        member = tl.arange(0, latent_width)
        inside = member < latent
        value = tl.load(kv + token * kv_row + member, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 0) / latent + eps)
        factor = tl.load(weight + member, mask=inside, other=0.0).to(tl.float32)
        tl.store(keys + token * width + member, rounded(value * scale, keys) * factor, mask=inside)
        only = tl.zeros([1, 1], tl.int64) + token  # a pointer as [1, 1], as those of heads are [heads, 1]
        k_source, k_target = kv + only * kv_row + latent, keys + only * width + latent
        _rotate(k_source, k_target, cosine, sine, column, known, half, interleaved)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _angles_kernel(positions, frequencies, cos, sin, factor, half: tl.constexpr, width: tl.constexpr):
    """Write one token's angles."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    known = column < half
    frequency = tl.load(frequencies + column, mask=known, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    tl.store(cos + token * half + column, tl.cos(angle) * factor, mask=known)
    tl.store(sin + token * half + column, tl.sin(angle) * factor, mask=known)


_launch_latents = Launcher(_latents_kernel, tensors=7, numbers=5)
_launch_angles = Launcher(_angles_kernel, tensors=4, numbers=1)


def rotate_latents(
    q_rope: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: tuple[Tensor, float],
    queries: Tensor,
    keys: Tensor,
    *,
    interleaved: bool,
) -> None:
    """Do what ``elementwise.py`` does: the front of ``queries`` is left as it is."""
    tokens, heads, rope = q_rope.shape
    latent = kv.shape[1] - rope
    weight, eps = norm
    if tokens:
        width, half_width = triton.next_power_of_2(latent), triton.next_power_of_2(rope // 2)
        _launch_latents(
            (tokens, triton.cdiv(heads, _HEADS) + 1, 1),
            (q_rope, kv, cos, sin, weight, queries, keys),
            (q_rope.stride(0), q_rope.stride(1), kv.stride(0), cos.stride(0), eps),
            (heads, latent, rope, width, half_width, _HEADS, interleaved),
            2,
        )


def angles(
    positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return ``factor`` times cosines and sines, [T, 1, half] each, of positions times ``frequencies``."""
    tokens, half = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty((tokens, 1, half), dtype=dtype, device=positions.device) for _ in range(2))
    if tokens:
        width = triton.next_power_of_2(half)
        _launch_angles((tokens, 1, 1), (positions, frequencies, cos, sin), (factor,), (half, width), 1)
    return cos, sin
