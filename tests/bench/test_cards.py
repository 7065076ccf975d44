"""The page of models and cards: configs are those of published models, rows what the engine builds."""

from pathlib import Path

import pytest
import torch
from generate_cards import CARDS, DOCUMENT, models, smallest

from caesura.scheduler.models.config import parse_model_config
from caesura.scheduler.models.registry import build_model

PAGE = Path(DOCUMENT).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", models())
def test_a_config_has_the_published_parameters(name: str) -> None:
    published, stated = models()[name]["published_parameters"], {**models()[name]["config"]}
    stated.pop("quantization_config", None)
    model = build_model(parse_model_config(stated), torch.bfloat16, torch.device("meta"))
    built = sum(tensor.numel() for _, tensor in model.named_storage())
    assert built == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("name", ["Qwen3-32B", "Qwen3-30B-A3B-FP8", "gpt-oss-120b"])
@pytest.mark.parametrize("rows_apart", [False, True])
def test_a_row_is_what_the_engine_builds(name: str, rows_apart: bool) -> None:
    for card, memory in CARDS.items():
        part = PAGE.partition(f"<!-- generated: {card} -->")[2].partition("<!-- end")[0]
        found = smallest(name, memory, rows_apart=rows_apart)
        if found is None:
            assert f"| {name} | none with " in part
            continue
        assert f"| {name} | {found.options} | {found.weights / 1e9:.1f} GB " in part
        assert f" KiB | {found.tokens_held(memory):,} |" in part
