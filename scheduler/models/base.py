"""The interface of models to the engine."""

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..execution.forward import AttentionBackend, ForwardBatch
from ..kernels.attention_form import AttentionForm
from ..layers.moe import RoutedExperts
from ..layers.parameters import WeightSlot
from .config import ModelConfig


class Weights(Protocol):
    """Interface of a model of any kind to updates, checks and counts of weights."""

    @property
    def components(self) -> tuple[str, ...]:
        """Return parts with folders of their own, the default of an update first; empty for a model of one.

        A tensor of a part is known as ``component.name``.
        """
        ...

    @property
    def kept_components(self) -> frozenset[str]:
        """Return those of :attr:`components` kept on the host, where updates write them."""
        ...

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the destination of each checkpoint tensor, by its name there."""
        ...

    @property
    def optional_names(self) -> frozenset[str]:
        """Return names in :meth:`weight_slots` that a complete checkpoint may lack."""
        ...

    def own_name(self, name: str) -> str:
        """Return the name in :meth:`weight_slots` of a tensor that some checkpoints call otherwise."""
        ...

    def is_skipped(self, name: str) -> bool:
        """Return True if a checkpoint tensor of this name is ignored, on purpose."""
        ...

    def finalize_weights(self) -> None:
        """Derive tensors that depend on several parameters, into preallocated storage; once, at commit."""
        ...

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that :meth:`finalize_weights` derives, by engine name."""
        ...

    def named_storage(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter and derived tensor, each once, by engine name."""
        ...


class CausalLM(Weights, Protocol):
    """A causal language model over paged KV. Its parameters have no values until it is loaded."""

    config: ModelConfig
    routing: RoutedExperts | None
    """Record of the experts that the last forward chose, or None without experts."""

    @property
    def in_one_call(self) -> bool:
        """The fused decoder computes all layers in one call, if the step's attention is compiled, too."""
        ...

    @property
    def forms(self) -> Sequence[AttentionForm]:
        """Attention form of each layer that has KV: a backend has to serve them all."""
        ...

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Return hidden states of the step's S sampled tokens, [S, hidden], after the final norm.

        ``backend.plan(batch)`` has been called. Runs under ``torch.inference_mode``.
        """
        ...

    def forward_by_layer(
        self, batch: ForwardBatch, backend: AttentionBackend
    ) -> Generator[int, None, Tensor]:
        """Run :meth:`forward`, yielding each layer's number before it is computed.

        For weights that are there layer by layer, and work that lets others in between. Pieces run under
        ``torch.inference_mode``.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Map [S, hidden] to [S, vocab] in the model's dtype, valid until the next call.

        None within :func:`~..layers.logits_processor.autotune_dummy_run_mode`: the head was not called then.
        """
        ...


@runtime_checkable
class ForeignModel(Protocol):
    """A causal language model whose modules are another library's."""

    torch_experts: bool

    @property
    def in_one_call(self) -> bool: ...

    def check(self) -> None:
        """Compare with the other library's results; CaesuraError UNSUPPORTED_MODEL if they differ."""
        ...
