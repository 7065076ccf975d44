"""Write random-weight Hugging Face checkpoints for benchmarks, with torch and safetensors only.

Invariants:
- A tensor's values depend on (seed, its name, its shape, the dtype) and nothing else: sharding, tying or
  adding layers changes no other tensor, and two seeds give two checkpoints between which every weight matrix
  differs.
- ``config.json`` is written last, so a folder that has one is complete.

Three shapes:

- ``tiny``: Qwen3, 6 layers, hidden 256, intermediate 768, 4 heads and 2 kv heads of 64, vocabulary 4,096,
  tied. The proportions of Qwen3-0.6B (intermediate = 3 x hidden, groups of 2) at a size where an engine's own
  overhead, not arithmetic, decides. Head size is 64: smaller ones meet no compiled attention kernel anywhere.
- ``0.6b``: Qwen3-0.6B as published: 28 layers, hidden 1,024, intermediate 3,072, 16 heads and 8 kv heads of
  128, vocabulary 151,936, tied.
- ``0.1b``: 8 layers of ``0.6b`` and the vocabulary of ``tiny``: 130 million parameters, which caches do not
  hold and a benchmark can train.

``image`` is a Stable Diffusion 3 pipeline instead, as ``harness/image_pipelines.py`` writes it; needs
diffusers.

The shapes of language models are bfloat16. Matrices are normal with standard deviation 0.02, norms are one:
logits are then close to normal with a standard deviation under one, so sampling at temperature 1 visits the
whole vocabulary.
"""

import argparse
import hashlib
import itertools
import json
import os
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

INIT_STD = 0.02
CHAT_TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class CheckpointShape(Protocol):
    """A model that checkpoints are made of."""

    @property
    def bos_token_id(self) -> int: ...

    @property
    def eos_token_id(self) -> int: ...

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by checkpoint name, in file order."""
        ...

    def tensor(self, name: str, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that checkpoint number ``seed`` holds under ``name``."""
        ...

    def config(self, dtype: str) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 decoder; field names follow the checkpoint's ``config.json``."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        assert self.num_attention_heads % self.num_key_value_heads == 0
        assert max(self.bos_token_id, self.eos_token_id) < self.vocab_size

    @property
    def cached_width(self) -> int:
        """Numbers that the KV of a token has in each layer."""
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def attended_width(self) -> int:
        """Multiplications of a token with another one in each layer: scores, and values."""
        return 2 * self.num_attention_heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that layers keep of a sequence, which each of its steps reads and writes."""
        return 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by checkpoint name, in file order; linear weights are [out features, in features]."""
        hidden = self.hidden_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
                f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
                f"{prefix}.self_attn.q_norm.weight": (self.head_dim,),
                f"{prefix}.self_attn.k_norm.weight": (self.head_dim,),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.mlp.gate_proj.weight": (self.intermediate_size, hidden),
                f"{prefix}.mlp.up_proj.weight": (self.intermediate_size, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, self.intermediate_size),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def used_by(self, name: str, tokens: int) -> float:
        """Return the share of the tensor that a step of ``tokens`` tokens reads."""
        return 1.0

    def tensor(self, name: str, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that checkpoint number ``seed`` holds under ``name``."""
        return random_tensor(name, self.tensor_shapes()[name], seed=seed, dtype=dtype)

    def config(self, dtype: str) -> dict[str, Any]:
        """Return ``config.json`` in the form of transformers 4, which all peers read."""
        sizes = {each.name: getattr(self, each.name) for each in fields(Shape)}
        return sizes | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": INIT_STD,
            "max_window_layers": self.num_hidden_layers,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "torch_dtype": dtype,
            "use_cache": True,
            "use_sliding_window": False,
        }


SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        num_hidden_layers=6,
        hidden_size=256,
        intermediate_size=768,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "0.6b": Shape(
        num_hidden_layers=28,
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
}
SHAPES["0.1b"] = replace(
    SHAPES["0.6b"],
    num_hidden_layers=8,
    vocab_size=SHAPES["tiny"].vocab_size,
    bos_token_id=SHAPES["tiny"].bos_token_id,
    eos_token_id=SHAPES["tiny"].eos_token_id,
)


def write_checkpoint(
    path: str | Path, shape: str | CheckpointShape, *, seed: int = 0, shards: int = 1, dtype: str = "bfloat16"
) -> Path:
    """Write a loadable checkpoint folder and return its path; an existing one is overwritten.

    Args:
        path: Folder to create; parents are created too.
        shape: A name from :data:`SHAPES`, or sizes of one's own.
        seed: Chooses the weights.
        shards: Number of safetensors files. 1: a single ``model.safetensors`` without an index.
        dtype: one of :data:`DTYPES`, of the files and of ``config.json``.

    Raises:
        ValueError: an unknown shape or dtype, or more shards than tensors.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    tensors = shape.tensor_shapes()
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"shards = {shards} must be between 1 and {len(tensors)}")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    for stale in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        stale.unlink()

    weight_map: dict[str, str] = {}
    for number, names in enumerate(_split(tensors, shards), start=1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        values = {name: shape.tensor(name, seed=seed, dtype=DTYPES[dtype]) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if shards > 1:
        total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    ends = {"bos_token_id": shape.bos_token_id, "eos_token_id": shape.eos_token_id}
    _write_json(folder / "generation_config.json", ends)
    _write_json(folder / "config.json", shape.config(dtype))
    return folder


def write_tokenizer(folder: Path, shape: Shape) -> None:
    """Add a tokenizer and a chat template.

    Text is encoded by bytes. The other tokens are words, which a model samples and a grammar's mask covers.
    """
    ends = {"<s>": shape.bos_token_id, "</s>": shape.eos_token_id}
    free = (number for number in range(shape.vocab_size) if number not in ends.values())
    vocab = ends | dict(
        zip(itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), _words()), free, strict=False)
    )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(ends))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    _write_json(folder / "tokenizer_config.json", config | {"chat_template": CHAT_TEMPLATE})


def _words() -> Iterator[str]:
    """Yield every word of two letters, of three, and so on."""
    for length in itertools.count(2):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


def random_tensor(name: str, shape: tuple[int, ...], *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values that checkpoint number ``seed`` has under ``name``."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(shape).normal_(std=INIT_STD, generator=generator).to(dtype)


def _split(tensors: dict[str, tuple[int, ...]], shards: int) -> Iterator[list[str]]:
    """Cut the names, in file order, into ``shards`` non-empty runs of roughly equal element counts."""
    names = list(tensors)
    elements = [torch.Size(tensors[name]).numel() for name in names]
    remaining, start = sum(elements), 0
    for left in range(shards, 0, -1):
        end, taken = start + 1, elements[start]
        while end < len(names) - (left - 1) and taken + elements[end] / 2 <= remaining / left:
            taken += elements[end]
            end += 1
        end = len(names) if left == 1 else end
        yield names[start:end]
        remaining, start = remaining - taken, end


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a random-weight Hugging Face checkpoint.")
    parser.add_argument("shape", choices=(*SHAPES, "image"))
    parser.add_argument("path", type=Path, help="folder to create or overwrite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1, help="number of safetensors files (default: 1)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument(
        "--tokenizer", action="store_true", help="also write a tokenizer of bytes; not for image"
    )
    options = parser.parse_args(argv)
    if options.shape == "image":
        for library in ("TRANSFORMERS", "DIFFUSERS"):  # they speak of other models' modules
            os.environ.setdefault(f"{library}_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from harness import image_pipelines  # diffusers is an extra

        tiny = image_pipelines.SHAPES["tiny"]
        folder = image_pipelines.write_pipeline(options.path, tiny, seed=options.seed)
    else:
        folder = write_checkpoint(
            options.path, options.shape, seed=options.seed, shards=options.shards, dtype=options.dtype
        )
        if options.tokenizer:
            write_tokenizer(folder, SHAPES[options.shape])
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    print(f"{folder}: {options.shape}, seed {options.seed}, {size / 2**20:.1f} MB")


if __name__ == "__main__":
    main()
