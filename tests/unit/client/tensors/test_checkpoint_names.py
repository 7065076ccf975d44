"""What a trainer sends equals what transformers would save, name by name and byte by byte."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from caesura.client.tensors import checkpoint_tensors
from caesura.io_struct import CaesuraError

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
DEEPSEEK = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 12}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, EXPERTS),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM, DEEPSEEK),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, DEEPSEEK),
}


def build(family: str, tied: bool) -> transformers.PreTrainedModel:
    config_class, model_class, fields = FAMILIES[family]
    torch.manual_seed(0)
    return model_class(config_class(**{**SHAPE, **fields}, tie_word_embeddings=tied)).to(torch.bfloat16)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_save_pretrained(tmp_path: Path, family, tied):
    model = build(family, tied)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = list(checkpoint_tensors(model))
    assert sorted(name for name, _ in sent) == sorted(saved)
    for name, tensor in sent:
        assert tensor.dtype == saved[name].dtype
        assert tensor.shape == saved[name].shape
        assert bytes_of(tensor) == bytes_of(saved[name])


def test_tensors_are_views_of_the_model():
    """Nothing is copied: a step of the optimizer shows in what was listed before it."""
    model = build("qwen3_moe", tied=False)
    listed = dict(checkpoint_tensors(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    assert all((tensor == 3).all() for tensor in listed.values())


def test_experts_fused_in_an_unknown_way_are_refused():
    model = build("qwen3_moe", tied=False)
    model.config.model_type = "gpt_oss"
    with pytest.raises(CaesuraError, match="gpt_oss") as caught:
        list(checkpoint_tensors(model))
    assert caught.value.code == "unsupported"
