"""What the engine asks of a model."""

from collections.abc import Generator, Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..execution.forward import AttentionBackend, ForwardBatch
from ..kernels.forms import AttentionForm
from ..layers.moe import RoutedExperts
from ..layers.parameters import WeightSlot
from .config import ModelConfig


class Weights(Protocol):
    """What updates, checks and counts of weights ask of a model of any kind."""

    @property
    def components(self) -> tuple[str, ...]:
        """Parts with folders of their own, the one first that an update writes unless it names another; empty for a model of
        one piece. A tensor of a part is known as ``component.name``."""
        ...

    @property
    def kept_components(self) -> frozenset[str]:
        """Those of :attr:`components` whose values lie on the host, also while the device has them: they survive a release, and
        updates write them there."""
        ...

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Where each checkpoint tensor goes, by its name there."""
        ...

    @property
    def optional_names(self) -> frozenset[str]:
        """Names in :meth:`weight_slots` that a complete checkpoint may lack."""
        ...

    def own_name(self, name: str) -> str:
        """The name in :meth:`weight_slots` of a tensor that some checkpoints and trainers know by another; else as it is."""
        ...

    def is_skipped(self, name: str) -> bool:
        """Whether a checkpoint tensor of this name is ignored, on purpose."""
        ...

    def finalize_weights(self) -> None:
        """Derive what depends on several parameters, into preallocated storage; once, at commit."""
        ...

    def derived(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that :meth:`finalize_weights` derives, by engine name."""
        ...

    def named_storage(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and derived tensor, each once, by engine name."""
        ...


class CausalLM(Weights, Protocol):
    """A causal language model over paged KV. Its parameters are allocated, and hold nothing, until it is loaded."""

    config: ModelConfig
    routing: RoutedExperts | None
    """Which experts the last forward chose. None: a model without experts."""

    @property
    def in_one_call(self) -> bool:
        """A compiled kernel computes all layers at once, where the step's attention is compiled, too."""
        ...

    @property
    def forms(self) -> Sequence[AttentionForm]:
        """Of the attention of each layer that has KV: what a backend has to serve."""
        ...

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Hidden states of the step's S sampled tokens, [S, hidden], after the final norm.

        ``backend.plan(batch)`` has been called. Runs under ``torch.inference_mode``.
        """
        ...

    def forward_by_layer(
        self, batch: ForwardBatch, backend: AttentionBackend
    ) -> Generator[int, None, Tensor]:
        """:meth:`forward` in pieces: yields each layer's number before it is computed, returns the hidden states.

        For weights that are there layer by layer, and for work that must let others in between. Each step runs under
        ``torch.inference_mode``.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[S, hidden] to [S, vocab] in the model's dtype, valid until the next call.

        None within :func:`~..layers.logits_processor.autotune_dummy_run_mode`, and then the head was not called.
        """
        ...


@runtime_checkable
class ForeignModel(Protocol):
    """A causal language model whose modules are another library's."""

    torch_experts: bool
    """It has experts, and some of them are computed by the other library's code."""

    @property
    def in_one_call(self) -> bool:
        """As of any :class:`CausalLM`."""
        ...

    def check(self) -> None:
        """Compare with what the other library computes; the weights are loaded.

        Raises:
            CaesuraError: UNSUPPORTED_MODEL, it differs.
        """
        ...
