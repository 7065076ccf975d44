"""Every place that empties the device cache does, in its order."""

import logging
import weakref

import pytest
import torch
from support.buckets_by_hand import Sender
from support.scripted import EngineDriver

from caesura.io_struct import (
    CaesuraError,
    ContinueGenerationReqInput,
    ErrorCode,
    ErrorReply,
    FlushCacheReqInput,
    GetMemoryHistoryReqInput,
    PauseGenerationReqInput,
    ScoreReqInput,
    WeightUpdateReqOutput,
)
from caesura.scheduler.execution.model_runner import ModelRunner
from caesura.scheduler.executor.executor import Executor
from caesura.scheduler.runtime import engine

MIB = 1 << 20


class Allocator:
    """A device module with 12 MB reserved before its first emptying and 8 MB from then on."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def memory_reserved(self) -> int:
        return (8 if "emptied" in self.log else 12) * MIB

    def memory_allocated(self) -> int:
        return 7 * MIB

    def empty_cache(self) -> None:
        self.log.append("emptied")


@pytest.fixture
def allocator(monkeypatch):
    allocator = Allocator()
    monkeypatch.setattr(engine, "device_module_for", lambda device: allocator)
    return allocator


@pytest.fixture
def driver(tiny_model, allocator):
    with EngineDriver(str(tiny_model), reference_model_path=str(tiny_model)) as driver:
        allocator.log.clear()
        yield driver


def derivations_into(log: list[str], driver: EngineDriver, monkeypatch) -> None:
    model = driver.engine.model
    derive = model.finalize_weights
    monkeypatch.setattr(model, "finalize_weights", lambda: (log.append("derived"), derive()))


def test_start_empties_leftovers_of_loading(tiny_model, allocator):
    with EngineDriver(str(tiny_model)):
        assert allocator.log == ["emptied"]


def test_an_expired_lease_empties_before_it_continues(driver, allocator, monkeypatch, caplog):
    driver.pause(owner="trainer", lease_s=60.0)
    run = driver.engine.state.run
    monkeypatch.setattr(driver.engine.state, "run", lambda: (allocator.log.append("runs"), run()))
    driver.engine.state.ownership.lease.expires = 0.0
    with caplog.at_level(logging.INFO, logger="caesura"):
        driver.tick()
    assert allocator.log == ["emptied", "runs"]
    assert "lease_expiry: reserved 12.0 MB -> 8.0 MB (freed 4.0 MB)" in caplog.messages


@pytest.mark.parametrize(
    ("part", "method", "error"),
    [
        pytest.param(lambda e: e.scoring.model, "forward_by_layer", MemoryError, id="in a chunk"),
        pytest.param(lambda e: e.residency, "leave", MemoryError, id="outside of its chunks"),
        pytest.param(lambda e: e.residency, "leave", OSError("no space"), id="the reference cannot leave"),
    ],
)
def test_a_failed_score_empties(driver, allocator, monkeypatch, part, method, error):
    def failing(*arguments):
        raise error
        yield

    monkeypatch.setattr(part(driver.engine), method, failing)
    driver.send(ScoreReqInput(input_ids=[[1, 2, 3]], start=[1]))
    driver.tick(20)
    assert allocator.log == ["emptied"]


# --- commands that fail


def answered_into(log: list[str], driver: EngineDriver, monkeypatch) -> None:
    replies = driver.engine.replies
    answer = replies.answer
    monkeypatch.setattr(
        replies, "answer", lambda i, reply: (log.append(type(reply).__name__), answer(i, reply))
    )


def test_a_commit_without_memory_empties_before_it_answers(driver, allocator, other_model, monkeypatch):
    scratch: list[weakref.ref] = []

    def derive() -> None:
        temporary = torch.zeros(10)
        scratch.append(weakref.ref(temporary))
        raise MemoryError

    monkeypatch.setattr(
        logging.getLogger("caesura"), "propagate", False
    )  # pytest keeps records, exceptions included
    answered_into(allocator.log, driver, monkeypatch)
    monkeypatch.setattr(driver.engine.model, "finalize_weights", derive)
    empty = allocator.empty_cache
    alive: list[bool] = []
    monkeypatch.setattr(
        allocator, "empty_cache", lambda: (alive.append(scratch[0]() is not None), empty()), raising=False
    )
    reply = driver.update(other_model)
    assert (reply.code, driver.status().weights) == (ErrorCode.OUT_OF_MEMORY, "poisoned")
    assert allocator.log == ["emptied", "ErrorReply"]
    assert alive == [False]


def test_an_update_that_poisons_empties_before_it_answers(driver, allocator, other_model, monkeypatch):
    def refuse() -> None:
        raise CaesuraError(ErrorCode.WEIGHT_MISMATCH, "half a tensor")

    answered_into(allocator.log, driver, monkeypatch)
    monkeypatch.setattr(driver.engine.model, "finalize_weights", refuse)
    reply = driver.update(other_model)
    assert reply.code == ErrorCode.WEIGHT_MISMATCH
    assert allocator.log == ["emptied", "ErrorReply"]


def test_a_refused_command_empties_nothing(driver, allocator, tmp_path):
    reply = driver.update(tmp_path)
    assert isinstance(reply, ErrorReply)
    assert driver.status().weights == "valid"
    assert allocator.log == []


@pytest.mark.parametrize(("part", "method"), [("answers", "attach"), ("commands", "add")])
def test_a_message_that_fails_at_once_empties_before_it_is_answered(
    driver, allocator, monkeypatch, part, method
):
    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(getattr(driver.engine, part), method, fail)
    say = driver.engine.replies.send_answer
    monkeypatch.setattr(
        driver.engine.replies, "send_answer", lambda *said: (allocator.log.append("answered"), say(*said))[1]
    )
    driver.send(PauseGenerationReqInput())
    driver.tick(2)
    assert allocator.log[0] == "emptied"
    if part == "answers":  # else the id is attached, and the stored answer goes out
        assert allocator.log == ["emptied", "answered"]


def test_emptying_waits_for_a_score_on_the_forward_stream(driver, allocator, monkeypatch):
    driver.pause()
    runner, synchronize = driver.engine.runner, driver.engine.runner.synchronize
    monkeypatch.setattr(runner, "synchronize", lambda: (allocator.log.append("idle"), synchronize()))
    allocator.log.clear()
    driver.send(ScoreReqInput(input_ids=[[1, 2, 3, 4]], start=[1]))
    driver.go_on()
    assert allocator.log[:2] == ["idle", "emptied"]


def test_bytes_are_counted_by_place(driver, allocator):
    driver.flush()
    driver.flush()
    driver.pause()
    driver.go_on()
    totals = {each.place: (each.count, each.freed_bytes) for each in driver.status().totals.emptied}
    assert totals == {"start": (1, 4 * MIB), "flush": (2, 4 * MIB), "continue": (1, 0)}


def test_flush_logs_freed_memory(driver, allocator, caplog):
    with caplog.at_level(logging.INFO, logger="caesura"):
        driver.flush()
    lines = [
        (r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith("flush_cache")
    ]
    assert lines == [("INFO", "flush_cache: reserved 12.0 MB -> 8.0 MB (freed 4.0 MB)")]


@pytest.mark.parametrize("command", [ContinueGenerationReqInput, FlushCacheReqInput])
def test_implicit_commit_derives_before_it_empties(driver, allocator, other_model, monkeypatch, command):
    derivations_into(allocator.log, driver, monkeypatch)
    driver.pause("abort")
    assert not Sender(driver, other_model).send(0).committed
    assert allocator.log == []
    driver.call(command())
    assert allocator.log == ["derived", "emptied"]
    assert driver.status().weights_epoch == 1


@pytest.mark.parametrize("first", [True, False])
def test_one_call_of_a_session_that_asks_is_enough(driver, allocator, other_model, first):
    driver.complete([5] * 40, 4)
    assert driver.status().kv.cached > 0
    session = driver.begin()
    sender = Sender(driver, other_model)
    for number, asks in enumerate([first, not first]):
        sender.send(number, session_id=session, flush_cache=asks, torch_empty_cache=asks)
    reply = driver.end(session_id=session)
    assert isinstance(reply, WeightUpdateReqOutput)
    assert reply.flushed
    assert driver.status().kv.cached == 0
    assert allocator.log == ["emptied"]


def test_a_session_without_a_request_to_empty_empties_nothing(driver, allocator, other_model):
    session = driver.begin()
    for number in range(2):
        Sender(driver, other_model).send(number, session_id=session, flush_cache=False)
    assert not driver.end(session_id=session).flushed
    assert allocator.log == []


def test_looking_empties_nothing(tiny_model, allocator, caplog):
    with EngineDriver(str(tiny_model), log_stages=True) as driver:
        allocator.log.clear()
        with caplog.at_level(logging.DEBUG, logger="caesura"):
            driver.status()
            driver.call(GetMemoryHistoryReqInput())
            driver.complete([5, 6, 7], 3)
            driver.engine.history.sample()
        assert "reserved 12.0 MiB, allocated 7.0 MiB" in driver.engine.gauges.describe()
    assert allocator.log == []
    ends = [line for line in caplog.messages if line.startswith("stage decode ends")]
    assert ends
    assert all(line.endswith("reserved 12.0 MiB, allocated 7.0 MiB") for line in ends)


@pytest.mark.parametrize("log_stages", [True, False])
def test_stages_are_logged_where_the_configuration_says_so(tiny_model, caplog, log_stages):
    with (
        EngineDriver(str(tiny_model), log_stages=log_stages) as driver,
        caplog.at_level(logging.INFO, logger="caesura"),
    ):
        driver.pause()
    stages = [line for line in caplog.messages if line.startswith("stage ")]
    assert ("stage pause begins" in stages) is log_stages
    assert any(line.startswith("stage pause ends after") for line in stages) is log_stages


# --- the start of an engine


def test_the_model_is_warm_before_its_graphs_are_captured(tiny_model, monkeypatch):
    order: list[str] = []

    class Graphs:
        nbytes = 0

        def capture(self):
            order.append("captured")
            yield

    def autotune(runner: ModelRunner, *rows: int) -> None:
        order.append("warm")
        runner.graphs = Graphs()

    monkeypatch.setattr(ModelRunner, "autotune", autotune)
    with EngineDriver(str(tiny_model), scripted=False):
        pass
    assert order == ["warm", "captured"]


def test_the_warm_up_runs_in_inference_mode(tiny_model, monkeypatch):
    """Tensors that autograd tracks would be kept alive by what they were made from."""
    modes: list[bool] = []
    dummy_run = ModelRunner._dummy_run
    monkeypatch.setattr(
        ModelRunner,
        "_dummy_run",
        lambda *arguments: (modes.append(torch.is_inference_mode_enabled()), dummy_run(*arguments))[1],
    )
    with EngineDriver(str(tiny_model), scripted=False):
        pass
    assert modes == [True]


def test_the_pool_is_sized_for_the_rank_that_has_the_least(tiny_model, monkeypatch):
    with EngineDriver(str(tiny_model), kv_pool_tokens=None) as driver:
        alone, per_token = driver.status().kv.total, driver.status().kv.bytes_per_token
    monkeypatch.setattr(Executor, "all_reduce_min", lambda _, value: min(value, 1 * MIB))
    with EngineDriver(str(tiny_model), kv_pool_tokens=None, kv_memory_fraction=0.5) as driver:
        total = driver.status().kv.total
    assert total < alone
    assert total * per_token <= MIB // 2 < (total + 16) * per_token
