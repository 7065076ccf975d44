"""Loads the reference model, the checkpoint that sequences are scored with.

Invariants:
- The reference is loaded before the policy, while the device is empty: both need not fit on it at once.
- Unless it stays resident, it has left the device when :func:`load_reference` returns. The device memory that
  it needs during use is reserved.
"""

import re
from dataclasses import replace

from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, Residency
from ..execution.build import build_backend, load_model, longest_context, make_pool, require_deterministic
from ..execution.forward import StepLimits
from ..memory.device_module import device_module_for
from ..memory.host_copy import exhaust
from ..memory.offload import ComponentOffloadStrategy, LayerwiseOffloadStrategy, ResidentStrategy, Strategy
from ..memory.residency import ComponentResidencyManager
from ..models.base import CausalLM
from ..runtime.config import EngineConfig
from ..scheduling.waiting_queue import pages_for
from .scoring import PAGES, WEIGHTS, ReferenceModel

_LAYER = re.compile(r"layers\.(\d+)\.")

_STRATEGIES: dict[Residency, tuple[Strategy, Strategy]] = {
    "resident": (ResidentStrategy(), ResidentStrategy(preserve=False)),
    "offload": (ComponentOffloadStrategy(), ComponentOffloadStrategy(preserve=False)),
    "layerwise": (LayerwiseOffloadStrategy(), ComponentOffloadStrategy(preserve=False)),
}
"""Strategies of the weights and of the KV pages, whose contents need not be preserved between requests."""


def load_reference(config: EngineConfig, residency: ComponentResidencyManager) -> ReferenceModel | None:
    """Load the reference model, if the configuration has one; raises what loading the policy does."""
    if config.reference_model_path is None:
        return None
    weights, pages = _STRATEGIES[config.reference_residency]
    residency.register(WEIGHTS, weights, memory_intensive=True)
    residency.register(PAGES, pages)
    with residency.component(WEIGHTS):
        loaded = load_model(replace(config, model_path=config.reference_model_path, context_len=None))
    if loaded.config.delta is not None:
        raise CaesuraError(
            ErrorCode.UNSUPPORTED_MODEL,
            f"{loaded.config.architecture} cannot be the reference model: its linear attention keeps a "
            "state per sequence, which "
            "scoring does not have",
            fields=["architectures"],
        )
    residency.divide(WEIGHTS, _layers(loaded.model))
    if config.deterministic:
        require_deterministic(loaded)
    context_len = longest_context(config, loaded)
    num_pages = 1 + pages_for(config.reference_pool_tokens or context_len)  # page 0 is scratch
    with residency.component(PAGES):
        pool = make_pool(loaded, num_pages)
    limits = StepLimits.of(
        max_rows=config.sizes.rows,
        chunk_tokens=config.sizes.chunk_tokens,
        context_len=context_len,
    )
    reference = ReferenceModel(
        model=loaded.model,
        backend=build_backend(config, loaded, pool, limits),
        device=loaded.device,
        model_path=config.reference_model_path,
        residency=config.reference_residency,
        num_pages=num_pages,
        context_len=context_len,
        max_rows=limits.rows,
        max_tokens=config.sizes.chunk_tokens,
        max_waiting=config.max_waiting_requests,
    )
    for name in (WEIGHTS, PAGES):
        residency.use(name)
    exhaust(residency.leave([WEIGHTS, PAGES]))
    module = device_module_for(loaded.device)
    if hasattr(module, "synchronize"):  # loading used another stream than steps do
        module.synchronize()
    return reference


def _layers(model: CausalLM) -> list[list[Tensor]]:
    """Return parameters and derived tensors by decoder layer, according to their names."""
    layers: list[list[Tensor]] = [[] for _ in range(model.config.num_layers)]
    for name, tensor in model.named_storage():
        if (found := _LAYER.match(name)) is not None:
            layers[int(found[1])].append(tensor)
    return layers
