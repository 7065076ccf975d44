"""Routed experts on CUDA: rows are read on a stream of their own, beside the steps."""

import numpy as np
import pytest
import torch
from support.checkpoints import make_checkpoint
from support.replay import chosen_experts, output_logprobs
from support.scripted import EngineDriver

from caesura.client.connection.results import decode_output
from caesura.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    SamplingParams,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 1e-3
"""In float32; the reference computes on the CPU."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "model"
    return str(path), make_checkpoint(path, "qwen3-moe", seed=5, num_hidden_layers=3, mlp_only_layers=[1])


@pytest.mark.parametrize("retract", [False, True])
def test_replayed_in_transformers(model, retract):
    path, reference = model
    with EngineDriver(
        path, scripted=False, device="cuda", chunked_prefill_size=32, max_running_requests=8
    ) as driver:
        prompts = [np.random.default_rng(i).integers(3, 97, 10 + 9 * i).tolist() for i in range(6)]
        rids = []
        for i, prompt in enumerate(prompts):
            # Of different lengths, so that some end while the step after theirs is running.
            params = SamplingParams(max_new_tokens=6 + 5 * i, temperature=1.0, seed=i, ignore_eos=True)
            message = GenerateReqInput(
                input_ids=prompt, sampling_params=params, return_logprob=True, return_routed_experts=True
            )
            rids.append(driver.submit(message))
        if retract:
            driver.tick(8)
            driver.call(PauseGenerationReqInput(mode="retract"))
            driver.call(ContinueGenerationReqInput())
        driver.run_until_idle()
        outputs = [decode_output(driver.result(rid)) for rid in rids]
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = torch.from_numpy(np.asarray(output.routed_experts).astype(np.int64))
        natural = chosen_experts(reference, [*prompt, *output.output_ids][:-1])
        assert (rows.sort(dim=-1).values == natural).float().mean() > 0.99, "more than ties"
        with torch.inference_mode():
            found = output_logprobs(reference, prompt, output.output_ids, rows)
        torch.testing.assert_close(found, torch.tensor(output.output_logprobs), rtol=0, atol=TOLERANCE)
