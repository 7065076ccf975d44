"""Architecture name to model.

Invariants:
- Files of this package that have ``FAMILIES`` are the architectures; no other list of them exists.
- ``transformers_backend/`` is imported with a model that it computes: it imports transformers.
"""

import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch

from ...io_struct import CaesuraError, ErrorCode
from ..layers.lora import AdapterSlots
from ..layers.parameters import Placement
from ..layers.rank_rows import RankRows
from ..parallel.group import SINGLE, TensorParallel
from .family import Family

if TYPE_CHECKING:
    from .causal_lm import CausalLM
    from .config import ModelConfig


@cache
def _modules() -> Mapping[str, ModuleType]:
    # Imported when somebody asks: model files know ModelConfig, whose module asks here.
    names = [module.name for module in pkgutil.iter_modules(sys.modules[__package__].__path__)]
    modules = [import_module(f".{name}", package=__package__) for name in names]
    return {architecture: module for module in modules for architecture in getattr(module, "FAMILIES", ())}


def families() -> Mapping[str, Family]:
    return {name: module.FAMILIES[name] for name, module in _modules().items()}


def require_ranks(config: "ModelConfig", ranks: int, ep: int = 1, dp_attention: int = 1) -> None:
    """Refuse (UNSUPPORTED_MODEL) sizes that ranks cannot divide, before workers start, without memory."""
    if ranks == 1:
        return
    if config.transformers_config is not None:
        reason = (
            f"{config.architecture} is computed by transformers' modules, which are not divided among "
            "ranks: start it with tp = 1"
        )
        raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=["architectures"], ranks=ranks)
    if dp_attention > 1:
        _require_rows_apart(config)
    last = TensorParallel(ranks - 1, ranks)
    build_model(config, config.dtype, torch.device("meta"), last, ep=ep, dp_attention=dp_attention)


def _require_rows_apart(config: "ModelConfig") -> None:
    if config.delta is not None:
        kept = "a state per sequence"
    elif any(window is not None for window in config.windows):
        kept = "a sliding window"
    else:
        return
    reason = f"data-parallel attention does not serve {config.architecture}, whose layers have {kept}"
    message = f"{reason}: leave dp_attention out"
    raise CaesuraError(ErrorCode.UNSUPPORTED, message, field="dp_attention")


def build_model(
    config: "ModelConfig",
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel = SINGLE,
    adapters: AdapterSlots | None = None,
    *,
    ep: int = 1,
    dp_attention: int = 1,
) -> "CausalLM":
    """Allocate a model, or this rank's shard, without values; UNSUPPORTED_MODEL: ranks do not divide it."""
    if ep > 1 and config.moe is None:
        reason = f"{config.architecture} has no routed experts to divide among {ep} groups: leave out ep"
        raise CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=["architectures"], ep=ep)
    place = Placement(
        dtype,
        device,
        config.quantization,
        parallel=parallel,
        ep=ep,
        adapters=adapters,
        rank_rows=RankRows(parallel) if dp_attention > 1 else None,
    )
    if config.transformers_config is not None:
        require_ranks(config, parallel.size)
        foreign = import_module(".transformers_backend.model", package=__package__)
        return cast("CausalLM", foreign.TransformersForCausalLM(config, place=place))
    model = getattr(_modules()[config.architecture], config.architecture)
    return cast("CausalLM", model(config, place=place))
