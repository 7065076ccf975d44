"""vLLM's weight transfer over a real socket: every transport, whole updates or none, repeated calls."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, served

from caesura.integrations.vllm import TrainerEngine, TrainerInitInfo


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    paths = [root / "one", root / "two"]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", seed=seed, tied=True, vocab_size=400, max_position_embeddings=512)
    return paths


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> Iterator[ServedEngine]:
    with served("--model", str(models[0]), "--tokenizer", "none", "--enable-memory-saver") as engine:
        yield engine


class Client:
    """vLLM's ``VLLMWeightSyncClient`` over HTTP; ``tamper`` changes what is sent."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self.tamper = lambda update_info: update_info

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.http.post(
            "/init_weight_transfer_engine", json={"init_info": init_info}
        ).raise_for_status()

    def start_weight_update(self) -> None:
        self._engine.http.post("/start_weight_update").raise_for_status()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        body = {"update_info": self.tamper(update_info)}
        self._engine.http.post("/update_weights", json=body).raise_for_status()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {} if weight_version is None else {"weight_version": weight_version}
        self._engine.http.post("/finish_weight_update", json=body).raise_for_status()


def tensors_of(model: Path) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(model / "model.safetensors").items())


def trainer(
    engine: ServedEngine, models: list[Path], transport: str, source: Any, **options: Any
) -> TrainerEngine:
    info = TrainerInitInfo(
        transport, rank=0, folder=str(models[0].parent), config=str(models[1] / "config.json"), **options
    )
    return TrainerEngine.trainer_init(info, client=Client(engine), source=source)


def tokens(engine: ServedEngine) -> list[int]:
    return engine.generate([5, 6, 7], sampling_params={"max_new_tokens": 12})["output_ids"]


@pytest.mark.parametrize("bucket_bytes", [20_000, 1 << 30], ids=["many messages", "one message"])
@pytest.mark.parametrize("transport", ["gloo", "shared_memory", "disk"])
def test_an_update_by_every_transport(engine, models, transport, bucket_bytes):
    expected = []
    for model in models:
        engine.ok("/update_weights_from_disk", {"model_path": str(model)})
        expected.append(tokens(engine))
    assert expected[0] != expected[1]
    sender = trainer(engine, models, transport, tensors_of(models[0]), bucket_bytes=bucket_bytes)
    try:
        engine.ok("/pause", params={"mode": "keep"})
        sender.send_weights("step-7")
        engine.ok("/resume")
    finally:
        sender.shutdown()
    assert tokens(engine) == expected[0]
    assert engine.get("/weight_info").json() == {"weight_version": "step-7"}
