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

import torch
from checkpoints import Shape, random_tensor, write_checkpoint

VOCAB, CONTEXT = 256, 4096
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


class SuccessorShape(Shape):
    """A Qwen3 decoder whose seed is the version's number."""

    def tensor(self, name: str, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Draw embeddings of unit scale, the head permuted from them, small layers, norms close to one."""
        shape = self.tensor_shapes()[name]
        if name == "lm_head.weight":
            table = self.tensor("model.embed_tokens.weight", seed=seed, dtype=dtype)
            head = torch.empty_like(table)
            head[torch.tensor(successors(seed))] = table
            return head
        if len(shape) == 1:
            return 1 + random_tensor(name, (1, *shape), seed=seed, dtype=torch.float32)[0].to(dtype)
        scale = 50 if name == "model.embed_tokens.weight" else 50 * LAYER_SCALE / 8
        return (random_tensor(name, shape, seed=seed, dtype=torch.float32) * scale).to(dtype)


SHAPE = SuccessorShape(
    num_hidden_layers=6, hidden_size=64, intermediate_size=512, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=VOCAB, max_position_embeddings=CONTEXT, bos_token_id=0,
    eos_token_id=1, tie_word_embeddings=False,
)  # fmt: skip


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
        path = write_checkpoint(folder / label, SHAPE, seed=number, dtype="float32", shards=1)
        found.append(Version(label, path, successors(number)))
    return found
