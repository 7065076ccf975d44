"""``caesura serve --replicas 2`` and a stranger on one replica's own socket."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
from support.http_serve import ServedEngine, served
from support.plain_trainer import weights_of
from support.tokenizers import make_byte_level

from caesura.client import SchedulerClient

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0
LONG = 1500
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("strangers")
    for seed in (3, 4):
        make_checkpoint(
            root / str(seed), "qwen3", tied=True, seed=seed, vocab_size=400, max_position_embeddings=2048
        )
        make_byte_level(root / str(seed), vocab_size=400)
    return [root / "3", root / "4"]


@pytest.fixture(scope="module")
def pair(models) -> Iterator[ServedEngine]:
    options = ("--replicas", "2", "--kv-pool-tokens", "16384", "--dtype", "float32")
    with served("--model", str(models[0]), *options) as engine:
        yield engine


@pytest.fixture(autouse=True)
def as_at_start(pair) -> Iterator[None]:
    yield
    pair.ok("/continue_generation", {"force": True})
    both_serve(pair)


def replicas(pair: ServedEngine) -> list[dict[str, Any]]:
    return pair.get("/server_info").json()["replicas"]


def both_serve(pair: ServedEngine) -> None:
    eventually(lambda: {each["state"] for each in replicas(pair)} == {"serving"}, lambda: replicas(pair))


def eventually(holds: Any, said: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, said()


def not_ready(pair: ServedEngine) -> str:
    return pair.get("/ready").text


def sampling(count: int) -> dict[str, Any]:
    return {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": count, "ignore_eos": True}


class Follower(threading.Thread):
    """A streamed answer: its last event, and the tokens of all."""

    def __init__(self, pair: ServedEngine, key: str) -> None:
        super().__init__()
        self.pair, self.key = pair, key
        self.began = threading.Event()
        self.last: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        body = {"input_ids": PROMPT, "sampling_params": sampling(LONG), "stream": True}
        headers = {"X-SMG-Routing-Key": self.key}
        with self.pair.http.stream(
            "POST", "/generate", json=body, headers=headers, timeout=PATIENCE_S
        ) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    self.last = json.loads(line[6:])
                    self.began.set()


@contextmanager
def long_answer(pair: ServedEngine) -> Iterator[tuple[Follower, int]]:
    follower = Follower(pair, "stranger")
    try:
        assert follower.began.wait(PATIENCE_S)
        running = [each["running_requests"] for each in pair.get("/server_info").json()["internal_states"]]
        yield follower, running.index(1)
    finally:
        follower.join(PATIENCE_S)
        assert not follower.is_alive()


def test_no_token_of_foreign_weights_is_served(pair, models):
    expected = pair.generate(PROMPT, sampling_params=sampling(LONG))["output_ids"]
    label = pair.get("/weight_version").json()
    with long_answer(pair) as (follower, home):
        place = replicas(pair)[home]
        with SchedulerClient(place["endpoint"]) as stranger:
            stranger.update_weights_from_disk(models[1], flush_cache=False)  # its label stays the server's
    assert follower.last["output_ids"] == expected
    assert {span["epoch"] for span in follower.last["meta_info"]["weight_versions"]} == {
        label["weights_epoch"]
    }
    both_serve(pair)
    assert pair.ok("/weights_checker")["success"]  # which compares them
    for key in range(8):
        answer = pair.ok(
            "/generate",
            {"input_ids": PROMPT, "sampling_params": sampling(8)},
            headers={"X-SMG-Routing-Key": str(key)},
        )
        assert answer["output_ids"] == expected[:8]
    assert pair.get("/weight_version").json() == label


@pytest.mark.parametrize("transport", ["disk", "tensor"])
def test_a_foreign_commit_is_noticed_without_a_request_and_told(pair, models, transport):
    expected = pair.generate(PROMPT, sampling_params=sampling(8))["output_ids"]
    pair.ok("/pause_generation", {"mode": "in_place"})
    place = replicas(pair)[0]
    with SchedulerClient(place["endpoint"]) as stranger:
        if transport == "disk":
            stranger.update_weights_from_disk(models[1], flush_cache=False)
        else:
            stranger.update_weights_from_tensor(weights_of(models[1]), flush_cache=False)
    eventually(lambda: replicas(pair)[0]["state"] == "fenced", lambda: replicas(pair))
    assert "on its own socket" in replicas(pair)[0]["reason"]
    assert "replica-0" in not_ready(pair)
    assert "on its own socket" in not_ready(pair)
    pair.ok("/continue_generation")
    both_serve(pair)
    for key in range(8):
        answer = pair.ok(
            "/generate",
            {"input_ids": PROMPT, "sampling_params": sampling(8)},
            headers={"X-SMG-Routing-Key": str(key)},
        )
        assert answer["output_ids"] == expected


def test_a_foreign_pause_holds_no_request_up(pair):
    expected = pair.generate(PROMPT, sampling_params=sampling(LONG))["output_ids"]
    with long_answer(pair) as (follower, home), SchedulerClient(replicas(pair)[home]["endpoint"]) as stranger:
        stranger.pause("retract")
        follower.join(PATIENCE_S)  # the stranger never continues
        assert follower.last["output_ids"] == expected
        both_serve(pair)
        assert stranger.status().generation == "running"
