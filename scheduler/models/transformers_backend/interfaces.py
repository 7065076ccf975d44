"""Functions that transformers' modules call for attention over pages and for experts.

Invariants:
- A step's backend reaches the function by a context variable, which holds for that step alone: models pass
  their forward's keyword arguments on or do not, and several models of one process never see each other's.
- Models make no mask for this attention: what a mask would say (causal, a window) is the backend's to do, and
  that a model asks for nothing else is known from :mod:`.probe` before the first step.
- The engine's layer stands in for experts that are gated by SiLU, without biases, whose checkpoints have a
  tensor for each expert and projection. Every other kind is computed by the module.
- What a router chose is recorded before it is computed with, where every layer's choice has the same form.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from ...execution.forward import AttentionBackend
from ...kernels.attention_form import AttentionForm, HeadNorms
from ...layers.experts import Experts
from ...layers.moe import RoutedExperts
from ...layers.parameters import Parameter, WeightSlot

if TYPE_CHECKING:
    from .assembly import Part

IMPLEMENTATION = "caesura"
"""Name in transformers' tables of functions."""


_step: ContextVar[tuple[Callable[..., Tensor], Any, Sequence[AttentionForm], int]] = ContextVar("step")


@contextmanager
def attending(
    backend: AttentionBackend,
    forms: Sequence[AttentionForm],
    head_size: int,
    by: Callable[..., Tensor] | None = None,
) -> Iterator[None]:
    """Have modules of this thread attend through ``backend``, whose step is planned, within the block.

    ``head_size`` is that of the pool, the wider of keys and values; ``by`` stands in for :func:`attend`.
    """
    outer = _step.set((by or attend, backend, forms, head_size))
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
    """Attend: query [1, H, T, D], key and value [1, KV, T, D or V] to [1, T, H, V]; the form was probed."""
    (by, backend, forms, size), layer = _step.get(), module.layer_idx
    return by(backend, query, key, value, layer, forms[layer], size), None


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

    ``qkv`` [T, heads * head size] is overwritten; ``cos``, ``sin``: [T, 1, rotated size / 2].
    """
    assert backend.fused is not None
    rows = qkv.view(qkv.shape[0], heads, qkv.shape[1] // heads)
    return backend.fused(rows, cos, sin, layer, norm, form)


def _rows(x: Tensor, size: int) -> Tensor:
    """Return [1, heads, T, width] as [T, heads, size], contiguous; zeros are cut from outputs."""
    rows = x[0].transpose(0, 1)
    return pad(rows, (0, size - rows.shape[-1])) if rows.shape[-1] < size else rows.contiguous()


AttentionInterface.register(IMPLEMENTATION, _attend)


class Computed:
    """Computes one module's experts, and records their choice; an attribute of the module."""

    ATTRIBUTE = "_caesura"

    def __init__(self, layer: int, routing: RoutedExperts | None, experts: Experts | None) -> None:
        self._layer, self._routing = layer, routing
        self._experts = experts

    def __call__(self, module: nn.Module, hidden: Tensor, ids: Any, weights: Any, *args: Any) -> Tensor:
        """Compute experts: hidden [T, hidden], ids int64 [T, k], weights [T, k]."""
        if self._routing is not None:
            self._routing.of_layer(self._layer, ids.shape[0]).copy_(ids)
        if self._experts is not None:
            return self._experts.forward(hidden, ids, weights)
        original: Any = type(module).forward
        out: Tensor = original.__wrapped__(module, hidden, ids, weights, *args)
        return out


def _compute(module: nn.Module, hidden: Tensor, *args: Any) -> Tensor:
    computed: Computed = getattr(module, Computed.ATTRIBUTE)
    return computed(module, hidden, *args)


ExpertsInterface.register(IMPLEMENTATION, _compute)


class NamedExperts:
    """The engine's experts under the names of a checkpoint that calls them otherwise; a ``Layer``."""

    def __init__(self, experts: Experts, names: list[str]) -> None:
        """``names``: those of each slot of ``experts``, in their order."""
        self._experts, self._names = experts, names

    def parameters(self) -> Iterator[Parameter]:
        yield from self._experts.parameters()

    def slots(self) -> Iterator[WeightSlot]:
        for slot, name in zip(self._experts.slots(), self._names, strict=True):
            slot.name = name
            yield slot


def checkpoint_names(module: nn.Module, path: str, parts: "dict[str, Part]") -> list[str] | None:
    """Return the names of each expert's gate, up and down, or None if the engine's layer does not fit."""
    if not _is_silu_gated(module):
        return None
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(gate_up, nn.Parameter) or not isinstance(down, nn.Parameter) or down.dim() != 3:
        return None
    count, hidden, width = down.shape
    if gate_up.shape != (count, 2 * width, hidden):
        return None
    by_place = {(part.parameter, part.offset, part.shape): name for name, part in parts.items()}
    wanted = [
        place
        for expert in range(count)
        for place in (
            (f"{path}.gate_up_proj", expert * 2 * width * hidden, (width, hidden)),
            (f"{path}.gate_up_proj", (expert * 2 + 1) * width * hidden, (width, hidden)),
            (f"{path}.down_proj", expert * hidden * width, (hidden, width)),
        )
    ]
    names = [by_place.get(place) for place in wanted]
    return None if None in names else [name for name in names if name is not None]


def _is_silu_gated(module: nn.Module) -> bool:
    plain = {
        "has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False,
        "is_concatenated": True,
    }  # fmt: skip
    return (
        all(getattr(module, name, None) is value for name, value in plain.items())
        and getattr(type(module), "_apply_gate", None) is _default_apply_gate
        and isinstance(getattr(module, "act_fn", None), (nn.SiLU, SiLUActivation))
        and {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
    )
