"""Elementwise operations between matrix products on the CPU, compiled (``cpu/elementwise.cpp``).

Invariants:
- Results are those of ``layers/`` but for the order of sums inside a norm and an exponential's last bit: they
  are rounded wherever torch's sequence of operations rounds. A row's bits depend on that row alone.
- All is of one dtype of :data:`~.native.FLOATS`, elements of a row contiguous; else ValueError.
"""

import torch
from torch import Tensor

from ..runtime.engine_config import PAGE_SIZE
from . import native
from .attention_form import Bend, HeadNorms
from .native import FLOAT, INT, POINTER, SIZE

_ROW = (POINTER, SIZE)
_NORM = native.by_dtype("caesura_rms_norm", *_ROW, *_ROW, POINTER, *_ROW, SIZE, SIZE, FLOAT, INT, INT)
_GATE_MUL = native.by_dtype("caesura_gate_mul", *_ROW, *_ROW, SIZE, SIZE, INT, INT)
BENDS: dict[Bend, int] = {"silu": 0, "gelu_tanh": 1, "clamped": 2}
_ROPE_STORE = native.by_dtype(
    "caesura_rope_store",
    *(*_ROW, SIZE, SIZE, SIZE, SIZE),  # qkv, query heads, kv heads, head size, of which is rotated
    *(POINTER, POINTER, FLOAT, INT),  # head norms
    *(POINTER, POINTER, SIZE),  # cosines, sines, stride of a token
    *(POINTER, POINTER, POINTER),  # slots, keys, values
    *(*_ROW, SIZE, INT),  # queries, tokens, threads
)

_ROTATE_LATENTS = native.by_dtype(
    "caesura_rotate_latents",
    *(*_ROW, *_ROW, SIZE, SIZE, SIZE, SIZE),  # queries, latents; heads, parts of a query, latent
    *(POINTER, FLOAT, INT),  # norm, whether rotated pairs are neighbours
    *(POINTER, POINTER, SIZE),  # cosines, sines, stride of a token
    *(POINTER, POINTER, SIZE, INT),  # queries, keys, tokens, threads
)
_GATE_HEADS = native.by_dtype("caesura_gate_heads", POINTER, POINTER, *[SIZE] * 5, INT)
_SIGMOID_MUL = native.by_dtype("caesura_sigmoid_mul", POINTER, POINTER, SIZE, SIZE, INT)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    from_one: bool = False,
) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` of each row; with ``residual``, of ``residual += x``.

    ``x``, ``residual``, ``out``: [T, size]; ``out`` may be ``x``. ``from_one``: the factor is ``1 + weight``,
    and the product is rounded once.
    """
    shape, dtype = x.shape, x.dtype
    rows, size = shape
    out = torch.empty_like(x) if out is None else out
    addend = out if residual is None else residual
    if not (
        _readable(dtype, x, weight, addend, out)
        and weight.shape == (size,)
        and out.shape == shape
        and addend.shape == shape
    ):
        raise native.misfit("no norm", x, weight, addend, out)
    _NORM[dtype](
        x.data_ptr(), x.stride(0), None if residual is None else residual.data_ptr(), addend.stride(0),
        weight.data_ptr(), out.data_ptr(), out.stride(0), rows, size, eps, from_one, torch.get_num_threads(),
    )  # fmt: skip
    return out


def gate_mul(gate_up: Tensor, out: Tensor | None = None, *, bend: Bend = "silu") -> Tensor:
    """Return ``bend(gate) * up`` of rows (gate, up): [T, 2 I] to [T, I], in ``out`` if given."""
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype) if out is None else out
    if not _readable(gate_up.dtype, gate_up, out) or width % 2 or out.shape != (rows, width // 2):
        raise native.misfit("no gate", gate_up, out)
    _GATE_MUL[gate_up.dtype](
        gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.stride(0), rows, width // 2, BENDS[bend],
        torch.get_num_threads(),
    )  # fmt: skip
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
    """Normalise (if asked to) and rotate queries and keys, store keys and values; return queries, ``out``.

    Args:
        qkv: [T, query heads + 2 kv heads, head size]: queries, keys, values; ``out`` may be its front.
        cos, sin: [T, 1, rotated size / 2], of equal strides; the rest of a head is not rotated.
        kv_slots: int64 [T], ``page * 16 + offset`` in the pool [pages, kv heads, 16, head size]; not checked.
    """
    tokens, heads, size = qkv.shape
    kv_heads = (heads - num_heads) // 2
    q_weight, k_weight, eps, from_one = norm or (None, None, 0.0, False)
    weights = [] if norm is None else [norm[0], norm[1]]
    if not (
        _readable(qkv.dtype, qkv, cos, sin, keys, values, out, *weights)
        and heads == num_heads + 2 * kv_heads
        and qkv.stride(1) == out.stride(1) == size
        and out.shape == (tokens, num_heads, size)
        and cos.shape == sin.shape == (tokens, 1, cos.shape[-1])
        and 2 * cos.shape[-1] <= size
        and cos.stride(0) == sin.stride(0)
        and keys.shape[1:] == values.shape[1:] == (kv_heads, PAGE_SIZE, size)
        and keys.is_contiguous()
        and values.is_contiguous()
        and all(weight.shape == (size,) for weight in weights)
        and kv_slots.dtype == torch.int64
        and kv_slots.shape == (tokens,)
        and kv_slots.is_contiguous()
    ):
        tensors = qkv, cos, sin, kv_slots, keys, values, out, *weights
        raise native.misfit(f"no rotation of {num_heads} heads", *tensors)
    _ROPE_STORE[qkv.dtype](
        qkv.data_ptr(), qkv.stride(0), num_heads, kv_heads, size, 2 * cos.shape[-1],
        None if q_weight is None else q_weight.data_ptr(), None if k_weight is None else k_weight.data_ptr(),
        eps, from_one, cos.data_ptr(), sin.data_ptr(), cos.stride(0),
        kv_slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
        out.data_ptr(), out.stride(0), tokens, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _readable(dtype: torch.dtype, *tensors: Tensor) -> bool:
    for tensor in tensors:  # a generator takes twice as long, and this is called forty times a step
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            return False
    return dtype in native.FLOATS


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply ``x`` [T, size] in place by the rounded sigmoid of ``gate`` [T, 1], both contiguous."""
    if not (
        _readable(x.dtype, x, gate)
        and gate.shape == (x.shape[0], 1)
        and x.is_contiguous()
        and gate.is_contiguous()
    ):
        raise native.misfit("no product", x, gate)
    _SIGMOID_MUL[x.dtype](x.data_ptr(), gate.data_ptr(), *x.shape, torch.get_num_threads())
    return x


def gate_heads(x: Tensor, gates: Tensor) -> Tensor:
    """Multiply contiguous ``x`` [T, heads * size] in place by sigmoids of ``gates`` [T, heads, size]."""
    tokens, heads, size = gates.shape
    if not (_readable(x.dtype, x, gates) and x.shape == (tokens, heads * size) and x.is_contiguous()):
        raise native.misfit("no gates of heads", x, gates)
    _GATE_HEADS[x.dtype](
        *(x.data_ptr(), gates.data_ptr(), gates.stride(0), gates.stride(1)),
        *(tokens, heads, size, torch.get_num_threads()),
    )
    return x


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
    """Write rotated queries, and keys, of latent attention.

    Args:
        q_rope: [T, heads, rope], to the end of each head of ``queries`` [T, heads, latent + rope].
        kv: [T, latent + rope]; latents are normalised, and written with rotated keys to ``keys``, alike.
        cos, sin: [T, 1, rope / 2]; pairs are neighbours if ``interleaved``.
        norm: norm of latents: weight [latent], epsilon.
    """
    (tokens, heads, rope), (weight, eps), width = q_rope.shape, norm, kv.shape[1]
    if not (
        _readable(kv.dtype, q_rope, kv, cos, sin, weight, queries, keys)
        and queries.shape == (tokens, heads, width)
        and keys.shape == kv.shape == (tokens, width)
        and cos.shape == sin.shape == (tokens, 1, rope // 2)
        and cos.stride(0) == sin.stride(0)
        and weight.shape == (width - rope,)
        and queries.is_contiguous()
        and keys.is_contiguous()
    ):
        raise native.misfit("no rotation", q_rope, kv, queries)
    _ROTATE_LATENTS[kv.dtype](
        *(q_rope.data_ptr(), q_rope.stride(0), kv.data_ptr(), kv.stride(0)),
        *(heads, q_rope.stride(1) - rope, rope, width - rope),
        *(weight.data_ptr(), eps, interleaved, cos.data_ptr(), sin.data_ptr(), cos.stride(0)),
        *(queries.data_ptr(), keys.data_ptr(), tokens, torch.get_num_threads()),
    )
