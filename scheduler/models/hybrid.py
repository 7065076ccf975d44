"""Decoder whose layers either attend to KV or have a state."""

from collections.abc import Sequence

from ..cache.pool import StateShape
from ..kernels.attention_form import AttentionForm
from ..layers.attention import Attention, AttentionShape
from ..layers.gated_delta import DeltaShape, GatedDelta
from ..layers.moe import RoutedExperts
from ..layers.parameters import Placement
from .config import ModelConfig
from .decoder import AttentionBlock, DecoderForCausalLM, FeedForward, Variants

_NEXT_TOKENS = "mtp."


def state_shape(config: ModelConfig) -> StateShape:
    """Return the state of the linear-attention layers, over all ranks; the config has some."""
    delta = config.delta
    assert delta is not None, "a hybrid has layers of linear attention"
    return StateShape(
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_size=delta.key_size,
        value_size=delta.value_size,
        kernel=delta.kernel,
    )


def hybrid_attention(
    config: ModelConfig, shape: AttentionShape, place: Placement, *, by_key_head: bool
) -> list[AttentionBlock]:
    """Return the block of every layer; those with KV and those with a state are counted apart."""
    assert config.delta is not None
    delta = DeltaShape(
        hidden_size=config.hidden_size,
        state=state_shape(config),
        eps=config.rms_norm_eps,
        by_key_head=by_key_head,
    )
    blocks: list[AttentionBlock] = []
    counts = {True: 0, False: 0}
    for layer, linear in enumerate(config.delta.layers):
        name, module, number = f"layers.{layer}.attention", f"model.layers.{layer}", counts[linear]
        counts[linear] += 1
        if linear:
            blocks.append(GatedDelta(name, f"{module}.linear_attn", number, delta, place=place))
        else:
            blocks.append(
                Attention(name, f"{module}.self_attn", number, shape, form=AttentionForm(), place=place)
            )
    return blocks


class HybridForCausalLM(DecoderForCausalLM):
    """Factors of all norms are ``1 + weight``; the head of multi-token prediction is ignored."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Sequence[AttentionBlock],
        mlp: Sequence[FeedForward],
        *,
        place: Placement,
        routing: RoutedExperts | None = None,
    ) -> None:
        variants = Variants(norm_from_one=True)
        super().__init__(config, attention, mlp, place=place, routing=routing, variants=variants)

    def is_skipped(self, name: str) -> bool:
        return name.startswith(_NEXT_TOKENS) or super().is_skipped(name)
