"""Experts of transformers' modules, computed by the engine's layer where it does the same.

Invariants:
- The engine's layer stands in for experts that are gated by SiLU, without biases, whose checkpoints have a
  tensor for each expert and projection. Every other kind is computed by the module.
- What a router chose is recorded before it is computed with, where every layer's choice has the same form.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from ...layers.experts import Experts
from ...layers.moe import RoutedExperts
from ...layers.parameters import Parameter, Placement, WeightSlot

if TYPE_CHECKING:
    from .assembly import Part

EXPERTS = "caesura"


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


ExpertsInterface.register(EXPERTS, _compute)


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
    """Return the checkpoint's names of gate, up and down of each expert, in the order of the slots.

    None if the engine's layer does not compute what ``module`` does, or checkpoints have other tensors.
    """
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


def engine_experts(module: nn.Module, name: str, path: str, place: Placement) -> Experts:
    count, hidden, width = getattr(module, "down_proj").shape  # noqa: B009
    return Experts(name, path, count, hidden, width, place=place)
