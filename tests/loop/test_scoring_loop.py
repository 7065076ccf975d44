"""Scoring inside a real engine, tick by tick."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.faults import BUG, NO_MEMORY, Fault
from support.properties import examples
from support.scripted import EngineDriver, assert_error

from caesura.io_struct import (
    GREEDY_BELOW,
    PauseGenerationReqInput,
    ScoreReqInput,
    ScoreReqOutput,
    ShutdownReqInput,
)
from caesura.scheduler.scoring import scoring

RESIDENCIES = ["resident", "offload", "layerwise"]
VOCAB = 97


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "reference"
    make_checkpoint(path, "llama", tied=False, seed=5, num_hidden_layers=5)
    return path


@pytest.fixture(scope="module")
def judge(reference):
    return Judge(reference)


class Judge:
    def __init__(self, path):
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def __call__(self, ids: list[int], start: int, temperature: float = 1.0) -> np.ndarray:
        scale = 1.0 if temperature < GREEDY_BELOW else temperature
        with torch.no_grad():
            logprobs = torch.log_softmax(self._model(torch.tensor([ids])).logits[0].double() / scale, -1)
        return np.asarray([logprobs[i - 1, ids[i]].item() for i in range(start, len(ids))])


def driver_with(model, reference, residency="resident", **options) -> EngineDriver:
    return EngineDriver(
        str(model), reference_model_path=str(reference), reference_residency=residency, **options
    )


def sequences(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def values_of(reply) -> list[np.ndarray]:
    assert isinstance(reply, ScoreReqOutput), reply
    return [np.frombuffer(data, "<f4") for data in reply.logprobs]


def assert_scores(reply, message: ScoreReqInput, judge: Judge) -> None:
    found = values_of(reply)
    assert len(found) == len(message.input_ids)
    for values, ids, start in zip(found, message.input_ids, message.start, strict=True):
        assert values.shape == (len(ids) - start,)
        np.testing.assert_allclose(values, judge(ids, start, message.temperature), atol=1e-4, rtol=0)


def status_of(driver):
    return driver.status().reference


@pytest.fixture
def sliced(monkeypatch):
    """Let the loop turn after each piece of a score."""
    monkeypatch.setattr(scoring, "SLICE_S", 0.0)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_exact_against_transformers(tiny_model, reference, judge, residency):
    with driver_with(tiny_model, reference, residency, chunked_prefill_size=48) as driver:
        for temperature in (1.0, 0.3, 0.0):
            message = ScoreReqInput(
                input_ids=sequences(7, 200, 1, 2, 33, 90, 48, 49),
                start=[1, 150, 1, 1, 33, 5, 48, 2],
                temperature=temperature,
            )
            assert_scores(driver.call(message), message, judge)
        while driver.engine.scoring.has_work:  # answered, and not yet off the device
            driver.tick()
        state = status_of(driver)
        assert state.model_path == str(reference)
        assert (state.residency, state.pending_sequences) == (residency, 0)
        assert state.scored_tokens == 3 * (6 + 50 + 1 + 85 + 47)
        assert state.device_bytes == (state.weights if residency == "resident" else 0)
        allocator = driver.engine.scoring.allocator
        assert allocator.num_free == allocator.total


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "deepseek-v3"])
def test_any_architecture_layer_by_layer(tmp_path, tiny_model, family):
    make_checkpoint(tmp_path / "reference", family, tied=False, seed=3)
    judge = Judge(tmp_path / "reference")
    with driver_with(tiny_model, tmp_path / "reference", "layerwise", chunked_prefill_size=32) as driver:
        message = ScoreReqInput(input_ids=sequences(70, 20), start=[10, 1])
        assert_scores(driver.call(message), message, judge)


@settings(max_examples=examples(25))
@given(
    shapes=st.lists(
        st.integers(1, 90).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), min_size=1, max_size=7
    ),
    budgets=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    head_rows=st.sampled_from([1, 16, 40]),
    split=st.integers(0, 7),
)
def test_no_way_of_cutting_changes_the_scores(engine, judge, shapes, budgets, rows, head_rows, split):
    scores = engine.engine.scoring
    turn = iter(range(10**6))
    scores._chunks.budget = lambda: budgets[next(turn) % len(budgets)]
    scores.max_rows = rows
    scoring._ROW_BYTES_CPU = head_rows * VOCAB * 4
    ids, starts = sequences(*(n for n, _ in shapes)), [start for _, start in shapes]
    messages = [
        ScoreReqInput(input_ids=ids[part], start=starts[part])
        for part in (slice(0, split), slice(split, None))
        if ids[part]
    ]
    for message in messages:
        engine.send(message)
    for _ in range(2000):
        engine.tick()
        if all(message.id in engine.replies for message in messages):
            break
    for message in messages:
        assert_scores(engine.replies.pop(message.id), message, judge)
    assert scores.allocator.num_free == scores.allocator.total
    assert not scores._messages


@pytest.fixture(scope="module")
def engine(tiny_model, reference):
    rows = scoring._ROW_BYTES_CPU
    with driver_with(tiny_model, reference, "layerwise", context_len=96, reference_pool_tokens=96) as driver:
        yield driver
    scoring._ROW_BYTES_CPU = rows


def test_logits_exist_for_a_few_rows_only(tiny_model, reference, monkeypatch):
    monkeypatch.setattr(scoring, "_ROW_BYTES_CPU", 39 * VOCAB * 4)
    with driver_with(tiny_model, reference, chunked_prefill_size=128) as driver:
        model = driver.engine.scoring.model
        rows, logits = [], model.logits
        model.logits = lambda hidden: rows.append(len(hidden)) or logits(hidden)
        driver.call(ScoreReqInput(input_ids=sequences(101), start=[1]))
        assert sum(rows) == 100
        assert max(rows) == 32
        workspace = driver.engine.scoring.workspace.take("scaled", (0, 1), torch.float32, "cpu")
        assert workspace.untyped_storage().nbytes() == 32 * VOCAB * 4


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_decoding_and_commands_go_on_between_two_slices(tiny_model, reference, judge, residency, sliced):
    with driver_with(tiny_model, reference, residency, chunked_prefill_size=16) as driver:
        rid = driver.generate([5, 6, 7], max_new_tokens=60)
        message = ScoreReqInput(input_ids=sequences(250, 200), start=[1, 1])
        driver.send(message)
        for _ in range(50):
            launches = len(driver.runner.launches)
            driver.tick()
            assert len(driver.runner.launches) == launches + 1
        assert message.id not in driver.replies
        assert status_of(driver).pending_sequences == 2
        ticks = 0
        driver.send(pause := PauseGenerationReqInput(mode="in_place"))
        while pause.id not in driver.replies:
            driver.tick()
            ticks += 1
        assert ticks <= 3
        assert message.id not in driver.replies
        launches = len(driver.runner.launches)
        for _ in range(3000):
            driver.tick()
            if message.id in driver.replies:
                break
        assert len(driver.runner.launches) == launches, "paused, and scoring all the same"
        assert_scores(driver.replies.pop(message.id), message, judge)
        assert driver.results.get((rid, 0)) is None


def test_the_loop_sleeps_when_nothing_is_left(tiny_model, reference, sliced):
    with driver_with(tiny_model, reference, "offload") as driver:
        driver.send(message := ScoreReqInput(input_ids=sequences(30), start=[1]))
        driver.tick()
        while message.id not in driver.replies:
            assert driver.sleep_s() == 0
            driver.tick()
        while driver.sleep_s() == 0:
            driver.tick()
        assert driver.sleep_s() > 1, "the idle timer"
        assert status_of(driver).device_bytes == 0


class LateDevice:
    """The part of a device module that scoring uses: what it was given is done at the tenth look."""

    Stream = None
    looks = 0

    def current_stream(self):
        return self

    record_event = current_stream

    def query(self) -> bool:
        self.looks += 1
        return self.looks >= 10


def test_the_loop_neither_waits_for_a_device_nor_spins(tiny_model, reference, judge):
    """Each tick looks once and goes on; with nothing else to do, the loop sleeps between two looks."""
    with driver_with(tiny_model, reference) as driver:
        device = driver.engine.device_module = LateDevice()
        driver.send(message := ScoreReqInput(input_ids=sequences(30), start=[1]))
        rid = driver.generate([5, 6, 7], max_new_tokens=4)
        while not device.looks:
            driver.tick()
        for looks in range(2, 10):
            driver.tick()
            assert device.looks == looks
            if (rid, 0) in driver.results:
                assert 0 < driver.sleep_s() <= 0.01
        assert (rid, 0) in driver.results
        driver.tick()
        assert_scores(driver.replies.pop(message.id), message, judge)


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_the_policy_has_no_part_in_it(tiny_model, other_model, reference, judge, residency):
    message = {"input_ids": sequences(60, 61), "start": [20, 1]}
    with driver_with(tiny_model, reference, residency) as driver:
        first = driver.call(ScoreReqInput(**message)).logprobs
        driver.update(other_model)
        assert driver.call(ScoreReqInput(**message)).logprobs == first
        prompt = [3, 1, 4, 1, 5]
        rid = driver.generate(prompt, max_new_tokens=40)
        assert driver.call(ScoreReqInput(**message)).logprobs == first
        driver.run_until_idle()
        driver.check(rid)
        driver.check_weights("reset_tensors")
        assert driver.status().weights == "poisoned"
        assert driver.call(ScoreReqInput(**message)).logprobs == first


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_release_of_the_weights_ends_scores(tiny_model, reference, judge, residency, sliced):
    message = {"input_ids": sequences(200), "start": [1]}
    with driver_with(tiny_model, reference, residency, chunked_prefill_size=32) as driver:
        for ticks in (1, 2, 7, 12):
            under_way = ScoreReqInput(**message)
            driver.send(under_way)
            driver.tick(ticks)
            assert under_way.id not in driver.replies
            driver.release("weights")
            driver.tick()
            assert_error(driver.replies.pop(under_way.id), "memory_released")
            assert status_of(driver).device_bytes == 0
            refused = assert_error(driver.call(ScoreReqInput(**message)), "memory_released")
            assert refused.detail == {"released": ["weights"]}
            driver.resume()
            again = ScoreReqInput(**message)
            assert_scores(driver.call(again, max_ticks=5000), again, judge)
        allocator = driver.engine.scoring.allocator
        assert allocator.num_free == allocator.total


def test_unscorable_requests_are_refused_by_name(tiny_model, reference):
    with driver_with(
        tiny_model, reference, context_len=100, reference_pool_tokens=64, max_waiting_requests=3
    ) as driver:

        def refused(code, **fields):
            fields = {"input_ids": [[1, 2, 3]], "start": [1]} | fields
            return assert_error(driver.call(ScoreReqInput(**fields)), code).detail

        assert refused("prompt_too_long", input_ids=[[1, 2, 3], [1] * 101], start=[1, 1]) == {
            "prompt_tokens": 101, "max_new_tokens": 0, "limit": 100,
        }  # fmt: skip
        assert refused("exceeds_kv_pool", input_ids=[[1] * 66]) == {"needed_tokens": 65, "total_tokens": 64}
        assert refused("invalid_request", input_ids=[[1, 2], []], start=[1, 1])["field"] == "input_ids[1]"
        assert refused("invalid_request", input_ids=[[1, VOCAB]])["value"] == VOCAB
        assert refused("invalid_request", start=[4])["field"] == "start[0]"
        assert refused("invalid_request", start=[1, 1])["field"] == "start"
        for temperature in (-1.0, float("nan"), float("inf")):
            assert refused("invalid_request", temperature=temperature)["field"] == "temperature"
        assert len(values_of(driver.call(ScoreReqInput(input_ids=[[1] * 65], start=[1])))[0]) == 64
        many = {"input_ids": [[1, 2]] * 2, "start": [1, 1]}
        one, two = ScoreReqInput(**many), ScoreReqInput(**many)
        driver.send(one)
        driver.send(two)
        driver.tick(5)
        assert_error(driver.replies.pop(two.id), "queue_full")
        assert isinstance(driver.replies.pop(one.id), ScoreReqOutput)
        assert not driver.engine.scoring.has_work


def test_shutdown_answers_messages_under_way(tiny_model, reference, sliced):
    with driver_with(tiny_model, reference, "layerwise") as driver:
        messages = [ScoreReqInput(input_ids=sequences(100), start=[1]) for _ in range(2)]
        for message in messages:
            driver.send(message)
        driver.tick(3)
        driver.send(ShutdownReqInput())
        driver.engine.scheduler.run()
        driver.collect()
        for message in messages:
            assert_error(driver.replies[message.id], "shutting_down")


@pytest.mark.parametrize("residency", RESIDENCIES)
@pytest.mark.parametrize(("error", "code"), [(BUG, "internal"), (NO_MEMORY[2], "out_of_memory")])
def test_a_chunk_that_fails_ends_its_messages_and_no_other(
    tiny_model, reference, judge, residency, error, code, caplog
):
    with driver_with(tiny_model, reference, residency, chunked_prefill_size=32) as driver:
        lengths = ((10,), (10, 40, 12), (50,))
        messages = [ScoreReqInput(input_ids=sequences(*some), start=[1] * len(some)) for some in lengths]
        for message in messages:
            driver.send(message)
        with Fault(driver.engine.scoring.model._layers[2], "forward", error):
            driver.tick(30)
        for message in messages[:2]:
            assert_error(driver.replies.pop(message.id), code)
        assert_scores(driver.replies.pop(messages[2].id), messages[2], judge)
        allocator = driver.engine.scoring.allocator
        assert allocator.num_free == allocator.total
        assert "scoring failed" in caplog.text


def test_logits_that_are_not_finite_end_their_message_only(tmp_path, tiny_model):
    make_checkpoint(tmp_path / "reference", "llama", tied=False, seed=5)
    file = next((tmp_path / "reference").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][90] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with driver_with(tiny_model, tmp_path / "reference") as driver:
        bad = ScoreReqInput(input_ids=[[1, 2, 3], [4, 90, 5]], start=[1, 1])
        good = ScoreReqInput(input_ids=[[1, 2, 3], [7, 8, 9, 10]], start=[1, 1])
        for message in (bad, good):
            driver.send(message)
        driver.tick(20)
        reply = assert_error(driver.replies.pop(bad.id), "internal")
        assert "not finite" in reply.message
        assert all(np.isfinite(values).all() for values in values_of(driver.replies.pop(good.id)))


@pytest.mark.parametrize("residency", ["offload", "layerwise"])
def test_a_reference_that_cannot_come_is_a_typed_error(tiny_model, reference, judge, residency):
    with driver_with(tiny_model, reference, residency) as driver:
        own = driver.engine.residency.module
        driver.engine.residency.module = SimpleNamespace(mem_get_info=lambda: (10, 1 << 40))
        reply = assert_error(driver.call(ScoreReqInput(input_ids=[[1, 2]], start=[1])), "out_of_memory")
        assert reply.detail["free_bytes"] == 10
        driver.engine.residency.module = own
        again = ScoreReqInput(input_ids=sequences(5), start=[1])
        assert_scores(driver.call(again), again, judge)


def test_the_pool_leaves_room_for_memory_taken_later(tiny_model, reference, monkeypatch):
    from caesura.scheduler.execution import build

    monkeypatch.setattr(build, "get_available_memory", lambda *_, **__: 3_000_000)
    sizes = {}
    for residency in RESIDENCIES:
        with driver_with(
            tiny_model, reference, residency, kv_pool_tokens=None, max_running_requests=200
        ) as driver:
            manager = driver.engine.residency
            sizes[residency] = (driver.status().device_memory.kv_cache, manager.still_to_come)
    assert sizes["resident"][1] == 0
    assert 0 < sizes["layerwise"][1] < sizes["offload"][1]
    for residency in RESIDENCIES:
        expected = 0.5 * (3_000_000 - sizes[residency][1])
        assert sizes[residency][0] == pytest.approx(expected, rel=0.02)
