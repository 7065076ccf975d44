"""Every bad input is answered by its own error, and leaves the engine exactly as it was."""

import math
import os
import shutil
from pathlib import Path
from time import monotonic

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import edit_config, make_checkpoint
from support.raw_client import RawClient
from support.scripted import EngineDriver, assert_error, one_piece_per_slice
from support.waiting import PATIENCE_S as PATIENCE
from support.waiting import eventually

from caesura.client import (
    CheckpointError,
    EngineError,
    ExceedsKVPool,
    InvalidRequest,
    MalformedMessage,
    PromptTooLong,
    QueueFull,
    SamplingParams,
    SchedulerClient,
    UnsupportedModel,
    WeightMismatch,
    launch_scheduler,
)
from caesura.io_struct import (
    AbortReq,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    GetStatusReqInput,
    GetStatusReqOutput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    WeightUpdateReqOutput,
)
from caesura.scheduler.runtime.engine import Engine
from caesura.scheduler.runtime.engine_config import EngineConfig

CONTEXT, POOL, VOCAB = 256, 128, 97
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    with launch_scheduler(
        tiny_model,
        num_threads=1,
        kv_pool_tokens=POOL,
        max_waiting_requests=64,
        check_ledger=True,
        log_path=tmp_path_factory.mktemp("log") / "engine.log",
    ) as client:
        yield client


def state(client: SchedulerClient) -> dict[str, object]:
    """Return everything in status that a refused request must not change."""
    status = msgspec.structs.asdict(client.status(timeout=PATIENCE))
    volatile = {
        "id", "step", "last_step_age_s", "generated_tokens", "uptime_s", "stages", "device_memory",
        "pause_age_s", "kv",
        "memory_by_tag", "totals", "gen_throughput",
    }  # fmt: skip
    kept = {name: value for name, value in status.items() if name not in volatile}
    return {**kept, "held": status["kv"].held}


@pytest.fixture
def unharmed(engine):
    before, tokens = state(engine), engine.generate([5, 6, 7], GREEDY, timeout=PATIENCE).output_ids
    yield
    assert state(engine) == before
    assert engine.generate([5, 6, 7], GREEDY, timeout=PATIENCE).output_ids == tokens


pytestmark = pytest.mark.usefixtures("tiny_model")


@pytest.mark.usefixtures("unharmed")
class TestGenerate:
    @pytest.mark.parametrize(
        "prompt,new,error",
        [
            ([5] * CONTEXT, 1, PromptTooLong),
            ([5] * 3, CONTEXT - 2, PromptTooLong),
            ([5] * (CONTEXT + 1), None, PromptTooLong),
            ([5] * 3, 2**63, PromptTooLong),
            ([5] * POOL, 2, ExceedsKVPool),
            ([5] * (POOL + 1), 1, ExceedsKVPool),
            ([5] * (POOL + 1), None, ExceedsKVPool),
            ([], 1, InvalidRequest),
            ([VOCAB], 1, InvalidRequest),
            ([5, 2**31 - 1], 1, InvalidRequest),
            ([-1], 1, MalformedMessage),
            ([2**31], 1, MalformedMessage),
            ([2**63], 1, MalformedMessage),
            ([True], 1, InvalidRequest),
            ([5, False], 1, InvalidRequest),
            ([5], 0, InvalidRequest),
            ([5], -1, InvalidRequest),
        ],
    )
    def test_prompts_and_lengths(self, engine, prompt, new, error):
        with pytest.raises(error) as caught:
            engine.generate(prompt, SamplingParams(max_new_tokens=new), timeout=PATIENCE)
        assert type(caught.value) is error
        if error is PromptTooLong:
            assert caught.value.detail["prompt_tokens"] == len(prompt)
            assert caught.value.detail["limit"] == CONTEXT
        if error is ExceedsKVPool:
            assert caught.value.detail["needed_tokens"] > caught.value.detail["total_tokens"] == POOL

    def test_the_largest_request_is_served(self, engine):
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        assert len(engine.generate([5] * POOL, params, timeout=PATIENCE).output_ids) == 1

    @pytest.mark.parametrize(
        "values",
        [
            {"temperature": -0.1},
            {"temperature": math.nan},
            {"temperature": math.inf},
            {"temperature": 1e5},
            {"top_p": 0.0},
            {"top_p": 1.1},
            {"top_p": math.nan},
            {"top_k": -2},
            {"top_k": 2**31},
            {"stop_token_ids": [VOCAB]},
            {"stop_token_ids": [5] * 65},
            {"min_p": -0.1},
            {"min_p": math.nan},
            {"repetition_penalty": 0.0},
            {"repetition_penalty": 2.1},
            {"frequency_penalty": -2.5},
            {"presence_penalty": math.inf},
            {"min_new_tokens": -1},
            {"min_new_tokens": 9, "max_new_tokens": 8},
            {"logit_bias": {VOCAB: 1.0}},
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        ],
        ids=str,
    )
    def test_sampling_values_out_of_range(self, engine, values):
        with pytest.raises(InvalidRequest) as caught:
            engine.generate([5], SamplingParams(**values), timeout=PATIENCE)
        assert caught.value.detail["field"] == f"sampling_params.{next(iter(values))}"

    @pytest.mark.parametrize("bias", [math.nan, 101.0])
    def test_a_bias_out_of_range_names_its_token(self, engine, bias):
        with pytest.raises(InvalidRequest) as caught:
            engine.generate([5], SamplingParams(logit_bias={5: bias}), timeout=PATIENCE)
        assert caught.value.detail["field"] == "sampling_params.logit_bias[5]"

    @pytest.mark.parametrize("prompt", [[1.5], ["5"], "text", [None]])
    def test_token_ids_of_another_type(self, engine, prompt):
        with pytest.raises((InvalidRequest, MalformedMessage)):
            engine.generate(prompt, timeout=PATIENCE)

    @pytest.mark.parametrize(
        "values",
        [
            {"temperature": "hot"},
            {"temperature": True},
            {"top_k": 1.5},
            {"n": 0},
            {"n": 1025},
            {"n": "2"},
            {"seed": -1},
            {"seed": 2**63},
            {"ignore_eos": 1},
            {"stop_token_ids": [-1]},
            {"stop_token_ids": None},
            {"max_new_tokens": "many"},
        ],
        ids=str,
    )
    def test_sampling_values_of_another_type(self, engine, values):
        with pytest.raises(MalformedMessage):
            engine.generate([5], SamplingParams(**values), timeout=PATIENCE)

    def test_more_samples_than_may_wait(self, engine):
        with pytest.raises(QueueFull) as caught:
            engine.generate([5], SamplingParams(n=65), timeout=PATIENCE)
        assert caught.value.detail["limit"] == 64

    @pytest.mark.parametrize(
        ("name", "error"), [("", MalformedMessage), ("r" * 129, MalformedMessage), (7, InvalidRequest)]
    )
    def test_names_that_are_none(self, engine, name, error):
        with pytest.raises(error):
            engine.submit([5], rid=name).result(timeout=PATIENCE)

    @pytest.mark.parametrize("name", [7, b"x", ["a"]])
    def test_a_message_id_that_is_no_string_is_not_sent(self, engine, name):
        with pytest.raises(InvalidRequest):
            engine.flush_cache(message_id=name, timeout=PATIENCE)

    def test_one_bad_prompt_of_a_batch(self, engine):
        with pytest.raises(InvalidRequest) as caught:
            engine.generate([[5], [6, VOCAB], [6]], GREEDY, timeout=PATIENCE)
        assert (caught.value.detail["field"], caught.value.detail["position"]) == ("input_ids", 1)


def test_an_abort_of_nothing_in_particular(engine, unharmed):
    with pytest.raises(InvalidRequest):
        engine.abort(timeout=PATIENCE)


NORM = "model.norm.weight"
BREAKAGES: dict[str, type[EngineError]] = {
    "missing folder": CheckpointError,
    "missing config": CheckpointError,
    "truncated data": CheckpointError,
    "a pickle": CheckpointError,
    "a pipe as weights": CheckpointError,
    "missing tensor": WeightMismatch,
    "wrong shape": WeightMismatch,
    "another config": WeightMismatch,
    "another architecture": UnsupportedModel,
}
"""One of each kind: ``test_disk_checkpoint.py`` and ``test_hostile_checkpoints.py`` have the others."""


def broken(tmp_path: Path, source: Path, breakage: str) -> Path:
    path = tmp_path / "broken"
    if breakage == "missing folder":
        return path
    shutil.copytree(source, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    if breakage == "missing config":
        (path / "config.json").unlink()
    elif breakage == "truncated data":
        os.truncate(file, file.stat().st_size - 1)
    elif breakage == "a pickle":
        file.unlink()
        torch.save(tensors, path / "pytorch_model.bin")
    elif breakage == "a pipe as weights":
        file.unlink()
        os.mkfifo(file)
    elif breakage == "another architecture":
        edit_config(path, architectures=["MambaForCausalLM"])
    elif breakage == "another config":
        edit_config(path, num_attention_heads=2)
    else:
        norm = {"missing tensor": {}, "wrong shape": {NORM: torch.zeros(41)}}[breakage]
        save_file({name: each for name, each in tensors.items() if name != NORM} | norm, file)
    return path


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_checkpoint_as_an_update(engine, unharmed, tmp_path, other_model, breakage):
    checksum = engine.check_weights("checksum", timeout=PATIENCE).total
    with pytest.raises(EngineError) as caught:
        engine.update_weights_from_disk(broken(tmp_path, other_model, breakage), timeout=PATIENCE)
    assert type(caught.value) is BREAKAGES[breakage], caught.value
    assert engine.check_weights("checksum", timeout=PATIENCE).total == checksum


@pytest.mark.parametrize("path", ["", "\0", "x" * 5000, "/dev/null", "a\nb"])
def test_a_path_that_leads_nowhere(engine, unharmed, path):
    with pytest.raises(CheckpointError):
        engine.update_weights_from_disk(path, timeout=PATIENCE)


@pytest.mark.parametrize("breakage", sorted(BREAKAGES.keys() - {"another config"}))
def test_a_broken_checkpoint_at_start(tmp_path, other_model, breakage):
    config = EngineConfig(
        model_path=str(broken(tmp_path, other_model, breakage)), endpoint=f"ipc://{tmp_path}/s"
    )
    with pytest.raises(Exception) as caught:
        Engine(config.resolve())
    assert getattr(caught.value, "code", None) == BREAKAGES[breakage].error_code, caught.value
    assert not (tmp_path / "s").exists()


@pytest.fixture
def driver(tiny_model):
    with EngineDriver(str(tiny_model)) as driver:
        yield driver


@pytest.fixture
def second(driver):
    with RawClient(driver.config.endpoint) as raw:
        yield raw


def until(driver: EngineDriver, raw: RawClient):
    for _ in range(500):
        driver.tick()
        if raw.socket.poll(1):
            return raw.receive(0)
    raise AssertionError("no answer")


def test_a_message_id_means_one_body(driver, second):
    known = driver.call(PauseGenerationReqInput(id="same", mode="retract"))
    assert_error(driver.call(PauseGenerationReqInput(id="same", mode="in_place")), "id_conflict")
    assert_error(driver.call(ContinueGenerationReqInput(id="same")), "id_conflict")
    second.send(AbortReq(id="same", abort_all=True))
    assert_error(until(driver, second), "id_conflict")
    assert driver.status().pause_mode == "retract"
    assert driver.call(PauseGenerationReqInput(id="same", mode="retract")) == known
    driver.go_on()
    assert driver.call(PauseGenerationReqInput(id="same", mode="retract")) == known, "the stored answer"
    assert driver.status().generation == "running", "and no second pause"


def test_a_retried_update_attaches_and_commits_once(driver, second, other_model, monkeypatch):
    one_piece_per_slice(monkeypatch, writes=True)
    update = UpdateWeightFromDiskReqInput(id="u", model_path=str(other_model), weight_version="v1")
    driver.send(update)
    eventually(lambda: driver.tick() or driver.status().update)
    assert "u" not in driver.replies, "the update was meant to be under way"
    second.send(update)
    driver.send(update)
    attached = until(driver, second)
    driver.tick(3)
    first = driver.replies.pop("u")
    assert attached == first == driver.call(update)
    assert isinstance(first, WeightUpdateReqOutput)
    assert first.committed
    assert driver.status().weights_epoch == 1


def test_a_refused_request_is_refused_again(driver):
    bad = GenerateReqInput(id="b", input_ids=[VOCAB])
    assert assert_error(driver.call(bad), "invalid_request") == driver.call(bad)


def test_a_defect_in_a_handler_is_told_with_its_traceback(driver, caplog):
    driver.engine.cache.flush = lambda: 1 // 0
    error = assert_error(driver.flush(), "internal")
    assert "ZeroDivisionError" in error.detail["traceback"]
    assert "FlushCacheReqInput failed" in caplog.text


@pytest.mark.parametrize("seconds", [86400.1, 1e15, 1e300, math.inf, math.nan])
@pytest.mark.parametrize(
    "message",
    [
        lambda seconds: BeginWeightUpdateReqInput(deadline_s=seconds),
        lambda seconds: FlushCacheReqInput(timeout_s=seconds),
        lambda seconds: PauseGenerationReqInput(owner="o", lease_s=seconds),
        lambda seconds: UpdateWeightsFromCheckpointEngineReqInput(zmq_handles={}, timeout_s=seconds),
        lambda seconds: InitWeightsUpdateGroupReqInput(
            master_address="h", master_port=1, rank_offset=1, world_size=2, timeout_s=seconds
        ),
    ],
    ids=["begin", "flush", "pause", "checkpoint-engine", "group"],
)
def test_a_time_beyond_all_time_is_refused(driver, message, seconds):
    assert_error(driver.call(message(seconds)), "malformed_message")
    status = driver.status()
    assert (status.generation, status.session) == ("running", None)


def test_the_furthest_deadline_can_be_waited_for(driver):
    session_id = driver.begin(deadline_s=86400.0)
    scheduler = driver.engine.scheduler
    driver.sleep_s()  # finds that it is idle
    driver.engine.housekeeping.timers.fire(monotonic() + driver.config.idle_empty_s)
    driver.send(GetStatusReqInput(id="s"))
    scheduler.tick(None)  # waits as the process does
    assert isinstance(driver.replies.pop("s"), GetStatusReqOutput)
    driver.end(commit=False, session_id=session_id)


def test_a_whole_family_of_shapes_is_still_refused_by_name(engine, unharmed, tmp_path):
    make_checkpoint(tmp_path / "wide", "qwen3", tied=True, hidden_size=48)
    with pytest.raises(WeightMismatch) as caught:
        engine.update_weights_from_disk(tmp_path / "wide", timeout=PATIENCE)
    assert caught.value.detail["config"] == ["hidden_size"]
