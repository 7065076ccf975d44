"""An engine of two ranks, driven tick by tick: the same results, states and refusals as of one."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.buckets_by_hand import Sender
from support.checkpoints import copy_configs
from support.faults import Fault
from support.lanes import quick
from support.parameter_server import ParameterServer
from support.plain_trainer import weights_of
from support.rank_updates import UPDATES, by_disk, by_ipc, checksums
from support.scripted import EngineDriver, assert_error, one_piece_per_slice, tokens_of
from support.state_table import STATES, TABLE, Recipes, clear

from caesura.client.trainer import SharedTensors
from caesura.io_struct import (
    SamplingParams,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromIPCReqInput,
)
from caesura.scheduler.executor import executor, parallel_runner

pytestmark = pytest.mark.slow  # its workers take seconds to start

PROMPT = [5, 6, 7, 8]
SHARES = 5
"""Into how many tests the table of states is split."""


@pytest.fixture(scope="module", params=quick([1, 0]), ids=["depth 1", "depth 0"])
def shared(request, tiny_model):
    options = {"pipeline_depth": request.param, "check_finite": True, "allow_legacy_pickle": True}
    with EngineDriver(str(tiny_model), scripted=False, tp=2, **options) as driver:
        yield driver


@pytest.fixture
def driver(shared, tiny_model):
    yield shared
    restore(shared, tiny_model)


@pytest.fixture(scope="module")
def alone(tiny_model):
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        yield driver


def restore(driver: EngineDriver, model) -> None:
    driver.abort(abort_all=True)
    driver.end(commit=False, force=True)
    driver.pause("abort")
    driver.resume()
    reply = driver.update(model)
    driver.go_on(force=True)
    status = driver.status()
    assert (status.generation, status.weights, status.session) == ("running", "valid", None), reply
    driver.engine.cache.check()


def outputs(driver: EngineDriver) -> list[tuple[list[int], np.ndarray]]:
    driver.flush()
    kinds = (
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
        {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "logit_bias": {11: 3.0}},
    )
    rids = [
        driver.generate(
            [*PROMPT, *range(9, 9 + 11 * number)],
            sampling_params=SamplingParams(
                **{"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.0, **kind}
            ),
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
        )
        for number, kind in enumerate(kinds)
    ]
    driver.run_until_idle()
    results = [driver.result(rid) for rid in rids]
    assert all(result.finish_reason.type == "length" for result in results), results
    return [(tokens_of(result), np.frombuffer(result.output_logprobs, np.float32)) for result in results]


def assert_same_outputs(found, expected) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_two_ranks_sample_the_tokens_of_one(driver, alone):
    assert_same_outputs(outputs(driver), outputs(alone))
    status = driver.status()
    assert [rank.rank for rank in status.ranks] == [1]
    assert status.ranks[0].reserved > 0
    assert alone.status().ranks == []
    assert status.kv.bytes_per_token * 2 == alone.status().kv.bytes_per_token
    assert status.device_memory.available <= status.ranks[0].available


@pytest.fixture(scope="module")
def cold(other_model):
    with EngineDriver(str(other_model), scripted=False, tp=2) as driver:
        return checksums(driver)


@pytest.mark.parametrize("send", UPDATES)
def test_an_update_is_a_cold_load_on_every_rank(driver, cold, other_model, send):
    before = checksums(driver)
    assert before.keys() == cold.keys()
    assert sum(name.endswith(" of rank 1") for name in cold) == len(cold) / 2
    reply = send(driver, other_model)
    assert reply.committed, reply
    assert checksums(driver) == cold != before


@pytest.mark.parametrize("send", [by_disk, by_ipc])
def test_an_update_counts_tensors_that_any_rank_changed(driver, tiny_model, tmp_path, send):
    copy_configs(tiny_model, tmp_path)
    weights = weights_of(tiny_model)
    weights["model.layers.0.self_attn.q_proj.weight"][0] += 1
    weights["model.layers.1.self_attn.q_proj.weight"][-1] += 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reply = send(driver, tmp_path)
    assert (reply.changed_tensors, reply.written_tensors) == (2, len(weights))
    assert reply.written_bytes == sum(tensor.nbytes for tensor in weights.values())


def exchange(server: ParameterServer, weights) -> None:
    for message in (server.handle, *server.buckets(weights), None, None):
        assert server.ask(message) == ""


def test_a_parameter_server_s_buckets_reach_every_rank(driver, cold, other_model):
    tensors = weights_of(other_model)
    with ParameterServer(1 << 20) as server, ThreadPoolExecutor(1) as beside:
        sent = beside.submit(exchange, server, tensors)
        message = UpdateWeightsFromCheckpointEngineReqInput(zmq_handles={"cpu": server.address})
        reply = driver.call(message, max_ticks=100_000)
        sent.result()
    assert reply.committed, reply
    assert checksums(driver) == cold


def test_a_commit_needs_every_rank(driver, other_model, tiny_model):
    weights = weights_of(other_model)
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name][-1, -1] = torch.nan
    with SharedTensors(list(weights.items())) as shared:
        reply = driver.call(UpdateWeightsFromIPCReqInput(specs=shared.specs, handle=shared.memory.handle))
    error = assert_error(reply, "weights_not_finite")
    assert list(error.detail["ranks"]) == ["1"]
    assert name in error.detail["ranks"]["1"]
    assert driver.status().weights == "poisoned"
    assert by_disk(driver, tiny_model).committed
    assert driver.status().weights == "valid"


def test_refusal_by_one_rank_changes_nothing(driver, other_model, monkeypatch):
    before = checksums(driver)
    described = executor.described

    def other_files(source):
        folder, frames = described(source)
        folder.digest = "0" * 64
        return folder, frames

    monkeypatch.setattr(executor, "described", other_files)
    error = assert_error(by_disk(driver, other_model), "checkpoint_error")
    assert "other files here than on rank 0" in error.detail["ranks"]["1"]
    assert driver.status().weights == "valid"
    assert checksums(driver) == before


def test_a_rank_that_fails_in_the_midst_poisons_all(driver, other_model, monkeypatch):
    call = executor.Executor.call

    def loses_its_source(self, method, *arguments, **options):
        if method == "write":
            call(self, "abandon").wait()
        return call(self, method, *arguments, **options)

    monkeypatch.setattr(executor.Executor, "call", loses_its_source)
    error = assert_error(by_disk(driver, other_model), "internal")
    assert "rank 0 has opened no source" in error.detail["ranks"]["1"]
    monkeypatch.undo()
    assert driver.status().weights == "poisoned"


def test_an_update_that_ends_early_ends_on_every_rank(driver, other_model, tiny_model):
    driver.pause("abort")
    before = checksums(driver)
    sender = Sender(driver, other_model)
    sender.send(0)
    driver.engine.updates.expire()
    assert driver.status().weights == "poisoned"
    assert by_disk(driver, tiny_model).committed
    assert checksums(driver) == before


def test_a_step_that_a_worker_cannot_read_fails_on_all(driver, alone, monkeypatch):
    encode = parallel_runner.encode_batch
    broken = iter([True])

    def torn(batch):
        header, arrays = encode(batch)
        return header, arrays[:-8] if next(broken, False) else arrays

    monkeypatch.setattr(parallel_runner, "encode_batch", torn)
    result = driver.complete(PROMPT)
    reason = result.finish_reason
    assert (reason.type, reason.code) == ("error", "internal")
    assert "rank 1: " in reason.message
    assert driver.status().step_failures.failed > 0
    assert_same_outputs(outputs(driver), outputs(alone))


def test_a_step_that_rank_0_cannot_execute_fails_on_all(driver, alone):
    with Fault(driver.engine.runner.own.model, "forward", MemoryError("no room for one more")):
        result = driver.complete(PROMPT)
    assert result.finish_reason.type == "length"  # memory that ran out once: computed again
    assert driver.status().step_failures.retried > 0
    assert_same_outputs(outputs(driver), outputs(alone))


def test_a_pause_answers_when_every_rank_has_ended_the_step(driver):
    rid = driver.generate(PROMPT, 40)
    driver.tick(5)
    driver.pause("in_place")
    steps = driver.engine.runner
    assert steps.under_way == []
    assert driver.engine.executor.answers == {}
    driver.go_on()
    driver.run_until_idle()
    assert len(tokens_of(driver.result(rid))) == 40


def test_memory_is_released_and_emptied_on_every_rank(driver, alone, tiny_model):
    driver.pause("abort")
    reserved = driver.status().ranks[0].reserved
    driver.release()
    assert driver.status().ranks[0].reserved < reserved
    driver.resume()
    assert by_disk(driver, tiny_model).committed
    report = driver.go_on()
    assert [rank.rank for rank in report.ranks] == [1]
    assert report.ranks[0].reserved_after <= report.ranks[0].reserved_before
    assert_same_outputs(outputs(driver), outputs(alone))


@pytest.mark.parametrize("share", quick(range(SHARES)))
def test_every_command_in_every_state(shared, tiny_model, other_model, broken_model, monkeypatch, share):
    if shared.config.pipeline_depth == 0:
        pytest.skip("once is enough for what takes so long")
    one_piece_per_slice(monkeypatch, writes=True)
    wrong = []
    for row, command in enumerate(sorted(TABLE.keys() - {"score"})):
        for state in [state for column, state in enumerate(STATES) if (row + column) % SHARES == share]:
            recipes = Recipes(shared, other_model, broken_model)
            recipes.enter(state)
            observed = recipes.observe(command)
            if observed != TABLE[command][state]:
                wrong.append(f"{command} in {state}: {observed}")
            clear(shared, tiny_model)
    assert not wrong
