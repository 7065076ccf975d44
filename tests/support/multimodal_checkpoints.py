"""Multimodal checkpoints, as transformers writes them, and as it did before version 5."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from .checkpoints import FAMILIES, HYBRIDS, SIZES, edit_config, randomize

_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}

WHOLE: dict[str, tuple[str, type, type, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "gemma3",
        transformers.Gemma3Config,
        transformers.Gemma3ForConditionalGeneration,
        _SIGLIP,
        {"mm_tokens_per_image": 4},
    ),
    "Mistral3ForConditionalGeneration": (
        "mistral",
        transformers.Mistral3Config,
        transformers.Mistral3ForConditionalGeneration,
        {**_SIGLIP, "model_type": "pixtral", "head_dim": 8},
        {},
    ),
    "Qwen3_5ForConditionalGeneration": (
        "qwen3.5",
        transformers.Qwen3_5Config,
        transformers.Qwen3_5ForConditionalGeneration,
        _QWEN,
        {},
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "qwen3.5-moe",
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
        _QWEN,
        {},
    ),
}
"""Family of the language model, multimodal config and model, and fields of the vision tower and of the
config, by architecture.
"""


def make_multimodal_checkpoint(
    path: str | Path, architecture: str, *, seed: int = 0, tied: bool = False, **overrides: object
) -> transformers.PreTrainedModel:
    family, config_class, model_class, tower, fields = WHOLE[architecture]
    _, _, defaults = {**FAMILIES, **HYBRIDS}[family]
    text = {**SIZES, **defaults, "tie_word_embeddings": tied, **overrides}
    if "model_type" not in tower:
        tower = {**tower, "out_hidden_size": text["hidden_size"]}
    config = config_class(text_config=text, vision_config=tower, tie_word_embeddings=tied, **fields)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = model_class._from_config(config, **eager).eval()
    randomize(model, seed)
    model.config.dtype = torch.float32
    model.save_pretrained(path)
    return model


def rename_tensors(path: str | Path, rename: Callable[[str], str]) -> None:
    file = Path(path) / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def alone(name: str) -> str:
    """Return the name that a tensor of the language model has in a checkpoint of the language model alone."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.")


def in_modules(name: str) -> str:
    """Return the name that the modules of transformers 5 give to a tensor of a checkpoint."""
    own = alone(name)
    if own.startswith("lm_head."):
        return own
    return (
        f"model.{name.removeprefix('model.')}"
        if own == name
        else f"model.language_model.{own.removeprefix('model.')}"
    )


def as_before_version_5(name: str) -> str:
    """Return the name that transformers 4 gave to it, in Gemma 3 and Mistral 3."""
    own = alone(name)
    if own == name and not own.startswith("lm_head."):
        return name.removeprefix("model.")
    return f"language_model.{own}"


def leave_out(path: str | Path, *names: str, whole: bool = False) -> None:
    """Drop fields of the language model's config, or of the ``whole`` one's."""
    config = json.loads((Path(path) / "config.json").read_text())
    part = config if whole else config["text_config"]
    for name in names:
        part.pop(name)
    if whole:
        (Path(path) / "config.json").write_text(json.dumps(config))
    else:
        edit_config(path, text_config=part)
