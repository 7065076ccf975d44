"""Scoring through a process and the clients."""

import numpy as np
import psutil
import pytest
import torch
import transformers
from support.checkpoints import make_checkpoint
from support.lanes import quick

from caesura.client import EngineError, InvalidRequest, SamplingParams, Unsupported, launch_scheduler

MIB = 1 << 20
SHAPE = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
OPTIONS = {
    "dtype": "float32", "device": "cpu", "num_threads": 1, "kv_pool_tokens": 4096, "check_ledger": True,
    "log_level": "WARNING",
}  # fmt: skip
RESIDENCIES = ["resident", "offload", "layerwise"]
PROMPTS = [[3 + (31 * row + 7 * i) % 2000 for i in range(40 + 9 * row)] for row in range(6)]
PARAMS = SamplingParams(max_new_tokens=30, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("scoring") / "policy"
    make_checkpoint(path, "qwen3", seed=1, num_hidden_layers=2, **SHAPE)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("scoring") / "reference"
    make_checkpoint(path, "qwen3", seed=2, num_hidden_layers=8, **SHAPE)
    return path


@pytest.fixture(scope="module")
def alone(policy):
    with launch_scheduler(policy, **OPTIONS) as client:
        client.generate(PROMPTS[0], PARAMS)
        return client.status().device_memory.reserved


def by_transformers(model, ids: list[int], start: int, temperature: float) -> np.ndarray:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0] / temperature, -1)
    return np.asarray([logprobs[i - 1, ids[i]].item() for i in range(start, len(ids))])


@pytest.mark.parametrize("residency", quick(RESIDENCIES))
def test_finished_rollouts_are_scored(policy, reference, residency):
    with launch_scheduler(
        policy, reference_model_path=reference, reference_residency=residency, **OPTIONS
    ) as client:
        outputs = client.generate(PROMPTS, PARAMS)
        rollouts = [prompt + out.output_ids for prompt, out in zip(PROMPTS, outputs, strict=True)]
        starts = [len(prompt) for prompt in PROMPTS]
        scores = client.score(rollouts, start=starts, temperature=0.8)
        model = transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
        for ids, start, found in zip(rollouts, starts, scores, strict=True):
            expected = by_transformers(model, ids, start, 0.8)
            np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
        client.pause()
        assert client.score(rollouts[0], start=starts[0], temperature=0.8) == pytest.approx(
            scores[0], abs=1e-5
        )


@pytest.mark.parametrize("residency", quick(RESIDENCIES[::-1]))
def test_the_reference_is_in_memory_while_it_is_used(policy, reference, alone, residency):
    with launch_scheduler(
        policy, reference_model_path=reference, reference_residency=residency, **OPTIONS
    ) as client:
        client.generate(PROMPTS[0], PARAMS)
        size = client.status().reference.weights
        assert size > 30 * MIB
        for _ in range(3):
            rest = client.status()
            while residency != "resident" and rest.reference.device_bytes:  # it leaves behind the answer
                rest = client.status()
            extra = rest.device_memory.reserved - alone
            if residency == "resident":
                assert rest.reference.device_bytes == size
                assert extra > 0.9 * size
            else:
                assert extra < 0.4 * size, "what is left: workspaces, and Python's objects"
            client.score(PROMPTS, start=1)
        assert psutil.Process(rest.pid).num_threads() < 12


def test_wrong_arguments_are_refused(policy, reference):
    with launch_scheduler(policy, **OPTIONS) as client:
        with pytest.raises(Unsupported, match="no reference is loaded"):
            client.score([1, 2, 3], start=1)
        with pytest.raises(InvalidRequest, match="2 start for 1 sequences"):
            client.score([[1, 2, 3]], start=[1, 2])
    with pytest.raises(EngineError, match="nowhere") as caught:
        launch_scheduler(policy, reference_model_path=policy / "nowhere", **OPTIONS)
    assert caught.value.code in ("checkpoint_error", "unsupported_model")
