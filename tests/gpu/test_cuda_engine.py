"""The same engine on CUDA: generation, the pause barrier on the forward stream."""

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.scripted import EngineDriver, tokens_of

from caesura.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
    WeightsCheckerReqInput,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(75)], [9], [11, 3, 96, 40, 12, 4, 8, 31, 60, 2]]
UPDATES = 20
MIB = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("cuda")
    made = {}
    for dtype in ("float32", "bfloat16"):
        paths = [root / f"{dtype}-{number}" for number in range(2)]
        stored = getattr(torch, dtype)
        found = [
            make_checkpoint(path, "qwen3", seed=3 + number, dtype=stored) for number, path in enumerate(paths)
        ]
        made[dtype] = (paths, found[0].float())
    return made


def engine(path, dtype: str = "float32", **options: object) -> EngineDriver:
    driver = EngineDriver(
        str(path), scripted=False, device=DEVICE, dtype=dtype, chunked_prefill_size=32, **options
    )
    assert driver.config.pipeline_depth == 1, "the default on an accelerator"
    return driver


def submit(driver: EngineDriver, params: SamplingParams) -> list[str]:
    rids = []
    for prompt in PROMPTS:
        message = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True)
        rids.append(driver.submit(message))
    return rids


def fresh_outputs(driver: EngineDriver, params: SamplingParams) -> list[tuple[list[int], list[float]]]:
    driver.call(FlushCacheReqInput(torch_empty_cache=False))
    return driver.finish(submit(driver, params))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.15)])
def test_generation_is_that_of_transformers(models, dtype, tolerance):
    paths, reference = models[dtype]
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    with engine(paths[0], dtype) as driver:
        assert driver.status().device == DEVICE
        found = fresh_outputs(driver, params)
    for prompt, (ids, logprobs) in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        chosen = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert len(ids) == 20
        assert (expected.max(-1).values - chosen).max() <= 2 * tolerance
        assert (chosen - torch.tensor(logprobs)).abs().max() <= tolerance


@pytest.mark.parametrize("ticks", [1, 2, 4, 9, 15])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_is_a_barrier_and_leaves_no_trace(models, mode, ticks):
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    with engine(models["float32"][0][0]) as driver:
        expected = fresh_outputs(driver, params)
        driver.call(FlushCacheReqInput(torch_empty_cache=False))
        rids = submit(driver, params)
        driver.tick(ticks)
        reply = driver.call(PauseGenerationReqInput(mode=mode))
        assert driver.ongoing is None
        assert driver.engine.runner._stream.query(), "the forward stream is still at work"
        if mode == "in_place":
            assert reply.held_requests > 0
        else:
            assert (reply.held_requests, reply.held_tokens) == (0, 0)
        assert reply.held_requests + reply.waiting_requests + reply.aborted_requests == len(PROMPTS)
        step = driver.status().step
        driver.tick(3)
        assert driver.status().step == step
        report = driver.call(ContinueGenerationReqInput())
        assert report.freed == max(0, report.reserved_before - report.reserved_after)
        found = driver.finish(rids)
        assert driver.status().kv.held == 0
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        count = len(ids) if mode == "abort" else 20
        assert ids == expected_ids[:count]
        if mode == "in_place":
            assert logprobs == expected_logprobs
        assert logprobs == pytest.approx(expected_logprobs[:count], rel=0, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_equals_a_cold_load(models, dtype):
    paths, _ = models[dtype]
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    with engine(paths[1], dtype) as driver:
        expected = driver.call(WeightsCheckerReqInput()).checksums, fresh_outputs(driver, params)
    with engine(paths[0], dtype, load_bucket_bytes=1000) as driver:
        rids = submit(driver, params)
        driver.tick(5)
        update = UpdateWeightFromDiskReqInput(model_path=str(paths[1]))
        assert driver.call(update, max_ticks=100_000).committed
        driver.run_until_idle()
        assert all(driver.result(rid).weight_versions[-1].epoch == 1 for rid in rids)
        assert (driver.call(WeightsCheckerReqInput()).checksums, fresh_outputs(driver, params)) == expected


def test_reserved_memory_is_flat_over_updates_in_place(models):
    paths, _ = models["float32"]
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=2, ignore_eos=True)
    before, after = [], []
    with engine(paths[0]) as driver:
        addresses = [tensor.data_ptr() for _, tensor in driver.engine.runner.model.named_storage()]
        for number in range(UPDATES):
            rids = submit(driver, params)
            driver.tick(8)
            assert driver.call(PauseGenerationReqInput(mode="in_place")).held_requests == len(PROMPTS)
            transient = [torch.ones(size * MIB, dtype=torch.uint8, device=DEVICE) for size in (64, 3, 32, 1)]
            del transient
            update = UpdateWeightFromDiskReqInput(model_path=str(paths[(number + 1) % 2]), flush_cache=False)
            reply = driver.call(update, max_ticks=100_000)
            assert reply.committed
            assert reply.changed_tensors == reply.written_tensors
            report = driver.call(ContinueGenerationReqInput())
            before.append(report.reserved_before)
            after.append(report.reserved_after)
            driver.run_until_idle()
            results = [driver.result(rid) for rid in rids]
            assert all(len(tokens_of(result)) == 40 for result in results)
            assert all(result.weight_versions[-1].stale_kv for result in results)
        status = driver.status()
        assert (status.weights_epoch, status.kv.held) == (UPDATES, 0)
        kept = [tensor.data_ptr() for _, tensor in driver.engine.runner.model.named_storage()]
        assert kept == addresses, "parameters were meant to be written in place"
    assert all(full - empty >= 90 * MIB for full, empty in zip(before, after)), (before, after)
    assert max(after[UPDATES // 2 :]) <= max(after[: UPDATES // 2]), after


def test_released_weights_come_back_from_the_host(models):
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    with engine(models["bfloat16"][0][0], "bfloat16", weights_cpu_backup=True) as driver:
        expected = driver.call(WeightsCheckerReqInput()).checksums, fresh_outputs(driver, params)
        for _ in range(2):
            driver.call(ReleaseMemoryOccupationReqInput(), max_ticks=100_000)
            assert driver.status().device_memory.weights_backup > 0
            driver.call(ResumeMemoryOccupationReqInput(), max_ticks=100_000)
            found = driver.call(WeightsCheckerReqInput()).checksums, fresh_outputs(driver, params)
            assert found == expected
