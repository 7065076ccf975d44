"""Expert fields of a config.

Invariants:
- One value describes the routing of every architecture with experts; features that one lacks are neutral.
- Two equal values mean the same routing over equal router logits.
"""

from dataclasses import dataclass
from typing import Literal

from ..kernels.decoder_layers import GroupRouting
from .config_reader import ConfigReader


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool
    """Weights of the chosen experts are divided by their sum."""
    sparse_layers: tuple[bool, ...]
    """True for each layer with experts; others are dense."""
    shared_size: int = 0
    """Width of the shared experts; 0 without them."""
    shared_gate: bool = False
    """A sigmoid of the token's own weights the shared experts' result."""
    in_groups: GroupRouting | None = None
    """Routing by groups, in float32. With sigmoid a learnt bias is added to scores for the choice alone."""


@dataclass(frozen=True, kw_only=True)
class MoeFields:
    """Values of an architecture's expert fields where a config lacks them, those of transformers."""

    count: int
    top_k: int | None
    width: int | None = None
    """None means that experts have the width of dense blocks."""
    normalize: bool | None = None
    """None means always, whatever a config says."""
    stepped: bool = False
    """``decoder_sparse_step`` and ``mlp_only_layers`` name dense layers, else none are."""
    shared: int = 0
    """Width of gated shared experts; with groups their number."""
    scoring: Literal["softmax", "sigmoid"] | None = None
    """Routing by groups (DeepSeek's), or None. Sigmoid: by the two best of each, with a bias."""
    first_dense: int = 0
    groups: int | None = None
    top_groups: int | None = None
    scale: float = 1.0


DEEPSEEK_V3 = MoeFields(
    count=256, top_k=8, width=2048, normalize=True, shared=1, scoring="sigmoid", first_dense=3,
    groups=8, top_groups=4, scale=2.5,
)  # fmt: skip


def parse_moe(fields: MoeFields, reader: ConfigReader, num_layers: int) -> MoeConfig:
    stated = reader.config.get("norm_topk_prob", fields.normalize)
    if stated is None:
        stated = fields.scoring == "sigmoid" and fields.normalize
    normalize = fields.normalize is None or bool(stated)
    if fields.scoring is not None:
        return _grouped(fields, reader, num_layers, normalize)
    experts, top_k = _num_experts(reader, fields.count), reader.count("num_experts_per_tok", fields.top_k)
    if top_k > experts:
        raise reader.invalid("num_experts_per_tok", f"= {top_k} of {experts} experts")
    width = "intermediate_size" if fields.width is None else "moe_intermediate_size"
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.count(width, fields.width),
        normalize=normalize,
        sparse_layers=_stepped(reader, num_layers) if fields.stepped else (True,) * num_layers,
        shared_size=reader.count("shared_expert_intermediate_size", fields.shared) if fields.shared else 0,
        shared_gate=bool(fields.shared),
    )


def _grouped(fields: MoeFields, reader: ConfigReader, num_layers: int, normalize: bool) -> MoeConfig:
    sigmoid, width = fields.scoring == "sigmoid", reader.count("moe_intermediate_size", fields.width)
    by_group = sigmoid or reader.config.get("topk_method", "greedy") == "group_limited_greedy"
    first = reader.count_or_zero("first_k_dense_replace", fields.first_dense)
    step = reader.count("moe_layer_freq", 1)
    by = GroupRouting(
        groups=reader.count("n_group", fields.groups) if by_group else 1,
        top_groups=reader.count("topk_group", fields.top_groups) if by_group else 1,
        sigmoid=sigmoid,
        best_two=sigmoid,
        scale=reader.positive(reader.config, "routed_scaling_factor", fields.scale),
    )
    moe = MoeConfig(
        num_experts=reader.count("n_routed_experts", fields.count),
        top_k=reader.count("num_experts_per_tok", fields.top_k),
        intermediate_size=width,
        normalize=normalize,
        sparse_layers=tuple(i >= first and i % step == 0 for i in range(num_layers)),
        shared_size=reader.count_or_zero("n_shared_experts", fields.shared) * width,
        in_groups=by,
    )
    in_group = moe.num_experts // by.groups
    if moe.num_experts % by.groups or (sigmoid and in_group < 2):
        raise reader.invalid("n_group", f"= {by.groups} for n_routed_experts = {moe.num_experts}")
    if by.top_groups > by.groups:
        raise reader.invalid("topk_group", f"= {by.top_groups} of {by.groups} groups")
    if moe.top_k > by.top_groups * in_group:
        reachable = by.top_groups * in_group
        raise reader.invalid("num_experts_per_tok", f"= {moe.top_k} of {reachable} experts in chosen groups")
    return moe


def _stepped(reader: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    step, dense = reader.count("decoder_sparse_step", 1), reader.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise reader.invalid("mlp_only_layers", f"= {dense!r} is not a list of layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))


def _num_experts(reader: ConfigReader, absent: int) -> int:
    names = ("num_experts", "num_local_experts")
    counts = {name: reader.count(name) for name in names if reader.config.get(name) is not None}
    if len(set(counts.values())) > 1:
        raise reader.invalid("num_experts", f"contradicts itself: {counts}")
    return next(iter(counts.values()), absent)
