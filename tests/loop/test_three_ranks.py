"""What one of several other ranks does when another one fails."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.plain_trainer import PlainTrainer, update_message, weights_of
from support.scripted import EngineDriver, assert_error

from caesura.io_struct import DestroyWeightsUpdateGroupReqInput, UpdateWeightFromDiskReqInput
from caesura.scheduler.executor.rpc import decode_call, encode
from caesura.scheduler.executor.workers import Workers

pytestmark = pytest.mark.slow  # workers take seconds to start


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
    """It is told something else that it cannot do."""
    send = Workers.send_to

    def changed(self, rank, frames):
        call = decode_call(frames[0])
        if rank == 1 and call.method == method:
            frames = [encode((call.number, "read", [["no such tensor"]]))]
        send(self, rank, frames)

    monkeypatch.setattr(Workers, "send_to", changed)


def test_a_rank_that_fails_ends_the_wait_of_the_others(driver, model, monkeypatch):
    """Of these, one waits for a broadcast that never comes."""
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
    assert driver.call(UpdateWeightFromDiskReqInput(model_path=str(model)), max_ticks=100_000).committed
    assert driver.engine.executor.answers == {}


def test_failure_on_rank_0_leaves_no_worker_answers(driver, monkeypatch):
    steps = driver.engine.runner

    def fails(*_):
        raise RuntimeError("an injected defect")

    for name, arguments in (
        ("synchronize", ()),
        ("set_last_tokens", (np.zeros(1, np.int64), np.zeros(1, np.int32))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(steps.own, name, fails)
            with pytest.raises(RuntimeError, match="injected"):
                getattr(steps, name)(*arguments)
    steps.synchronize()  # every rank has come to the end of what it was told
    assert driver.engine.executor.answers == {}
