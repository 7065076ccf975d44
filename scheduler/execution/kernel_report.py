"""Report the kernels that serve each operation of a loaded model, and why torch serves where it does.

Invariants: what is reported is what is built. An operation counts as torch's if torch computes the products
of any layer. Nothing depends on requests: answers hold from the start of an engine to its end.
"""

import logging
from dataclasses import dataclass

import torch

from ..attention.backends import Choice, choose
from ..attention.shape import Shape
from ..kernels import TORCH, TRITON, serving, why_not_triton
from ..kernels.delta import LARGEST_HEAD, computable
from ..kernels.linear import packable, scalable
from ..kernels.native import why_not
from ..layers.fp8_products import dense_for, experts_for
from ..runtime.engine_config import EngineConfig
from ..weights.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    by: dict[str, str]
    """Operation to ``torch``, an instruction set of compiled kernels, or a library of kernels."""
    reason: str | None
    """Why torch serves on a CPU, or why no better kernels serve attention elsewhere; or None."""

    def log(self) -> None:
        """Log one line; a warning if no compiled kernels serve on a CPU."""
        if self.reason is not None and set(self.by.values()) == {TORCH}:
            logger.warning(
                "compiled kernels do not serve, torch computes everything, slower: %s", self.reason
            )
            return
        operations: dict[str, list[str]] = {}
        for operation, name in self.by.items():
            operations.setdefault(name, []).append(operation)
        served = "; ".join(f"{name}: {', '.join(which)}" for name, which in operations.items())
        logger.info("kernels: %s%s", served, "" if self.reason is None else f" ({self.reason})")


def what_serves(config: EngineConfig, loaded: LoadedModel) -> Serving:
    """Return what serves the operations of the model. Raises as :func:`~.backends.choose`."""
    model, by = loaded.config, serving(loaded.device, loaded.dtype)
    attention = choose(config, Shape.of(loaded))
    by["attention"] = attention.by
    if _unpacked_fp8(loaded) is not None or _unpacked(loaded) is not None:
        by["linear"] = TORCH
        if by["experts"] != TRITON:  # which is what surrounds the products
            by["experts"] = TORCH
    if model.quantization is not None and (dense := dense_for(loaded.device)) is not None:
        by["linear"] = dense.by
        if model.moe is not None and (experts := experts_for(loaded.device)) is not None:
            by["experts"] = experts.by
    if TORCH in (by["linear"], by["attention"]):
        by["decoder"] = TORCH
    foreign, lm = model.transformers_config is not None, loaded.model
    if foreign and (by["decoder"] == TORCH or not lm.in_one_call):
        by["elementwise"] = TORCH
    if lm.torch_experts:
        by["experts"] = TORCH
    if model.moe is None and lm.routing is None and not lm.torch_experts:
        del by["experts"]
    _name_layers(by, loaded)
    if loaded.device.type != "cpu":
        return Serving(by, _why_not_better(attention, loaded.device))
    reason = None if foreign and lm.in_one_call else why_torch(loaded)
    if reason is None and by["attention"] == TORCH:
        reason = f"attention_backend = {config.attention_backend!r}"
    return Serving(by, reason)


def _name_layers(by: dict[str, str], loaded: LoadedModel) -> None:
    """Add what only some models' layers have; drop the fused decoder if layers are computed part by part."""
    if loaded.config.delta is None:
        del by["linear_attention"]
    elif not computable(loaded.config.delta.state):
        by["linear_attention"] = TORCH
    if by["decoder"] != TORCH and not loaded.model.in_one_call:
        del by["decoder"]


def _why_not_better(attention: Choice, device: torch.device) -> str | None:
    reasons = []
    if attention.reason is not None:
        reasons.append(f"attention by {attention.by}, as {attention.reason}")
    if device.type == "cuda" and (reason := why_not_triton(device)) is not None:
        reasons.append(f"torch instead of Triton, as {reason}")
    return "; ".join(reasons) or None


def why_torch(loaded: LoadedModel) -> str | None:
    """Return why torch computes some of this model's products, whatever is configured, or None."""
    config = loaded.config
    if TORCH in serving(loaded.device, loaded.dtype).values():
        return why_not() or "there are none for this device and dtype"
    if config.transformers_config is not None:
        return "transformers computes some of what lies between the products"
    if config.delta is not None and not computable(config.delta.state):
        return f"heads of linear attention have more than {LARGEST_HEAD} elements"
    if (reason := _unpacked_fp8(loaded)) is not None:
        return reason
    moe = config.moe
    if moe is not None and (by := moe.in_groups) is not None and not by.serves(moe.num_experts, moe.top_k):
        return f"experts are chosen from {by.groups} groups, which torch does"
    return _unpacked(loaded)


def _unpacked(loaded: LoadedModel) -> str | None:
    sizes, mla = _projections(loaded), loaded.config.mla
    if mla is not None:
        sizes |= {mla.kv_lora_rank, mla.qk_nope_head_dim}
    odd = [size for size in sizes if not packable(size, loaded.dtype)]
    return f"rows of {min(odd)} cannot be packed" if odd else None


def _unpacked_fp8(loaded: LoadedModel) -> str | None:
    blocks = loaded.config.quantization
    if blocks is None:
        return None
    if loaded.device.type != "cpu":
        return "products with FP8 weights are a library's"
    if all(scalable(size, blocks.columns, blocks.dtype, blocks.codes) for size in _projections(loaded)):
        return None
    return "products with quantised weights in rows or blocks that cannot be packed are torch's"


def _projections(loaded: LoadedModel) -> set[int]:
    """Return the row lengths of projections, which an FP8 model has in FP8."""
    config, ranks, mla = loaded.config, loaded.parallel.size, loaded.config.mla
    sizes = {config.hidden_size}
    if mla is None:
        sizes.add(loaded.num_heads * config.head_dim)
    else:
        sizes.add(loaded.num_heads * mla.v_head_dim)
        sizes |= set() if mla.q_lora_rank is None else {mla.q_lora_rank}
    if config.moe is None or not all(config.moe.sparse_layers):
        sizes.add(config.intermediate_size // ranks)
    if config.moe is not None:
        sizes.add(config.moe.intermediate_size // ranks)
        sizes |= {config.moe.shared_size // ranks} - {0}
    if config.delta is not None:
        sizes.add(config.delta.state.value_heads * config.delta.state.value_size)
    return sizes
