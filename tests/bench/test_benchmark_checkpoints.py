"""The random checkpoints are what the engines take them for: loadable, complete, seeded."""

from pathlib import Path

import checkpoints
import pytest
import torch
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


def test_text_is_bytes_and_every_id_a_token(tmp_path: Path) -> None:
    checkpoints.main(["tiny", str(tmp_path), "--tokenizer"])
    tokenizer = TextTokenizer.from_folder(tmp_path)
    text = "Fluß\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.encode("<s></s>"), tokenizer.size) == ([0, 1], 4096)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "user: Hi\nassistant:"
