"""Operations between matrix products on CUDA, in Triton: functions of ``elementwise.py``, and latents.

Invariants:
- Results are those of ``layers/`` but for the order of sums inside a norm and an exponential's last bit: they
  are rounded wherever torch's sequence of operations rounds. A row's bits depend on that row alone.
- Arguments are tensors and the size of the grid: no number of rows needs a variant, and graphs hold launches.

Imported only with Triton. Compiled for sm_90 and tested in Triton's interpreter; not run on a GPU.
"""

# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from . import self_test
from .attention_form import Bend, HeadNorms
from .elementwise import BENDS
from .triton_launch import Launcher

_HEADS = 4
"""Heads of a program that rotates: with heads of 128 in two bytes a thread reads 16 bytes of each half."""
_GATED = 1024
ELEMENTS_PER_WARP = 512
"""Elements of a normalised row per warp: 16 to a thread."""
_AGREEMENT = 1e-4
"""Largest difference from torch's result in a float32 self-test: several times that of exponentials."""


@triton.jit
def rounded(value, like):
    """Round float32 to the dtype that the pointer ``like`` points to, and back."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def normalized(
    x, residual, weight, row, column, inside, x_row, residual_row, eps,
    size: tl.constexpr, added: tl.constexpr, from_one: tl.constexpr,
):  # fmt: skip
    """Add a row to that of the residual, if ``added``, and return its norm in float32, not yet rounded."""
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if added:
        target = residual + row * residual_row + column
        value = rounded(tl.load(target, mask=inside, other=0.0).to(tl.float32) + value, residual)
        tl.store(target, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if from_one:
        result = value * scale * (1.0 + factor)
    else:
        result = rounded(value * scale, x) * factor
    return result


@triton.jit
def _norm_kernel(
    x, residual, weight, out, x_row, residual_row, out_row, eps,
    size: tl.constexpr, width: tl.constexpr, added: tl.constexpr, from_one: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    inside = column < size
    result = normalized(
        x, residual, weight, row, column, inside, x_row, residual_row, eps, size, added, from_one
    )
    tl.store(out + row * out_row + column, result, mask=inside)


@triton.jit
def bent(gate, up, like, bend: tl.constexpr):
    """Return ``bend(gate) * up`` in float32, rounded in between; ``bend`` as in :data:`BENDS`."""
    if bend == 2:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        up = rounded(up, like)
        gated = gate / (1 + tl.exp(-1.702 * gate))
    elif bend == 1:
        inner = 0.7978845608 * (gate + 0.044715 * gate * gate * gate)
        gated = gate / (1 + tl.exp(-2.0 * inner))
    else:
        gated = gate / (1 + tl.exp(-gate))
    return rounded(gated, like) * up


@triton.jit
def _gate_mul_kernel(
    gate_up, out, gate_up_row, out_row, size: tl.constexpr, block: tl.constexpr, bend: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < size
    source = gate_up + row * gate_up_row + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + column, bent(gate, up, out, bend), mask=inside)


@triton.jit
def _weighted(
    first, second, q_weight, k_weight, is_query, first_at, second_at, known, eps,
    size: tl.constexpr, from_one: tl.constexpr, like,
):  # fmt: skip
    """Normalise and weight the halves [heads, half] of some heads."""
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / size + eps)[:, None]
    of_first = tl.where(
        is_query,
        tl.load(q_weight + first_at, mask=known, other=0.0)[None, :],
        tl.load(k_weight + first_at, mask=known, other=0.0)[None, :],
    )
    of_second = tl.where(
        is_query,
        tl.load(q_weight + second_at, mask=known, other=0.0)[None, :],
        tl.load(k_weight + second_at, mask=known, other=0.0)[None, :],
    )
    if from_one:
        first = rounded(first * scale * (1.0 + of_first.to(tl.float32)), like)
        second = rounded(second * scale * (1.0 + of_second.to(tl.float32)), like)
    else:
        first = rounded(rounded(first * scale, like) * of_first.to(tl.float32), like)
        second = rounded(rounded(second * scale, like) * of_second.to(tl.float32), like)
    return first, second


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_store_kernel(
    qkv, q_weight, k_weight, cos, sin, slots, keys, values, out, token_row, out_row, angle_row, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, rotated: tl.constexpr, turned: tl.constexpr,
    size: tl.constexpr, width: tl.constexpr, block: tl.constexpr, page_size: tl.constexpr,
    norms: tl.constexpr, from_one: tl.constexpr,
):  # fmt: skip
    """Rotate and store some heads of one token; their number tells queries, keys and values apart.

    Angle i rotates elements i and turned / 2 + i of a head; those behind ``turned`` have angle 0.
    """
    half: tl.constexpr = size // 2
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block + tl.arange(0, block))[:, None]
    column = tl.arange(0, width)
    known = column < half
    inside = (head < heads + 2 * kv_heads) & known[None, :]
    turns = column < turned // 2
    first_at = tl.where(turns, column, column + turned // 2)
    second_at = tl.where(turns, column + turned // 2, column + half)
    source = qkv + token * token_row + head * size
    stored_first = tl.load(source + first_at[None, :], mask=inside, other=0.0)
    stored_second = tl.load(source + second_at[None, :], mask=inside, other=0.0)
    first, second = stored_first.to(tl.float32), stored_second.to(tl.float32)
    if norms:
        first, second = _weighted(
            first,
            second,
            q_weight,
            k_weight,
            head < heads,
            first_at,
            second_at,
            known,
            eps,
            size,
            from_one,
            qkv,
        )
    cosine = tl.load(cos + token * angle_row + column, mask=turns, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * angle_row + column, mask=turns, other=0.0).to(tl.float32)[None, :]
    rotated_first = (rounded(first * cosine, qkv) - second * sine).to(qkv.dtype.element_ty)
    rotated_second = (rounded(second * cosine, qkv) + first * sine).to(qkv.dtype.element_ty)

    target = out + token * out_row + head * size
    wanted = inside & (head < rotated)
    tl.store(target + first_at[None, :], rotated_first, mask=wanted)
    tl.store(target + second_at[None, :], rotated_second, mask=wanted)
    slot = tl.load(slots + token)
    page, offset = slot // page_size, slot % page_size
    kv_head = (head - heads) % kv_heads
    cell = ((page * kv_heads + kv_head) * page_size + offset) * size
    is_key = inside & (head >= heads) & (head < heads + kv_heads)
    tl.store(keys + cell + first_at[None, :], rotated_first, mask=is_key)
    tl.store(keys + cell + second_at[None, :], rotated_second, mask=is_key)
    is_value = inside & (head >= heads + kv_heads)
    tl.store(values + cell + first_at[None, :], stored_first, mask=is_value)
    tl.store(values + cell + second_at[None, :], stored_second, mask=is_value)


_launch_norm = Launcher(_norm_kernel, tensors=4, numbers=4)
_launch_gate_mul = Launcher(_gate_mul_kernel, tensors=2, numbers=2)
_launch_rope_store = Launcher(_rope_store_kernel, tensors=9, numbers=4)


def why_not(device: torch.device) -> str | None:
    """Return why kernels do not serve on ``device``: running one needs a C compiler, a driver, a chip."""
    return self_test.failure(lambda: _attempt(device), _AGREEMENT, "a kernel in Triton")


def _attempt(device: torch.device) -> Iterator[float]:
    gate_up = torch.linspace(-9, 9, 128, device=device).view(2, 64)
    expected = functional.silu(gate_up[:, :32]) * gate_up[:, 32:]
    yield float((gate_mul(gate_up) - expected).abs().max())


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    from_one: bool = False,
) -> Tensor:
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device) if out is None else out
    if rows:
        addend = out if residual is None else residual
        width = triton.next_power_of_2(size)
        _launch_norm(
            (rows, 1, 1),
            (x, addend, weight, out),
            (x.stride(0), addend.stride(0), out.stride(0), eps),
            (size, width, residual is not None, from_one),
            min(16, max(1, width // ELEMENTS_PER_WARP)),
        )
    return out


def gate_mul(gate_up: Tensor, out: Tensor | None = None, *, bend: Bend = "silu") -> Tensor:
    rows, width = gate_up.shape
    size = width // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if rows:
        grid = rows, triton.cdiv(size, _GATED), 1
        constants = size, _GATED, BENDS[bend]
        _launch_gate_mul(grid, (gate_up, out), (gate_up.stride(0), out.stride(0)), constants, 4)
    return out


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
    """Do what ``elementwise.py`` does; ``out`` may have the kv heads as well, for the rotated keys."""
    tokens, heads, size = qkv.shape
    _, kv_heads, page_size, _ = keys.shape
    q_weight, k_weight, eps, from_one = (qkv, qkv, 0.0, False) if norm is None else norm
    if tokens:
        width = triton.next_power_of_2(size // 2)
        _launch_rope_store(
            (tokens, triton.cdiv(heads, _HEADS), 1),
            (qkv, q_weight, k_weight, cos, sin, kv_slots, keys, values, out),
            (qkv.stride(0), out.stride(0), cos.stride(0), eps),
            (
                num_heads,
                kv_heads,
                out.shape[1],
                2 * cos.shape[-1],
                size,
                width,
                _HEADS,
                page_size,
                norm is not None,
                from_one,
            ),
            1,
        )
    return out


_QUERIES, _ABSORBED = 64, 64
"""Tokens whose queries of a head a program multiplies, and elements of the latent that it computes."""


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
def _angles_of(cos, sin, token, angle_row, column, inside):
    places = token * angle_row + column
    cosine = tl.load(cos + places, mask=inside, other=0.0).to(tl.float32)
    return cosine, tl.load(sin + places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_key(
    token, kv, cos, sin, weight, slots, cells, kv_row, angle_row, eps, latent: tl.constexpr,
    latent_width: tl.constexpr, rope: tl.constexpr, half_width: tl.constexpr, interleaved: tl.constexpr,
):  # fmt: skip
    """Normalise the latent of a ``token`` [1, 1], rotate its key, and store both."""
    member = tl.arange(0, latent_width)[None, :]
    inside = member < latent
    value = tl.load(kv + token * kv_row + member, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / latent + eps)[:, None]
    factor = tl.load(weight + member, mask=inside, other=0.0).to(tl.float32)
    cell = cells + tl.load(slots + token) * (latent + rope)
    tl.store(cell + member, rounded(value * scale, cells) * factor, mask=inside)
    column = tl.arange(0, half_width)[None, :]
    known = column < rope // 2
    cosine, sine = _angles_of(cos, sin, token, angle_row, column, known)
    key = kv + token * kv_row + latent
    _rotate(key, cell + latent, cosine, sine, column, known, rope // 2, interleaved)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _latents_kernel(
    q, w_kc, kv, cos, sin, weight, slots, queries, cells, q_row, q_head, kv_row, angle_row, eps, tokens,
    heads: tl.constexpr, nope: tl.constexpr, nope_width: tl.constexpr, latent: tl.constexpr,
    latent_width: tl.constexpr, rope: tl.constexpr, half_width: tl.constexpr, rows: tl.constexpr,
    block: tl.constexpr, interleaved: tl.constexpr,
):  # fmt: skip
    """Store one token's key, or, behind these, compute a part of some tokens' queries of one head."""
    blocks: tl.constexpr = (latent + block - 1) // block
    if tl.program_id(0) < tokens:
        only = tl.zeros([1, 1], tl.int64) + tl.program_id(0)
        _store_key(
            only, kv, cos, sin, weight, slots, cells, kv_row, angle_row, eps, latent, latent_width, rope,
            half_width, interleaved,
        )  # fmt: skip
    else:
        work = tl.program_id(0) - tokens
        head = (work // blocks) % heads
        token = (work // (blocks * heads) * rows + tl.arange(0, rows))[:, None].to(tl.int64)
        is_token = token < tokens
        inner = tl.arange(0, nope_width)
        outer = work % blocks * block + tl.arange(0, block)
        source = q + token * q_row + head * q_head
        target = queries + (token * heads + head) * (latent + rope)
        query = tl.load(source + inner[None, :], mask=is_token & (inner < nope)[None, :], other=0.0)
        inside = (inner < nope)[:, None] & (outer < latent)[None, :]
        of_head = w_kc + (head.to(tl.int64) * nope + inner)[:, None] * latent
        matrix = tl.load(of_head + outer[None, :], mask=inside, other=0.0)
        absorbed = tl.dot(query, matrix, input_precision="ieee").to(queries.dtype.element_ty)
        tl.store(target + outer[None, :], absorbed, mask=is_token & (outer < latent)[None, :])
        if work % blocks == 0:
            column = tl.arange(0, half_width)[None, :]
            turned = is_token & (column < rope // 2)
            cosine, sine = _angles_of(cos, sin, token, angle_row, column, turned)
            _rotate(source + nope, target + latent, cosine, sine, column, turned, rope // 2, interleaved)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _angles_kernel(positions, frequencies, cos, sin, factor, half: tl.constexpr, width: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    known = column < half
    frequency = tl.load(frequencies + column, mask=known, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    tl.store(cos + token * half + column, tl.cos(angle) * factor, mask=known)
    tl.store(sin + token * half + column, tl.sin(angle) * factor, mask=known)


_launch_latents = Launcher(_latents_kernel, tensors=9, numbers=6)
_launch_angles = Launcher(_angles_kernel, tensors=4, numbers=1)


def store_latents(
    q: Tensor,
    w_kc: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: tuple[Tensor, float],
    cells: Tensor,
    slots: Tensor,
    *,
    interleaved: bool,
) -> Tensor:
    """Store the keys of latent attention, and return its queries [T, heads, latent + rope].

    Args:
        q: [T, heads, nope + rope]; the front of a head is multiplied by ``w_kc`` [heads, nope, latent], and
            the rest is rotated.
        kv: [T, latent + rope]; latents are normalised, and written with rotated keys to ``cells`` number
            ``slots`` (int64 [T]).
        cos, sin: [T, 1, rope / 2]; pairs are neighbours if ``interleaved``.
        norm: norm of latents: weight [latent], epsilon.
    """
    (tokens, heads, _), (_, nope, latent), (weight, eps) = q.shape, w_kc.shape, norm
    rope = kv.shape[1] - latent
    queries = torch.empty((tokens, heads, latent + rope), dtype=q.dtype, device=q.device)
    if tokens:
        nope_width = max(16, triton.next_power_of_2(nope))  # as long as a tile of a product is at least
        widths = triton.next_power_of_2(latent), triton.next_power_of_2(rope // 2)
        _launch_latents(
            (tokens + triton.cdiv(tokens, _QUERIES) * heads * triton.cdiv(latent, _ABSORBED), 1, 1),
            (q, w_kc, kv, cos, sin, weight, slots, queries, cells),
            (q.stride(0), q.stride(1), kv.stride(0), cos.stride(0), eps, tokens),
            (heads, nope, nope_width, latent, widths[0], rope, widths[1], _QUERIES, _ABSORBED, interleaved),
            4,
        )
    return queries


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
