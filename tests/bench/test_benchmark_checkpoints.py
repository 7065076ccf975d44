"""The random checkpoints are what the engines take them for: loadable, complete, seeded."""

import json
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from caesura.client.text import TextTokenizer

SMALL = checkpoints.Shape(
    num_hidden_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=50, max_position_embeddings=64, bos_token_id=0,
    eos_token_id=1,
)  # fmt: skip


@pytest.mark.parametrize("shape", [*checkpoints.SHAPES, "small-untied"])
def test_names_and_shapes_are_those_of_the_architecture(shape: str) -> None:
    sizes = checkpoints.SHAPES.get(shape) or checkpoints.Shape(
        **{**vars(SMALL), "tie_word_embeddings": False}
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes.config("bfloat16")))
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert sizes.tensor_shapes() == expected


def test_transformers_loads_every_weight_as_written(tmp_path: Path) -> None:
    folder = checkpoints.write_checkpoint(tmp_path / "model", SMALL, dtype="float32", shards=3)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, value in model.named_parameters():
        assert torch.equal(
            value, checkpoints.random_tensor(name, tuple(value.shape), seed=0, dtype=torch.float32)
        )


def test_sharding_changes_no_value_and_the_index_is_complete(tmp_path: Path) -> None:
    whole = load_file(checkpoints.write_checkpoint(tmp_path / "whole", SMALL) / "model.safetensors")
    folder = checkpoints.write_checkpoint(tmp_path / "cut", SMALL, shards=4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) == 4
    assert set(index) == set(whole)
    for name, file in index.items():
        with safe_open(folder / file, framework="pt") as handle:
            assert torch.equal(handle.get_tensor(name), whole[name])


def test_every_matrix_differs_between_seeds_and_repeats_with_one(tmp_path: Path) -> None:
    first, again, other = (
        load_file(
            checkpoints.write_checkpoint(tmp_path / str(number), SMALL, seed=seed) / "model.safetensors"
        )
        for number, seed in enumerate((0, 0, 1))
    )
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert value.dim() == 1 or not torch.equal(value, other[name])


def test_rewriting_a_folder_leaves_no_stale_shard(tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, SMALL, shards=3)
    checkpoints.write_checkpoint(tmp_path, SMALL)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


@pytest.mark.parametrize("wrong", [{"shape": "huge"}, {"dtype": "int8"}, {"shards": 0}, {"shards": 1000}])
def test_impossible_wishes_write_nothing(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        checkpoints.write_checkpoint(tmp_path / "model", **{"shape": SMALL, **wrong})
    assert not (tmp_path / "model").exists()


def test_text_is_bytes_and_every_id_a_token(tmp_path: Path) -> None:
    checkpoints.main(["tiny", str(tmp_path), "--tokenizer"])
    tokenizer = TextTokenizer.from_folder(tmp_path)
    text = "Fluß\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.encode("<s></s>"), tokenizer.size) == ([0, 1], 4096)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant:"
