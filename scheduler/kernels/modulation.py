"""Operations between the products of transformers of images on the CPU, compiled (``cpu/modulation.cpp``).

Invariants:
- Arithmetic is float32 and what is stored is rounded once: in float32 results are those of diffusers' modules
  but for the order of sums and an exponential's last bit, in bfloat16 they are nearer the exact ones.
- A row's bits depend on that row and its sample alone.
- A call is one of :class:`~..tracing.Tracer`'s.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function_unary

from . import native
from .native import FLOAT, INT, POINTER, SIZE

_MODULATE = native.by_dtype("caesura_modulate", *[POINTER] * 6, SIZE, POINTER, *[SIZE] * 3, FLOAT, INT)
_JOIN_HEADS = native.by_dtype(
    "caesura_join_heads", *[POINTER, POINTER, SIZE] * 2, POINTER, *[SIZE] * 3, FLOAT, INT
)
_ATTENTION = native.by_dtype("caesura_joint_attention", *[POINTER] * 4, *[SIZE] * 4, FLOAT, INT)
_GELU = native.by_dtype("caesura_gelu_tanh", POINTER, SIZE, INT)


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have the function's calls noted by modes of torch, as those of torch's own functions are."""

    @wraps(function)
    def call(x: Tensor, *arguments: Any, **options: Any) -> Any:
        if has_torch_function_unary(x):
            return handle_torch_function(function, (x,), x, *arguments, **options)
        return function(x, *arguments, **options)

    return call


@_noted
def modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return ``(1 + scale) * (x - mean) / sqrt(variance + eps) + shift`` of rows x [samples, tokens, size].

    ``scale``, ``shift``: [samples, size], columns contiguous.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    _run(x, None, None, None, scale, shift, out, eps)
    return out


@_noted
def add_gated(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """Return ``x + gate * update`` of rows [samples, tokens, size]; ``gate`` as :func:`modulate`'s scale."""
    x = x.contiguous()
    total = torch.empty_like(x)
    _run(x, update.contiguous(), gate, total, None, None, None, 0.0)
    return total


@_noted
def add_and_modulate(
    x: Tensor, update: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return what :func:`add_gated` does, and what :func:`modulate` makes of it."""
    x = x.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    _run(x, update.contiguous(), gate, total, scale, shift, out, eps)
    return total, out


def _run(
    x: Tensor,
    update: Tensor | None,
    gate: Tensor | None,
    total: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    out: Tensor | None,
    eps: float,
) -> None:
    samples, tokens, size = x.shape
    of_samples = [each for each in (gate, scale, shift) if each is not None]
    row = of_samples[0].stride(0)
    fits = all((each.shape, each.stride()) == ((samples, size), (row, 1)) for each in of_samples)
    given = (x, *of_samples) if update is None else (x, update, *of_samples)
    fits = fits and (update is None or update.shape == x.shape)
    if not fits or x.dtype not in _MODULATE or any(each.dtype != x.dtype for each in given):
        raise native.misfit("no modulation", *given)
    addresses = [None if each is None else each.data_ptr() for each in (update, gate, total, scale, shift)]
    _MODULATE[x.dtype](
        x.data_ptr(), *addresses, row, None if out is None else out.data_ptr(), samples, tokens, size, eps,
        torch.get_num_threads(),
    )  # fmt: skip


@_noted
def join_heads(
    image: Tensor, text: Tensor, heads: int, image_norm: Tensor | None, text_norm: Tensor | None, eps: float
) -> Tensor:
    """Return the heads of ``image`` [samples, tokens, heads * size] and of ``text`` behind it.

    They become [samples, tokens, heads, size], those with a norm's weight normalised as by ``rms_norm``.
    """
    image, text = image.contiguous(), text.contiguous()
    samples, tokens, width = image.shape
    size, of_text = width // heads, text.shape[1]
    norms = [each for each in (image_norm, text_norm) if each is not None]
    if (
        text.shape != (samples, of_text, heads * size)
        or any(each.shape != (size,) or not each.is_contiguous() for each in norms)
        or image.dtype not in _JOIN_HEADS
        or any(each.dtype != image.dtype for each in (text, *norms))
    ):
        raise native.misfit("no heads", image, text, *norms)
    out = image.new_empty((samples, tokens + of_text, heads, size))
    weights = [None if each is None else each.data_ptr() for each in (image_norm, text_norm)]
    _JOIN_HEADS[image.dtype](
        image.data_ptr(), weights[0], tokens, text.data_ptr(), weights[1], of_text, out.data_ptr(),
        samples, heads, size, eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


@_noted
def joint_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of every token to all of its sample, shaped as q, k, v.

    They are [samples, tokens, heads, size], contiguous.
    torch computes heads that are no multiple of 64 bytes or longer than 128, and bfloat16 with AMX.
    """
    samples, tokens, heads, size = q.shape
    by_torch = size * q.itemsize % 64 or size > 128 or (q.dtype == torch.bfloat16 and native.isa() == "amx")
    if by_torch or q.dtype == torch.float16:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)
    given = q, k, v
    if any((e.shape, e.dtype) != (q.shape, q.dtype) or not e.is_contiguous() for e in given):
        raise native.misfit("no attention", *given)
    out = torch.empty_like(q)
    _ATTENTION[q.dtype](
        *(each.data_ptr() for each in (*given, out)),
        samples, tokens, heads, size, size**-0.5, torch.get_num_threads(),
    )  # fmt: skip
    return out


@_noted
def gelu_of_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the GELU, in the form with tanh, of ``product(x)``, which is fresh memory.

    ``weight``, ``bias``: what the product computes with, which traces must know of.
    """
    made = product(x)
    _GELU[made.dtype](made.data_ptr(), made.numel(), torch.get_num_threads())
    return made


@_noted
def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor]) -> Tensor:
    """Return ``product(x, bias)``, whose ``x`` is contiguous. ``weight``: as in :func:`gelu_of_product`."""
    return product(x.contiguous(), bias)
