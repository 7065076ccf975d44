"""Queries and keys of latent attention on CUDA, in Triton: rotation, the norm of latents, and both parts side by side.

Invariant: results are those of ``layers/mla.py`` by torch but for the order of the sum inside the norm: they are rounded to the
dtype wherever torch's sequence of operations rounds.

Imported only where Triton is installed. Traced, compiled for sm_90 and tested in Triton's interpreter; not run on a GPU.
"""

# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from .triton_elementwise import rounded

_HEADS = 16
"""Query heads of a program."""


@triton.jit
def _rotate(source, target, cosine, sine, column, inside, half: tl.constexpr, interleaved: tl.constexpr):
    """Rows [n, 2 half] from pointers [n, 1] to pointers [n, 1]; the result has first halves first."""
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
    """Some query heads of one token, or, behind these, its key."""
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
        only = tl.zeros([1, 1], tl.int64) + token
        source, target = kv + only * kv_row + latent, keys + only * width + latent
        _rotate(source, target, cosine, sine, column, known, half, interleaved)


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
    """Rotated queries behind the absorbed ones in ``queries``; normalised latents and rotated keys in ``keys``.

    Args:
        q_rope: [T, heads, rope], elements of a head contiguous.
        kv: [T, latent + rope], elements of a row contiguous.
        cos, sin: [T, 1, rope / 2], of equal strides.
        norm: weight [latent] of the latents' norm, and its epsilon.
        queries: [T, heads, latent + rope], contiguous; its front is left as it is.
        keys: [T, latent + rope], contiguous.
        interleaved: pairs are neighbours in ``q_rope`` and ``kv``.
    """
    tokens, heads, rope = q_rope.shape
    latent = kv.shape[1] - rope
    weight, eps = norm
    if tokens:
        _latents_kernel[(tokens, triton.cdiv(heads, _HEADS) + 1)](
            q_rope, kv, cos, sin, weight, queries, keys,
            q_rope.stride(0), q_rope.stride(1), kv.stride(0), cos.stride(0), eps,
            heads=heads, latent=latent, rope=rope, latent_width=triton.next_power_of_2(latent),
            half_width=triton.next_power_of_2(rope // 2), block=_HEADS, interleaved=interleaved, num_warps=2,
        )  # fmt: skip
