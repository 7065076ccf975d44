"""Arguments of the fused decoder kernel, and checks that they fit.

Invariant: whatever passes the checks is read within its bounds; an absent tensor is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import native
from .attention_form import PLAIN, Bend, FormKind
from .delta import DeltaStep
from .elementwise import BENDS
from .linear import FP8, Codes, Scales, holds
from .native import LayerForm

MAX_GROUPS = 64
"""Largest number of expert groups that routing by groups can choose from; operations.h has the same."""


class LayerTensors(NamedTuple):
    """One layer's parameters; products are packed storage (``linear.py``)."""

    input_norm: Tensor
    qkv: Tensor
    """With latent attention: queries or their latents, then latents and rotated keys."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    """Weight of the heads' norm, or of latents with latent attention; so is ``k_norm``."""
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor | None = None
    """First product of the dense block, or of the shared experts."""
    down: Tensor | None = None
    behind_attention: Tensor | None = None
    behind_mlp: Tensor | None = None
    sinks: Tensor | None = None
    q_up: Tensor | None = None
    w_kc: Tensor | None = None
    """With latent attention, per head: latents by unrotated keys, packed."""
    w_vc: Tensor | None = None
    """With latent attention, per head: values by latents, packed."""
    filters: Tensor | None = None
    """Parameters of a layer with states (``delta.py``), whose products are ``qkv`` and ``o``."""
    log_rate: Tensor | None = None
    rate_bias: Tensor | None = None
    delta_norm: Tensor | None = None
    router: Tensor | None = None
    router_bias: Tensor | None = None
    """float32 bias of routing by groups, used for the choice alone."""
    experts_gate_up: Tensor | None = None
    experts_gate_up_bias: Tensor | None = None
    experts_down: Tensor | None = None
    experts_down_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    qkv_scales: Tensor | None = None
    """Scales of a quantised weight (``linear.py``); the following fields likewise."""
    o_scales: Tensor | None = None
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None
    q_up_scales: Tensor | None = None
    experts_gate_up_scales: Tensor | None = None
    experts_down_scales: Tensor | None = None
    shared_gate_scales: Tensor | None = None


class LayerAdapters(NamedTuple):
    """Packed factors of one layer's adapters, those of all slots in each tensor (``layers/lora.py``)."""

    qkv: Sequence[Tensor]
    """A of all three, then B of queries, keys and values."""
    o: Sequence[Tensor]
    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterForm:
    slots: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRouting:
    """Choice by groups of experts (``layers/moe.py``)."""

    groups: int
    top_groups: int
    sigmoid: bool
    best_two: bool
    """A group's score is the sum of its two best, else its best."""
    scale: float

    def serves(self, experts: int, top_k: int) -> bool:
        """Return True if kernels can choose ``top_k`` of ``experts`` so."""
        size = experts // max(self.groups, 1)
        return (
            0 < self.top_groups <= self.groups <= MAX_GROUPS
            and self.groups * size == experts
            and size >= (2 if self.best_two else 1)
            and top_k <= self.top_groups * size
        )


NO_GROUPS = GroupRouting(groups=1, top_groups=1, sigmoid=False, best_two=False, scale=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """A layer's experts; sizes are this rank's."""

    count: int
    held: range
    """Experts whose weights this rank has."""
    top_k: int
    size: int
    bend: Bend
    normalize: bool
    in_groups: GroupRouting | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    intermediate: int
    """Width of the dense block, or of the shared experts; 0 without them."""
    bend: Bend = "silu"
    attention: FormKind = PLAIN.kind
    has_states: bool = False
    """The delta rule over states instead of attention."""
    experts: ExpertsForm | None = None

    def as_struct(self, record: Tensor | None) -> LayerForm:
        """``record``: integers [T, k] where the choice is noted."""
        attention, experts = self.attention, self.experts
        form = LayerForm(
            intermediate=self.intermediate,
            bend=BENDS[self.bend],
            window=attention.window or 0,
            has_states=self.has_states,
            scale=attention.scale or 0.0,
            softcap=attention.softcap or 0.0,
        )
        if experts is not None:
            form.experts, form.top_k, form.expert_size = experts.count, experts.top_k, experts.size
            form.first_expert, form.held_experts = experts.held.start, len(experts.held)
            form.expert_bend, form.normalize = BENDS[experts.bend], experts.normalize
            if record is not None:
                form.record_row, form.record_bytes = record.stride(0), record.element_size()
            if (by := experts.in_groups) is not None:
                form.groups, form.top_groups, form.route_scale = by.groups, by.top_groups, by.scale
                form.sigmoid, form.best_two = by.sigmoid, by.best_two
        return form


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of latent attention; names are those of config.json."""

    q_lora_rank: int | None
    """Width of the queries' own latent, or None if queries are projected at once."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool
    """Rotated pairs are neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes of a layer, the same for all; heads are this rank's."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    rotated: int
    from_one: bool = False
    head_gates: bool = False
    """Each query head is followed by gates of its output."""
    latent: LatentShape | None = None
    delta: DeltaStep | None = None
    """Delta rule of layers with states."""
    scale_columns: int = 0
    """Inputs that share a scale of a weight with scales."""
    scaled: torch.dtype = FP8
    """Dtype of weights with scales."""
    codes: Codes | None = None

    @property
    def q(self) -> int:
        return self.heads * self.head_size

    @property
    def qkv(self) -> int:
        """Outputs of attention's first product: queries, keys and values, or their latents."""
        if self.latent is None:
            return ((2 if self.head_gates else 1) * self.heads + 2 * self.kv_heads) * self.head_size
        return (self.latent.q_lora_rank or self.q) + self.width

    @property
    def width(self) -> int:
        return 0 if self.latent is None else self.latent.kv_lora_rank + self.rotated

    @property
    def attended(self) -> int:
        return self.q if self.latent is None else self.heads * self.latent.v_head_dim

    def _products(self, kind: LayerKind) -> dict[str, tuple[int, int, int]]:
        """Return by name the number of stacked weights, and outputs and inputs of each."""
        hidden, size, experts, latent = self.hidden, kind.intermediate, kind.experts, self.latent
        if kind.has_states:
            assert self.delta is not None
            products = {"qkv": (1, self.delta.width, hidden), "o": (1, hidden, self.delta.values)}
        else:
            products = {"qkv": (1, self.qkv, hidden), "o": (1, hidden, self.attended)}
        if size:
            products |= {"gate_up": (1, 2 * size, hidden), "down": (1, hidden, size)}
        if experts is not None:
            products |= {
                "router": (1, experts.count, hidden),
                "experts_gate_up": (len(experts.held), 2 * experts.size, hidden),
                "experts_down": (len(experts.held), hidden, experts.size),
                "shared_gate": (1, 1, hidden),
            }
        if latent is not None:
            products |= {
                "w_kc": (self.heads, latent.kv_lora_rank, latent.qk_nope_head_dim),
                "w_vc": (self.heads, latent.v_head_dim, latent.kv_lora_rank),
            }
            if latent.q_lora_rank:
                products["q_up"] = (1, self.q, latent.q_lora_rank)
        return products

    def _vectors(self, kind: LayerKind, *, head_norms: bool) -> dict[str, tuple[int, ...]]:
        hidden, experts, latent = self.hidden, kind.experts, self.latent
        norms = ("input_norm", "mlp_norm", "behind_attention", "behind_mlp")
        vectors: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (hidden,))
        vectors |= {"qkv_bias": (self.qkv,), "o_bias": (hidden,)}
        if kind.has_states:
            assert self.delta is not None
            state = self.delta.shape
            vectors |= {"filters": (state.kernel, state.channels), "delta_norm": (state.value_size,)}
            vectors |= dict.fromkeys(("log_rate", "rate_bias"), (state.value_heads,))
        elif latent is not None:
            vectors["k_norm"] = (latent.kv_lora_rank,)
            if latent.q_lora_rank:
                vectors["q_norm"] = (latent.q_lora_rank,)
        elif head_norms:
            vectors |= dict.fromkeys(("q_norm", "k_norm"), (self.head_size,))
        if kind.attention.sinks:
            vectors["sinks"] = (self.heads,)
        if experts is not None:
            vectors |= {
                "router_bias": (experts.count,),
                "experts_gate_up_bias": (len(experts.held), 2 * experts.size),
                "experts_down_bias": (len(experts.held), hidden),
            }
        return vectors

    def check_adapters(
        self, adapters: LayerAdapters, kind: LayerKind, form: AdapterForm, dtype: torch.dtype
    ) -> None:
        """Raise ValueError for whatever the kernel would misread."""
        heads, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        sizes = {
            "qkv": (self.hidden, [heads, kv, kv]),
            "o": (heads, [self.hidden]),
            "gate_up": (self.hidden, [kind.intermediate] * 2),
            "down": (kind.intermediate, [self.hidden]),
        }
        for name, (inputs, outputs) in sizes.items():
            a, *b = getattr(adapters, name)
            shapes = [(len(outputs) * form.rank, inputs), *((size, form.rank) for size in outputs)]
            for tensor, shape in zip((a, *b), shapes, strict=True):
                if not holds(tensor, None, form.slots, *shape, dtype):
                    raise native.misfit(f"no adapters of {name} of {self}", tensor)

    def check(
        self, number: int, layer: LayerTensors, kind: LayerKind, dtype: torch.dtype, *, head_norms: bool
    ) -> None:
        """Raise ValueError for whatever the kernel would misread."""
        products, vectors = self._products(kind), self._vectors(kind, head_norms=head_norms)
        tensors, experts = layer._asdict(), kind.experts
        in_groups = experts is not None and experts.in_groups is not None
        for name, tensor in tensors.items():
            wanted = torch.float32 if name == "router_bias" and in_groups else dtype
            if tensor is None:
                fits = name in _OPTIONAL or not (name in products or name in vectors)
            elif name in products:
                lines = tensors.get(f"{name}_scales")
                scales = None if lines is None else Scales(lines, self.scale_columns, self.scaled, self.codes)
                fits = holds(tensor, scales, *products[name], dtype)
            elif name.endswith(_SCALES):  # they have been seen with their weight
                weight = name.removesuffix(_SCALES)
                fits = tensors[weight] is not None and weight in products
            else:
                fits = tensor.shape == vectors.get(name) and tensor.is_contiguous() and tensor.dtype == wanted
            if not fits:
                described = None if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"no layer {number} of {self} in {dtype}: {name} is {described}")
        if experts is None:
            fits = kind.intermediate > 0
        else:
            held = experts.held
            fits = 0 < experts.top_k <= experts.count and 0 <= held.start < held.stop <= experts.count
            if experts.in_groups is not None:
                fits = fits and experts.in_groups.serves(experts.count, experts.top_k)
        if not fits:
            raise ValueError(f"no layer {number} of {kind}")


_SCALES = "_scales"
_OPTIONAL = frozenset({
    "qkv_bias", "o_bias", "behind_attention", "behind_mlp", "shared_gate",
    "router_bias", "experts_gate_up_bias", "experts_down_bias",
})  # fmt: skip
