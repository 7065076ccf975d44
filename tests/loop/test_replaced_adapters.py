"""Adapters tick by tick, on a real model: what waits or runs while one is replaced."""

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.lora import ALL_LINEAR, make_adapter
from support.scripted import EngineDriver, assert_error

from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    GenerateReqOutput,
    GetStatusReqInput,
    LoadAdapterReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    WeightUpdateReqOutput,
)

PROMPT = [3 + 7 * i % 90 for i in range(33)]
"""Prompt of two chunks: 32 tokens, and the last one."""
SCORED = {"adapter": "a", "return_logprob": True, "logprob_start_len": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "base"
    make_checkpoint(path, "qwen3")
    return path


def load(driver: EngineDriver, path: Path, on_running: str = "finish_old") -> None:
    driver.call(LoadAdapterReqInput(name="a", path=str(path), on_running=on_running))


def scores(result: GenerateReqOutput) -> np.ndarray:
    return np.frombuffer(result.input_logprobs, "<f4")[1:]


@pytest.mark.parametrize("on_running", ["retract", "keep"])
@pytest.mark.parametrize("ticks", [1, 2, 4])
def test_prompts_are_scored_by_the_version_that_samples(base, tmp_path, ticks, on_running):
    first, second = (make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(2))
    options = {"enable_lora": True, "chunked_prefill_size": 32, "dtype": "float32"}
    with EngineDriver(str(base), scripted=False, **options) as driver:
        load(driver, first)
        old = driver.complete(PROMPT, 1, **SCORED)
        rid = driver.generate(PROMPT, 8, **SCORED)
        driver.hear()
        driver.tick(ticks)
        driver.call(PauseGenerationReqInput(mode="retract" if on_running == "retract" else "in_place"))
        load(driver, second, on_running)
        driver.call(ContinueGenerationReqInput())
        driver.run_until_idle()
        found = driver.result(rid)
        new = driver.complete(PROMPT, 1, **SCORED)
    epochs = [span.adapter_epoch for span in found.weight_versions]
    assert epochs in ([1, 2], [2])
    assert not np.allclose(scores(old), scores(new), atol=1e-3)
    np.testing.assert_allclose(scores(found), scores(old if epochs[0] == 1 else new), atol=1e-5)


def test_prompts_end_under_adapters_replaced_at_every_step(base, tmp_path):
    paths = [make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(2)]
    options = {"enable_lora": True, "chunked_prefill_size": 32, "dtype": "float32"}
    with EngineDriver(str(base), scripted=False, **options) as driver:
        load(driver, paths[0])
        running = driver.generate(PROMPT, 60)
        driver.hear()
        driver.tick(4)
        waiting = driver.generate(PROMPT + PROMPT[:20], 1, adapter="a")
        driver.hear()
        for cycle in range(1, 13):
            step = driver.engine.state.step
            while driver.engine.state.step == step:
                driver.tick()
            driver.pause("in_place")
            load(driver, paths[cycle % 2], "keep")
            driver.go_on()
        assert driver.result(waiting)
        driver.run_until_idle()
        assert driver.result(running)


def test_a_session_publishes_its_adapters_at_its_commit(base, tmp_path):
    paths = [make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(2)]
    with EngineDriver(str(base), scripted=False, enable_lora=True, max_loras=2, dtype="float32") as driver:

        def names() -> dict[str, int]:
            status = driver.call(GetStatusReqInput())
            return {each.name: each.adapter_epoch for each in status.adapters if not each.replaced}

        def staged(*changes: tuple[str, int], commit: bool = True) -> WeightUpdateReqOutput:
            session = driver.call(BeginWeightUpdateReqInput()).session_id
            for name, number in changes:
                before = names()
                driver.call(LoadAdapterReqInput(name=name, path=str(paths[number]), session_id=session))
                assert names() == before
            end = EndWeightUpdateReqInput(session_id=session, commit=commit)
            return driver.call(end)

        load(driver, paths[0])
        assert not staged(("a", 1), ("b", 1), commit=False).committed
        assert names() == {"a": 1}
        first = driver.complete(PROMPT, 1, **SCORED)
        committed = staged(("a", 1), ("b", 1))
        assert (committed.committed, committed.written_tensors, committed.weights_epoch) == (True, 56, 0)
        assert names() == {"a": 4, "b": 5}
        assert not np.allclose(scores(first), scores(driver.complete(PROMPT, 1, **SCORED)), atol=1e-3)
        session = driver.call(BeginWeightUpdateReqInput()).session_id
        request = LoadAdapterReqInput(name="c", path=str(paths[0]), session_id=session, adapter_epoch=9)
        assert driver.call(request).evicted == ["b"]
        driver.call(
            UpdateWeightFromDiskReqInput(model_path=str(base), session_id=session, weight_version="second")
        )
        assert names() == {"a": 4, "b": 5}
        reply = driver.call(EndWeightUpdateReqInput(session_id=session))
        assert (reply.weights_epoch, reply.weight_version) == (1, "second")
        assert names() == {"a": 4, "c": 9}
        error = driver.call(LoadAdapterReqInput(name="c", path=str(paths[0]), session_id=session))
        assert_error(error, "no_session")


def test_versions_of_one_number_share_no_prefix(base, tmp_path):
    paths = [make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(2)]
    with EngineDriver(str(base), scripted=False, enable_lora=True, dtype="float32") as driver:
        for path in paths:
            driver.call(LoadAdapterReqInput(name="a", path=str(path), adapter_epoch=7))
            for cached in (0, 32):
                assert driver.complete(PROMPT, 1, adapter="a").cached_tokens == cached


def adapters_of(driver: EngineDriver) -> dict[str, int]:
    return {each.name: each.adapter_epoch for each in driver.call(GetStatusReqInput()).adapters}


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_keep_an_adapter_whose_slot_is_wanted(base, tmp_path, depth):
    paths = [make_adapter(base, tmp_path / str(i), ALL_LINEAR, seed=i) for i in range(3)]
    options = {"enable_lora": True, "max_loras": 1, "max_loaded_loras": 3, "pipeline_depth": depth}
    with EngineDriver(str(base), scripted=False, dtype="float32", **options) as driver:
        for name, path in zip("ab", paths, strict=False):
            driver.call(LoadAdapterReqInput(name=name, path=str(path)))
        rid = driver.generate(PROMPT, 40, adapter="a", return_logprob=True)
        driver.hear()
        driver.tick(4)
        session = driver.call(BeginWeightUpdateReqInput()).session_id
        staged = {"name": "a", "path": str(paths[2]), "session_id": session}
        driver.call(LoadAdapterReqInput(**staged, on_running="keep"))
        waiting = driver.generate(PROMPT, 2, adapter="b")
        driver.hear()
        driver.call(EndWeightUpdateReqInput(session_id=session))
        (sample,) = driver.engine.live.samples(rid)
        assert driver.engine.batcher.table.adapter[sample.slot] == sample.adapter.slot >= 0
        driver.run_until_idle()
        found = driver.result(rid)
        assert driver.result(waiting).weight_versions[-1].adapter == "b"
    assert [span.adapter_epoch for span in found.weight_versions] == [1, 3]


def test_a_refused_load_unloads_nothing(base, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    options = {"enable_lora": True, "max_loras": 1, "max_loaded_loras": 3, "dtype": "float32"}
    with EngineDriver(str(base), scripted=False, **options) as driver:
        for name in "abc":
            driver.call(LoadAdapterReqInput(name=name, path=str(path), pinned=name == "a"))
        error = driver.call(LoadAdapterReqInput(name="d", path=str(path), pinned=True))
        assert_error(error, "no_adapter_slot")
        assert adapters_of(driver) == {"a": 1, "b": 2, "c": 3}


def test_a_load_that_cannot_be_recorded_unloads_nothing(base, tmp_path):
    path, folder = make_adapter(base, tmp_path / "a", ALL_LINEAR), tmp_path / "state"
    folder.mkdir()
    options = {"enable_lora": True, "max_loras": 1, "dtype": "float32", "state_file": str(folder / "file")}
    with EngineDriver(str(base), scripted=False, **options) as driver:
        driver.call(LoadAdapterReqInput(name="a", path=str(path)))
        folder.rename(tmp_path / "moved")
        assert_error(driver.call(LoadAdapterReqInput(name="b", path=str(path))), "state_file_error")
        assert adapters_of(driver) == {"a": 1}


def test_a_session_unloads_nothing_that_it_replaces(base, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    options = {"enable_lora": True, "max_loras": 2, "max_loaded_loras": 3, "dtype": "float32"}
    with EngineDriver(str(base), scripted=False, **options) as driver:
        for name in "abc":
            driver.call(LoadAdapterReqInput(name=name, path=str(path)))
        session = driver.call(BeginWeightUpdateReqInput()).session_id
        evicted = [
            driver.call(LoadAdapterReqInput(name=name, path=str(path), session_id=session)).evicted
            for name in "az"
        ]
        driver.call(EndWeightUpdateReqInput(session_id=session))
        assert (evicted, adapters_of(driver)) == ([[], ["b"]], {"a": 4, "c": 3, "z": 5})


def test_adapters_change_slots_beside_a_session(base, tmp_path):
    path = make_adapter(base, tmp_path / "a", ALL_LINEAR)
    options = {"enable_lora": True, "max_loras": 1, "max_loaded_loras": 3, "dtype": "float32"}
    with EngineDriver(str(base), scripted=False, **options) as driver:
        for name in "ab":
            driver.call(LoadAdapterReqInput(name=name, path=str(path), pinned=name == "a"))
        session = driver.call(BeginWeightUpdateReqInput()).session_id
        driver.call(LoadAdapterReqInput(name="c", path=str(path), session_id=session))
        assert driver.complete(PROMPT, 2, adapter="b").weight_versions[0].adapter == "b"
