"""A trainer that dies in any call of vLLM's routes: every token that is sampled is of whole weights."""

import itertools
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, served
from support.lanes import every
from support.waiting import eventually

from caesura.integrations.vllm import TrainerEngine, TrainerInitInfo

pytestmark = pytest.mark.slow
PROMPT, LENGTH = [5, 6, 7], 24
SAMPLING = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
KEEP, DISCARD, WEIGHTS = "/pause?mode=keep", "/sleep?level=2", "/wake_up?tags=weights"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
NUMBERS = itertools.count()
Tensors = list[tuple[str, Any]]


class DiedError(Exception):
    pass


class DyingTrainer:
    """vLLM's ``VLLMWeightSyncClient``, which dies in the call ``at``: a path, and its earlier calls."""

    def __init__(self, engine: ServedEngine, at: tuple[str, int] | None = None, how: str = "") -> None:
        self._engine = engine
        self._at, self._how = at, how
        self._calls: Counter[str] = Counter()

    def call(self, path: str, **body: Any) -> None:
        if (path, self._calls[path]) == self._at:
            self._die(path, json.dumps(body).encode())
        self._calls[path] += 1
        self._engine.http.post(path, json=body).raise_for_status()

    def _die(self, path: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        url = self._engine.http.base_url
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall((head + body)[: -1 if self._how == "sending" else None])
        raise DiedError

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("/init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self.call(START)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call(UPDATE, update_info=update_info)

    def finish_weight_update(self, weight_version: str) -> None:
        self.call(FINISH, weight_version=weight_version)


@contextmanager
def sender_of(trainer: DyingTrainer, tensors: Tensors) -> Iterator[TrainerEngine]:
    info = TrainerInitInfo("shared_memory", rank=0, bucket_bytes=20_000)
    sender = TrainerEngine.trainer_init(info, client=trainer, source=tensors)
    try:
        yield sender
    finally:
        sender.shutdown()  # its memory is gone, also while the engine still reads


def train(trainer: DyingTrainer, tensors: Tensors, version: str) -> None:
    """Update in a pause, and again after the weights have been discarded in a sleep."""
    trainer.call(KEEP)
    with sender_of(trainer, tensors) as sender:
        sender.send_weights(version)
        trainer.call("/resume")
        trainer.call(DISCARD)
        trainer.call(WEIGHTS)
        sender.send_weights(version)
        trainer.call("/wake_up")


def restore(engine: ServedEngine, tensors: Tensors, version: str) -> None:
    """Send everything anew, as the next trainer does, until no call of the last one comes between."""

    def restored() -> bool:
        try:
            _restore(DyingTrainer(engine), tensors, version)
        except httpx.HTTPStatusError:
            return False
        return True

    eventually(restored)


def _restore(trainer: DyingTrainer, tensors: Tensors, version: str) -> None:
    trainer.call("/shutdown_weight_transfer_engine")
    trainer.call(KEEP)
    trainer.call(WEIGHTS)
    with sender_of(trainer, tensors) as sender:
        sender.send_weights(version)
    trainer.call("/wake_up")
    trainer.call("/resume")


def sample(http: httpx.Client) -> httpx.Response:
    return http.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": SAMPLING})


@contextmanager
def sampling(engine: ServedEngine) -> Iterator[list[dict[str, Any]]]:
    """Sample again and again beside the block; yield the list of what came."""
    over, choices = threading.Event(), []

    def run() -> None:
        with httpx.Client(base_url=engine.url, timeout=None) as http:
            while not over.is_set():
                response = sample(http)
                if response.status_code == 503:
                    continue
                choices.extend(response.raise_for_status().json()["choices"])

    thread = threading.Thread(target=run)
    thread.start()
    eventually(lambda: choices)
    try:
        yield choices
    finally:
        over.set()
        thread.join()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensors]]:
    root, tensors = tmp_path_factory.mktemp("models"), {}
    for seed, name in enumerate("ab"):
        make_checkpoint(root / name, "qwen3", seed=seed, tied=True, vocab_size=400)
        tensors[name] = list(load_file(root / name / "model.safetensors").items())
    return root / "a", tensors


@pytest.fixture(scope="module")
def engine(weights: tuple[Path, dict[str, Tensors]]) -> Iterator[ServedEngine]:
    with served("--model", str(weights[0]), "--tokenizer", "none", "--enable-memory-saver") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: ServedEngine, weights: tuple[Path, dict[str, Tensors]]) -> dict[str, list[int]]:
    found = {}
    for name in "ba":
        restore(engine, weights[1][name], name)
        found[name] = sample(engine.http).json()["choices"][0]["token_ids"]
    assert found["a"] != found["b"]
    return found


CALLS = [
    (KEEP, 0), ("/init_weight_transfer_engine", 0), (START, 0), (UPDATE, 0), (UPDATE, 1), (FINISH, 0),
    ("/resume", 0), (DISCARD, 0), (WEIGHTS, 0), (START, 1), (UPDATE, 4), (FINISH, 1), ("/wake_up", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("at", "how"),
    [*every(((at, "waiting") for at in CALLS), 2), *every(((at, "sending") for at in CALLS), 5)],
)
def test_a_trainer_that_dies_in_a_call(engine, weights, expected, at, how):
    number = next(NUMBERS)
    with sampling(engine) as choices:
        with pytest.raises(DiedError):
            train(DyingTrainer(engine, at, how), weights[1]["b"], f"b{number}")
        restore(engine, weights[1]["a"], f"a{number}")
    for choice in choices:
        for span in choice["weight_versions"][:1]:
            assert choice["token_ids"][: span["end"]] == expected[span["version"][0]][: span["end"]]
    assert sample(engine.http).json()["choices"][0]["token_ids"] == expected["a"]
    assert engine.get("/weight_info").json() == {"weight_version": f"a{number}"}
