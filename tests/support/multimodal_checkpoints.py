"""Multimodal checkpoints, as transformers writes them, and as it did before version 5."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from .checkpoints import FAMILIES, HYBRIDS, SIZES, edit_config, random_model

_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}

WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": ("gemma3", _SIGLIP, {"mm_tokens_per_image": 4}),
    "Mistral3ForConditionalGeneration": ("mistral", {**_SIGLIP, "model_type": "pixtral", "head_dim": 8}, {}),
    "Qwen3_5ForConditionalGeneration": ("qwen3.5", _QWEN, {}),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3.5-moe", _QWEN, {}),
}
"""Family of the language model, and fields of the vision tower and of the config, by architecture."""


def make_multimodal_checkpoint(
    path: str | Path, architecture: str, *, seed: int = 0, tied: bool = False, **overrides: object
) -> transformers.PreTrainedModel:
    family, tower, fields = WHOLE[architecture]
    model_class = getattr(transformers, architecture)
    _, _, defaults = {**FAMILIES, **HYBRIDS}[family]
    text = {**SIZES, **defaults, "tie_word_embeddings": tied, **overrides}
    if "model_type" not in tower:
        tower = {**tower, "out_hidden_size": text["hidden_size"]}
    parts = {"text_config": text, "vision_config": tower}
    config = model_class.config_class(**parts, tie_word_embeddings=tied, **fields)
    model = random_model(model_class, config, seed)
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
