"""A model of transformers, computed by the engine over pages in every way and compared with transformers
itself.

Every way is gone twice, over attention by torch's operations and over compiled ones, where there are any: a
decoder's calls are others then.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from support.architectures import tiny_model
from support.forward_batches import PagedModel, Sequence, load_model
from torch import Tensor

from caesura.scheduler.kernels import TORCH, best
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.weights.loader import WeightLoader
from caesura.scheduler.weights.transports.disk import load_from_disk, open_checkpoint

VOCABULARY = 97
WAYS = {
    "prefill", "chunked prefill", "prefix hit", "decode", "mixed", "in_place update", "retract and update",
}  # fmt: skip


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Compared:
    """An architecture in two states of its weights, and the engine's model of the first."""

    old: transformers.PreTrainedModel
    new: transformers.PreTrainedModel
    model: CausalLM
    new_folder: Path
    gaps: dict[str, float]
    """Largest difference of a logit, by way of computing it."""

    def note(self, way: str, got: Tensor, expected: Tensor) -> None:
        assert got.shape == expected.shape
        assert got.isfinite().all(), way
        self.gaps[way] = max(self.gaps.get(way, 0.0), (got - expected).abs().max().item())

    def update(self) -> None:
        load_from_disk(WeightLoader(self.model), open_checkpoint(self.new_folder), 1 << 12)
        self.model.finalize_weights()


def compare(architecture: str, folder: Path | None = None, **changes: Any) -> Compared:
    """Run every way of computing a token. The model is checked at load, as an engine does."""
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return compare(architecture, Path(made), **changes)
    models = [tiny_model(architecture, seed, **changes) for seed in (1, 2)]
    for name, each in zip(("old", "new"), models):
        each.save_pretrained(folder / name)
    model = load_model(str(folder / "old"), torch.float32, backend="transformers")
    model.check()
    return compare_models(Compared(*models, model, folder / "new", {}))


def compare_models(compared: Compared) -> Compared:
    """Run every way of computing a token and note the gaps."""
    kinds = [False] if best("attention", "cpu", torch.float32) == TORCH else [False, True]
    with torch.inference_mode():
        for compiled in kinds:
            _prefills(compared, compiled)
            _mixed(compared, compiled)
        _updates(
            compared, [PagedModel(compared.model, torch.float32, compiled=compiled) for compiled in kinds]
        )
    return compared


def _expected(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


def _prefills(compared: Compared, compiled: bool) -> None:
    paged, tokens = PagedModel(compared.model, torch.float32, compiled=compiled), prompt(70)
    expected = _expected(compared.old, tokens)
    whole = Sequence(tokens)
    compared.note("prefill", paged.step([], [(whole, 70)])[0], expected)
    several = [Sequence(prompt(n, seed)) for seed, n in enumerate((1, 16, 17, 23, 23, 5, 32, 32))]
    for each, got in zip(several, paged.step([], [(each, len(each.tokens)) for each in several])):
        compared.note("prefill", got, _expected(compared.old, each.tokens))
    sequence, parts = Sequence(tokens), []
    for chunk in (16, 1, 7, 33, 13):
        parts += paged.step([], [(sequence, chunk)])
    compared.note("chunked prefill", torch.cat(parts), expected)
    hits = [Sequence(tokens[:32] + prompt(9, seed), computed=32, pages=whole.pages[:2]) for seed in (2, 3)]
    for each, got in zip(hits, paged.step([], [(each, 9) for each in hits])):
        compared.note("prefix hit", got, _expected(compared.old, each.tokens)[32:])


def _mixed(compared: Compared, compiled: bool) -> None:
    paged = PagedModel(compared.model, torch.float32, compiled=compiled)
    sequences = [Sequence(prompt(n + 4, seed)) for seed, n in enumerate((3, 14, 15, 16, 40, 120))]
    expected = [_expected(compared.old, each.tokens) for each in sequences]
    paged.step([], [(each, len(each.tokens) - 4) for each in sequences])
    for step in range(4):
        beside, way = [], "decode"
        if step >= 2:
            chunk, way = Sequence(prompt(19, 9 + step)), "mixed"
            beside = [(chunk, 19)]
        results = paged.step(sequences, beside)
        for got, each, logits in zip(results, sequences, expected):
            compared.note(way, got, logits[each.computed - 1 : each.computed])
        if beside:
            compared.note(way, results[-1], _expected(compared.old, chunk.tokens))


def _updates(compared: Compared, kinds: list[PagedModel]) -> None:
    tokens = prompt(30, 5)
    requests = [(paged, Sequence(tokens), Sequence(tokens)) for paged in kinds]
    for paged, frozen, retracted in requests:
        paged.step([], [(frozen, 24), (retracted, 24)])
    cache = compared.old(torch.tensor([tokens[:24]]), use_cache=True).past_key_values
    compared.update()
    # transformers' cache has latents, ours what follows from them
    latent = hasattr(compared.old.config, "kv_lora_rank")
    if not latent:
        rest = compared.new(torch.tensor([tokens[24:]]), past_key_values=cache, use_cache=True).logits[0]
    for paged, frozen, retracted in requests:
        if not latent:
            compared.note("in_place update", torch.cat([paged.step([frozen])[0] for _ in range(6)]), rest)
        retracted.computed, retracted.pages = 0, []
        again = paged.step([], [(retracted, 30)])[0]
        compared.note("retract and update", again, _expected(compared.new, tokens))
