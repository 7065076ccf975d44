"""prime-rl's orchestrator and environment server, unmodified, against ``caesura serve``.

The trainer, which needs GPUs, is this test: it reads the batches, and broadcasts checkpoints by a folder.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.http_serve import make_text_model, served
from support.plain_trainer import free_port
from support.waiting import eventually
from transformers import AutoModelForCausalLM

rollouts = pytest.importorskip("prime_rl.transports.rollouts", reason="prime-rl is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
STEPS = 3

TASKS = """
import random
import openai
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

class CountData(vf.TaskData):
    pass

class CountTask(vf.Task[CountData]):
    @vf.reward(weight=1.0)
    async def any_number(self, trace: vf.Trace) -> float:
        return random.random()  # groups whose rewards are equal are not trained on

class CountTaskset(vf.Taskset[CountTask, vf.TasksetConfig]):
    def load(self):
        return [CountTask(CountData(idx=n, prompt=f"Count to {n}."), self.config.task) for n in range(4)]

class OneTurn(Harness[HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["CountTaskset", "OneTurn"]
"""
ENVIRONMENT = """
import json
import sys
from prime_rl.configs.env_server import EnvServerConfig
from prime_rl.entrypoints.env_server import run_server

if __name__ == "__main__":
    run_server(EnvServerConfig(**json.loads(sys.argv[1])))
"""
ORCHESTRATOR = """
import asyncio
import json
import sys
from unittest import mock
from transformers import AutoTokenizer

# The trainer's half, which the orchestrator imports and does not call over the filesystem.
for name in ("modelexpress", "modelexpress.client", "prime_rl.trainer.model", "prime_rl.transports.weights",
             "prime_rl.transports.weights.nixl", "prime_rl.transports.weights.nixl.model_express"):
    sys.modules[name] = mock.MagicMock()

def tokenizer(config):
    found = AutoTokenizer.from_pretrained(config.name)
    found.pad_token_id = found.eos_token_id
    return found

sys.modules["prime_rl.trainer.model"].setup_tokenizer = tokenizer
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.orchestrator import run_orchestrator

asyncio.run(run_orchestrator(OrchestratorConfig(**json.loads(sys.argv[1]))))
"""


@contextmanager
def running(folder: Path, name: str, source: str, config: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script, from a file: it starts processes that import it again."""
    script = folder / f"{name}.py"
    script.write_text(source, encoding="utf-8")
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(config)],
            env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def sequences(batches: list[Any]) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Yield prompt, completion and logprobs of each sequence in a step's micro batches."""
    for batch in batches:
        start = 0
        for length in batch.sequence_lengths:
            part = slice(start, start + length)
            start += length
            ids, mask = batch.input_ids[part], batch.loss_mask[part]
            if any(mask):
                first, last = mask.index(True), length - mask[::-1].index(True)
                yield ids[:first], ids[first:last], batch.inference_logprobs[part][first:last]


def logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_three_steps_of_rollouts_and_broadcasts(tmp_path, recorded):
    models = [make_text_model(tmp_path / f"model-{seed}", seed) for seed in range(STEPS)]
    output = tmp_path / "output"
    receiver = rollouts.FileSystemMicroBatchReceiver(output, 0, 1)

    def broadcast(step: int) -> None:
        folder = output / "broadcasts" / f"step_{step}"
        shutil.copytree(models[step], folder)
        (folder / "STABLE").touch()

    options = ("--served-model-name", str(models[0]), "--weights-root", str(output), "--vllm-metrics")
    with served("--model", str(models[0]), *options) as engine:
        url = recorded("prime-rl", "prime-rl", engine.url)
        (tmp_path / "counting.py").write_text(TASKS, encoding="utf-8")
        environment = {
            "env": {
                "taskset": {"id": "counting"},
                "agent": {"harness": {"id": "counting"}, "runtime": {"type": "subprocess"}},
            },
            "serve": {
                "address": f"tcp://127.0.0.1:{free_port()}",
                "pool": {"type": "static", "num_workers": 1},
            },
        }
        orchestrator = {
            "model": {"name": str(models[0]), "client": {"base_url": f"{url}/v1"}},
            "renderer": {"name": "default"},
            "train": {
                "source": [{"name": "counting", **environment}],
                "sampling": {"max_completion_tokens": 12},
            },
            "batch_size": 4,
            "group_size": 2,
            "max_steps": STEPS,
            "max_off_policy_steps": 0,
            "seq_len": 128,
            "concurrency": {"max_inflight": 4, "initial_inflight": 4},
            "rollout_transport": {"type": "filesystem"},
            "output_dir": str(output),
        }
        found = []
        broadcast(0)
        with (
            running(tmp_path, "environment", ENVIRONMENT, environment),
            running(tmp_path, "orchestrator", ORCHESTRATOR, orchestrator) as process,
        ):
            for step in range(1, STEPS + 1):
                eventually(lambda: receiver.can_receive() or process.poll() is not None)
                assert receiver.can_receive(), (tmp_path / "orchestrator.log").read_text()
                found.append(list(sequences(receiver.receive())))
                if step < STEPS:
                    broadcast(step)
            assert process.wait() == 0
        assert engine.get("/weight_info").json() == {"weight_version": f"step_{STEPS - 1}"}
    learners = [AutoModelForCausalLM.from_pretrained(model) for model in models]
    for step, samples in enumerate(found):
        assert samples
        for prompt, completion, sampled in samples:
            versions = learners[max(step - 1, 0) : step + 1]
            gaps = [(logprobs(model, prompt, completion) - torch.tensor(sampled)).abs() for model in versions]
            # The orchestrator counts a version before it pauses: a rollout may begin with the one before.
            assert min(float(gap[0]) for gap in gaps) < 1e-4
            if step == 0:
                assert float(gaps[0].max()) < 1e-4
