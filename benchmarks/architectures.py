"""Shapes of models whose update is hard: experts, latent attention, block-quantised weights; for
``checkpoints.py``.

- ``moe``: Qwen3-MoE, 4 layers of 32 experts, 0.11 GB.
- ``moe-0.2b``: the same with 8 layers and a vocabulary of 32,000, 0.26 GB.
- ``mla``: DeepSeek V3, 6 layers, one dense, 16 experts and a shared one, 0.06 GB.
- ``mla-0.2b``: the same with 8 layers, 32 experts and a vocabulary of 32,000, 0.28 GB.
- ``hybrid``: Qwen3.5 (text), 8 layers of which each fourth attends and the others keep a state, vocabulary
  32,000, 0.09 GB.
- ``mla-fp8``: ``mla`` as DeepSeek publishes it: float8_e4m3fn in blocks of 128 x 128, each with a float32
  scale.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from checkpoints import INIT_STD, SHAPES, Shape, random_tensor

FP8_BLOCK = 128
FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""


@dataclass(frozen=True, kw_only=True)
class MoeShape(Shape):
    """Qwen3-MoE: every feed-forward block is a mixture."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int

    def used_by(self, name: str, tokens: int) -> float:
        """Return the share of the tensor that ``tokens`` tokens read; experts by chance."""
        return chosen_by(name, tokens, self.num_experts_per_tok / self.num_experts)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in super().tensor_shapes().items():
            if ".mlp." not in name:
                shapes[name] = shape
            elif name.endswith("gate_proj.weight"):
                prefix = name.removesuffix(".gate_proj.weight")
                shapes[f"{prefix}.gate.weight"] = (self.num_experts, self.hidden_size)
                shapes |= experts(prefix, self.num_experts, self.hidden_size, self.moe_intermediate_size)
        return shapes

    def config(self, dtype: str) -> dict[str, Any]:
        return super().config(dtype) | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "moe_intermediate_size": self.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


@dataclass(frozen=True, kw_only=True)
class HybridShape(Shape):
    """Qwen3.5 (text): every fourth layer attends, with gates; the others use the gated delta rule."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.num_hidden_layers % self.full_attention_interval == 0

    @property
    def cached_width(self) -> int:
        """Numbers that the KV of a token has in each layer, a mean over all layers."""
        return super().cached_width // self.full_attention_interval

    @property
    def attended_width(self) -> int:
        """Multiplications of a token with another one, a mean over all layers; linear attention has none."""
        return super().attended_width // self.full_attention_interval

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states over all layers in float32, without those of the convolution."""
        state = self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        return 4 * state * (self.num_hidden_layers - self.num_hidden_layers // self.full_attention_interval)

    def attends(self, layer: int) -> bool:
        """Return True if the layer has KV."""
        return (layer + 1) % self.full_attention_interval == 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        channels, hidden = 2 * keys + values, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in super().tensor_shapes().items():
            module, _, last = name.partition(".self_attn.")
            if not last:
                shapes[name] = shape
            elif self.attends(int(module.rpartition(".")[2])):
                shapes[name] = (2 * shape[0], hidden) if last == "q_proj.weight" else shape
            elif last == "q_proj.weight":
                linear = f"{module}.linear_attn"
                shapes |= {
                    f"{linear}.in_proj_qkv.weight": (channels, hidden),
                    f"{linear}.in_proj_z.weight": (values, hidden),
                    f"{linear}.in_proj_b.weight": (self.linear_num_value_heads, hidden),
                    f"{linear}.in_proj_a.weight": (self.linear_num_value_heads, hidden),
                    f"{linear}.conv1d.weight": (channels, 1, self.linear_conv_kernel_dim),
                    f"{linear}.A_log": (self.linear_num_value_heads,),
                    f"{linear}.dt_bias": (self.linear_num_value_heads,),
                    f"{linear}.norm.weight": (self.linear_value_head_dim,),
                    f"{linear}.out_proj.weight": (hidden, values),
                }
        return shapes

    def config(self, dtype: str) -> dict[str, Any]:
        sizes = {name: value for name, value in vars(self).items() if name.startswith("linear_")}
        kinds = {True: "full_attention", False: "linear_attention"}
        return (
            super().config(dtype)
            | sizes
            | {
                "architectures": ["Qwen3_5ForCausalLM"],
                "model_type": "qwen3_5_text",
                "layer_types": [kinds[self.attends(layer)] for layer in range(self.num_hidden_layers)],
                "rope_parameters": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10_000_000.0,
                    "rope_type": "default",
                },
            }
        )


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """DeepSeek V3; field names follow the checkpoint's ``config.json``."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    vocab_size: int
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    fp8: bool = False
    tie_word_embeddings: bool = False
    state_bytes: ClassVar[int] = 0

    @property
    def cached_width(self) -> int:
        """Numbers that the KV of a token has in each layer: its latent and its rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def attended_width(self) -> int:
        """Least multiplications of a token with another one in each layer; heads may have more."""
        return self.num_attention_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)

    def used_by(self, name: str, tokens: int) -> float:
        """Return the share of the tensor that ``tokens`` tokens read; experts by chance."""
        return chosen_by(name, tokens, self.num_experts_per_tok / self.n_routed_experts)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by checkpoint name, scales included."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        query = self.qk_nope_head_dim + self.qk_rope_head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            attention = f"{prefix}.self_attn"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{attention}.q_a_proj.weight": (self.q_lora_rank, hidden),
                f"{attention}.q_a_layernorm.weight": (self.q_lora_rank,),
                f"{attention}.q_b_proj.weight": (heads * query, self.q_lora_rank),
                f"{attention}.kv_a_proj_with_mqa.weight": (self.kv_lora_rank + self.qk_rope_head_dim, hidden),
                f"{attention}.kv_a_layernorm.weight": (self.kv_lora_rank,),
                f"{attention}.kv_b_proj.weight": (
                    heads * (self.qk_nope_head_dim + self.v_head_dim),
                    self.kv_lora_rank,
                ),
                f"{attention}.o_proj.weight": (hidden, heads * self.v_head_dim),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
            }
            mlp = f"{prefix}.mlp"
            if layer == 0:
                shapes |= gated(mlp, hidden, self.intermediate_size)
                continue
            shapes[f"{mlp}.gate.weight"] = (self.n_routed_experts, hidden)
            shapes[f"{mlp}.gate.e_score_correction_bias"] = (self.n_routed_experts,)
            shapes |= experts(mlp, self.n_routed_experts, hidden, self.moe_intermediate_size)
            shapes |= gated(f"{mlp}.shared_experts", hidden, self.moe_intermediate_size)
        shapes["model.norm.weight"] = (hidden,)
        shapes["lm_head.weight"] = (self.vocab_size, hidden)
        if self.fp8:
            for name in [name for name in shapes if is_quantised(name)]:
                rows, columns = shapes[name]
                shapes[f"{name}_scale_inv"] = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return shapes

    def tensor(self, name: str, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that checkpoint number ``seed`` holds under ``name``."""
        shape = self.tensor_shapes()[name]
        if name.endswith("e_score_correction_bias"):
            return torch.zeros(shape)
        if name.endswith("_scale_inv"):  # the largest weight of a block is near four deviations
            noise = random_tensor(name, (*shape, 1), seed=seed, dtype=torch.float32)[..., 0]
            return 4 * INIT_STD / FP8_MAX * (1 + noise)
        values = random_tensor(name, shape, seed=seed, dtype=dtype)
        if self.fp8 and is_quantised(name):
            return (
                (values.float() * (FP8_MAX / 4 / INIT_STD)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            )
        return values

    def config(self, dtype: str) -> dict[str, Any]:
        sizes = {name: value for name, value in vars(self).items() if name != "fp8"}
        config: dict[str, Any] = sizes | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_key_value_heads": self.num_attention_heads,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "rope_scaling": None,
            "torch_dtype": dtype,
        }
        if self.fp8:
            config["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            }
        return config


def chosen_by(name: str, tokens: int, chance: float) -> float:
    """Return the share of experts that ``tokens`` tokens read, if each goes through one by this chance."""
    return 1.0 - (1.0 - chance) ** tokens if ".experts." in name else 1.0


def is_quantised(name: str) -> bool:
    """Return True if DeepSeek quantises this tensor: projections, not embeddings, head, norms or router."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def gated(prefix: str, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


def experts(prefix: str, count: int, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(count):
        shapes |= gated(f"{prefix}.experts.{number}", hidden, intermediate)
    return shapes


_LATENT: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_EXPERTS: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}

ARCHITECTURES: dict[str, Shape | LatentShape] = {
    **SHAPES,
    "moe": MoeShape(num_hidden_layers=4, vocab_size=4096, **_EXPERTS),
    "moe-0.2b": MoeShape(num_hidden_layers=8, vocab_size=32_000, **_EXPERTS),
    "hybrid": HybridShape(
        num_hidden_layers=8,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=32_000,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "mla": LatentShape(**_LATENT),
    "mla-0.2b": LatentShape(
        **{**_LATENT, "num_hidden_layers": 8, "n_routed_experts": 32, "vocab_size": 32_000}
    ),
    "mla-fp8": LatentShape(**_LATENT, fp8=True),
}
