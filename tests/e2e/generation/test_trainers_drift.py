"""Faults between a trainer and an engine, which a check with the trainer's log-probabilities finds."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint

from caesura.client import (
    AsyncSchedulerClient,
    InvalidRequest,
    SamplingParams,
    SchedulerClient,
    TimedOut,
    Unsupported,
    launch_scheduler,
)
from caesura.io_struct import DriftReport

OPTIONS = {
    "dtype": "float32", "device": "cpu", "num_threads": 1, "kv_pool_tokens": 4096, "check_ledger": True,
    "log_level": "WARNING", "drift_warn": 1e-8, "drift_limit": 1e-4,
}  # fmt: skip
PROMPTS = [[3 + (31 * row + 7 * i) % 90 for i in range(40 + 9 * row)] for row in range(4)]
PARAMS = SamplingParams(max_new_tokens=30, temperature=0.8, seed=5, ignore_eos=True)
SHAPE = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 12, "initializer_range": 0.2}
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """Return the weights that the engine starts with, and those that the trainer has now."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("old", 1), ("new", 2)):
        make_checkpoint(folder / name, "qwen3", tied=False, seed=seed, **SHAPE)
    return folder / "old", folder / "new"


@pytest.fixture(scope="module")
def engine(models) -> Iterator[SchedulerClient]:
    with launch_scheduler(models[0], **OPTIONS) as client:
        yield client


class Trainer:
    """Computes what a trainer's loss needs, with transformers."""

    def __init__(self, path: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.weights = dict(self.model.state_dict())

    def __call__(self, prompt: list[int], output: list[int], bfloat16_head: bool = False) -> list[float]:
        ids = torch.tensor([prompt + output])
        with torch.no_grad():
            hidden = self.model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
            head = self.model.lm_head.weight
            logits = (hidden.bfloat16() @ head.bfloat16().T).float() if bfloat16_head else hidden @ head.T
        return torch.log_softmax(logits / PARAMS.temperature, -1)[range(len(output)), output].tolist()


@pytest.fixture(scope="module")
def trainer(models) -> Trainer:
    return Trainer(models[1])


def rollouts(engine: SchedulerClient) -> list[tuple[list[int], list[int]]]:
    outputs = engine.generate(PROMPTS, PARAMS)
    return [(prompt, output.output_ids) for prompt, output in zip(PROMPTS, outputs, strict=True)]


def samples(engine: SchedulerClient, logprobs_of: Any, temperature: float = 0.8) -> list[dict[str, Any]]:
    return [
        {
            "token_ids": prompt + output,
            "prompt_len": len(prompt),
            "logprobs": logprobs_of(prompt, output),
            "temperature": temperature,
        }
        for prompt, output in rollouts(engine)
    ]


def checked(engine: SchedulerClient, logprobs_of: Any) -> DriftReport:
    return engine.check_drift(samples(engine, logprobs_of))


def test_weights_that_are_not_the_trainers_are_found(engine, trainer, models):
    old, new = load_file(models[0] / "model.safetensors"), trainer.weights
    faults = {
        "a layer that was not updated": {**new, **{name: old[name] for name in old if ".layers.1." in name}},
        "a transposed shard": {**new, QUERY: new[QUERY].T.contiguous()},
        "an update that did not arrive": old,
    }
    for fault, sent in faults.items():
        engine.update_weights_from_tensor(sent)
        report = checked(engine, trainer)
        assert (report.state, report.k3 > 1e-3) == ("limit", True), fault
    engine.update_weights_from_tensor(new)
    report = checked(engine, trainer)
    assert (report.state, report.tokens, report.weights_epoch) == ("ok", 4 * 30, 4)
    assert 0.0 < report.max_abs < 1e-4
    assert report.ess == pytest.approx(1.0)


def test_numbers_that_a_trainer_computes_otherwise_are_found(engine, trainer):
    engine.update_weights_from_tensor(trainer.weights)
    rounding = checked(engine, trainer)
    assert checked(engine, lambda prompt, output: trainer([1, *prompt], output)).state == "limit", (
        "a template"
    )
    assert engine.check_drift(samples(engine, trainer, temperature=1.0)).state == "limit"
    report = checked(engine, partial(trainer, bfloat16_head=True))
    assert (report.state, report.mean_abs > 20 * rounding.mean_abs) == ("warn", True)


def test_another_rotary_base_is_found(models, trainer, tmp_path):
    shutil.copytree(models[1], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 20_000.0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with launch_scheduler(tmp_path / "model", **OPTIONS) as engine:
        assert checked(engine, trainer).state == "limit"


def test_the_asyncio_client_has_the_same_report(engine, trainer):
    sent = samples(engine, trainer)

    async def check() -> DriftReport:
        async with AsyncSchedulerClient(engine.endpoint) as client:
            return await client.check_drift(sent)

    assert asyncio.run(check()) == engine.check_drift(sent)


def test_who_waits_is_told_that_the_engine_is_paused(engine, trainer):
    sent = samples(engine, trainer)
    engine.pause("in_place")
    with pytest.raises(TimedOut, match="the engine was paused"):
        engine.check_drift(sent, timeout=1.0)
    engine.continue_generation()


def test_samples_may_have_arrays(engine, trainer):
    sent = samples(engine, trainer)
    arrays = [
        {**each, "token_ids": torch.tensor(each["token_ids"]), "logprobs": torch.tensor(each["logprobs"])}
        for each in sent
    ]
    assert engine.check_drift(arrays) == engine.check_drift(sent)


MISTAKES = [
    ({"token_ids": None}, r"samples\[0\]"),
    ({"logprobs": ["x"]}, r"samples\[0\]"),
    ({"logprobs": [0.0]}, r"samples\[0\]: logprobs = '1 values' must be those of 2 output tokens"),
    ({"prompt_len": 4}, r"samples\[0\]: prompt_len = 4 must be in \[1, 3\]"),
    ({"what": 1}, "what"),
]


def test_a_sample_that_is_none_is_refused_by_name(engine):
    for fields, message in MISTAKES:
        sample = {"token_ids": [5, 6, 7, 8], "prompt_len": 2, "logprobs": [-1.0, -2.0], **fields}
        with pytest.raises(InvalidRequest, match=message):
            engine.check_drift([sample])


def test_a_report_of_checks_needs_the_option(engine):
    with pytest.raises(Unsupported, match="enable_drift_check"):
        engine.check_drift()
    with pytest.raises(InvalidRequest, match=r"samples\[0\] has no logprobs"):
        engine.check_drift([{"token_ids": [5, 6], "prompt_len": 1}])
