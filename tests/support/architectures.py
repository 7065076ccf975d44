"""Tiny configs of architectures that transformers has, for comparisons with it.

Invariant: one entry per architecture, each of a few layers, whose awkward parts (windows shorter than the
prompts, soft caps, sinks, several experts) are in use.
"""

from typing import Any

import torch
import transformers
from support.checkpoints import DEEPSEEK, GROUPED, LATENT, ROUTED, SIZES, random_model

LEFT_OUT: Any = object()
"""A field that the config class does not take."""
_SIZES: dict[str, Any] = {
    **SIZES,
    "hidden_size": 48,  # as many as the heads have together: some architectures know no other
    "intermediate_size": 80,
    "tie_word_embeddings": False,
}
_WINDOW = {"sliding_window": 8}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], **_WINDOW}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2}
_ONE_GROUP = {**ROUTED, "n_group": 1, "topk_group": 1}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {**_MIXED, **_EXPERTS, "num_dense_layers": 1},
    "ExaoneMoeForCausalLM": {**_MIXED, **_EXPERTS},
    "Glm4MoeLiteForCausalLM": {**_ONE_GROUP, **LATENT, "v_head_dim": 20},
    "GraniteSWAForCausalLM": {**_MIXED, "attention_multiplier": 0.2},
    "HYV3ForCausalLM": _EXPERTS,
    "LagunaForCausalLM": {**_MIXED, **_EXPERTS},
    "MellumForCausalLM": {**_MIXED, **_EXPERTS},
    "MiniCPM3ForCausalLM": LATENT,
    "MiniMaxM2ForCausalLM": _EXPERTS,
    "ApertusForCausalLM": {},
    "ArceeForCausalLM": {},
    "BitNetForCausalLM": {},
    "CohereForCausalLM": {"logit_scale": 0.25},
    "Cohere2ForCausalLM": {**_MIXED, "logit_scale": 0.25},
    "CwmForCausalLM": _MIXED,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Dots1ForCausalLM": {**_MIXED, **GROUPED, "n_shared_experts": 1},
    "Emu3ForCausalLM": {"pad_token_id": 0},
    "Ernie4_5ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {
        "moe_intermediate_size": 24,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "Exaone4ForCausalLM": _MIXED,
    "FlexOlmoForCausalLM": {"num_experts": 5, "num_experts_per_tok": 2},
    "GemmaForCausalLM": {"tie_word_embeddings": True},
    "Gemma2ForCausalLM": {
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 20,
        **_MIXED,
    },
    "Gemma3ForCausalLM": {"tie_word_embeddings": True, "query_pre_attn_scalar": 20, **_MIXED},
    "GlmForCausalLM": {"partial_rotary_factor": 0.5},
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5},
    "Glm4MoeForCausalLM": {**_ONE_GROUP, "first_k_dense_replace": 1, "use_qk_norm": True},
    "GPTBigCodeForCausalLM": {"multi_query": True},
    "GPT2LMHeadModel": {},
    "GPTNeoXForCausalLM": {},
    "GptOssForCausalLM": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteForCausalLM": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    },
    "GraniteMoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
    "GraniteMoeSharedForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "shared_intermediate_size": 40,
    },
    "HeliumForCausalLM": {},
    "HunYuanDenseV1ForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {"num_experts": 4, "moe_topk": 2},
    "HyperCLOVAXForCausalLM": {},
    "Jais2ForCausalLM": {},
    "LlamaForCausalLM": {},
    "MinistralForCausalLM": _MIXED,
    "Ministral3ForCausalLM": _WINDOW,
    "MistralForCausalLM": _WINDOW,
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "NanoChatForCausalLM": {},
    "NemotronForCausalLM": {},
    "OlmoForCausalLM": {"clip_qkv": 1.5},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": _MIXED,
    "OlmoeForCausalLM": {"num_experts": 5, "num_experts_per_tok": 2},
    "OPTForCausalLM": {"ffn_dim": 80, "word_embed_proj_dim": 48},
    "PersimmonForCausalLM": {},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "Phi3ForCausalLM": _WINDOW,
    "PhimoeForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2ForCausalLM": {**_MIXED, "use_sliding_window": True},
    "Qwen2MoeForCausalLM": {**_EXPERTS, "shared_expert_intermediate_size": 40},
    "Qwen3ForCausalLM": {**_MIXED, "use_sliding_window": True},
    "Qwen3MoeForCausalLM": _EXPERTS,
    "SeedOssForCausalLM": {},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    "SolarOpenForCausalLM": {**_ONE_GROUP, "first_k_dense_replace": 1},
    "Starcoder2ForCausalLM": _WINDOW,
    "YoutuForCausalLM": LATENT,
    "VaultGemmaForCausalLM": {"tie_word_embeddings": True, "attn_logit_softcapping": 2.0, **_MIXED},
}
REFUSED: dict[str, dict[str, Any]] = {
    "DiffLlamaForCausalLM": {},
    "DogeForCausalLM": {},
    "JetMoeForCausalLM": {"kv_channels": 12, "num_local_experts": 4, "num_key_value_heads": 2},
    "FalconForCausalLM": {"head_dim": LEFT_OUT},
    "Lfm2ForCausalLM": {},
    "MiniMaxForCausalLM": {},
    "StableLmForCausalLM": {},
    "MiMoV2FlashForCausalLM": {},
    "Llama4ForCausalLM": {},
}


def tiny_config(architecture: str, **changes: Any) -> Any:
    fields = {**_SIZES, **{**ARCHITECTURES, **REFUSED}[architecture], **changes}
    given = {name: value for name, value in fields.items() if value is not LEFT_OUT}
    return getattr(transformers, architecture).config_class(**given)


def tiny_model(architecture: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """Return a model of this architecture as transformers runs it, every parameter random."""
    model_class = getattr(transformers, architecture)
    return random_model(model_class, tiny_config(architecture, **changes), seed).to(torch.float32)
