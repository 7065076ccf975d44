"""The decoder that Llama and its relatives share: embedding, blocks of attention and MLP, norm, head.

Invariants:
- An architecture is this skeleton, with attributes of its class for what it does otherwise; anything more
  belongs in a file of its own.
- Names follow the checkpoint (``model.layers.N.self_attn.q_proj.weight``); tensors of layers beyond
  ``num_layers`` are unexpected, but for those of multi-token prediction if the config counts some.
- The residual stream is updated in place. Each rank has all of it, or that of its own rows (``RankRows``).
"""

import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from torch import Tensor

from ..execution.forward import AttentionBackend, ForwardBatch
from ..kernels.attention import PagedStep
from ..kernels.attention_form import AttentionForm, Bend
from ..kernels.decoder import Angles, Vocabulary
from ..kernels.native import Sampling
from ..layers.attention import Attention, AttentionShape
from ..layers.embedding import Embedding
from ..layers.experts import ExpertNames, Experts, SharedExperts, among_experts
from ..layers.fp8_products import Quantizer, Rows
from ..layers.logits_processor import LogitsProcessor
from ..layers.lora import AdapterRows
from ..layers.mlp import GatedMLP
from ..layers.moe import FeedForward, GatedShared, MoeBlock, RoutedExperts, Router
from ..layers.norm import RMSNorm
from ..layers.parameters import Layer, Placement
from ..layers.rotary import RotaryEmbedding
from .causal_lm import CausalLM, result_of
from .config import ModelConfig
from .config_moe import MoeConfig
from .fused_decoder import FusedDecoder
from .multimodal import is_vision_tensor

if TYPE_CHECKING:
    from ..execution.sampler import SamplerOutput, SamplingArguments

_ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers of old checkpoints that follow from the config."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class AttentionBlock(Layer, Protocol):
    @property
    def form(self) -> AttentionForm | None:
        """Attention form over KV, or None if the block has a state per sequence instead."""
        ...

    @property
    def quantizer(self) -> Quantizer | None:
        """Quantizer for the rows of :meth:`forward`, or None if it takes them as they are."""
        ...

    def forward(self, x: Rows, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        """Map [T, hidden] to [T, hidden]; ``cos`` and ``sin`` are [T, 1, rotated size / 2]."""
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
        norm_from_one: bool,
        norms_behind: bool,
        place: Placement,
    ) -> None:
        def norm(name: str, checkpoint: str) -> RMSNorm:
            return RMSNorm(
                f"layers.{layer}.{name}",
                f"model.layers.{layer}.{checkpoint}",
                config.hidden_size,
                config.rms_norm_eps,
                from_one=norm_from_one,
                place=place,
            )

        self.input_norm = norm("input_norm", "input_layernorm")
        self.attention = attention
        before_mlp = "pre_feedforward_layernorm" if norms_behind else "post_attention_layernorm"
        self.mlp_norm = norm("mlp_norm", before_mlp)
        self.mlp = mlp
        self.norms_behind: tuple[RMSNorm, RMSNorm] | None = None
        if norms_behind:
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
        if not len(residual):
            return self.mlp.forward(residual)  # for the rows of other ranks
        rows, addend = (residual, None) if update is None else (update, residual)
        normalized = self.input_norm.rows(rows, self.attention.quantizer, residual=addend)
        x = self.attention.forward(normalized, *rotary, backend)
        if self.norms_behind is None:
            return self.mlp.forward(self.mlp_norm.rows(x, self.mlp.quantizer, residual=residual))
        behind_attention, behind_mlp = self.norms_behind
        x = behind_attention.forward(x)
        x = self.mlp.forward(self.mlp_norm.rows(x, self.mlp.quantizer, residual=residual))
        return behind_mlp.forward(x)

    def layers(self) -> tuple[Layer, ...]:
        return (self.input_norm, self.attention, self.mlp_norm, self.mlp, *(self.norms_behind or ()))


@dataclass(frozen=True, kw_only=True)
class SparseNames:
    """Checkpoint names of the parts of a block; the defaults are Qwen's and DeepSeek's."""

    block: str = "mlp"
    router: str = "gate"
    experts: ExpertNames = field(default_factory=ExpertNames)
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


class _Sampled(NamedTuple):
    batch: ForwardBatch
    output: "SamplerOutput"
    longest: int
    """Positions that the angles of the call reach."""


class DecoderForCausalLM(CausalLM):
    has_inner_states = True
    o_bias: ClassVar[bool] = False
    """The output's projection has a bias if those of queries, keys and values do."""
    qk_norm: ClassVar[bool] = False
    """Queries and keys are normalised per head; False: if the config says so."""
    sinks: ClassVar[bool] = False
    norm_from_one: ClassVar[bool] = False
    """The factor of a norm is ``1 + weight``."""
    norms_behind: ClassVar[bool] = False
    """Both blocks have a norm behind them, too, before they are added to the residual stream."""
    scales_embeddings: ClassVar[bool] = False
    """Embeddings are multiplied by the root of their size."""
    bend: ClassVar[Bend] = "silu"
    names: ClassVar[SparseNames] = SparseNames()
    expert_bias: ClassVar[bool] = False
    """Routers and experts have biases."""

    def __init__(self, config: ModelConfig, *, place: Placement) -> None:
        self.config = config
        self.rank_rows = place.rank_rows
        attention = self.attention_blocks(config, place.of_own_rows)
        mlp, self.routing = self._mlp_blocks(config, place)
        vocab, hidden, from_one = config.vocab_size, config.hidden_size, self.norm_from_one
        tied = config.tie_word_embeddings
        scale = hidden**0.5 if self.scales_embeddings else 1.0
        self._embed = Embedding(
            "embed", "model.embed_tokens", vocab, hidden, projects=tied, scale=scale, place=place
        )
        self._layers = [
            DecoderLayer(
                i, config, *blocks, norm_from_one=from_one, norms_behind=self.norms_behind, place=place
            )
            for i, blocks in enumerate(zip(attention, mlp, strict=True))
        ]
        self._norm = RMSNorm(
            "norm", "model.norm", hidden, config.rms_norm_eps, from_one=from_one, place=place
        )
        self._head: Embedding | None = None
        project = self._embed.project
        if not tied:
            self._head = Embedding("lm_head", "lm_head", vocab, hidden, projects=True, place=place)
            project = self._head.project
        rotary = {rope: RotaryEmbedding(rope, config.rotary_dim, place=place) for rope in set(config.ropes)}
        self._rotary = [rotary[rope] for rope in config.ropes]
        self.logits_processor = LogitsProcessor(project, vocab, place=place)
        vocabulary = self._vocabulary(place)
        self._samples = vocabulary.head is not None
        self._sampled: _Sampled | None = None
        """The last call of :meth:`sample`, if it can be made again."""
        self._kernel = FusedDecoder.of(config, self._layers, self._norm, vocabulary, place)
        self.in_one_call = self._kernel is not None
        self.forms = [block.form for block in attention if block.form is not None]

    def _vocabulary(self, place: Placement) -> Vocabulary:
        table, head = self._embed.table, (self._head or self._embed).head
        if place.blocks is not None and place.blocks.of_head is not place.blocks:
            head = None  # one call has one form of scaled weights
        return Vocabulary(
            size=self.config.vocab_size,
            embeddings=None if table is None else table.parameter.data,
            packed=table is not None and table.packed is not None,
            head=None if head is None else head.packed,
            head_scales=None if head is None or head.packed is None else head.scales,
        )

    def attention_blocks(self, config: ModelConfig, place: Placement) -> Sequence[AttentionBlock]:
        shape = self.attention_shape(config)
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

    def attention_shape(self, config: ModelConfig, *, gated: bool = False) -> AttentionShape:
        return AttentionShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=self.o_bias and config.attention_bias,
            qk_norm_eps=config.rms_norm_eps if self.qk_norm or config.qk_norm else None,
            norm_from_one=self.norm_from_one,
            sinks=self.sinks,
            gated=gated,
        )

    def _mlp_blocks(
        self, config: ModelConfig, place: Placement
    ) -> tuple[list[FeedForward], RoutedExperts | None]:
        """Return the block of every layer, and the experts' record if any."""
        moe, names, hidden, bias = config.moe, self.names, config.hidden_size, self.expert_bias
        routing = None
        if moe is not None:
            routing = RoutedExperts(config.num_layers, moe.top_k, moe.num_experts, place=place)

        def block(layer: int) -> FeedForward:
            name, prefix = f"layers.{layer}.mlp", f"model.layers.{layer}.{names.block}"
            if moe is None or routing is None or not moe.sparse_layers[layer]:
                return GatedMLP(name, prefix, hidden, config.intermediate_size, bend=self.bend, place=place)
            among = None
            if moe.shared_size and not moe.shared_gate and self.bend == "silu":
                module, size = f"{prefix}.{names.shared}", (moe.shared_size, f"{prefix}.experts")
                among = among_experts(module, *size, moe.intermediate_size, names.experts, place)
            experts = Experts(
                f"{name}.experts",
                f"{prefix}.experts",
                moe.num_experts,
                hidden,
                moe.intermediate_size,
                names=names.experts,
                bias=bias,
                bend=self.bend,
                shared=among,
                place=place,
            )
            router = _router(f"{name}.gate", f"{prefix}.{names.router}", hidden, moe, bias, among, place)
            of_shared = place.of_own_rows if place.sends_rows(moe.top_k) else place
            shared = _shared(name, prefix, hidden, moe, names, of_shared) if among is None else None
            return MoeBlock(layer, router, experts, routing, shared=shared, place=place)

        return [block(layer) for layer in range(config.num_layers)], routing

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        adapts = batch.adapters is None or (self._kernel is not None and self._kernel.adapts)
        whole = batch.hidden is None or not batch.hidden.inner
        if self._kernel is not None and backend.paged is not None and adapts and whole:
            return self._in_one_call(self._kernel, self._angles(batch), batch, backend.paged)
        return result_of(self.forward_by_layer(batch, backend))

    def sample(
        self, batch: ForwardBatch, backend: AttentionBackend, arguments: "SamplingArguments"
    ) -> "SamplerOutput | None":
        if self._kernel is None or not self._samples or backend.paged is None:
            return None
        longest, last, self._sampled = max(batch.kv_lens_host), self._sampled, None
        same = last is not None and last.batch is batch and longest <= last.longest
        if last is not None and same and self._kernel.kernel.again(backend.paged):
            self._sampled = last
            return last.output
        if batch.adapters is not None:
            head, rows = self._head or self._embed, AdapterRows(batch.adapters)
            if not self._kernel.adapts or head.is_adapted([slot for slot, _ in rows.groups]):
                return None
        angles = self._angles(batch)
        logits = self.logits_processor.memory(batch.sample_tokens.shape[0])
        out, sampling = arguments(logits, batch.sampling)
        self._in_one_call(self._kernel, angles, batch, backend.paged, sampling)
        if self._embed.table is not None:
            self._sampled = _Sampled(batch, out, min(len(cos) for cos, _ in angles))
        return out

    def _in_one_call(
        self,
        kernel: FusedDecoder,
        angles: Sequence[Angles],
        batch: ForwardBatch,
        step: PagedStep,
        sampling: Sampling | None = None,
    ) -> Tensor:
        tokens = batch.input_ids if self._embed.table is not None else self._embed.forward(batch.input_ids)
        return kernel(tokens, angles, batch, step, self.routing, sampling)

    def _angles(self, batch: ForwardBatch) -> list[Angles]:
        """Return the angles of each layer, for the batch's positions at least."""
        longest = max(batch.kv_lens_host)
        tables = {rotary: rotary.table(longest) for rotary in set(self._rotary)}
        return [tables[rotary] for rotary in self._rotary]

    def forward_by_layer(
        self, batch: ForwardBatch, backend: AttentionBackend
    ) -> Generator[int, None, Tensor]:
        longest = max(batch.kv_lens_host)
        rows = self.rank_rows
        positions = batch.positions if rows is None else rows.own(batch.positions)
        angles = {rotary: rotary.forward(positions, longest) for rotary in set(self._rotary)}
        residual = self._embed.forward(batch.input_ids)
        update: Tensor | None = None
        for number, layer in enumerate(self._layers):
            yield number
            if batch.hidden is not None and number in batch.hidden.inner:
                taken = self._pick(residual, batch.hidden.tokens)
                if update is not None:
                    taken += self._pick(update, batch.hidden.tokens)
                batch.hidden.taken[number] = self._on_all_ranks(taken)
            update = layer.forward(update, residual, angles[self._rotary[number]], backend)
        assert update is not None, "a model has at least one layer"
        sampled = batch.sample_tokens
        if sampled.shape[0] == 0:
            return residual[:0]
        normalized = self._norm.add(self._pick(update, sampled), self._pick(residual, sampled))
        return self._on_all_ranks(normalized)

    def _pick(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x.index_select(0, tokens) if self.rank_rows is None else self.rank_rows.pick(x, tokens)

    def _on_all_ranks(self, picked: Tensor) -> Tensor:
        return picked if self.rank_rows is None else self.rank_rows.sum(picked)

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


def _router(
    name: str,
    module: str,
    hidden: int,
    moe: MoeConfig,
    bias: bool,
    among: SharedExperts | None,
    place: Placement,
) -> Router:
    by = moe.in_groups
    bias = bias if by is None else by.sigmoid
    size = hidden, moe.num_experts, moe.top_k
    shared = 0 if among is None else among.count
    return Router(name, module, *size, by=by, normalize=moe.normalize, bias=bias, shared=shared, place=place)


def _shared(
    name: str, prefix: str, hidden: int, moe: MoeConfig, names: SparseNames, place: Placement
) -> FeedForward | None:
    if not moe.shared_size:
        return None
    module = f"{prefix}.{names.shared}"
    field = "shared_expert_intermediate_size" if moe.shared_gate else "moe_intermediate_size"
    mlp = GatedMLP(f"{name}.shared", module, hidden, moe.shared_size, place=place, partial=True, field=field)
    if not moe.shared_gate:
        return mlp
    return GatedShared(f"{name}.shared_gate", f"{prefix}.{names.shared_gate}", hidden, mlp, place=place)
