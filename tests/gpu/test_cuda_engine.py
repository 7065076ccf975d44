"""The same engine on CUDA: generation, the pause barrier on the forward stream, captured decode steps, a full
device, and routed experts whose rows are read on a stream of their own.
"""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support.checkpoints import make_checkpoint
from support.replay import chosen_experts, output_logprobs
from support.scripted import EngineDriver, tokens_of

from caesura.client.connection.results import decode_output
from caesura.io_struct import (
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SamplingParams,
)

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


def submit(driver: EngineDriver, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[str]:
    messages = (
        GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True) for prompt in prompts
    )
    return [driver.submit(message) for message in messages]


def fresh_outputs(driver: EngineDriver, params: SamplingParams) -> list[tuple[list[int], list[float]]]:
    driver.flush()
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
        driver.flush(torch_empty_cache=False)
        rids = submit(driver, params)
        driver.tick(ticks)
        reply = driver.pause(mode)
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
        report = driver.go_on()
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
        expected = driver.check_weights().checksums, fresh_outputs(driver, params)
    with engine(paths[0], dtype, load_bucket_bytes=1000) as driver:
        rids = submit(driver, params)
        driver.tick(5)
        assert driver.update(paths[1]).committed
        driver.run_until_idle()
        assert all(driver.result(rid).weight_versions[-1].epoch == 1 for rid in rids)
        assert (driver.check_weights().checksums, fresh_outputs(driver, params)) == expected


def test_reserved_memory_is_flat_over_updates_in_place(models):
    paths, _ = models["float32"]
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=2, ignore_eos=True)
    before, after = [], []
    with engine(paths[0]) as driver:
        addresses = [tensor.data_ptr() for _, tensor in driver.engine.runner.model.named_storage()]
        for number in range(UPDATES):
            rids = submit(driver, params)
            driver.tick(8)
            assert driver.pause("in_place").held_requests == len(PROMPTS)
            transient = [torch.ones(size * MIB, dtype=torch.uint8, device=DEVICE) for size in (64, 3, 32, 1)]
            del transient
            reply = driver.update(paths[(number + 1) % 2], flush_cache=False)
            assert reply.committed
            assert reply.changed_tensors == reply.written_tensors
            report = driver.go_on()
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
        expected = driver.check_weights().checksums, fresh_outputs(driver, params)
        for _ in range(2):
            driver.call(ReleaseMemoryOccupationReqInput(), max_ticks=100_000)
            assert driver.status().device_memory.weights_backup > 0
            driver.call(ResumeMemoryOccupationReqInput(), max_ticks=100_000)
            found = driver.check_weights().checksums, fresh_outputs(driver, params)
            assert found == expected


BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}"))
    for name in ("flashinfer", "triton")
]

TOLERANCE = 0.05
"""Tolerance of a logprob: another kernel or number of padding rows rounds bfloat16 differently."""


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("graphs") / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        make_checkpoint(folder, "qwen3", seed=seed, dtype=torch.bfloat16, head_dim=64)
    return [str(folder) for folder in folders]


def capturing(path: str, **options: object) -> EngineDriver:
    return engine(path, "bfloat16", max_running_requests=10, **options)


def graphs_of(driver: EngineDriver):
    return driver.engine.runner.graphs


def generate(driver: EngineDriver) -> list[tuple[list[int], list[float]]]:
    return fresh_outputs(driver, SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True))


def assert_close(found, expected) -> None:
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        same = [mine == theirs for mine, theirs in zip(ids, expected_ids, strict=True)]
        agreed = same.index(False) if False in same else len(same)
        assert agreed >= 2
        assert logprobs[:agreed] == pytest.approx(expected_logprobs[:agreed], rel=0, abs=TOLERANCE)


def test_replays_equal_eager_steps_after_updates(paths, backend):
    expected = []
    for path in paths:
        with capturing(path, cuda_graphs=False, attention_backend="sdpa") as driver:
            assert graphs_of(driver) is None
            expected.append(generate(driver))
    with capturing(paths[0], attention_backend=backend) as driver:
        graphs = graphs_of(driver)
        assert graphs.are_captured
        assert graphs.nbytes > 0
        assert_close(generate(driver), expected[0])
        assert driver.update(paths[1]).committed
        assert_close(generate(driver), expected[1])
        for tags in (["cuda_graph"], ["kv_cache"], []):
            driver.pause("abort")
            driver.release(*tags)
            driver.resume()
            assert graphs.are_captured
            if not tags:
                driver.update(paths[0])
            driver.go_on()
            assert_close(generate(driver), expected[1 if tags else 0])


SAMPLING = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_p": 0.8},
    {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
]


def sampled(driver: EngineDriver) -> list[tuple[list[int], list[float]]]:
    driver.flush()
    results = []
    for ways in (SAMPLING[:5], SAMPLING, *([way] for way in SAMPLING)):
        rids = []
        for number, way in enumerate(ways):
            params = SamplingParams(
                max_new_tokens=12, ignore_eos=True, **{"temperature": 1.0, "seed": 7, **way}
            )
            message = GenerateReqInput(
                input_ids=[5, 6, 7 + number],
                sampling_params=params,
                return_logprob=True,
                return_raw_logprob=number % 2 == 0,
            )
            rids.append(driver.submit(message))
        results += driver.finish(rids)
    return results


def test_replayed_steps_sample_like_eager_ones(paths, backend):
    with capturing(paths[0], cuda_graphs=False, attention_backend=backend) as driver:
        expected = sampled(driver)
    with capturing(paths[0], attention_backend=backend) as driver:
        graphs = graphs_of(driver)
        assert all(captured.head is not None for captured in graphs.captured.values())
        assert_close(sampled(driver), expected)


def test_graph_memory_is_freed_and_replays_allocate_none(paths, backend):
    with capturing(paths[0], attention_backend=backend) as driver:
        generate(driver)
        reserved = []
        for _ in range(10):
            generate(driver)
            driver.pause("in_place")
            reserved.append(driver.go_on().reserved_after)
        assert max(reserved[5:]) <= max(reserved[:5]), reserved
        driver.pause("abort")
        reply = driver.release("cuda_graph")
        assert reply.reserved_after < reply.reserved_before
        assert not graphs_of(driver).are_captured


ROOM = 96 << 20
"""Bytes left on the device; the feed-forward block takes 118 MB for the whole prompt, 64 KB for a token of
it.
"""
LARGE = [3 + (i * 7 + i * i % 11) % 90 for i in range(1800)]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model"
    make_checkpoint(
        path, "qwen3", seed=3, hidden_size=64, intermediate_size=8192, max_position_embeddings=4096
    )
    return str(path)


def large_outputs(driver: EngineDriver) -> list[tuple[list[int], list[float]]]:
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    rids = submit(driver, params, [[5, 6, 7], [8, 9], LARGE])
    found = driver.finish(rids)
    assert {driver.result(rid).finish_reason.type for rid in rids} == {"length"}
    assert driver.status().kv.held == 0
    return found


@pytest.mark.parametrize("depth", [0, 1])
def test_a_full_device(wide_model, depth):
    options = {"device": "cuda", "pipeline_depth": depth, "prefix_cache": False, "kv_pool_tokens": 8192}
    with EngineDriver(
        wide_model, scripted=False, chunked_prefill_size=2048, max_running_requests=8, **options
    ) as driver:
        driver.generate([5, 6, 7], 4)  # what a first step allocates is there
        driver.run_until_idle()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        filler = torch.empty(free - ROOM, dtype=torch.uint8, device="cuda")
        found = large_outputs(driver)
        failures = driver.status().step_failures
        assert 0 < failures.splits == failures.failed <= 16
        del filler
        torch.cuda.empty_cache()
        expected = large_outputs(driver)
        assert driver.status().step_failures.failed == failures.failed
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, rel=0, abs=1e-3)


ROUTED_TOLERANCE = 1e-3
"""In float32; the reference computes on the CPU."""


@pytest.fixture(scope="module")
def routed_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe") / "model"
    return str(path), make_checkpoint(path, "qwen3-moe", seed=5, num_hidden_layers=3, mlp_only_layers=[1])


@pytest.mark.parametrize("retract", [False, True])
def test_routed_experts_are_those_of_transformers(routed_model, retract):
    path, reference = routed_model
    with EngineDriver(
        path, scripted=False, device="cuda", chunked_prefill_size=32, max_running_requests=8
    ) as driver:
        prompts = [np.random.default_rng(i).integers(3, 97, 10 + 9 * i).tolist() for i in range(6)]
        rids = []
        for i, prompt in enumerate(prompts):
            # Of different lengths, so that some end while the step after theirs is running.
            params = SamplingParams(max_new_tokens=6 + 5 * i, temperature=1.0, seed=i, ignore_eos=True)
            message = GenerateReqInput(
                input_ids=prompt, sampling_params=params, return_logprob=True, return_routed_experts=True
            )
            rids.append(driver.submit(message))
        if retract:
            driver.tick(8)
            driver.pause("retract")
            driver.go_on()
        driver.run_until_idle()
        outputs = [decode_output(driver.result(rid)) for rid in rids]
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = torch.from_numpy(np.asarray(output.routed_experts).astype(np.int64))
        natural = chosen_experts(reference, [*prompt, *output.output_ids][:-1])
        assert (rows.sort(dim=-1).values == natural).float().mean() > 0.99, "more than ties"
        with torch.inference_mode():
            found = output_logprobs(reference, prompt, output.output_ids, rows)
        torch.testing.assert_close(found, torch.tensor(output.output_logprobs), rtol=0, atol=ROUTED_TOLERANCE)
