"""Release and resume by tag in one real engine."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.buckets_by_hand import Sender
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.faults import Fault, full_disk
from support.scripted import EngineDriver, assert_error, ok, one_piece_per_slice, tokens_of

from caesura.io_struct import (
    GenerateReqInput,
    MemoryTag,
)
from caesura.io_struct import ReleaseMemoryOccupationReqInput as Release
from caesura.io_struct import ResumeMemoryOccupationReqInput as Resume
from caesura.scheduler.memory.storage import StorageComponent

ALL = ["kv_cache", "weights"]
"""Memory that an engine without captured graphs can release."""
PROMPT = [3 + 7 * i % 90 for i in range(40)]


def generate(driver: EngineDriver) -> list[int]:
    return tokens_of(driver.complete(PROMPT, 20, seed=7))


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("models") / name for name in ("first", "second")]
    for seed, path in enumerate(paths):
        make_checkpoint(path, "qwen3", tied=False, seed=seed)
    return paths


@pytest.fixture
def real(models, backend):
    with EngineDriver(str(models[0]), scripted=False) as driver:
        yield driver


@pytest.fixture
def keeping(models, backend):
    with EngineDriver(str(models[0]), scripted=False, weights_cpu_backup=True) as driver:
        yield driver


@pytest.fixture
def cold(models) -> list[int]:
    with EngineDriver(str(models[1]), scripted=False) as driver:
        return generate(driver)


def release(driver: EngineDriver, *tags: MemoryTag) -> list[MemoryTag]:
    return ok(driver.release(*tags)).released_tags


def resume(driver: EngineDriver, *tags: MemoryTag) -> list[MemoryTag]:
    return ok(driver.resume(*tags)).released_tags


# -- the orders that trainers use ----------------------------------------------------------------------------


def test_an_engine_continues_before_its_cache_is_back(real, models, cold):
    assert generate(real) != cold
    ok(real.flush())
    assert release(real) == ALL
    assert resume(real, "weights") == ["kv_cache"]
    ok(real.pause())
    ok(real.flush())
    replies = Sender(real, models[1]).send_all(flush_cache=False, weight_version="1")
    assert [reply.committed for reply in replies] == [False] * (len(replies) - 1) + [True]
    assert {reply.weights for reply in replies[:-1]} == {"invalid"}
    ok(real.go_on())
    rid = real.generate(PROMPT, 20, seed=7)
    real.tick(5)
    real.assert_status(generation="running", weights="valid", memory="released", waiting_requests=1)
    assert resume(real, "kv_cache", "cuda_graph") == []
    real.run_until_idle()
    assert tokens_of(real.result(rid)) == cold == generate(real)


def test_buckets_fill_invalid_weights_of_a_running_engine(real, models, cold):
    generate(real)
    assert release(real, "kv_cache", "weights") == ["kv_cache", "weights"]
    assert resume(real, "weights") == ["kv_cache"]
    sender = Sender(real, models[1])
    for number in range(len(sender.parts)):
        assert_error(real.call(GenerateReqInput(input_ids=PROMPT)), "weights_invalid")
        reply = sender.send(number, flush_cache=True)
    assert (reply.committed, reply.weights, reply.weights_epoch, reply.flushed) == (True, "valid", 1, True)
    ok(real.flush())
    assert resume(real, "kv_cache") == []
    assert generate(real) == cold


def test_a_frozen_request_outlives_a_release_of_weights(driver, other_model):
    rid = driver.generate(PROMPT, 30)
    driver.tick(5)
    driver.pause("in_place")
    assert_error(driver.release(), "not_idle")
    assert release(driver, "weights", "cuda_graph") == ["weights"]
    resume(driver)
    ok(driver.update(other_model, flush_cache=False))
    ok(driver.go_on())
    driver.run_until_idle()
    result = driver.check(rid)
    assert len(tokens_of(result)) == 30
    assert result.weight_versions[-1].stale_kv


# -- replies and status --------------------------------------------------------------------------------------


def test_sizes_are_reported_once_and_the_log_has_the_gain(driver, caplog):
    sizes = driver.status().device_memory
    taken = {tag: driver.engine.residency.occupied_bytes(tag) for tag in ALL}
    with caplog.at_level(logging.INFO, logger="caesura"):
        reply = driver.release("weights", "kv_cache")
    assert (reply.freed_bytes, reply.weights_kept) == (taken, False)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("release_memory: reserved ")]
    assert len(lines) == 1
    again = driver.release()
    assert (again.released_tags, again.freed_bytes, again.weights_kept) == (ALL, {}, False)
    status = driver.status()
    assert (status.memory, status.released_tags) == ("released", ALL)
    assert (status.device_memory.weights, status.device_memory.kv_cache) == (sizes.weights, sizes.kv_cache)
    reply = driver.resume("kv_cache")
    assert (reply.released_tags, reply.resumed_bytes) == (["weights"], {"kv_cache": sizes.kv_cache})
    assert driver.resume("kv_cache").resumed_bytes == {}
    assert resume(driver) == []
    driver.assert_status(memory="resident", weights="invalid")
    assert driver.resume().resumed_bytes == {}


def gone_of(driver: EngineDriver) -> set[MemoryTag]:
    """Return a set of the tags that are away, as memory goes and comes and not as the lifecycle says."""
    gone: set[MemoryTag] = set()
    manager = driver.engine.residency
    real_release, real_resume = manager.release, manager.resume

    def release(tags):
        gone.update(tags)
        yield from real_release(tags)

    def resume(tags):
        yield from real_resume(tags)
        gone.difference_update(tags)

    manager.release, manager.resume = release, resume
    return gone


def test_the_allocator_is_emptied_once_the_memory_has_gone(driver, caplog):
    gone = gone_of(driver)
    emptied = []

    class Allocator:
        def memory_reserved(self) -> int:
            return (8 if emptied else 12) << 20

        def empty_cache(self) -> None:
            emptied.append(set(gone))

    driver.engine.device_cache.module = Allocator()
    ok(driver.release(tags=[]))
    assert not emptied
    with caplog.at_level(logging.INFO, logger="caesura"):
        reply = driver.release("kv_cache")
    assert (emptied, reply.weights_kept) == ([{"kv_cache"}], None)
    assert (reply.reserved_before, reply.reserved_after) == (12 << 20, 8 << 20)
    assert "release_memory: reserved 12.0 MB -> 8.0 MB (freed 4.0 MB)" in caplog.messages
    ok(driver.release("kv_cache"))
    assert len(emptied) == 1


def test_no_tags_at_all_is_harmless_even_under_load(driver):
    rid = driver.generate(PROMPT, 30)
    driver.tick(3)
    assert driver.release(tags=[]).released_tags == []
    assert driver.resume(tags=[]).released_tags == []
    assert driver.resume().released_tags == []
    driver.run_until_idle()
    assert len(tokens_of(driver.result(rid))) == 30


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_wait_while_the_cache_is_away(tiny_model, depth):
    with EngineDriver(str(tiny_model), pipeline_depth=depth) as driver:
        release(driver, "kv_cache")
        rid = driver.generate(PROMPT, 8)
        driver.tick(5)
        assert driver.runner.launches == []
        assert driver.sleep_s() != 0
        resume(driver)
        driver.run_until_idle()
        driver.check(rid)


def test_no_step_runs_while_memory_goes_or_comes(driver, monkeypatch):
    one_piece_per_slice(monkeypatch)
    gone, synchronized = gone_of(driver), []
    driver.runner.synchronize = lambda: synchronized.append(set(gone))
    message_id = driver.send(Release())
    driver.tick(2)
    assert synchronized == [set()], "the forward stream is idle before anything goes"
    assert message_id not in driver.replies, "the release takes more than two ticks"
    driver.assert_status(memory="released", weights="invalid")
    assert_error(driver.release("kv_cache"), "busy")
    while message_id not in driver.replies:
        driver.tick()
    for component in driver.engine.residency.components.values():  # whose mappings resume at once
        component.resume = lambda: iter([None] * 5)
    message_id = driver.send(Resume())
    driver.tick(3)
    assert message_id not in driver.replies
    assert driver.status().released_tags == ALL
    while message_id not in driver.replies:
        driver.tick()
    assert driver.status().released_tags == []
    emptied = {*ALL}  # the device cache is emptied when all is gone, and before it comes back
    assert synchronized == [set(), emptied, emptied, set()], "all of it is there before the reply"


# -- refusals ------------------------------------------------------------------------------------------------


def test_the_tag_of_graphs_that_there_are_not_is_harmless(real, models, cold):
    assert release(real) == ALL
    assert resume(real, "weights", "kv_cache") == []
    assert real.status().memory == "resident"
    ok(real.update(models[1]))
    assert generate(real) == cold
    assert release(real, "cuda_graph") == []
    assert generate(real) == cold


def test_a_release_frees_the_allocated_memory(real):
    """Pages that nothing has been written to since the resume are nobody's."""
    sizes = real.status().device_memory
    taken = real.engine.residency.occupied_bytes("kv_cache")
    assert real.release("kv_cache").freed_bytes == {"kv_cache": taken}
    assert real.resume().resumed_bytes == {"kv_cache": sizes.kv_cache}
    moves = isinstance(real.engine.residency.components["kv_cache"], StorageComponent)
    assert real.release("kv_cache").freed_bytes == {"kv_cache": sizes.kv_cache if moves else 0}


@pytest.mark.parametrize("tag", ["weights", "cuda_graph"])
def test_weights_need_a_pause_or_an_idle_engine(driver, tag):
    release(driver, "kv_cache")
    driver.generate(PROMPT, 50)  # waits: nothing is held, but the engine is not idle
    driver.tick(2)
    error = assert_error(driver.release(tag), "not_idle")
    assert (error.detail["waiting"], error.detail["held_tokens"]) == (1, 0)
    driver.pause("retract")
    release(driver, tag)


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], None])
def test_an_implicit_session_forbids_a_release(driver, other_model, tags):
    driver.pause()
    assert not Sender(driver, other_model).send(0).committed
    assert driver.status().weights == "updating"
    assert_error(driver.release(tags=tags), "session_open")
    assert driver.status().weights == "updating"
    ok(driver.flush())  # commits it
    release(driver, *(tags or []))


def test_unfinished_writes_are_forgotten_on_release(driver, other_model):
    driver.pause()
    release(driver, "weights")
    resume(driver)
    sender = Sender(driver, other_model)
    assert not sender.send(0, weight_version="lost").committed
    assert driver.status().session is not None
    release(driver, "weights")
    assert driver.status().session is None
    resume(driver)
    assert not any(reply.committed for reply in sender.send_all(1))
    reply = sender.send(0)
    assert (reply.committed, reply.weight_version, reply.weights_epoch) == (True, "default", 1)


def test_a_resume_without_enough_memory_changes_nothing(driver):
    driver.pause()
    release(driver)
    before = driver.status()
    device = SimpleNamespace(mem_get_info=lambda: (100, 1 << 40))
    own, driver.engine.residency.module = driver.engine.residency.module, device
    error = assert_error(driver.resume(), "out_of_memory")
    sizes = before.device_memory
    assert error.detail == {"needed_bytes": sizes.weights + sizes.kv_cache, "free_bytes": 100}
    driver.assert_status(released_tags=ALL, weights="invalid", generation="paused")
    assert driver.resume("cuda_graph").released_tags == ALL
    driver.engine.residency.module = own
    assert resume(driver) == []


# -- weights that survive their release ----------------------------------------------------------------------


def test_a_server_without_updates_serves_again(keeping):
    before, total = generate(keeping), keeping.checksum()
    sizes = keeping.status().device_memory
    for _ in range(3):
        reply = ok(keeping.release())
        status = keeping.status()
        assert (status.weights, status.memory) == ("valid", "released")
        assert reply.freed_bytes["weights"] == sizes.weights
        assert reply.weights_kept
        assert status.device_memory.weights_backup == sizes.weights
        rid = keeping.generate(PROMPT, 20, seed=7)  # waits, as without KV memory
        keeping.tick(5)
        assert keeping.status().waiting_requests == 1
        ok(keeping.resume())
        keeping.run_until_idle()
        assert tokens_of(keeping.result(rid)) == before == generate(keeping)
        assert keeping.checksum() == total
        assert keeping.status().device_memory.weights_backup == 0
        assert keeping.status().weights_epoch == 0


def test_the_copy_is_that_of_the_last_update(keeping, models):
    """Weights change between two releases; what the first release kept must not come back."""
    ok(keeping.release("weights"))
    assert_error(keeping.update(models[1]), "memory_released")
    ok(keeping.resume("weights"))
    ok(keeping.update(models[1]))
    updated, total = generate(keeping), keeping.checksum()
    ok(keeping.release("weights"))
    ok(keeping.resume("weights"))
    assert (generate(keeping), keeping.checksum()) == (updated, total)
    with EngineDriver(str(models[1]), scripted=False) as cold:
        assert (generate(cold), cold.checksum()) == (updated, total)


def test_poisoned_weights_stay_poisoned(keeping, models):
    ok(keeping.check_weights("reset_tensors"))
    ok(keeping.release())
    ok(keeping.resume())
    assert keeping.status().weights == "poisoned"
    assert_error(keeping.call(GenerateReqInput(input_ids=PROMPT)), "weights_poisoned")
    ok(keeping.update(models[1]))
    assert keeping.status().weights == "valid"


def test_nothing_commits_or_compares_released_weights(keeping):
    total = keeping.checksum()
    ok(keeping.release("weights"))
    for action in ("snapshot", "compare", "checksum"):
        assert_error(keeping.check_weights(action), "memory_released")
    session = keeping.begin()
    assert_error(keeping.end(session_id=session, weight_version="new"), "memory_released")
    ok(keeping.resume("weights"))
    ok(keeping.end(session_id=session, weight_version="new"))
    assert (keeping.checksum(), keeping.status().weight_version) == (total, "new")


def test_a_copy_that_does_not_fit_leaves_the_weights(keeping):
    before = generate(keeping)
    with full_disk():
        error = assert_error(keeping.release(), "out_of_memory")
    assert "File too large" in error.message
    status = keeping.status()
    assert (status.memory, status.weights, status.device_memory.weights_backup) == ("resident", "valid", 0)
    assert generate(keeping) == before
    ok(keeping.release())
    ok(keeping.resume())
    assert generate(keeping) == before


def test_a_resume_that_fails_half_way_keeps_the_copy(keeping):
    """The KV cannot be allocated after the weights have come back."""
    before = generate(keeping)
    ok(keeping.release())
    with Fault(keeping.engine.residency.components["kv_cache"], "resume", MemoryError()):
        assert_error(keeping.resume("weights", "kv_cache"), "out_of_memory")
    status = keeping.status()
    assert (status.memory, status.device_memory.weights_backup > 0) == ("released", True)
    ok(keeping.resume())
    assert generate(keeping) == before


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_scales_and_derived_tensors_come_back(tmp_path, backend, family):
    make_checkpoint(tmp_path / "plain", family, seed=3)
    path = tmp_path / "fp8"
    make_fp8_checkpoint(tmp_path / "plain", path, (16, 16))
    with EngineDriver(str(path), scripted=False, weights_cpu_backup=True) as keeping:
        model = keeping.engine.model
        storage = {name: tensor.clone() for name, tensor in model.named_storage()}
        before = generate(keeping)
        ok(keeping.release())
        ok(keeping.resume())
        for name, tensor in model.named_storage():
            assert torch.equal(tensor.view(torch.uint8), storage[name].view(torch.uint8)), name
        assert generate(keeping) == before


def test_without_a_copy_the_engine_names_the_awaited_update(models):
    with EngineDriver(str(models[0]), scripted=False) as keeping:
        ok(keeping.release())
        assert keeping.status().device_memory.weights_backup == 0
        ok(keeping.resume())
        error = assert_error(keeping.call(GenerateReqInput(input_ids=PROMPT)), "weights_invalid")
        assert "without a copy" in error.message
        assert "send a complete update" in error.message
        assert "--enable-weights-cpu-backup" in error.message
