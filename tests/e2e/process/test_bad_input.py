"""Every bad input is answered by its own error, and leaves the engine exactly as it was."""

import math
import os
import shutil
from itertools import product
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


def refused(engine: SchedulerClient, error: type[EngineError], prompt: object, **params: object) -> dict:
    """Return the details with which ``prompt`` is refused."""
    with pytest.raises(error) as caught:
        engine.generate(prompt, SamplingParams(**params), timeout=PATIENCE)
    assert type(caught.value) is error, (prompt, params)
    return caught.value.detail


def test_prompts_and_lengths_beyond_a_limit(engine, unharmed):
    for length, new in ((CONTEXT, 1), (3, CONTEXT - 2), (CONTEXT + 1, None), (3, 2**63)):
        detail = refused(engine, PromptTooLong, [5] * length, max_new_tokens=new)
        assert (detail["prompt_tokens"], detail["limit"]) == (length, CONTEXT)
    for length, new in ((POOL, 2), (POOL + 1, 1), (POOL + 1, None)):
        detail = refused(engine, ExceedsKVPool, [5] * length, max_new_tokens=new)
        assert detail["needed_tokens"] > detail["total_tokens"] == POOL
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    assert len(engine.generate([5] * POOL, params, timeout=PATIENCE).output_ids) == 1


def test_prompts_that_are_no_token_ids(engine, unharmed):
    for prompt in ([], [VOCAB], [5, 2**31 - 1], [True], [5, False]):
        refused(engine, InvalidRequest, prompt, max_new_tokens=1)
    for prompt in ([-1], [2**31], [2**63]):
        refused(engine, MalformedMessage, prompt, max_new_tokens=1)
    for prompt in ([1.5], ["5"], "text", [None]):
        with pytest.raises((InvalidRequest, MalformedMessage)):
            engine.generate(prompt, timeout=PATIENCE)
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([[5], [6, VOCAB], [6]], GREEDY, timeout=PATIENCE)
    assert (caught.value.detail["field"], caught.value.detail["position"]) == ("input_ids", 1)


OUT_OF_RANGE = [
    {"max_new_tokens": 0}, {"max_new_tokens": -1},
    {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": 1e5},
    {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}, {"top_k": -2}, {"top_k": 2**31},
    {"stop_token_ids": [VOCAB]}, {"stop_token_ids": [5] * 65}, {"min_p": -0.1}, {"min_p": math.nan},
    {"repetition_penalty": 0.0}, {"repetition_penalty": 2.1}, {"frequency_penalty": -2.5},
    {"presence_penalty": math.inf}, {"min_new_tokens": -1}, {"min_new_tokens": 9, "max_new_tokens": 8},
    {"logit_bias": {VOCAB: 1.0}}, {"logit_bias": dict.fromkeys(range(1025), 1.0)},
]  # fmt: skip
OF_ANOTHER_TYPE = [
    {"temperature": "hot"}, {"temperature": True}, {"top_k": 1.5}, {"n": 0}, {"n": 1025}, {"n": "2"},
    {"seed": -1}, {"seed": 2**63}, {"ignore_eos": 1}, {"stop_token_ids": [-1]}, {"stop_token_ids": None},
    {"max_new_tokens": "many"},
]  # fmt: skip


def test_sampling_values_that_cannot_be(engine, unharmed):
    for values in OUT_OF_RANGE:
        detail = refused(engine, InvalidRequest, [5], **values)
        assert detail["field"] == f"sampling_params.{next(iter(values))}"
    for bias in (math.nan, 101.0):
        detail = refused(engine, InvalidRequest, [5], logit_bias={5: bias})
        assert detail["field"] == "sampling_params.logit_bias[5]"
    for values in OF_ANOTHER_TYPE:
        refused(engine, MalformedMessage, [5], **values)
    assert refused(engine, QueueFull, [5], n=65)["limit"] == 64, "as many as may wait"


def test_names_that_are_none(engine, unharmed):
    for name, error in (("", MalformedMessage), ("r" * 129, MalformedMessage), (7, InvalidRequest)):
        with pytest.raises(error):
            engine.submit([5], rid=name).result(timeout=PATIENCE)
    for name in (7, b"x", ["a"]):
        with pytest.raises(InvalidRequest):
            engine.flush_cache(message_id=name, timeout=PATIENCE)
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


def test_a_path_that_leads_nowhere(engine, unharmed):
    for path in ("", "\0", "x" * 5000, "/dev/null", "a\nb"):
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


TIMES = [
    lambda seconds: BeginWeightUpdateReqInput(deadline_s=seconds),
    lambda seconds: FlushCacheReqInput(timeout_s=seconds),
    lambda seconds: PauseGenerationReqInput(owner="o", lease_s=seconds),
    lambda seconds: UpdateWeightsFromCheckpointEngineReqInput(zmq_handles={}, timeout_s=seconds),
    lambda seconds: InitWeightsUpdateGroupReqInput(
        master_address="h", master_port=1, rank_offset=1, world_size=2, timeout_s=seconds
    ),
]


def test_a_time_beyond_all_time_is_refused(driver):
    for make, seconds in product(TIMES, (86400.1, 1e15, 1e300, math.inf, math.nan)):
        assert_error(driver.call(make(seconds)), "malformed_message")
    driver.assert_status(generation="running", session=None)


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
