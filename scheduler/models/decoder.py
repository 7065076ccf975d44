"""The decoder that Llama and its relatives share: embedding, blocks of attention and MLP, norm, head.

Invariants:
- An architecture is this skeleton and its :class:`AttentionShape`; anything more belongs in a file of its
  own.
- Names follow the checkpoint (``model.layers.N.self_attn.q_proj.weight``); tensors of layers beyond
  ``num_layers`` are unexpected, but for those of multi-token prediction if the config counts some.
- The residual stream is updated in place; each rank has all of it.
"""

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from ..execution.forward import AttentionBackend, ForwardBatch
from ..kernels.attention_form import AttentionForm, Bend
from ..layers.attention import Attention, AttentionShape
from ..layers.embedding import Embedding, OutputHead
from ..layers.logits_processor import LogitsProcessor
from ..layers.mlp import GatedMLP
from ..layers.moe import RoutedExperts
from ..layers.norm import RMSNorm
from ..layers.parameters import Layer, Placement
from ..layers.rotary import RotaryEmbedding
from .base import CausalLM
from .config import ModelConfig
from .fused_decoder import FusedDecoder
from .multimodal import is_vision_tensor

_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers of old checkpoints that follow from the config."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Variants:
    norm_from_one: bool = False
    norms_behind: bool = False
    """Both blocks have a norm behind them, too, before they are added to the residual stream."""
    embedding_scale: float = 1.0


LLAMA = Variants()


class AttentionBlock(Layer, Protocol):
    @property
    def form(self) -> AttentionForm | None:
        """Attention form over KV, or None if the block has a state per sequence instead."""
        ...

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        """Map [T, hidden] to [T, hidden]; ``cos`` and ``sin`` are [T, 1, rotated size / 2]."""
        ...


class FeedForward(Layer, Protocol):
    def forward(self, x: Tensor) -> Tensor:
        """Map [T, hidden] to [T, hidden], in fresh memory."""
        ...


class DecoderLayer:
    """Attention and feed-forward, each behind a norm, around one residual stream."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        attention: AttentionBlock,
        mlp: FeedForward,
        *,
        variants: Variants,
        place: Placement,
    ) -> None:
        def norm(name: str, checkpoint: str) -> RMSNorm:
            return RMSNorm(
                f"layers.{layer}.{name}",
                f"model.layers.{layer}.{checkpoint}",
                config.hidden_size,
                config.rms_norm_eps,
                from_one=variants.norm_from_one,
                place=place,
            )

        self.input_norm = norm("input_norm", "input_layernorm")
        self.attention = attention
        before_mlp = "pre_feedforward_layernorm" if variants.norms_behind else "post_attention_layernorm"
        self.mlp_norm = norm("mlp_norm", before_mlp)
        self.mlp = mlp
        self.norms_behind: tuple[RMSNorm, RMSNorm] | None = None
        if variants.norms_behind:
            self.norms_behind = (
                norm("attention_out_norm", "post_attention_layernorm"),
                norm("mlp_out_norm", "post_feedforward_layernorm"),
            )

    def forward(
        self,
        update: Tensor | None,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        backend: AttentionBackend,
    ) -> Tensor:
        """Add ``update`` (None: nothing yet) to ``residual`` [T, hidden]; return the next update."""
        x = self.input_norm.forward(residual) if update is None else self.input_norm.add(update, residual)
        x = self.attention.forward(x, *rotary, backend)
        if self.norms_behind is None:
            return self.mlp.forward(self.mlp_norm.add(x, residual))
        behind_attention, behind_mlp = self.norms_behind
        x = self.mlp.forward(self.mlp_norm.add(behind_attention.forward(x), residual))
        return behind_mlp.forward(x)

    def layers(self) -> tuple[Layer, ...]:
        return (self.input_norm, self.attention, self.mlp_norm, self.mlp, *(self.norms_behind or ()))


class DecoderForCausalLM(CausalLM):
    def __init__(
        self,
        config: ModelConfig,
        attention: Sequence[AttentionBlock],
        mlp: Sequence[FeedForward],
        *,
        place: Placement,
        routing: RoutedExperts | None = None,
        variants: Variants = LLAMA,
    ) -> None:
        """``attention``, ``mlp``: one block per layer; ``routing``: record of their experts, or None."""
        self.config = config
        self.routing = routing
        vocab, hidden = config.vocab_size, config.hidden_size
        tied = config.tie_word_embeddings
        self._embed = Embedding(
            "embed",
            "model.embed_tokens",
            vocab,
            hidden,
            tied=tied,
            scale=variants.embedding_scale,
            place=place,
        )
        self._layers = [
            DecoderLayer(i, config, *blocks, variants=variants, place=place)
            for i, blocks in enumerate(zip(attention, mlp, strict=True))
        ]
        self._norm = RMSNorm(
            "norm",
            "model.norm",
            hidden,
            config.rms_norm_eps,
            from_one=variants.norm_from_one,
            place=place,
        )
        self._head: OutputHead | None = None
        project = self._embed.project
        if not tied:
            self._head = OutputHead("lm_head", "lm_head", vocab, hidden, place=place)
            project = self._head.project
        rotary = {rope: RotaryEmbedding(rope, config.rotary_dim, place=place) for rope in set(config.ropes)}
        self._rotary = [rotary[rope] for rope in config.ropes]
        self.logits_processor = LogitsProcessor(project, vocab, place=place)
        self._kernel = FusedDecoder.of(config, self._layers, self._norm, place)
        self.in_one_call = self._kernel is not None
        self.forms = [block.form for block in attention if block.form is not None]

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        if self._kernel is not None and backend.paged is not None:
            longest = max(batch.kv_lens_host)
            tables = {rotary: rotary.table(longest) for rotary in set(self._rotary)}
            return self._kernel(
                self._embed.forward(batch.input_ids),
                [tables[rotary] for rotary in self._rotary],
                batch,
                backend.paged,
                self.routing,
            )
        steps = self.forward_by_layer(batch, backend)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cast("Tensor", end.value)

    def forward_by_layer(
        self, batch: ForwardBatch, backend: AttentionBackend
    ) -> Generator[int, None, Tensor]:
        longest = max(batch.kv_lens_host)
        angles = {rotary: rotary.forward(batch.positions, longest) for rotary in set(self._rotary)}
        residual = self._embed.forward(batch.input_ids)
        update: Tensor | None = None
        for number, layer in enumerate(self._layers):
            yield number
            update = layer.forward(update, residual, angles[self._rotary[number]], backend)
        assert update is not None, "a model has at least one layer"
        sampled = batch.sample_tokens
        if sampled.shape[0] == 0:
            return residual[:0]
        return self._norm.add(update.index_select(0, sampled), residual.index_select(0, sampled))

    def logits(self, hidden: Tensor) -> Tensor | None:
        return self.logits_processor.forward(hidden)

    def check(self) -> None:
        pass  # its modules are the engine's own

    def is_skipped(self, name: str) -> bool:
        """Return True for rotary buffers, multi-token prediction, copies of tied heads, and vision towers."""
        if is_vision_tensor(self.config.architecture, name):
            return True
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        match, layers = _LAYER.match(name), self.config.num_layers
        if match is not None and layers <= int(match[1]) < layers + self.config.num_mtp_layers:
            return True
        return _ROTARY_BUFFER.fullmatch(name) is not None

    def owners(self) -> Iterator[Layer]:
        yield self._embed
        for layer in self._layers:
            yield from layer.layers()
        yield self._norm
        if self._head is not None:
            yield self._head


def dense_attention(config: ModelConfig, shape: AttentionShape, place: Placement) -> list[Attention]:
    return [
        Attention(
            f"layers.{i}.attention",
            f"model.layers.{i}.self_attn",
            i,
            shape,
            form=AttentionForm(window=window),
            place=place,
        )
        for i, window in enumerate(config.windows)
    ]


def dense_mlp(config: ModelConfig, place: Placement, *, bend: Bend = "silu") -> list[GatedMLP]:
    return [
        GatedMLP(
            f"layers.{i}.mlp",
            f"model.layers.{i}.mlp",
            config.hidden_size,
            config.intermediate_size,
            bend=bend,
            place=place,
        )
        for i in range(config.num_layers)
    ]


def attention_shape(
    config: ModelConfig,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    norm_from_one: bool = False,
    sinks: bool = False,
    gated: bool = False,
) -> AttentionShape:
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm_eps=config.rms_norm_eps if qk_norm else None,
        norm_from_one=norm_from_one,
        sinks=sinks,
        gated=gated,
    )
