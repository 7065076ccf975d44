"""Architecture name to model, imported when it is asked for."""

from importlib import import_module
from typing import cast

import torch

from ..layers.parameters import Placement
from .base import CausalLM
from .config import ModelConfig

MODULES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architecture (also the name of its class) to the module of this package that holds it."""


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Allocate a model of this config; its weights hold nothing until they are loaded."""
    module = import_module(f".{MODULES[config.architecture]}", package=__package__)
    return cast("CausalLM", getattr(module, config.architecture)(config, place=Placement(dtype, device)))
