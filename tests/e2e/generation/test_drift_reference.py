"""An engine's own samples against transformers with the same weights, without a trainer."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.checkpoints import copy_configs, make_checkpoint
from support.waiting import eventually

from caesura.client import (
    CheckpointError,
    EngineOutOfMemory,
    EpochBehind,
    InvalidRequest,
    SamplingParams,
    SchedulerClient,
    TimedOut,
    Unsupported,
    check_reference,
    drift_reference,
    launch_scheduler,
    reference_logprobs,
)
from caesura.client.cli import cli
from caesura.client.trainer.reference import score

pytestmark = pytest.mark.slow  # the reference's process imports transformers

OPTIONS = {
    "dtype": "float32", "num_threads": 1, "kv_pool_tokens": 4096, "log_level": "WARNING",
    "enable_drift_check": True, "drift_samples": 3, "drift_share": 0.0,
    "drift_warn": 1e-8, "drift_limit": 1e-4,
}  # fmt: skip
PROMPTS = [[3 + (31 * row + 7 * i) % 90 for i in range(20 + 9 * row)] for row in range(4)]
QUERY = "model.layers.1.self_attn.q_proj.weight"
SHAPE = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 12, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Return folders: the right weights, others, and the right ones with a fault."""
    root = tmp_path_factory.mktemp("models")
    found = {name: root / name for name in ("right", "other", "layer", "transposed", "rotary")}
    for seed, name in enumerate(("right", "other")):
        make_checkpoint(found[name], "qwen3", seed=seed, **SHAPE)
    right, other = (load_file(found[name] / "model.safetensors") for name in ("right", "other"))
    stale = {name: other[name] if ".layers.1." in name else each for name, each in right.items()}
    for name, tensors in (("layer", stale), ("transposed", {**right, QUERY: right[QUERY].T.contiguous()})):
        copy_configs(found["right"], found[name])
        save_file(tensors, found[name] / "model.safetensors", {"format": "pt"})
    shutil.copytree(found["right"], found["rotary"])
    config = json.loads((found["rotary"] / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 20_000.0}
    (found["rotary"] / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture(scope="module")
def engine(models) -> Iterator[SchedulerClient]:
    with launch_scheduler(models["right"], **OPTIONS) as client:
        with pytest.raises(EpochBehind, match="no sample"):
            check_reference(client, models["right"])
        params = SamplingParams(max_new_tokens=30, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
        client.generate(PROMPTS, params)
        eventually(lambda: len(client.drift_samples(8).samples) == 3)
        yield client


@pytest.fixture(scope="module")
def samples(engine, models) -> list[dict[str, Any]]:
    """Return the engine's samples with the reference's log-probabilities."""
    kept = [msgspec.to_builtins(each) for each in engine.drift_samples(8).samples]
    assert [each["prompt_len"] for each in kept] == [38, 29, 20]
    assert engine.drift_samples(1).samples == engine.drift_samples(8).samples[:1]
    scores = reference_logprobs(models["right"], kept)
    return [{**each, "logprobs": values} for each, values in zip(kept, scores, strict=True)]


def test_right_weights_differ_by_rounding_alone(engine, samples):
    report = engine.check_drift(samples)
    assert (report.state, report.tokens, 0.0 < report.max_abs < 1e-4) == ("ok", 3 * 30, True)


@pytest.mark.parametrize("fault", ["layer", "transposed", "rotary"])
def test_wrong_weights_of_the_engine_are_found(models, samples, fault):
    with launch_scheduler(models[fault], **OPTIONS) as wrong:
        report = wrong.check_drift(samples)
    assert report.state == "limit"


@pytest.mark.long
def test_the_command_follows_the_weight_version(engine, models):
    engine.update_weights_from_disk(models["right"], weight_version="transposed")
    eventually(lambda: len(engine.drift_samples(8).samples) == 3)  # scored by the new weights
    folder = str(models["right"].parent / "{version}")
    asked = ["drift", "--endpoint", engine.endpoint, "--json", "--samples", "9", "--reference", folder]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)["report"]
    assert (report["samples"], report["weight_version"], report["state"]) == (3, "transposed", "limit")


@pytest.mark.long
def test_watching_checks_again_after_each_update(engine, models):
    folder = str(models["right"].parent / "{version}")
    asked = ["drift", "--endpoint", engine.endpoint, "--json", "--watch", "--reference", folder]
    program = "import sys; from caesura.client.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", program, *asked]
    engine.update_weights_from_disk(models["right"], weight_version="right")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        states = [json.loads(watching.stdout.readline())["report"]["state"]]
        engine.update_weights_from_disk(models["right"], weight_version="nowhere")
        assert "nowhere" in watching.stderr.readline()  # says so, and goes on
        engine.update_weights_from_disk(models["right"], weight_version="transposed")
        states.append(json.loads(watching.stdout.readline())["report"]["state"])
        watching.send_signal(signal.SIGINT)
        said = watching.stderr.read()
    assert (states, watching.wait()) == (["ok", "limit"], 130), said


@pytest.mark.long
def test_a_reference_is_bounded(samples, models):
    with pytest.raises(TimedOut, match=r"within 0\.01 s"):
        reference_logprobs(models["right"], samples, timeout=0.01)
    with pytest.raises(EngineOutOfMemory, match="with 1 MiB"):
        reference_logprobs(models["right"], samples, memory_bytes=1 << 20)


def test_what_is_no_reference_is_refused(samples, models, tmp_path, monkeypatch):
    copy_configs(models["right"], tmp_path)
    tensors = load_file(models["right"] / "model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if n != QUERY}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError, match=QUERY):
        score(str(tmp_path), samples, "float32")
    with pytest.raises(CheckpointError, match="nowhere"):
        score(str(tmp_path / "nowhere"), samples, "float32")
    with pytest.raises(InvalidRequest, match="'a'"):
        reference_logprobs(models["right"], [{**samples[0], "adapter": "a"}])
    monkeypatch.setattr(drift_reference, "find_spec", lambda _: None)
    with pytest.raises(Unsupported, match="pip install"):
        reference_logprobs(models["right"], samples)
