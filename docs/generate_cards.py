"""Writes the table of docs/explanation/cards.md: which public model runs on how many cards.

Invariants:
- Bytes of weights and of KV are those of the tensors that the engine would allocate on the last rank: it
  builds that rank's part of a model of ``docs/public_models.json`` on torch's ``meta`` device. Only
  :data:`RESERVED` is an estimate.
- Each row has the smallest number of cards whose KV holds :data:`LEAST_TOKENS` tokens.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from generated_parts import update

from caesura.io_struct import CaesuraError
from caesura.scheduler.execution.build import kv_bytes_per_token
from caesura.scheduler.models.config import parse_model_config
from caesura.scheduler.models.registry import build_model, require_ranks
from caesura.scheduler.parallel.group import TensorParallel
from caesura.scheduler.weights.loaded_model import LoadedModel
from caesura.scheduler.weights.loader import WeightLoader

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "explanation" / "cards.md"
CONFIGS = ROOT / "docs" / "public_models.json"
CARDS = {"H100": 80e9, "H200": 141e9}
"""Bytes of memory of a card."""
RESERVED = 6e9
"""Bytes of a card for the driver's context, graphs, and the activations and logits of a step."""
KV_FRACTION = 0.85
"""``kv_memory_fraction`` of accelerators."""
LEAST_TOKENS = 200_000
RANKS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Division:
    """One way to divide a model among ranks, and the bytes of the last of these."""

    tp: int
    ep: int
    dp_attention: int
    weights: int
    kv_per_token: int

    def tokens_held(self, memory: float) -> int:
        """Return the tokens whose KV all cards of ``memory`` bytes hold together."""
        left = max(0.0, memory - RESERVED - self.weights) * KV_FRACTION
        return self.dp_attention * int(left // self.kv_per_token)

    @property
    def options(self) -> str:
        others = {"ep": self.ep, "dp-attention": self.dp_attention}
        found = [f"--tp {self.tp}", *(f"--{name} {size}" for name, size in others.items() if size > 1)]
        return f"`{' '.join(found)}`"


def models() -> Mapping[str, Mapping[str, Any]]:
    """Return the published number of parameters, and the config, of each public model."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(CONFIGS.read_text(encoding="utf-8"))
    return found


@cache
def divided(name: str, tp: int, ep: int, dp_attention: int) -> Division | None:
    """Return the division of model ``name``, or None if the engine refuses it."""
    config = parse_model_config(models()[name]["config"])
    last, meta = TensorParallel(tp - 1, tp), torch.device("meta")
    try:
        if dp_attention > 1:
            require_ranks(config, tp, ep=ep, dp_attention=dp_attention)
        model = build_model(config, config.dtype, meta, last, ep=ep, dp_attention=dp_attention)
    except CaesuraError:
        return None
    loader = WeightLoader(model)
    loaded = LoadedModel(
        config=config, model=model, loader=loader, dtype=config.dtype, device=meta, digest="", parallel=last
    )
    return Division(tp, ep, dp_attention, loaded.weights_bytes, kv_bytes_per_token(loaded))


def smallest(name: str, memory: float, *, rows_apart: bool) -> Division | None:
    """Return the division over the fewest cards of ``memory`` bytes, by whole experts where others fail."""
    whole = divided(name, 1, 1, 1)
    assert whole is not None, "one rank divides nothing"
    for tp in RANKS[rows_apart:]:
        if whole.weights > tp * memory:
            continue
        for ep in (1, tp):
            found = divided(name, tp, ep, tp if rows_apart else 1)
            if found is not None and found.tokens_held(memory) >= LEAST_TOKENS:
                return found
    return None


def rows(memory: float) -> Iterator[str]:
    for name in models():
        for rows_apart in (False, True):
            found = smallest(name, memory, rows_apart=rows_apart)
            if found is None:
                way = "data-parallel attention" if rows_apart else "attention divided by heads"
                yield f"| {name} | none with {way} | | | |"
                continue
            yield (
                f"| {name} | {found.options} | {found.weights / 1e9:.1f} GB "
                f"| {found.kv_per_token / 1024:.1f} KiB | {found.tokens_held(memory):,} |"
            )


def table(memory: float) -> str:
    head = (
        "| model | options | weights of a card | KV of a token, on each card with it | tokens of all cards |"
    )
    return "\n".join([head, "|---|---|---|---|---|", *rows(memory)])


if __name__ == "__main__":
    sys.exit(update(DOCUMENT, {name: partial(table, memory) for name, memory in CARDS.items()}))
