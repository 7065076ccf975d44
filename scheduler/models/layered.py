"""The weights of a language model that is made of layers.

Invariant: every parameter belongs to one layer, and what is derived from parameters to the layer that owns them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

from torch import Tensor

from ..layers.parameters import DerivingLayer, Layer, WeightSlot
from . import multimodal
from .config import ModelConfig


class LayeredModel(ABC):
    """Part of :class:`~.base.CausalLM`: one piece, whose layers own all weights."""

    @abstractmethod
    def owners(self) -> Iterator[Layer]:
        """Layers that own parameters, in the order of the checkpoint."""

    config: ModelConfig

    @property
    def components(self) -> tuple[str, ...]:
        """None: a language model is one piece."""
        return ()

    @property
    def kept_components(self) -> frozenset[str]:
        """None, of none."""
        return frozenset()

    @property
    def optional_names(self) -> frozenset[str]:
        """None: every slot needs its tensor, and what is tied has no slot."""
        return frozenset()

    def own_name(self, name: str) -> str:
        """Without what the names of a multimodal model begin with, where the language model is one of those."""
        return multimodal.own_name(self.config.architecture, name)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """By checkpoint name; a tied tensor has one."""
        return {slot.name: slot for layer in self.owners() for slot in layer.slots()}

    def finalize_weights(self) -> None:
        """Have each layer derive what follows from several of its parameters."""
        for layer in self._deriving:
            layer.finalize()

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        """Those of each layer."""
        for layer in self._deriving:
            yield from layer.derived()

    def named_storage(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and derived tensors by engine name, each once."""
        for layer in self.owners():
            for parameter in layer.parameters():
                yield parameter.name, parameter.data
        yield from self.derived()

    @cached_property
    def _deriving(self) -> list[DerivingLayer]:
        return [layer for layer in self.owners() if isinstance(layer, DerivingLayer)]
