"""Parameters of the GPU benchmark: models, prompts, concurrencies and time limits."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from architectures import FP8_BLOCK, FP8_MAX, MoeShape, is_quantised
from checkpoints import INIT_STD, SHAPES, CheckpointShape, Shape

ITEMSIZE = 2
"""Bytes of a number in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Fp8Shape(Shape):
    """Qwen3 with projections in FP8, one scale per block."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by checkpoint name, scales included."""
        shapes = super().tensor_shapes()
        for name in [name for name in shapes if is_quantised(name)]:
            rows, columns = shapes[name]
            shapes[f"{name}_scale_inv"] = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return shapes

    def config(self, dtype: str) -> dict[str, Any]:
        blocks = {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
        return super().config(dtype) | {
            "quantization_config": {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **blocks,
            }
        }  # fmt: skip


_8B: dict[str, Any] = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "tie_word_embeddings": False,
}
_TOY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""Qwen3-30B-A3B, with 8 of its 48 layers."""
_TOY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of everything; lengths in tokens."""

    shape: Shape
    small: Shape
    """Shape for runs over many updates, and whatever does not need a large one."""
    experts: MoeShape
    fp8: Fp8Shape
    buffer_bytes: int
    product_size: int
    link_bytes: int
    """Bytes of one copy between host and device."""
    batches: tuple[int, ...]
    compared: tuple[int, ...]
    """Batches whose captured steps are held against eager ones."""
    prompt_tokens: int
    steps: int
    """Decode steps that are averaged over."""
    prefill: tuple[int, int]
    """Prompts, and their length."""
    requests: int
    new_tokens: int
    """Output tokens of a request of the rollout."""
    chunk_tokens: int
    cycles: int
    """Pauses under load."""
    large_updates: int
    updates: int
    """Updates of the small model, for growth."""
    transport_updates: int
    """Updates of the small model by each transport."""
    peer_pool: dict[str, int]
    """Sizes of continuous batching; its own if empty."""

    @property
    def context_len(self) -> int:
        """Tokens of the longest request: one that others wait for decodes meanwhile."""
        return max(self.prefill[1] + 1, self.prompt_tokens + 4 * self.steps)

    @property
    def rows(self) -> int:
        return max(*self.batches, self.requests)

    @property
    def kv_tokens(self) -> int:
        """Tokens of the largest batch while it is measured; prefills and pauses have fewer requests."""
        return self.rows * (self.prompt_tokens + 4 * self.steps)

    @property
    def load_tokens(self) -> int:
        """Output tokens of requests that are paused: as many as fit, so that few end meanwhile."""
        return min(self.context_len, self.kv_tokens // self.requests) - self.prompt_tokens


FULL = Plan(
    shape=Shape(**_8B),
    small=SHAPES["0.6b"],
    experts=MoeShape(**{**_8B, **_EXPERTS}),
    fp8=Fp8Shape(**_8B),
    buffer_bytes=8 << 30,
    product_size=8192,
    link_bytes=1 << 30,
    batches=(1, 8, 64, 256),
    compared=(1, 3, 64, 256),
    prompt_tokens=512,
    steps=64,
    prefill=(8, 4096),
    requests=64,
    new_tokens=128,
    chunk_tokens=2048,
    cycles=100,
    large_updates=3,
    updates=60,
    transport_updates=5,
    peer_pool={},
)
SMOKE = Plan(
    shape=Shape(**_TOY),
    small=Shape(**_TOY),
    experts=MoeShape(**{**_TOY, **_TOY_EXPERTS}),
    fp8=Fp8Shape(**_TOY),
    buffer_bytes=4 << 20,
    product_size=64,
    link_bytes=1 << 20,
    batches=(1, 3),
    compared=(1, 3),
    prompt_tokens=24,
    steps=8,
    prefill=(2, 40),
    requests=3,
    new_tokens=6,
    chunk_tokens=64,
    cycles=4,
    large_updates=1,
    updates=14,
    transport_updates=2,
    peer_pool={"num_blocks": 16, "max_batch_tokens": 64},
)


@dataclass(frozen=True)
class OnDevice:
    """A shape whose tensors are drawn on the device: a CPU would take minutes for 8 billion normal values."""

    shape: CheckpointShape
    device: torch.device

    @property
    def bos_token_id(self) -> int:
        return self.shape.bos_token_id

    @property
    def eos_token_id(self) -> int:
        return self.shape.eos_token_id

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shape.tensor_shapes()

    def config(self, dtype: str) -> dict[str, Any]:
        return self.shape.config(dtype)

    def tensor(self, name: str, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that depends on the seed, name, shape and device type alone."""
        shapes = self.tensor_shapes()
        size = shapes[name]
        if name.endswith("_scale_inv"):  # the largest weight of a block is near four deviations
            return torch.full(size, 4 * INIT_STD / FP8_MAX)
        if len(size) == 1:
            return torch.ones(size, dtype=dtype)
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
        drawn = torch.empty(size, dtype=dtype, device=self.device).normal_(std=INIT_STD, generator=generator)
        if f"{name}_scale_inv" in shapes:
            scaled = drawn.float() * (FP8_MAX / 4 / INIT_STD)
            drawn = scaled.clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return drawn.cpu()


def step_bytes(shape: Shape, batch: int) -> float:
    """Return the bytes of weights that a decode step of ``batch`` rows reads, with evenly chosen experts."""
    shapes, total = shape.tensor_shapes(), 0.0
    for name, size in shapes.items():
        if name == "model.embed_tokens.weight" and not shape.tie_word_embeddings:
            continue
        itemsize = 4 if name.endswith("_scale_inv") else 1 if f"{name}_scale_inv" in shapes else ITEMSIZE
        total += torch.Size(size).numel() * itemsize * shape.used_by(name, batch)
    return total
