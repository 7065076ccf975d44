"""Errors of a start that cannot work, and the dtypes that one can name."""

import re
from pathlib import Path

import pytest
import torch
from support.scripted import EngineDriver
from transformers import AutoModelForCausalLM

from caesura.io_struct import CaesuraError
from caesura.process.engine_options import DtypeName
from caesura.scheduler.runtime.dtypes import SHORT_NAMES
from caesura.scheduler.runtime.engine_config import EngineConfig

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
PROMPT = [5, 6, 7, 8]


def refusal(path, **options):
    with pytest.raises(CaesuraError) as caught:
        EngineDriver(str(path), **options)
    return caught.value


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "./Qwen/Qwen3-0.6B", "/no/such/folder"])
def test_a_hub_id_is_told_that_nothing_is_downloaded(path):
    error = refusal(path)
    name = "Qwen/Qwen3-0.6B" if "Qwen" in path else "ORG/NAME"
    assert error.code == "checkpoint_error"
    assert error.message.endswith(
        f"there is no such folder. Nothing is downloaded: `hf download {name} --local-dir FOLDER` gets a "
        "model of the Hugging "
        "Face hub, and FOLDER is then its path"
    )


def test_a_folder_without_a_model_is_told_what_lacks(tmp_path, tiny_model):
    file = tiny_model / "model.safetensors"
    assert (
        refusal(file).message == f"{file}: is a file; a model is a folder with config.json and *.safetensors"
    )
    assert refusal(tmp_path).message == f"{tmp_path}: has no config.json"
    revision = tmp_path / "snapshots" / "0a1b"
    revision.mkdir(parents=True)
    (revision / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    assert refusal(tmp_path).message == f"{tmp_path}: has no config.json; {revision} has one"
    assert refusal(revision).message == f"{revision}: has no *.safetensors file"
    (revision / "config.json").write_text("{")
    assert "config.json: is not a JSON object" in refusal(revision).message


def test_a_context_beyond_the_models_is_refused(tiny_model):
    error = refusal(tiny_model, context_len=257)
    assert error.message.startswith(
        "context_len = 257 is beyond the 256 tokens of this model (max_position_embeddings in "
    )
    assert (error.code, error.detail["limit"]) == ("invalid_request", 256)
    with EngineDriver(str(tiny_model), context_len=256) as driver:
        assert driver.status().context_len == 256


@pytest.mark.parametrize("name", ["float16", "fp16", "half"])
def test_float16_is_served_whatever_it_is_called(tiny_model, name):
    with EngineDriver(str(tiny_model), dtype=name, scripted=False) as driver:
        assert driver.status().dtype == "float16"
        result = driver.complete(PROMPT, 1, return_logprob=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float16)
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
    token = int.from_bytes(result.output_ids, "little")
    assert logprobs[token] > logprobs.max() - 0.02
    assert torch.frombuffer(bytearray(result.output_logprobs), dtype=torch.float32)[0] == pytest.approx(
        logprobs[token].item(), abs=0.02
    )


def test_names_of_dtypes_are_those_of_the_page():
    served = re.search(r"Data types are (.*?), that of the checkpoint", " ".join(PAGE.read_text().split()))
    assert served is not None
    short = re.findall(r"\w+", served[1].replace("and", ""))
    assert {SHORT_NAMES[name] for name in short} == set(SHORT_NAMES.values())
    named = set(DtypeName.__args__) - {"auto"}
    assert named == SHORT_NAMES.keys() | SHORT_NAMES.values()
    for name in named:
        assert EngineConfig(model_path="m", dtype=name).dtype == name
