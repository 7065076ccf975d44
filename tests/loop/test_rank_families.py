"""Models of other families than llama on two ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.faults import BUG, Fault
from support.lanes import quick
from support.plain_trainer import PlainTrainer, update_message, weights_of
from support.rank_updates import UPDATES, checksums
from support.scripted import EngineDriver, assert_error, tokens_of

from caesura.io_struct import DestroyWeightsUpdateGroupReqInput
from caesura.scheduler.executor.rpc import decode_call, encode
from caesura.scheduler.executor.workers import Workers
from caesura.scheduler.runtime.guard import EngineEndsError

pytestmark = pytest.mark.slow  # workers take seconds to start
LENGTHS = (100, 30, 200, 210, 180, 170, 205, 90)
"""Tokens of the prompts: twice as many as layers with a window have pages for, so pages beyond theirs are in
use.
"""


def sampled(path: str, tp: int) -> tuple[list[list[int]], np.ndarray]:
    options = {"chunked_prefill_size": 48, "max_running_requests": 2, "kv_pool_tokens": 16384}
    with EngineDriver(path, scripted=False, tp=tp, **options) as driver:
        rids = [
            driver.generate(
                [3 + (7 * token + number) % 90 for token in range(length)],
                40,
                seed=number,
                return_logprob=True,
            )
            for number, length in enumerate(LENGTHS)
        ]
        driver.run_until_idle()
        results = [driver.result(rid) for rid in rids]
        driver.engine.cache.check()
    logprobs = np.stack([np.frombuffer(result.output_logprobs, np.float32) for result in results])
    return [tokens_of(result) for result in results], logprobs


@pytest.mark.parametrize("family", quick(["gemma3", "gpt-oss"]))
def test_layers_with_a_window_have_pages_on_every_rank(family, tmp_path):
    make_checkpoint(tmp_path, family, seed=1)
    tokens, logprobs = sampled(str(tmp_path), 1)
    found, close = sampled(str(tmp_path), 2)
    assert found == tokens
    np.testing.assert_allclose(close, logprobs, atol=1e-4)


@pytest.mark.parametrize(("family", "tp", "overrides"), quick([
    ("deepseek-v3", 3, {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 36}),
    ("qwen3-moe", 2, {"num_experts": 6}),
    ("qwen2-moe", 4, {"num_experts": 8, "num_key_value_heads": 4}),
    ("gpt-oss", 2, {"num_local_experts": 4}),
    ("qwen3-next", 2, {"num_experts": 4}),
]))  # fmt: skip
def test_ranks_with_whole_experts_sample_the_tokens_of_one(family, tp, overrides, tmp_path):
    make_checkpoint(tmp_path, family, seed=1, **overrides)
    with EngineDriver(str(tmp_path), scripted=False) as driver:
        tokens, logprobs, routing = with_routing(driver)
    with EngineDriver(str(tmp_path), scripted=False, tp=tp, ep=tp) as driver:
        for pause in (None, "in_place", "retract"):
            found, close, same_routing = with_routing(driver, pause)
            assert found == tokens
            assert same_routing == routing
            np.testing.assert_allclose(close, logprobs, atol=1e-4)
            driver.flush()
        (worker, *_) = driver.status().ranks
        driver.generate([1, 2, 3], 100)
        driver.tick(3)
        psutil.Process(worker.pid).kill()
        with pytest.raises(EngineEndsError, match="was killed by SIGKILL"):
            driver.engine.scheduler.run()


def with_routing(driver: EngineDriver, pause: str | None = None) -> tuple[Any, ...]:
    """Return tokens, log-probabilities and experts of greedy and sampled requests, paused in their midst."""
    prompts = [[3 + (7 * token + number) % 90 for token in range(30 + number)] for number in range(4)]
    rids = [
        driver.generate(prompt, 20, seed=number or None, return_logprob=True, return_routed_experts=True)
        for number, prompt in enumerate(prompts)
    ]
    driver.tick(6)
    if pause is not None:
        driver.pause(pause)
        driver.go_on()
    driver.run_until_idle()
    results = [driver.result(rid) for rid in rids]
    logprobs = np.stack([np.frombuffer(result.output_logprobs, np.float32) for result in results])
    return [tokens_of(each) for each in results], logprobs, [each.routed_experts for each in results]


@dataclass
class Engine:
    """An engine of two ranks, and the checkpoint that it is to become."""

    driver: EngineDriver
    first: Path
    second: Path
    cold: dict[str, str]
    """Checksums of an engine that was started with the second."""


UPDATED = {
    "qwen3.5": {},
    "deepseek-v3, ep": {},
    "gpt-oss, ep": {"num_local_experts": 4},
    "qwen3-moe, ep": {"num_experts": 6},
    **{family: {} for family in ("qwen3-next", "deepseek-v3", "gpt-oss", "gemma3")},
}


@pytest.fixture(scope="module", params=quick(UPDATED, 2))
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    family, _, grouped = request.param.partition(", ")
    options = {"tp": 2, "ep": 2 if grouped else 1, "kv_pool_tokens": 1024}
    paths = [folder / "first", folder / "second"]
    for seed, path in enumerate(paths):
        make_checkpoint(path, family, seed=seed, **UPDATED[request.param])
    with EngineDriver(str(paths[1]), scripted=False, **options) as driver:
        cold = checksums(driver)
    with EngineDriver(str(paths[0]), scripted=False, **options) as driver:
        yield Engine(driver, *paths, cold)


@pytest.mark.parametrize("send", UPDATES)
def test_an_update_is_a_cold_load_on_every_rank(engine, send):
    driver = engine.driver
    driver.update(engine.first)
    assert checksums(driver) != engine.cold
    reply = send(driver, engine.second)
    assert reply.committed, reply
    assert checksums(driver) == engine.cold
    driver.go_on(force=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "six-heads"
    make_checkpoint(path, "qwen3", num_attention_heads=6, num_key_value_heads=3, hidden_size=36)
    return path


@pytest.fixture(scope="module")
def driver(model) -> Iterator[EngineDriver]:
    with EngineDriver(str(model), scripted=False, tp=3) as driver:
        yield driver


def rank_1_fails_at(monkeypatch, method: str) -> None:
    """Let rank 1 fail in ``method``: it is told something else that it cannot do."""
    send = Workers.send_to

    def changed(self, rank, frames):
        call = decode_call(frames[0])
        if rank == 1 and call.method == method:
            frames = [encode((call.number, "read", [["no such tensor"]]))]
        send(self, rank, frames)

    monkeypatch.setattr(Workers, "send_to", changed)


def test_a_rank_that_fails_ends_the_wait_of_the_others(driver, model, monkeypatch):
    """One of the others waits for a broadcast that never comes."""
    trainer = PlainTrainer(world_size=4)
    trainer.beside(trainer.join)
    driver.call(trainer.init_message(), max_ticks=100_000)
    trainer.finish()
    weights = weights_of(model)
    first = next(iter(weights))
    trainer.beside(lambda: trainer.broadcast_each({first: weights[first]}))
    with monkeypatch.context() as patch:
        rank_1_fails_at(patch, "write")
        reply = driver.call(update_message(weights), max_ticks=100_000)
    trainer.finish()
    assert assert_error(reply, "internal").detail["ranks"] == {"1": "KeyError: 'no such tensor'"}
    assert driver.status().weights == "poisoned"
    driver.call(DestroyWeightsUpdateGroupReqInput(), max_ticks=100_000)
    trainer.close()
    assert driver.update(model).committed
    assert driver.engine.executor.answers == {}


def test_failure_on_rank_0_leaves_no_worker_answers(driver):
    steps = driver.engine.runner
    last = np.zeros(1, np.int64), np.zeros(1, np.int32)
    for name, arguments in (("synchronize", ()), ("set_last_tokens", last)):
        with Fault(steps.own, name, BUG), pytest.raises(RuntimeError, match="injected"):
            getattr(steps, name)(*arguments)
    steps.synchronize()  # every rank has come to the end of what it was told
    assert driver.engine.executor.answers == {}
