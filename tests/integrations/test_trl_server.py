"""TRL's own clients of a vLLM server against ``caesura serve``, in processes that find vLLM's stand-in."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import vllm_stand_in
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, served
from support.tokenizers import make_byte_level

pytest.importorskip("trl", reason="trl comes with the extra `trl`")
STAND_IN = Path(vllm_stand_in.__path__[0])
ROOT = Path(__file__).parents[2]

ASYNC = """
import sys
from accelerate import PartialState
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient

url, model = sys.argv[1:]
PartialState()
model = AutoModelForCausalLM.from_pretrained(model)
names = list(model.named_parameters())
info = {
    "names": [name for name, _ in names],
    "dtype_names": [str(parameter.dtype).removeprefix("torch.") for _, parameter in names],
    "shapes": [list(parameter.shape) for _, parameter in names],
}
transfer = WeightTransferClient(VLLMClient(url), info)
transfer.init_weight_transfer()
for _ in range(2):
    transfer.pause()
    transfer.send_weights(iter(names))
    transfer.resume()
transfer.destroy()
"""

SYNC = """
import sys
import datasets
import torch
import trl
from trl.generation.vllm_client import VLLMClient

url, model, output = sys.argv[1:]
# TRL sends weights from CUDA devices only; gloo takes them from the host.
torch.cuda.set_device = lambda device: None
joined = VLLMClient.init_communicator
VLLMClient.init_communicator = lambda self, device=0: joined(self, 0)


def reward(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


config = trl.GRPOConfig(
    output_dir=output, per_device_train_batch_size=4, num_generations=4, max_steps=3, learning_rate=1e-3,
    max_completion_length=12, temperature=1.0, use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
    logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False, seed=1, beta=0.0,
)
rows = [{"prompt": [{"role": "user", "content": f"Count to {n}."}]} for n in range(8)]
trainer = trl.GRPOTrainer(
    model=model, reward_funcs=reward, args=config, train_dataset=datasets.Dataset.from_list(rows),
)
trainer.train()
ratios = [row["sampling/importance_sampling_ratio/mean"] for row in trainer.state.log_history
          if "sampling/importance_sampling_ratio/mean" in row]
assert len(ratios) == 3 and all(abs(ratio - 1) < 0.02 for ratio in ratios), trainer.state.log_history
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("trl")
    paths = [root / "one", root / "two"]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", tied=True, seed=seed, vocab_size=512, pad_token_id=0)
        make_byte_level(path, pad_token="</s>")
    return paths


@pytest.fixture
def engine(models: list[Path]) -> Iterator[ServedEngine]:
    with served("--model", str(models[0]), "--weight-transfer-backend", "gloo") as engine:
        yield engine


def run(script: str, *arguments: object) -> None:
    path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_async_trainers_weight_transfer(engine, models, recorded):
    before = engine.get("/weight_version").json()["weights_epoch"]
    run(ASYNC, recorded("TRL, asynchronous", "trl", engine.url), models[1])
    assert engine.get("/weight_version").json()["weights_epoch"] == before + 2
    sent = engine.generate([5, 6, 7])["output_ids"]
    engine.ok("/update_weights_from_disk", {"model_path": str(models[1])})
    assert engine.generate([5, 6, 7])["output_ids"] == sent


def test_a_grpo_trainer_in_server_mode(engine, models, recorded, tmp_path):
    run(SYNC, recorded("TRL", "trl", engine.url), models[1], tmp_path)
    assert engine.get("/weight_version").json()["weights_epoch"] >= 3
