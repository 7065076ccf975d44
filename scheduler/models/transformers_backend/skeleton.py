"""A transformers model without weights, built on the meta device; its parameters are for others to place.

Invariants:
- No parameter of the module is ever given memory here: a model of any size is built in milliseconds.
- Buffers that checkpoints do not hold (rotary frequencies) are what transformers computes when it loads a
  checkpoint. They are allocated by torch as always, so no release of the weights loses them.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..config import ModelConfig
from .attention import IMPLEMENTATION
from .config import FAILURES, read_config
from .experts import IMPLEMENTATION as EXPERTS
from .probe import refused


def build(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return the module of this config on the meta device, with the engine's attention and experts.

    Raises:
        CaesuraError: UNSUPPORTED_MODEL, transformers' modules do not take the config.
    """
    kind: type[PreTrainedModel] = getattr(transformers, config.architecture)
    options = {"experts_implementation": EXPERTS} if kind._can_set_experts_implementation() else {}
    try:
        read = read_config(config)
        with torch.device("meta"):
            module: PreTrainedModel = kind._from_config(
                read, dtype=dtype, attn_implementation=IMPLEMENTATION, **options
            )
    except FAILURES as error:
        reason = f"its modules cannot be built: {type(error).__name__}: {error}"
        raise refused(config.architecture, reason) from error
    module.eval()
    module.requires_grad_(False)
    return module


def compute_buffers(module: PreTrainedModel, device: torch.device) -> None:
    """Give every buffer memory on ``device``, and those that are not of checkpoints their values.

    Raises:
        CaesuraError: UNSUPPORTED_MODEL, a tensor that is neither a parameter nor a buffer has no values.
    """
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            each._buffers[name] = torch.zeros_like(buffer, device=device)
    for parameter in module.parameters():
        parameter._is_hf_initialized = True
    module.initialize_weights()
    for path, each in module.named_modules():
        _fix_frequencies(each)
        for name, value in vars(each).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise refused(type(module).__name__, f"{path}.{name} is neither a parameter nor a buffer")


def _fix_frequencies(module: Any) -> None:
    """Fix frequencies that follow a batch's longest position: the first set serves every context here."""
    kind = getattr(module, "rope_type", None)
    if kind is not None:  # what a forward on the meta device has left for the second set
        for name in [name for name, value in vars(module).items() if isinstance(value, Tensor)]:
            delattr(module, name)
    if isinstance(kind, str):
        module.rope_type = "default"
    elif isinstance(kind, dict):
        module.rope_type = dict.fromkeys(kind, "default")


def stored_tensors(module: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield every parameter and buffer of checkpoints: name, owner, name there, tensor; a tied one once."""
    tied = set(module.all_tied_weights_keys)
    for path, each in module.named_modules(remove_duplicate=True):
        tensors = dict(each._parameters)
        tensors |= {k: b for k, b in each._buffers.items() if k not in each._non_persistent_buffers_set}
        for name, tensor in tensors.items():
            full = f"{path}.{name}" if path else name
            if tensor is not None and full not in tied:
                yield full, each, name, tensor


def float32_names(module: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return names of tensors that transformers keeps in float32 in a model of ``dtype``, or None."""
    kept = set(module._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())
    if not kept:
        return None
    return re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in sorted(kept)))
