"""Attention of transformers' modules over pages: the function that their ``AttentionInterface`` calls.

Invariants:
- A step's backend reaches the function by a context variable, which holds for that step alone: models pass
  their forward's keyword arguments on or do not, and several models of one process never see each other's.
- Models make no mask for this attention: what a mask would say (causal, a window) is the backend's to do, and
  that a model asks for nothing else is known from :mod:`.probe` before the first step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface

from ...execution.forward import AttentionBackend
from ...kernels.attention_form import AttentionForm, HeadNorms

IMPLEMENTATION = "caesura"


@dataclass(frozen=True, slots=True)
class _Step:
    backend: AttentionBackend
    forms: Sequence[AttentionForm]
    head_size: int
    """Size of the pool's heads: the wider of keys and values."""


_step: ContextVar[_Step] = ContextVar("step")


@contextmanager
def attending(backend: AttentionBackend, forms: Sequence[AttentionForm], head_size: int) -> Iterator[None]:
    """Have modules of this thread attend through ``backend``, whose step is planned, within the block."""
    outer = _step.set(_Step(backend, forms, head_size))
    try:
        yield
    finally:
        _step.reset(outer)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend: query [1, H, T, D], key and value [1, KV, T, D or V] to [1, T, H, V].

    Scale, window and the rest are those of the layer's form: no call differs from the one that was probed.
    """
    step, layer = _step.get(), module.layer_idx
    return attend(step.backend, query, key, value, layer, step.forms[layer], step.head_size), None


def attend(
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    form: AttentionForm,
    size: int,
) -> Tensor:
    """Compute one layer's attention, in transformers' shapes; ``size`` is that of the pool's heads."""
    q, k, v = (_rows(x, size) for x in (query, key, value))
    out = backend.forward(q, k, v, layer, form)
    return out.view(1, q.shape[0], q.shape[1], size)[..., : value.shape[-1]]


def attend_fused(
    backend: AttentionBackend,
    qkv: Tensor,
    heads: int,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    norm: HeadNorms | None,
    form: AttentionForm,
) -> Tensor:
    """Return head norms, rotation and attention of a layer, [T, query heads * head size].

    Args:
        qkv: [T, heads * head size]: queries, keys and values; overwritten. ``heads`` is that of all three.
        cos, sin: [T, 1, rotated size / 2].
    """
    assert backend.fused is not None
    rows = qkv.view(qkv.shape[0], heads, qkv.shape[1] // heads)
    return backend.fused(rows, cos, sin, layer, norm, form)


def _rows(x: Tensor, size: int) -> Tensor:
    """Return [1, heads, T, width] as [T, heads, size], contiguous; zeros are cut from outputs."""
    rows = x[0].transpose(0, 1)
    return pad(rows, (0, size - rows.shape[-1])) if rows.shape[-1] < size else rows.contiguous()


AttentionInterface.register(IMPLEMENTATION, _attend)
