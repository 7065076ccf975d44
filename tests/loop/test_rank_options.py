"""Options that several ranks share with one."""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest
import torch
from support.faults import Fault, full_disk
from support.lanes import quick
from support.plain_trainer import free_port, weights_of
from support.scripted import EngineDriver, assert_error, ok, tokens_of

from caesura.client.trainer import SharedTensors
from caesura.io_struct import (
    CaesuraError,
    InitWeightsUpdateGroupReqInput,
    ScoreReqInput,
    UpdateWeightsFromIPCReqInput,
    new_id,
)
from caesura.scheduler.executor import executor
from caesura.scheduler.executor.executor import Executor
from caesura.scheduler.kernels import TORCH, best

pytestmark = pytest.mark.slow  # workers take seconds to start

PROMPT = [5, 6, 7, 8]
DETERMINISTIC = best("linear", "cpu", torch.float32) != TORCH


@pytest.fixture(scope="module")
def start(tiny_model, tmp_path_factory):
    state_file = tmp_path_factory.mktemp("state") / "weights.json"

    def started() -> EngineDriver:
        return EngineDriver(
            str(tiny_model),
            scripted=False,
            tp=2,
            weights_cpu_backup=True,
            state_file=str(state_file),
            deterministic=DETERMINISTIC,
        )

    started.state_file = state_file
    return started


@pytest.fixture(scope="module")
def shared(start) -> Iterator[EngineDriver]:
    with start() as driver:
        yield driver


@pytest.fixture
def driver(shared, tiny_model) -> EngineDriver:
    ok(shared.update(tiny_model))
    return shared


def checksums(driver: EngineDriver) -> dict[str, str]:
    found = ok(driver.check_weights()).checksums
    assert sum(name.endswith(" of rank 1") for name in found) == len(found) / 2
    return found


def generate(driver: EngineDriver) -> list[int]:
    ok(driver.flush())
    return tokens_of(driver.complete(PROMPT, 20, seed=7))


def test_released_weights_come_back_on_every_rank(driver, other_model):
    for path in (None, other_model):
        if path is not None:
            ok(driver.update(path))
        before, tokens, reserved = checksums(driver), generate(driver), driver.status().ranks[0].reserved
        ok(driver.release())
        status = driver.status()
        assert (status.weights, status.memory) == ("valid", "released")
        assert status.ranks[0].reserved < reserved
        rid = driver.generate(PROMPT, 20, seed=7)
        driver.tick(3)
        assert driver.status().waiting_requests == 1
        ok(driver.resume())
        driver.run_until_idle()
        assert checksums(driver) == before
        assert tokens_of(driver.result(rid)) == tokens == generate(driver)


@contextmanager
def workers_fail_at(refused: str) -> Iterator[None]:
    """Let the workers fail in ``refused``: they are told something else that they cannot do."""
    call = Executor.call

    def changed(self, method, *arguments, **options):
        return call(self, "write") if method == refused else call(self, method, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "call", changed)
        yield


@pytest.mark.parametrize(("where", "code"), [("another rank", "internal"), ("rank 0", "out_of_memory")])
def test_a_resume_that_one_rank_cannot_do_keeps_every_copy(driver, where, code):
    before = checksums(driver)
    ok(driver.release())
    failing = (
        Fault(driver.engine.residency, "resume", MemoryError())
        if where == "rank 0"
        else workers_fail_at("resume")
    )
    with failing:
        error = assert_error(driver.resume(), code)
    assert where == "rank 0" or "rank 0 has opened no source" in error.detail["ranks"]["1"]
    assert driver.status().memory == "released"
    ok(driver.resume())
    assert checksums(driver) == before


def copies_of(pid: int) -> int:
    count = 0
    for each in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # what has listed them
            path = os.readlink(f"/proc/{pid}/fd/{each}")
            count += "/caesura-" in path and path.endswith("(deleted)")
    return count


@pytest.mark.parametrize("where", ["rank 0", "another rank"])
def test_a_copy_that_one_rank_cannot_make_is_dropped_by_all(driver, where):
    worker = driver.status().ranks[0].pid
    gc.collect()  # engines of other tests have copies, too
    before = copies_of(os.getpid()), copies_of(worker)
    with full_disk() if where == "rank 0" else workers_fail_at("keep"):
        assert_error(driver.release(), "out_of_memory" if where == "rank 0" else "internal")
    assert driver.status().memory == "resident"
    checksums(driver)  # every rank has come to the end of what it was told
    assert (copies_of(os.getpid()), copies_of(worker)) == before
    ok(driver.release())
    assert (copies_of(os.getpid()), copies_of(worker)) == (1, 1)
    ok(driver.resume())


def test_a_group_that_is_not_joined_leaves_nothing_behind(driver):
    join = InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1", master_port=free_port(), rank_offset=1, world_size=3,
        group_name="nobody's",
        timeout_s=0.2,
    )  # fmt: skip
    for _ in range(2):
        assert_error(
            driver.call(msgspec.structs.replace(join, id=new_id()), max_ticks=100_000), "group_error"
        )
    checksums(driver)
    assert driver.engine.executor.answers == {}


@pytest.mark.skipif(not DETERMINISTIC, reason="no compiled kernels on this machine")
def test_deterministic_ranks_sample_the_same_bits(driver):
    def bits(beside: int, *, paused: bool = False) -> tuple[bytes, bytes]:
        ok(driver.flush())
        rid, *_ = [
            driver.generate([*PROMPT, *range(9, 39 - number)], 20, seed=7, return_logprob=True)
            for number in range(1 + beside)
        ]
        if paused:
            driver.tick(6)
            ok(driver.pause("retract"))
            ok(driver.go_on())
        driver.run_until_idle()
        result = driver.result(rid)
        return bytes(result.output_ids), bytes(result.output_logprobs)

    alone = bits(0)
    assert bits(5) == alone
    assert bits(3, paused=True) == alone


def test_a_state_file_brings_every_rank_back(shared, start, other_model):
    ok(shared.update(other_model, weight_version="step-17"))
    expected, epoch, tokens = checksums(shared), shared.status().weights_epoch, generate(shared)
    shared.__exit__(None, None, None)
    with start() as again:
        status = again.status()
        assert (status.weight_version, status.weights) == ("step-17", "valid")
        assert status.weights_epoch == epoch + 1
        assert checksums(again) == expected
        assert generate(again) == tokens
        with SharedTensors(list(weights_of(other_model).items())) as tensors:
            update = UpdateWeightsFromIPCReqInput(
                specs=tensors.specs, handle=tensors.memory.handle, weight_version="step-18"
            )
            assert ok(again.call(update, max_ticks=100_000)).committed
    record = json.loads(start.state_file.read_text())
    assert (record["weight_version"], record["source"]) == ("step-18", None)


@pytest.mark.parametrize("residency", quick(["layerwise", "offload", "resident"]))
def test_a_reference_model_is_rank_0_s_wherever_it_is(tiny_model, other_model, residency):
    options = {"reference_model_path": str(other_model), "reference_residency": residency}
    found = []
    for tp in (1, 2):
        with EngineDriver(str(tiny_model), scripted=False, tp=tp, **options) as driver:
            rid = driver.generate(PROMPT, 20, seed=7)
            score = ok(driver.call(ScoreReqInput(input_ids=[[*PROMPT, *range(9, 30)]], start=[4])))
            driver.run_until_idle()
            found.append((tokens_of(driver.result(rid)), score.logprobs))
    assert found[0] == found[1]


@pytest.fixture
def no_workers(monkeypatch):
    """Fail where a worker is started."""
    monkeypatch.setattr(executor, "Workers", None)


def refusal(path, **options) -> CaesuraError:
    with pytest.raises(CaesuraError) as caught:
        EngineDriver(str(path), scripted=False, **{"tp": 2, **options})
    return caught.value


def test_image_pipelines_have_one_rank(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    error = refusal(tmp_path)
    assert (error.code, error.detail["field"], error.detail["value"]) == ("unsupported", "tp", 2)
    assert error.message == "tp = 2: image pipelines have one rank"


@pytest.mark.parametrize("where", ["asked for", "needed"])
def test_models_of_transformers_have_one_rank(tmp_path, tiny_model, where, no_workers):
    backend, path = "transformers", tiny_model
    if where == "needed":
        backend, path = "auto", tmp_path / "cohere"
        from support.architectures import tiny_model as foreign

        foreign("Cohere2ForCausalLM", 1).save_pretrained(path)
    error = refusal(path, model_backend=backend)
    name = "Qwen3ForCausalLM" if where == "asked for" else "Cohere2ForCausalLM"
    assert error.code == "unsupported_model"
    assert error.message == (
        f"{name} is computed by transformers' modules, which are not divided among ranks: start it with tp "
        "= 1"
    )


@pytest.mark.parametrize("tp", [3, 1000])
def test_too_many_ranks_are_refused_before_one_is_started(tiny_model, tp, no_workers):
    error = refusal(tiny_model, tp=tp)
    assert (error.code, error.detail["ranks"]) == ("unsupported_model", tp)
    assert error.detail["fields"] == ["num_attention_heads"]


def test_ranks_that_cut_fp8_blocks_start_none(tmp_path, no_workers):
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 1024),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 8),
        "moe_intermediate_size": 768,
        "num_experts": 8,
        "num_hidden_layers": 1,
        "head_dim": 128,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refusal(tmp_path, tp=8)
    assert error.code == "unsupported_model"
    assert "moe_intermediate_size [672, 768) of 768 cut its blocks of 128" in error.message
