"""The language model of a multimodal checkpoint: its config, and the names of its tensors.

Invariants:
- Text alone goes in. Vision towers and projectors are ignored by name.
- Tensors are known by the names of a checkpoint of its own. Those of the multimodal one are accepted as well:
  ``model.language_model.layers`` (transformers 5) and ``language_model.model.layers`` (before).
"""

from typing import Any

from .config_reader import ConfigReader

LANGUAGE_MODELS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}

_OF_ALL = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id")
"""Fields at the top level of a multimodal config that override the language model's."""
_MODULES = ("modules_to_not_convert", "ignored_layers")
_SPELLED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_TOWERS = ("visual.", "vision_tower.", "multi_modal_projector.")
_MULTIMODAL = frozenset(LANGUAGE_MODELS.values())


def language_config(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the config of the language model in ``config``; CHECKPOINT_ERROR if there is none."""
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str):
        return config
    if architecture in LANGUAGE_MODELS:
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise ConfigReader(config, source).invalid("text_config", "is not there, or no object")
        said = {name: config[name] for name in _OF_ALL if config.get(name) is not None}
        architecture = LANGUAGE_MODELS[architecture]
        config = {**text, **said, "architectures": [architecture]}
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        config = {**config, "quantization_config": _with_own_names(architecture, quantized)}
    return config


def _with_own_names(architecture: str, quantized: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [own_name(architecture, module) if isinstance(module, str) else module for module in value]
        if name in _MODULES and isinstance(value, list)
        else value
        for name, value in quantized.items()
    }


def own_name(architecture: str, name: str) -> str:
    """Return the own name of a tensor or module of a multimodal model's language model."""
    if architecture in _MULTIMODAL:
        for prefix, own in _SPELLED.items():
            if name.startswith(prefix):
                return own + name[len(prefix) :]
    return name


def is_vision_tensor(architecture: str, name: str) -> bool:
    """Return True if a tensor belongs to a vision tower, or to the projection of its output."""
    return architecture in _MULTIMODAL and name.removeprefix("model.").startswith(_TOWERS)
