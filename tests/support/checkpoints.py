"""Small randomly initialised checkpoints, written by transformers, with awkward shapes."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPE_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}
ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 1,
}
SIZES = {
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
ROUTED = {"moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 3}
GROUPED = {**ROUTED, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "head_dim": 6,  # as transformers' classes have it: of the rotated part
    "v_head_dim": 14,
}
DEEPSEEK = {**GROUPED, **LATENT}

_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 3}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 56}
_WINDOWS = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    # What random states return is small, and a norm makes its rounding errors large.
    "rms_norm_eps": 1e-3,
}


def _family(name: str, **fields: Any) -> tuple[type, type, dict[str, Any]]:
    model = getattr(transformers, f"{name}ForCausalLM")
    return model.config_class, model, fields


FAMILIES = {
    "llama": _family("Llama"),
    "llama3-rope": _family("Llama", rope_parameters=ROPE_LLAMA3),
    "mistral": _family("Mistral", sliding_window=None),
    "gemma3": _family("Gemma3", **_WINDOWS, sliding_window=20, query_pre_attn_scalar=14),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3"),
    "qwen3-moe": _family("Qwen3Moe", **_EXPERTS, norm_topk_prob=True),
    "qwen2-moe": _family("Qwen2Moe", **_SHARED),
    "mixtral": _family("Mixtral", num_local_experts=5),
    "gpt-oss": _family("GptOss", **_WINDOWS, num_local_experts=5, num_experts_per_tok=3, sliding_window=19),
    "glm4-moe": _family("Glm4Moe", **ROUTED, first_k_dense_replace=1, use_qk_norm=True),
    "deepseek-v2": _family(
        "DeepseekV2", **DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=1.7
    ),
    "deepseek-v3": _family("DeepseekV3", **DEEPSEEK),
}
"""Config class, model class and fields of each family."""

HYBRIDS = {
    "qwen3-next": _family("Qwen3Next", **LINEAR, **_SHARED, mlp_only_layers=[2]),
    "qwen3.5": _family("Qwen3_5", **LINEAR),
    "qwen3.5-moe": _family("Qwen3_5Moe", **LINEAR, **_SHARED),
}
"""Some of their layers keep a state per sequence, which steps without an engine around them do not have."""


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
    """Write a checkpoint of ``family`` to ``path`` and return the transformers model it came from."""
    config_class, model_class, defaults = {**FAMILIES, **HYBRIDS}[family]
    config = config_class(**{**SIZES, **defaults, "tie_word_embeddings": tied, **overrides})
    model = random_model(model_class, config, seed).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(path, max_shard_size="20KB" if sharded else "1GB")
    return model


def random_model(model_class: Any, config: Any, seed: int) -> transformers.PreTrainedModel:
    # Not "grouped_mm", which takes no odd sizes.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = model_class._from_config(config, **eager).eval()
    randomize(model, seed)
    return model


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter anew from ``seed``, keeping activations near unit scale."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.3 * noise)
            elif name.endswith("A_log"):  # states remember some twenty tokens
                parameter.copy_(0.5 * noise - 3.0)
            elif parameter.dim() == 1:
                parameter.copy_(1.0 + 0.2 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def rewrite_config_as_v4(path: str | Path) -> None:
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if "num_local_experts" in config and config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["transformers_version"] = "4.51.0"
    file.write_text(json.dumps(config))


def edit_config(path: str | Path, **changes: object) -> None:
    file = Path(path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def quantize_fp8(value: torch.Tensor, blocks: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = value.shape
    grid = math.ceil(rows / blocks[0]), math.ceil(columns / blocks[1])
    quantized, scales = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            here = slice(i * blocks[0], (i + 1) * blocks[0]), slice(j * blocks[1], (j + 1) * blocks[1])
            block = value[here].float()
            factor = 448.0 * (1.0 / block.abs().max()) if block.any() else torch.tensor(1.0)
            quantized[here] = (block * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
            scales[i, j] = 1.0 / factor
    return quantized, scales


def dequantize_fp8(
    quantized: torch.Tensor, scales: torch.Tensor, blocks: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = quantized.shape
    spread = scales.float().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
    return (quantized.float() * spread[:rows, :columns]).to(dtype)


def make_fp8_checkpoint(
    source: str | Path, path: str | Path, blocks: tuple[int, int] = (128, 128), skipped: tuple[str, ...] = ()
) -> None:
    """Write the checkpoint ``source`` to ``path`` with its projections as FP8."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(Path(source) / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name == module or "_proj" not in module.rsplit(".", 1)[-1] or module.endswith(skipped):
            tensors[name] = value
        else:
            tensors[name], tensors[f"{name}_scale_inv"] = quantize_fp8(value, blocks)
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(blocks),
        "modules_to_not_convert": list(skipped) or None,
    }
    write_like(source, path, tensors, quantization_config=quantization)


def make_dequantized_checkpoint(
    source: str | Path,
    path: str | Path,
    blocks: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write what the FP8 checkpoint ``source`` stands for to ``path``, as an ordinary one."""
    tensors = load_file(Path(source) / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scales, weight = tensors.pop(name), name.removesuffix("_scale_inv")
        tensors[weight] = dequantize_fp8(tensors[weight], scales, blocks, dtype)
    write_like(source, path, tensors, quantization_config=None)


def copy_configs(source: str | Path, path: str | Path) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    for file in Path(source).glob("*.json"):
        (Path(path) / file.name).write_text(file.read_text())


def write_like(
    source: str | Path, path: str | Path, tensors: dict[str, torch.Tensor], **changes: object
) -> None:
    """Write ``tensors`` to ``path`` with the configs of ``source``, changed."""
    copy_configs(source, path)
    save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, **changes)
