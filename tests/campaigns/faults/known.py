"""Checkpoints whose greedy output is known without running them.

Invariants:
- A version is a permutation of the vocabulary: its head's row for a token's successor is that token's
  embedding, and the layers between add next to nothing. So the greedy token after ``t`` is ``successor[t]``,
  whatever came before ``t``, in whichever batch, on KV of whichever weights. One token of a wrong version is
  seen, in the middle of a request too.
- Every tensor of two versions differs, so half of an update is seen in the checksum where tokens do not show
  it.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import random_tensor, write_checkpoint

VOCAB, HIDDEN, LAYERS, CONTEXT = 256, 64, 6, 4096
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 16, 512
FIRST_TOKEN = 2
"""First id above those of beginning and end."""
LAYER_SCALE = 0.05
"""Scale of what attention and MLP add to the residual stream; embeddings have unit scale."""


@dataclass(frozen=True)
class Version:
    """One set of weights: its public label, its folder, and what follows each token."""

    label: str
    folder: Path
    successor: tuple[int, ...]

    def after(self, token: int, count: int) -> list[int]:
        found = []
        for _ in range(count):
            token = self.successor[token]
            found.append(token)
        return found


class SuccessorShape:
    """A Qwen3 decoder for ``write_checkpoint``; its seed is the version's number."""

    bos_token_id, eos_token_id = 0, 1

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (HIDDEN,),
                f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
                f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
                f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
                f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
                f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
                f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
                f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
                f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
                f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            }
        shapes["model.norm.weight"] = (HIDDEN,)
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
        return shapes

    def tensor(self, name: str, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Draw embeddings of unit scale, the head permuted from them, small layers, norms close to one."""
        shape = self.tensor_shapes()[name]
        if name == "lm_head.weight":
            table = self.tensor("model.embed_tokens.weight", seed=seed, dtype=dtype)
            head = torch.empty_like(table)
            head[torch.tensor(successors(seed))] = table
            return head
        if name == "model.embed_tokens.weight":
            return random_tensor(name, shape, seed=seed, dtype=torch.float32).mul_(50).to(dtype)
        if len(shape) == 1:
            noise = random_tensor(name, (1, *shape), seed=seed, dtype=torch.float32)[0]
            return (1 + noise).to(dtype)
        return (random_tensor(name, shape, seed=seed, dtype=torch.float32) * 50 * LAYER_SCALE / 8).to(dtype)

    def config(self, dtype: str) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": LAYERS,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 10_000.0,
            "sliding_window": None,
            "torch_dtype": dtype,
            "use_sliding_window": False,
        }


def successors(seed: int) -> tuple[int, ...]:
    """Return the successor of each token under version ``seed``: one cycle through all but special tokens."""
    order = list(range(FIRST_TOKEN, VOCAB))
    random.Random(f"successors {seed}").shuffle(order)
    found = list(range(VOCAB))
    for token, following in zip(order, order[1:] + order[:1], strict=True):
        found[token] = following
    return tuple(found)


def make_versions(folder: Path, count: int = 3) -> list[Version]:
    found = []
    for number in range(count):
        label = chr(ord("A") + number)
        path = write_checkpoint(folder / label, SuccessorShape(), seed=number, dtype="float32", shards=1)
        found.append(Version(label, path, successors(number)))
    return found
