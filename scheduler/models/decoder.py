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
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..execution.forward import AttentionBackend, ForwardBatch
from ..kernels.attention_form import AttentionForm, Bend
from ..kernels.decoder_layers import GroupRouting
from ..layers.attention import Attention, AttentionShape
from ..layers.embedding import Embedding
from ..layers.experts import ExpertNames, Experts
from ..layers.gated_delta import DeltaShape, GatedDelta
from ..layers.logits_processor import LogitsProcessor
from ..layers.mlp import GatedMLP
from ..layers.moe import GatedShared, MoeBlock, RoutedExperts, Router, Shared
from ..layers.norm import RMSNorm
from ..layers.parameters import Layer, Placement
from ..layers.rotary import RotaryEmbedding
from .causal_lm import CausalLM, result_of
from .config import ModelConfig
from .config_moe import MoeConfig
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
    has_inner_states = True

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
        table, scale = ("embed", "model.embed_tokens", vocab, hidden), variants.embedding_scale
        self._embed = Embedding(*table, projects=tied, scale=scale, place=place)
        self._layers = [
            DecoderLayer(i, config, *blocks, variants=variants, place=place)
            for i, blocks in enumerate(zip(attention, mlp, strict=True))
        ]
        self._norm = RMSNorm(
            "norm", "model.norm", hidden, config.rms_norm_eps, from_one=variants.norm_from_one, place=place
        )
        self._head: Embedding | None = None
        project = self._embed.project
        if not tied:
            self._head = Embedding("lm_head", "lm_head", vocab, hidden, projects=True, place=place)
            project = self._head.project
        rotary = {rope: RotaryEmbedding(rope, config.rotary_dim, place=place) for rope in set(config.ropes)}
        self._rotary = [rotary[rope] for rope in config.ropes]
        self.logits_processor = LogitsProcessor(project, vocab, place=place)
        self._kernel = FusedDecoder.of(config, self._layers, self._norm, place)
        self.in_one_call = self._kernel is not None
        self.forms = [block.form for block in attention if block.form is not None]

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        adapts = batch.adapters is None or (self._kernel is not None and self._kernel.adapts)
        whole = batch.hidden is None or not batch.hidden.inner
        if self._kernel is not None and backend.paged is not None and adapts and whole:
            longest = max(batch.kv_lens_host)
            tables = {rotary: rotary.table(longest) for rotary in set(self._rotary)}
            return self._kernel(
                self._embed.forward(batch.input_ids),
                [tables[rotary] for rotary in self._rotary],
                batch,
                backend.paged,
                self.routing,
            )
        return result_of(self.forward_by_layer(batch, backend))

    def forward_by_layer(
        self, batch: ForwardBatch, backend: AttentionBackend
    ) -> Generator[int, None, Tensor]:
        longest = max(batch.kv_lens_host)
        angles = {rotary: rotary.forward(batch.positions, longest) for rotary in set(self._rotary)}
        residual = self._embed.forward(batch.input_ids)
        update: Tensor | None = None
        for number, layer in enumerate(self._layers):
            yield number
            if batch.hidden is not None and number in batch.hidden.inner:
                batch.hidden.take(number, residual, update)
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


def attention_shape(config: ModelConfig, *, qk_norm: bool = False, **variants: bool) -> AttentionShape:
    return AttentionShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qk_norm_eps=config.rms_norm_eps if qk_norm else None,
        **variants,
    )


@dataclass(frozen=True, kw_only=True)
class SparseNames:
    """Checkpoint names of the parts of a block; the defaults are Qwen's and DeepSeek's."""

    block: str = "mlp"
    router: str = "gate"
    experts: ExpertNames = field(default_factory=ExpertNames)
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


def sparse_mlp(
    config: ModelConfig,
    place: Placement,
    *,
    names: SparseNames = SparseNames(),
    bias: bool = False,
    bend: Bend = "silu",
) -> tuple[list[FeedForward], RoutedExperts | None]:
    """Return the block of every layer, and the experts' record if any; ``bias``: of routers and experts."""
    moe = config.moe
    if moe is None:
        return [*dense_mlp(config, place)], None
    routing = RoutedExperts(config.num_layers, moe.top_k, moe.num_experts, place=place)

    def block(layer: int) -> FeedForward:
        name, prefix = f"layers.{layer}.mlp", f"model.layers.{layer}.{names.block}"
        if not moe.sparse_layers[layer]:
            return GatedMLP(name, prefix, config.hidden_size, config.intermediate_size, place=place)
        experts = Experts(
            f"{name}.experts",
            f"{prefix}.experts",
            moe.num_experts,
            config.hidden_size,
            moe.intermediate_size,
            names=names.experts,
            bias=bias,
            bend=bend,
            place=place,
        )
        router = _router(f"{name}.gate", f"{prefix}.{names.router}", config.hidden_size, moe, bias, place)
        shared = _shared(name, prefix, config, names, place)
        return MoeBlock(layer, router, experts, routing, shared=shared, place=place)

    return [block(layer) for layer in range(config.num_layers)], routing


def _router(name: str, module: str, hidden: int, moe: MoeConfig, bias: bool, place: Placement) -> Router:
    by = None
    if moe.grouped:
        by = GroupRouting(
            groups=moe.num_groups,
            top_groups=moe.top_groups,
            sigmoid=moe.scoring == "sigmoid",
            best_two=moe.group_score == "top2",
            scale=moe.routed_scale,
        )
        bias = moe.score_bias
    size = hidden, moe.num_experts, moe.top_k
    return Router(name, module, *size, by=by, normalize=moe.normalize, bias=bias, place=place)


def _shared(
    name: str, prefix: str, config: ModelConfig, names: SparseNames, place: Placement
) -> Shared | None:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None, "an architecture with experts has a config of them"
    if not moe.shared_size:
        return None
    module = f"{prefix}.{names.shared}"
    field = "shared_expert_intermediate_size" if moe.shared_gate else "moe_intermediate_size"
    mlp = GatedMLP(f"{name}.shared", module, hidden, moe.shared_size, place=place, partial=True, field=field)
    if not moe.shared_gate:
        return mlp
    return GatedShared(f"{name}.shared_gate", f"{prefix}.{names.shared_gate}", hidden, mlp, place=place)


def hybrid_attention(config: ModelConfig, place: Placement, *, by_key_head: bool) -> list[AttentionBlock]:
    """Return the block of every layer; those with KV and those with a state are counted apart."""
    bias = config.attention_bias
    shape = attention_shape(config, qkv_bias=bias, o_bias=bias, qk_norm=True, norm_from_one=True, gated=True)
    assert config.delta is not None
    delta = DeltaShape(
        hidden_size=config.hidden_size,
        state=config.delta.state,
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
