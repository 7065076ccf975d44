"""Feed-forward blocks of models with experts."""

from dataclasses import dataclass, field

from ..kernels.attention_form import Bend
from ..kernels.decoder_layers import GroupRouting
from ..layers.experts import ExpertNames, Experts
from ..layers.mlp import GatedMLP
from ..layers.moe import GatedShared, GroupedRouter, MoeBlock, RoutedExperts, Router, Shared, TopKRouter
from ..layers.parameters import Placement
from .config import ModelConfig
from .config_moe import MoeConfig
from .decoder import FeedForward


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
) -> tuple[list[FeedForward], RoutedExperts]:
    """Return the block of every layer, and the record of the experts that they choose.

    ``bias``: routers and experts have biases; ``bend``: activation of the experts' gates.
    """
    moe = config.moe
    assert moe is not None, "an architecture with experts has a config of them"
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
    if not moe.grouped:
        return TopKRouter(
            name,
            module,
            hidden,
            moe.num_experts,
            moe.top_k,
            normalize=moe.normalize,
            bias=bias,
            place=place,
        )
    return GroupedRouter(
        name,
        module,
        hidden,
        moe.num_experts,
        moe.top_k,
        GroupRouting(
            groups=moe.num_groups,
            top_groups=moe.top_groups,
            sigmoid=moe.scoring == "sigmoid",
            best_two=moe.group_score == "top2",
            scale=moe.routed_scale,
        ),
        normalize=moe.normalize,
        bias=moe.score_bias,
        place=place,
    )


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
