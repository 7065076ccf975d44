"""The page of models and cards: configs are those of published models, rows what the engine builds."""

from pathlib import Path

import pytest
import torch
from generate_cards import CARDS, DOCUMENT, divided, models, smallest
from support.lanes import quick

from caesura.scheduler.models.config import parse_model_config
from caesura.scheduler.models.registry import build_model
from caesura.scheduler.parallel.group import TensorParallel

PAGE = Path(DOCUMENT).read_text(encoding="utf-8")


def bytes_of(parts: tuple[str, ...], rank: int, ranks: int, **division: int) -> int:
    """Return the bytes of DeepSeek-V3 on one rank whose names have one of ``parts``."""
    config = parse_model_config(models()["DeepSeek-V3"]["config"])
    place = torch.device("meta"), TensorParallel(rank, ranks)
    stored = build_model(config, config.dtype, *place, **division).named_storage()
    return sum(tensor.nbytes for name, tensor in stored if any(part in name for part in parts))


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


def test_scale_page_has_the_capacity_of_dp_attention() -> None:
    page, memory = DOCUMENT.with_name("scale.md").read_text(encoding="utf-8"), 40e9
    rows: dict[str, list[str]] = {}
    for dp in (1, 8):
        found = divided("DeepSeek-V3", 8, 1, dp)
        assert found is not None
        attention = bytes_of((".attention.",), 7, 8, dp_attention=dp)
        tokens = dp * (memory - attention) / found.kv_per_token
        for name, value in (
            ("KV of a token, mean", f"{found.kv_per_token // dp:,} bytes"),
            ("attention in FP8, and the absorbed projections in bfloat16", f"{attention / 1e9:.1f} GB"),
            ("tokens of all ranks, 40 GB for both on each", f"{round(tokens, -3):,.0f}"),
        ):
            rows.setdefault(name, []).append(value)
    for name, values in rows.items():
        assert f"| {name} | {' | '.join(values)} |" in page


def test_shared_experts_by_blocks_take_the_bytes_of_their_page() -> None:
    parts = ".mlp.shared.", ".mlp.gate_up.", ".mlp.down."
    page = DOCUMENT.with_name("parallelism.md").read_text(encoding="utf-8").replace("\n", " ")
    whole, fullest = bytes_of(parts, 0, 1), bytes_of(parts, 31, 32, ep=32)
    assert bytes_of(parts[:1], 0, 32, ep=32) == 0
    assert f"{fullest / 1e9:.2f} GB on the fullest rank. Whole on each" in page
    assert f"rank they would be {whole / 1e9:.2f} GB" in page


@pytest.mark.parametrize(("name", "heads", "rows"), quick([("DeepSeek-V3", 64, 256), ("Kimi-K2", 32, 128)]))
def test_most_ranks_are_those_of_the_page(name: str, heads: int, rows: int) -> None:
    for most, rows_apart in ((heads, False), (rows, True)):
        for ranks, goes in ((most, True), (2 * most, False)):
            found = divided(name, ranks, ranks, ranks if rows_apart else 1)
            assert (found is not None) == goes
