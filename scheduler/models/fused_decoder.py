"""The fused decoder: all layers of a model, and what samples, in one call of a kernel that can compute them.

Invariant: a layer's computation is defined in ``layers/``; this module only collects the arguments.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from torch import Tensor

from ..execution.forward import ForwardBatch
from ..kernels import TORCH, best
from ..kernels.attention import PagedStep
from ..kernels.attention_form import PLAIN
from ..kernels.decoder import AdapterGroups, Angles, DecoderKernel, Vocabulary
from ..kernels.decoder_layers import (
    AdapterForm,
    ExpertsForm,
    LayerAdapters,
    LayerKind,
    LayerShape,
    LayerTensors,
)
from ..kernels.native import Sampling
from ..layers.attention import Attention
from ..layers.gated_delta import GatedDelta
from ..layers.linear import PackedTensors
from ..layers.lora import AdapterRows, LinearAdapters
from ..layers.mla import LATENT_EPS, LatentAttention
from ..layers.mlp import GatedMLP
from ..layers.moe import GatedShared, MoeBlock, RoutedExperts
from ..layers.norm import RMSNorm
from ..layers.parameters import Placement, ScaleBlocks
from ..parallel.host_group import HostGroup
from .config import ModelConfig

if TYPE_CHECKING:
    from .decoder import DecoderLayer

T = TypeVar("T")


class _OtherLayerError(Exception):
    pass


class FusedDecoder:
    def __init__(
        self,
        kernel: DecoderKernel,
        experts: Sequence[bool],
        adapters: Sequence[Sequence[LinearAdapters]] | None,
    ) -> None:
        """``experts``: True for each layer with experts; ``adapters``: of each layer's four products."""
        self.kernel, self._experts = kernel, any(experts)
        self._adapters = adapters

    @property
    def adapts(self) -> bool:
        """True if it computes adapters, too."""
        return self._adapters is not None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layers: Sequence["DecoderLayer"],
        last_norm: RMSNorm,
        vocabulary: Vocabulary,
        place: Placement,
    ) -> "FusedDecoder | None":
        """Return the fused decoder; None without kernels, or if a layer or the ranks do not fit."""
        ranks = place.parallel if isinstance(place.parallel, HostGroup) else None
        if best("decoder", place.device, place.dtype) == TORCH or (ranks is None and place.parallel.size > 1):
            return None
        if place.rank_rows is not None:
            return None
        try:
            packed = [_of_layer(layer) for layer in layers]
        except _OtherLayerError:
            return None
        attending = [layer for layer in layers if not isinstance(layer.attention, GatedDelta)]
        if len({_eps_of(layer) for layer in attending}) != 1:
            return None
        adapters = None if place.adapters is None else _adapters_of(layers)
        adapted = None
        if place.adapters is not None and adapters is not None:
            form = AdapterForm(slots=place.adapters.count, rank=place.adapters.width)
            adapted = form, [_packed(each) for each in adapters]
        kernel = DecoderKernel(
            [tensors for tensors, _ in packed],
            [kind for _, kind in packed],
            last_norm.weight,
            _shape_of(config, layers, attending[0].attention, place),
            eps=config.rms_norm_eps,
            head_eps=_eps_of(attending[0]),
            ranks=ranks,
            vocabulary=vocabulary,
            adapters=adapted,
        )
        return cls(kernel, [kind.experts is not None for _, kind in packed], adapters)

    def __call__(
        self,
        tokens: Tensor,
        angles: Sequence[Angles],
        batch: ForwardBatch,
        step: PagedStep,
        routing: RoutedExperts | None,
        sampling: Sampling | None = None,
    ) -> Tensor:
        """Return normalised hidden states [S, hidden], valid until the next call.

        ``tokens`` and ``sampling`` as in :class:`DecoderKernel`.
        """
        record = None
        if routing is not None and self._experts:
            rows = routing.of_layers(tokens.shape[0])
            record = rows.__getitem__
        adapters = None
        if batch.adapters is not None and self._adapters is not None:
            adapters = _groups(AdapterRows(batch.adapters), self._adapters)
        of_step = batch.positions, batch.sample_tokens, step
        return self.kernel(tokens, angles, *of_step, record, adapters, sampling)


def _groups(rows: AdapterRows, layers: Sequence[Sequence[LinearAdapters]]) -> AdapterGroups:
    slots = [slot for slot, _ in rows.groups]
    each = [np.arange(len(rows.slots)) if index is None else index.numpy() for _, index in rows.groups]
    return AdapterGroups(
        tokens=np.concatenate(each),
        slots=np.asarray(slots, np.int64),
        starts=np.cumsum([0, *map(len, each)]),
        changed=[[product.changed_by(slots) for product in layer] for layer in layers],
    )


def _adapters_of(layers: Sequence["DecoderLayer"]) -> list[list[LinearAdapters]] | None:
    """Return the adapters of each layer's products, or None if the kernel cannot compute them."""
    found = []
    for layer in layers:
        attention, block = layer.attention, layer.mlp
        if not isinstance(attention, Attention) or not isinstance(block, GatedMLP):
            return None
        products = [each.adapters for each in (attention.qkv, attention.o, block.gate_up, block.down)]
        packed = [each for each in products if each is not None and each.packed is not None]
        if len(packed) < len(products):
            return None
        found.append(packed)
    return found


def _packed(products: Sequence[LinearAdapters]) -> LayerAdapters:
    return LayerAdapters(*(each.packed or () for each in products))


def _shape_of(
    config: ModelConfig, layers: Sequence["DecoderLayer"], attention: object, place: Placement
) -> LayerShape:
    """``attention``: of all layers that have KV."""
    latent, gated, blocks = None, False, place.blocks or ScaleBlocks()
    delta = next((x.attention.kernel for x in layers if isinstance(x.attention, GatedDelta)), None)
    if isinstance(attention, LatentAttention):
        latent = attention.shape
        heads, kv_heads, size = attention.heads, 1, latent.qk_nope_head_dim + latent.qk_rope_head_dim
    else:
        assert isinstance(attention, Attention)
        shape = attention.shape
        heads, kv_heads, size, gated = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.gated
    return LayerShape(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        rotated=config.rotary_dim,
        from_one=layers[0].input_norm.from_one,
        head_gates=gated,
        latent=latent,
        delta=delta,
        scale_columns=blocks.columns,
        scaled=blocks.dtype,
        codes=blocks.codes,
    )


def _eps_of(layer: "DecoderLayer") -> float | None:
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        return LATENT_EPS
    return attention.shape.qk_norm_eps if isinstance(attention, Attention) else None


def _of_layer(layer: "DecoderLayer") -> tuple[LayerTensors, LayerKind]:
    if isinstance(layer.mlp, GatedMLP) and not layer.mlp.on_all_ranks:
        raise _OtherLayerError  # the ranks alike: empty ones have nothing for the kernel
    attention, (tensors, size, experts) = _of_attention(layer.attention), _of_block(layer.mlp)
    norms: PackedTensors = {"input_norm": layer.input_norm.weight, "mlp_norm": layer.mlp_norm.weight}
    if layer.norms_behind is not None:
        behind_attention, behind_mlp = layer.norms_behind
        norms |= {"behind_attention": behind_attention.weight, "behind_mlp": behind_mlp.weight}
    bend = layer.mlp.bend if isinstance(layer.mlp, GatedMLP) else "silu"
    form = layer.attention.form
    kind = LayerKind(
        intermediate=size,
        bend=bend,
        attention=(PLAIN if form is None else form).kind,
        has_states=form is None,
        experts=experts,
    )
    return LayerTensors(**norms, **attention, **tensors), kind


def _there(found: T | None) -> T:
    if found is None:
        raise _OtherLayerError
    return found


def _of_attention(attention: object) -> PackedTensors:
    if isinstance(attention, LatentAttention | GatedDelta):
        return _there(attention.packed)
    if not isinstance(attention, Attention):
        raise _OtherLayerError
    qkv, o = _there(attention.qkv.packed_as("qkv", bias=True)), _there(attention.o.packed_as("o", bias=True))
    q_norm, k_norm = (None, None) if attention.qk_norms is None else (n.weight for n in attention.qk_norms)
    return qkv | o | {"q_norm": q_norm, "k_norm": k_norm, "sinks": attention.form.sinks}


def _of_block(block: object) -> tuple[PackedTensors, int, ExpertsForm | None]:
    """Return tensors, the width of the dense block or shared experts (0 without), and experts."""
    if isinstance(block, GatedMLP):
        tensors = _there(block.gate_up.packed_as("gate_up")) | _there(block.down.packed_as("down"))
        return tensors, block.gate_up.out_features // 2, None
    if not isinstance(block, MoeBlock):
        raise _OtherLayerError
    tensors = _there(block.router.packed) | _there(block.experts.packed)
    form = ExpertsForm(
        count=block.experts.count,
        held=block.experts.held,
        top_k=block.router.top_k,
        size=block.experts.width,
        bend=block.experts.bend,
        normalize=block.router.normalize,
        in_groups=block.router.in_groups,
    )
    shared = block.shared
    mlp = shared.mlp if isinstance(shared, GatedShared) else shared
    if mlp is None:
        return tensors, 0, form
    if not isinstance(mlp, GatedMLP) or mlp.bend != "silu":
        raise _OtherLayerError
    if mlp.is_empty:
        return tensors, 0, form
    if isinstance(shared, GatedShared):
        tensors |= _there(shared.gate.packed_as("shared_gate"))
    further, size, _ = _of_block(mlp)
    return tensors | further, size, form
