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

trl = pytest.importorskip("trl", reason="trl comes with the extra `trl`")
TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
"""One of those that TRL knows how to parse the answers of."""
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
from vllm.utils.network_utils import get_open_port

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
    vllm_group_port=get_open_port(),
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


LOOP = """
import sys
import types
from itertools import pairwise
import datasets
import peft
import torch
from transformers import AutoTokenizer
from trl.experimental import async_grpo
from trl.experimental.async_grpo import packing

torch.cuda.get_device_name = lambda device: ""


def attention(query, key, value, starts, key_starts, *_, softmax_scale, causal, window_size):
    assert causal and window_size == (-1, -1)
    found = []
    for rows, columns in zip(pairwise(starts), pairwise(key_starts), strict=True):
        parts = query[slice(*rows)], key[slice(*columns)], value[slice(*columns)]
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        attend = torch.nn.functional.scaled_dot_product_attention
        found.append(attend(q, k, v, seen, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(found)


# In the place of FlashAttention 3, which TRL takes from a hub, and which runs on CUDA devices only.
packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attention)


def reward(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


if __name__ == "__main__":  # the worker's process imports this file again
    url, model, output, adapts = sys.argv[1:]
    adapter = None
    if adapts == "True":
        adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    config = async_grpo.AsyncGRPOConfig(
        output_dir=output, per_device_train_batch_size=4, num_generations=4, max_steps=3, learning_rate=1e-3,
        gradient_accumulation_steps=1, token_budget=128, max_completion_length=12, vllm_server_base_url=url,
        report_to="none", save_strategy="no", use_cpu=True, bf16=False, seed=1, max_staleness=1,
    )
    rows = [{"prompt": [{"role": "user", "content": f"Count to {n}."}]} for n in range(8)]
    trainer = async_grpo.AsyncGRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model), peft_config=adapter,
    )
    trainer.train()
    steps = [row for row in trainer.state.log_history if "kl" in row]
    assert len(steps) == 3, trainer.state.log_history
    assert steps[0]["sample/staleness_max"] == 0 and steps[0]["kl"] < 1e-6, steps[0]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("trl")
    paths = [root / "one", root / "two"]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", tied=True, seed=seed, vocab_size=512, pad_token_id=0)
        make_byte_level(path, pad_token="</s>", chat_template=TEMPLATE.read_text(encoding="utf-8"))
    return paths


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[ServedEngine]:
    with served("--model", str(models[0]), "--weight-transfer-backend", "gloo") as engine:
        yield engine


def run(folder: Path, script: str, *arguments: object) -> None:
    file = folder / "script.py"
    file.write_text(script, encoding="utf-8")
    path = os.pathsep.join([str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(file), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.long
def test_the_async_trainers_weight_transfer(engine, models, recorded, tmp_path):
    before = engine.get("/weight_version").json()["weights_epoch"]
    run(tmp_path, ASYNC, recorded("TRL, asynchronous", "trl", engine.url), models[1])
    assert engine.get("/weight_version").json()["weights_epoch"] == before + 2
    sent = engine.generate([5, 6, 7])["output_ids"]
    engine.ok("/update_weights_from_disk", {"model_path": str(models[1])})
    assert engine.generate([5, 6, 7])["output_ids"] == sent


def test_a_grpo_trainer_in_server_mode(engine, models, recorded, tmp_path):
    run(tmp_path, SYNC, recorded("TRL", "trl", engine.url), models[1], tmp_path)
    assert engine.get("/weight_version").json()["weights_epoch"] >= 3


@pytest.mark.long
def test_the_loop_of_the_async_trainer(engine, models, recorded, tmp_path):
    """Samples of the trainer's own weights are on its policy: their importance ratios are 1."""
    pytest.importorskip("aiohttp", reason="TRL's worker needs aiohttp")
    before = engine.get("/weight_version").json()["weights_epoch"]
    run(tmp_path, LOOP, recorded("TRL, asynchronous", "trl", engine.url), models[0], tmp_path, False)
    assert engine.get("/weight_version").json()["weights_epoch"] >= before + 3


def test_the_loop_of_the_async_trainer_with_an_adapter(models, recorded, tmp_path):
    """Each step's policy is an adapter of its own name; the weights stay as they are."""
    pytest.importorskip("aiohttp", reason="TRL's worker needs aiohttp")
    lora = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "4")
    with served("--model", str(models[0]), "--weights-root", str(tmp_path), *lora) as engine:
        run(tmp_path, LOOP, recorded("TRL, asynchronous", "trl", engine.url), models[0], tmp_path, True)
        names = [each["id"] for each in engine.get("/v1/models").json()["data"][1:]]
        assert names[-1].startswith("trl-policy-v")
        assert len(names) <= 2
        assert engine.get("/weight_version").json()["weights_epoch"] == 0
