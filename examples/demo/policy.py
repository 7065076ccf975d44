"""The policy: two layers of transformers' Qwen3, Qwen3-MoE or DeepSeek V3, and how it gets to disk.

Invariant: a checkpoint folder appears under its final name complete or not at all (written aside, then
renamed), so an engine that is told the name can never read half of one.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from . import task
from .settings import Policy

HIDDEN = 128
LAYERS = 2


def build_policy(kind: Policy = "dense", **sizes: int) -> PreTrainedModel:
    """Return a random policy in float32 of less than a million parameters; torch's global seed decides.

    ``sizes`` are fields of its configuration, in place of those that spelling needs.
    """
    common: dict[str, Any] = {
        "vocab_size": task.VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": task.CONTEXT_LEN,
        "tie_word_embeddings": True,
        "pad_token_id": task.PAD,
        "bos_token_id": None,
        "eos_token_id": task.END,
        **sizes,
    }
    grouped: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": HIDDEN // 4}
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**common, **grouped))
    experts: dict[str, Any] = {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN,
        "norm_topk_prob": True,
    }
    if kind == "moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **grouped, **experts, num_experts=8))
    latent: dict[str, Any] = {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": HIDDEN // 2,
        "qk_nope_head_dim": HIDDEN // 4,
        "qk_rope_head_dim": HIDDEN // 8,
        "v_head_dim": HIDDEN // 4,
    }
    chosen: dict[str, Any] = {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**common, **latent, **experts, **chosen))


def build_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character (the run itself uses token ids)."""
    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(task.TOKENS)}, unk_token=task.TOKENS[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


class CheckpointWriter:
    """Checkpoints in two folders in turn: the engine may still hold the last one."""

    def __init__(self, directory: Path, save: Callable[[PreTrainedModel, Path], None]) -> None:
        self._directory, self._save = directory, save
        self._count = 0

    def write(self, model: PreTrainedModel) -> Path:
        """Save ``model``; the folder written two calls ago is replaced."""
        aside = self._directory / "unfinished"
        shutil.rmtree(aside, ignore_errors=True)
        self._save(model, aside)
        final = self._directory / f"checkpoint-{self._count % 2}"
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        self._count += 1
        return final


def save_policy(model: PreTrainedModel, folder: Path) -> None:
    """Save ``model`` with its tokenizer as a folder that can be served."""
    model.save_pretrained(folder)
    build_tokenizer().save(str(folder / "tokenizer.json"))


def token_logprobs(
    model: PreTrainedModel, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every token's log-probability given those before it, and the entropy, at ``temperature``.

    Args:
        tokens: int64 [batch, length], padded on the right. Padding needs no mask: attention is causal, and
            the caller drops what stands on it.

    Returns:
        (logprobs, entropy), both float32 [batch, length - 1] in nats; column ``i`` is about ``tokens[:, i +
        1]``.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = distribution.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return chosen, -(distribution.exp() * distribution).sum(-1)
