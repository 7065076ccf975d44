"""The interface of models to the engine, and the weights part of models that are made of layers.

Invariant: every parameter of a language model, and every derived tensor, belongs to one layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from ..execution.forward import AttentionBackend, ForwardBatch
from ..kernels.attention_form import AttentionForm
from ..layers.logits_processor import LogitsProcessor, SharedLogits
from ..layers.moe import RoutedExperts
from ..layers.parameters import DerivingLayer, Layer, WeightSlot
from ..layers.rank_rows import RankRows
from . import multimodal
from .config import ModelConfig

if TYPE_CHECKING:
    from ..execution.sampler import SamplerOutput, SamplingArguments

_Result = TypeVar("_Result")


def result_of(steps: Generator[Any, None, _Result]) -> _Result:
    """Run a generator to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: _Result = end.value
            return found


class Weights(ABC):
    """Interface of a model of any kind to updates, checks and counts of weights."""

    components: tuple[str, ...] = ()
    """Parts with folders of their own, the default of an update first; a tensor is ``component.name``."""
    kept_components: frozenset[str] = frozenset()
    """Members of :attr:`components` kept on the host, where updates write them."""
    optional_names: frozenset[str] = frozenset()
    """Names in :meth:`weight_slots` that a complete checkpoint may lack."""

    @abstractmethod
    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the destination of each checkpoint tensor, by its name there; a tied one once."""

    def own_name(self, name: str) -> str:
        """Return the name in :meth:`weight_slots` of a tensor that some checkpoints call otherwise."""
        return name

    @abstractmethod
    def is_skipped(self, name: str) -> bool:
        """Return True if a checkpoint tensor of this name is ignored, on purpose."""

    @abstractmethod
    def finalize_weights(self) -> None:
        """Derive tensors that depend on several parameters, into preallocated storage; once, at commit."""

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that :meth:`finalize_weights` derives, by engine name."""
        yield from ()

    @abstractmethod
    def named_storage(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and derived tensor, each once, by engine name."""


class CausalLM(Weights):
    """A causal language model over paged KV. Its parameters have no values until it is loaded."""

    config: ModelConfig
    routing: RoutedExperts | None
    """Record of the experts that the last forward chose, or None without experts."""
    forms: Sequence[AttentionForm]
    """Attention form of each layer that has KV: a backend has to serve them all."""
    logits_processor: LogitsProcessor
    in_one_call: bool
    """The fused decoder computes all layers in one call, if the step's attention is compiled, too."""
    has_inner_states = False
    """Hidden states of layers before the last can be taken (``ForwardBatch.hidden``)."""
    rank_rows: RankRows | None = None
    """Rows of data-parallel attention, or None if every rank has all rows."""
    torch_experts = False
    """Another library's code computes some of its experts."""

    @abstractmethod
    def owners(self) -> Iterator[Layer]:
        """Yield layers that own parameters, in the order of the checkpoint; a tied head owns nothing."""

    @abstractmethod
    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Return [S, hidden] after the final norm, for a planned step, under ``torch.inference_mode``."""

    def sample(
        self, batch: ForwardBatch, backend: AttentionBackend, arguments: "SamplingArguments"
    ) -> "SamplerOutput | None":
        """Compute a planned step up to its tokens in one call; None if that is not possible."""
        return None

    @abstractmethod
    def forward_by_layer(
        self, batch: ForwardBatch, backend: AttentionBackend
    ) -> Generator[int, None, Tensor]:
        """Run :meth:`forward` in pieces under ``inference_mode``, yielding each layer's number before it."""

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Map [S, hidden] to [S, vocab], valid until the next call; None if it is a dummy run's."""
        return self.logits_processor.forward(hidden)

    def logits_to_sample(self, hidden: Tensor) -> Tensor | SharedLogits | None:
        """Do as :meth:`logits`, but divide the rows among ranks with rows of their own."""
        return self.logits(hidden) if self.rank_rows is None else self.logits_processor.forward_shared(hidden)

    def check(self) -> None:
        """Compare with the library whose modules compute it, if any; UNSUPPORTED_MODEL if they differ."""

    def own_name(self, name: str) -> str:
        return multimodal.own_name(self.config.architecture, name)

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {slot.name: slot for layer in self.owners() for slot in layer.slots()}

    def finalize_weights(self) -> None:
        for layer in self._deriving:
            layer.finalize()

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self._deriving:
            yield from layer.derived()

    def named_storage(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self.owners():
            for parameter in layer.parameters():
                yield parameter.name, parameter.data
        yield from self.derived()

    @cached_property
    def _deriving(self) -> list[DerivingLayer]:
        return [layer for layer in self.owners() if isinstance(layer, DerivingLayer)]
