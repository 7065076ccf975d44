"""Small randomly initialised checkpoints, written by transformers, with awkward shapes."""

import json
import math
from pathlib import Path

import torch
import transformers

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}

FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama3-rope": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": ROPE_LLAMA3},
    ),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
}


def make_checkpoint(
    path: str | Path,
    family: str,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    sharded: bool = False,
    seed: int = 0,
    **overrides: object,
) -> transformers.PreTrainedModel:
    """Write a checkpoint of ``family`` to ``path`` and return the transformers model it came from.

    Every tensor is random, norms and biases included, and large enough for a wrong one to show in the logits.
    ``overrides`` are config fields.
    """
    config_class, model_class, defaults = FAMILIES[family]
    shape = {
        "vocab_size": 97,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    config = config_class(**{**shape, **defaults, "tie_word_embeddings": tied, **overrides})
    model = model_class._from_config(config, attn_implementation="eager").eval()
    randomize(model, seed)
    model = model.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(path, max_shard_size="20KB" if sharded else "1GB")
    return model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter anew from ``seed``, keeping activations near unit scale."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1.0 + 0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[1]))


def rewrite_config_as_v4(path: str | Path) -> None:
    """Rewrite a transformers-5 config.json into the spelling of transformers 4."""
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["transformers_version"] = "4.51.0"
    file.write_text(json.dumps(config))


def edit_config(path: str | Path, **changes: object) -> None:
    """Set fields of config.json."""
    file = Path(path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
