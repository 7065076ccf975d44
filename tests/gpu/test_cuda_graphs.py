"""Captured decode steps on a real device."""

from importlib.util import find_spec

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.scripted import EngineDriver

from caesura.io_struct import (
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    SamplingParams,
    UpdateWeightFromDiskReqInput,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"needs {name}"))
    for name in ("flashinfer", "triton")
]

PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(75)], [9], [11, 3, 96, 40, 12, 4, 8, 31, 60, 2]]
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


def engine(path: str, **options: object) -> EngineDriver:
    return EngineDriver(
        path,
        scripted=False,
        device="cuda",
        dtype="bfloat16",
        chunked_prefill_size=32,
        max_running_requests=10,
        **options,
    )


def graphs_of(driver: EngineDriver):
    return driver.engine.runner.graphs


def generate(driver: EngineDriver) -> list[tuple[list[int], list[float]]]:
    driver.call(FlushCacheReqInput())
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
    rids = []
    for prompt in PROMPTS:
        message = GenerateReqInput(input_ids=prompt, sampling_params=params, return_logprob=True)
        rids.append(driver.submit(message))
    return driver.finish(rids)


def assert_close(found, expected) -> None:
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(found, expected, strict=True):
        same = [mine == theirs for mine, theirs in zip(ids, expected_ids, strict=True)]
        agreed = same.index(False) if False in same else len(same)
        assert agreed >= 2
        assert logprobs[:agreed] == pytest.approx(expected_logprobs[:agreed], rel=0, abs=TOLERANCE)


def test_replayed_steps_equal_eager_ones_across_updates_and_releases(paths, backend):
    expected = []
    for path in paths:
        with engine(path, cuda_graphs=False, attention_backend="sdpa") as driver:
            assert graphs_of(driver) is None
            expected.append(generate(driver))
    with engine(paths[0], attention_backend=backend) as driver:
        graphs = graphs_of(driver)
        assert graphs.are_captured
        assert graphs.nbytes > 0
        assert_close(generate(driver), expected[0])
        assert driver.call(UpdateWeightFromDiskReqInput(model_path=paths[1]), max_ticks=100_000).committed
        assert_close(generate(driver), expected[1])
        for tags in (["cuda_graph"], ["kv_cache"], None):
            driver.call(PauseGenerationReqInput(mode="abort"))
            driver.call(ReleaseMemoryOccupationReqInput(tags=tags))
            driver.call(ResumeMemoryOccupationReqInput())
            assert graphs.are_captured
            if tags is None:
                driver.call(UpdateWeightFromDiskReqInput(model_path=paths[0]), max_ticks=100_000)
            driver.call(ContinueGenerationReqInput())
            assert_close(generate(driver), expected[0 if tags is None else 1])


SAMPLING = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_p": 0.8},
    {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
]


def sampled(driver: EngineDriver) -> list[tuple[list[int], list[float]]]:
    driver.call(FlushCacheReqInput())
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
    with engine(paths[0], cuda_graphs=False, attention_backend=backend) as driver:
        expected = sampled(driver)
    with engine(paths[0], attention_backend=backend) as driver:
        graphs = graphs_of(driver)
        assert all(captured.head is not None for captured in graphs.captured.values())
        assert_close(sampled(driver), expected)


def test_releasing_the_tag_frees_graph_memory_and_replays_allocate_none(paths, backend):
    with engine(paths[0], attention_backend=backend) as driver:
        generate(driver)
        reserved = []
        for _ in range(10):
            generate(driver)
            driver.call(PauseGenerationReqInput(mode="in_place"))
            reserved.append(driver.call(ContinueGenerationReqInput()).reserved_after)
        assert max(reserved[5:]) <= max(reserved[:5]), reserved
        driver.call(PauseGenerationReqInput(mode="abort"))
        reply = driver.call(ReleaseMemoryOccupationReqInput(tags=["cuda_graph"]))
        assert reply.reserved_after < reply.reserved_before
        assert not graphs_of(driver).are_captured
