"""What serves each operation of a loaded model, and why torch does where compiled kernels could have been expected.

Invariants:
- What is reported is what is built: attention is chosen here for both, and an operation counts as torch's where torch
  computes the products of any layer.
- Nothing here depends on requests: the answers hold from the start of an engine to its end.
"""

import logging
from dataclasses import dataclass

from ..io_struct import CaesuraError, ErrorCode
from .attention import flashinfer, paged_triton
from .config import EngineConfig
from .kernels import TORCH, TRITON, best, serving
from .kernels.linear import packable
from .kernels.native import why_not
from .weights.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """The operations that a model has, and what serves them."""

    by: dict[str, str]
    """Operation to ``torch``, an instruction set of compiled kernels, or a library of attention kernels."""
    reason: str | None
    """Why torch serves some of them on a CPU. None: it does not, or the device is no CPU."""

    def log(self) -> None:
        """One line at start; a warning where no compiled kernels serve on a CPU."""
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


def attention_by(config: EngineConfig, loaded: LoadedModel) -> str:
    """What computes attention: the best that there is for this model, or what the configuration names.

    Raises:
        CaesuraError: ``unsupported``, what was named cannot serve this model here.
    """
    model, wanted = loaded.config, config.attention_backend
    unfit = {
        "flashinfer": flashinfer.why_not(loaded.device, loaded.dtype, model.head_dim),
        "triton": paged_triton.why_not(loaded.device),
    }
    if model.mla is not None:
        unfit = dict.fromkeys(unfit, "latent attention has a backend of its own")
    if (reason := unfit.get(wanted)) is not None:
        raise CaesuraError(
            ErrorCode.UNSUPPORTED, f"attention_backend = {wanted!r}: {reason}", field="attention_backend"
        )
    for name, reason in unfit.items():
        if reason is None and wanted in ("auto", name):
            return name
    if wanted == "auto" and model.mla is None:
        return best("attention", loaded.device, loaded.dtype)
    return TORCH


def what_serves(config: EngineConfig, loaded: LoadedModel) -> Serving:
    """Of the operations that the model has.

    Raises:
        CaesuraError: as :func:`attention_by`.
    """
    model, by = loaded.config, serving(loaded.device, loaded.dtype)
    by["attention"] = attention_by(config, loaded)
    if model.fp8 is not None or not all(packable(size, loaded.dtype) for size in _row_sizes(loaded)):
        by["linear"] = TORCH
        if by["experts"] != TRITON:  # which is what surrounds the products
            by["experts"] = TORCH
    if TORCH in (by["linear"], by["attention"]):
        by["decoder"] = TORCH
    if model.moe is None:
        del by["experts"]
    if model.moe is not None or model.mla is not None:
        del by["decoder"]  # layers are computed part by part, whatever computes the parts
    if loaded.device.type != "cpu":
        return Serving(by, None)
    reason = why_torch(loaded)
    if reason is None and by["attention"] == TORCH:
        reason = f"attention_backend = {config.attention_backend!r}"
    return Serving(by, reason)


def why_torch(loaded: LoadedModel) -> str | None:
    """Why torch computes some of this model's products, whatever the configuration names. None: it computes none."""
    config = loaded.config
    if TORCH in serving(loaded.device, loaded.dtype).values():
        return why_not() or "there are none for this device and dtype"
    if config.mla is not None:
        return "latent attention is computed by torch"
    if config.fp8 is not None:
        return "products with FP8 weights are torch's"
    odd = [size for size in _row_sizes(loaded) if not packable(size, loaded.dtype)]
    return f"rows of {min(odd)} cannot be packed" if odd else None


def _row_sizes(loaded: LoadedModel) -> set[int]:
    """Lengths of the rows of the model's matrices."""
    config = loaded.config
    sizes = {config.hidden_size, config.num_heads * config.head_dim}
    if config.moe is None or not all(config.moe.sparse_layers):
        sizes.add(config.intermediate_size)
    if config.moe is not None:
        sizes.add(config.moe.intermediate_size)
    return sizes
