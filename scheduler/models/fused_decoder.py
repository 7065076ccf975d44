"""The fused decoder: all layers of a model in one call of a compiled kernel, if it can compute them.

Invariant: a layer's computation is defined in ``layers/``; this module only collects the arguments.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..execution.forward import ForwardBatch
from ..kernels import TORCH, best
from ..kernels.attention import PagedStep
from ..kernels.decoder import Angles, DecoderKernel
from ..kernels.decoder_layers import ExpertsForm, LatentSizes, LayerKind, LayerShape, LayerTensors
from ..layers.attention import Attention
from ..layers.linear import Linear
from ..layers.mla import LATENT_EPS, LatentAttention
from ..layers.mlp import GatedMLP
from ..layers.moe import GatedShared, MoeBlock, RoutedExperts
from ..layers.norm import RMSNorm
from ..layers.parameters import Placement
from .config import ModelConfig

if TYPE_CHECKING:
    from .decoder import DecoderLayer

Packed = dict[str, Any]
"""Tensors, or None, by the names of :class:`~..kernels.decoder_layers.LayerTensors`."""


class FusedDecoder:
    def __init__(self, kernel: DecoderKernel, experts: Sequence[bool]) -> None:
        """``experts``: True for each layer with experts."""
        self.kernel, self._experts = kernel, any(experts)

    @classmethod
    def of(
        cls, config: ModelConfig, layers: Sequence["DecoderLayer"], last_norm: RMSNorm, place: Placement
    ) -> "FusedDecoder | None":
        """Return the fused decoder; None without kernels, or if a layer or the ranks do not fit."""
        ranks = place.parallel
        if best("decoder", place.device, place.dtype) == TORCH or (ranks.size > 1 and ranks.compiled is None):
            return None
        packed = [found for layer in layers if (found := _of_layer(layer)) is not None]
        if len(packed) < len(layers) or len({_eps_of(layer) for layer in layers}) > 1:
            return None
        kernel = DecoderKernel(
            [tensors for tensors, _ in packed],
            [kind for _, kind in packed],
            last_norm.weight,
            _shape_of(config, layers[0], place),
            eps=config.rms_norm_eps,
            head_eps=_eps_of(layers[0]),
            ranks=ranks.compiled,
        )
        return cls(kernel, [kind.experts is not None for _, kind in packed])

    def __call__(
        self,
        embedded: Tensor,
        angles: Sequence[Angles],
        batch: ForwardBatch,
        step: PagedStep,
        routing: RoutedExperts | None,
    ) -> Tensor:
        """Return normalised hidden states of the sampled tokens, [S, hidden], valid until the next call.

        ``embedded`` [T, hidden] is overwritten; ``angles`` are those of each layer.
        """
        record = None
        if routing is not None and self._experts:
            rows = routing.of_layers(embedded.shape[0])
            record = rows.__getitem__
        return self.kernel(embedded, angles, batch.positions, batch.sample_tokens, step, record)


def _shape_of(config: ModelConfig, layer: "DecoderLayer", place: Placement) -> LayerShape:
    attention, hidden = layer.attention, config.hidden_size
    scale_columns = 0 if place.fp8 is None else place.fp8.columns
    from_one = layer.input_norm.from_one
    if isinstance(attention, LatentAttention):
        sizes = attention.shape
        nope, rope = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim
        return LayerShape(
            hidden=hidden,
            heads=attention.heads,
            kv_heads=1,
            head_size=nope + rope,
            rotated=rope,
            from_one=from_one,
            scale_columns=scale_columns,
            latent=LatentSizes(
                latent=sizes.kv_lora_rank,
                q_rank=sizes.q_lora_rank or 0,
                nope=nope,
                value=sizes.v_head_dim,
                interleaved=sizes.rope_interleave,
            ),
        )
    assert isinstance(attention, Attention)
    shape = attention.shape
    return LayerShape(
        hidden=hidden,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_size=shape.head_dim,
        rotated=config.rotary_dim,
        from_one=from_one,
        scale_columns=scale_columns,
    )


def _eps_of(layer: "DecoderLayer") -> float | None:
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        return LATENT_EPS
    return attention.shape.qk_norm_eps if isinstance(attention, Attention) else None


def _of_layer(layer: "DecoderLayer") -> tuple[LayerTensors, LayerKind] | None:
    attention, block, form = _of_attention(layer.attention), _of_block(layer.mlp), layer.attention.form
    if attention is None or block is None or form is None:
        return None
    tensors, size, experts = block
    norms: Packed = {"input_norm": layer.input_norm.weight, "mlp_norm": layer.mlp_norm.weight}
    if layer.norms_behind is not None:
        behind_attention, behind_mlp = layer.norms_behind
        norms |= {"behind_attention": behind_attention.weight, "behind_mlp": behind_mlp.weight}
    bend = layer.mlp.bend if isinstance(layer.mlp, GatedMLP) else "silu"
    kind = LayerKind(intermediate=size, bend=bend, attention=form.kind, experts=experts)
    return LayerTensors(**norms, **attention, **tensors), kind


def _of_linear(name: str, linear: Linear) -> Packed | None:
    return None if linear.packed is None else {name: linear.packed, f"{name}_scales": linear.scales}


def _of_attention(attention: object) -> Packed | None:
    if isinstance(attention, LatentAttention):
        return None if attention.packed is None else attention.packed._asdict()
    if not isinstance(attention, Attention) or attention.shape.gated:
        return None
    qkv, o, norms = _of_linear("qkv", attention.qkv), _of_linear("o", attention.o), attention.qk_norms
    if qkv is None or o is None:
        return None
    q_norm, k_norm = (None, None) if norms is None else (norm.weight for norm in norms)
    return {
        **qkv,
        "qkv_bias": attention.qkv.bias,
        "q_norm": q_norm,
        "k_norm": k_norm,
        **o,
        "o_bias": attention.o.bias,
        "sinks": attention.form.sinks,
    }


def _of_block(block: object) -> tuple[Packed, int, ExpertsForm | None] | None:
    """Return tensors, the width of the dense block or shared experts, and experts."""
    if isinstance(block, GatedMLP):
        gate_up, down = _of_linear("gate_up", block.gate_up), _of_linear("down", block.down)
        if gate_up is None or down is None:
            return None
        return gate_up | down, block.gate_up.out_features // 2, None
    if not isinstance(block, MoeBlock):
        return None
    router, experts, shared = block.router.packed, block.experts.packed, _of_shared(block.shared)
    if router is None or experts is None or shared is None:
        return None
    tensors: Packed = {
        "router": router[0],
        "router_bias": router[1],
        **{f"experts_{name}": tensor for name, tensor in experts._asdict().items()},
    }
    form = ExpertsForm(
        count=block.experts.count,
        top_k=block.router.top_k,
        size=block.experts.width,
        bend=block.experts.bend,
        normalize=block.router.normalize,
        in_groups=block.router.in_groups,
    )
    return tensors | shared[0], shared[1], form


def _of_shared(shared: object) -> tuple[Packed, int] | None:
    """Return tensors and width (0 without shared experts), or None for other storage."""
    if shared is None:
        return {}, 0
    gate: Packed = {}
    if isinstance(shared, GatedShared):
        gated = _of_linear("shared_gate", shared.gate)
        if gated is None:
            return None
        gate, shared = gated, shared.mlp
    found = _of_block(shared)
    if not isinstance(shared, GatedMLP) or shared.bend != "silu" or found is None:
        return None
    return found[0] | gate, found[1]
