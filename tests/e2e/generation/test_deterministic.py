"""Deterministic mode: a request's tokens and logprobs are the same bits, whatever happens around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from support.checkpoints import make_checkpoint
from support.faults import NO_MEMORY, Fault
from support.lanes import quick
from support.scripted import EngineDriver

from caesura.client import Unsupported, launch_scheduler
from caesura.io_struct import GenerateReqOutput, SamplingParams
from caesura.scheduler.kernels import TORCH, best

needs_kernels = pytest.mark.skipif(
    best("linear", "cpu", torch.float32) == TORCH, reason="no compiled kernels on this machine"
)
NEW_TOKENS = 24


@dataclass(frozen=True)
class Work:
    prompt: tuple[int, ...]
    params: SamplingParams


def _params(**fields: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, **fields)


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


WORK = [
    Work(_prompt(1, 0), _params(temperature=0.0)),
    Work(_prompt(17, 1), _params(temperature=1.0, seed=5)),
    Work(_prompt(40, 2), _params(temperature=0.7, seed=6, top_p=0.9)),
    Work(_prompt(100, 3), _params(temperature=1.3, seed=7, top_k=5)),
    Work(_prompt(64, 4), _params(temperature=1.0, seed=8)),
    Work(_prompt(33, 5), _params(temperature=0.0)),
]
Bits = list[tuple[bytes, bytes]]


FAMILIES = {
    "tied": "qwen3",
    "untied": "qwen3",
    "experts": "qwen3-moe",
    "windows": "gemma3",
    "sinks": "gpt-oss",
    "states": "qwen3.5",
    "states-and-experts": "qwen3-next",
}
QUICK = ["states float32", "sinks bfloat16", "experts bfloat16", "tied float32"]
CASES = [f"{name} {dtype}" for name in FAMILIES for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=quick(dict.fromkeys(QUICK + CASES), len(QUICK)))
def case(request, tmp_path_factory) -> tuple[str, str]:
    name, dtype = request.param.split()
    path = tmp_path_factory.mktemp("models") / "model"
    make_checkpoint(path, FAMILIES[name], tied=name == "tied", seed=3, max_position_embeddings=512)
    return str(path), dtype


@contextmanager
def engine(case: tuple[str, str], **options: object) -> Iterator[EngineDriver]:
    model, dtype = case
    with EngineDriver(model, scripted=False, dtype=dtype, deterministic=True, **options) as driver:
        yield driver


def start(driver: EngineDriver, work: Work) -> str:
    return driver.generate(list(work.prompt), sampling_params=work.params, return_logprob=True)


def bits(result: GenerateReqOutput) -> tuple[bytes, bytes]:
    assert len(result.output_ids) == 4 * NEW_TOKENS
    return result.output_ids, result.output_logprobs


def together(driver: EngineDriver) -> Bits:
    rids = [start(driver, work) for work in WORK]
    driver.run_until_idle()
    return [bits(driver.result(rid)) for rid in rids]


@pytest.fixture(scope="module")
def alone(case) -> Bits:
    found = []
    with engine(case) as driver:
        for work in WORK:
            rid = start(driver, work)
            driver.run_until_idle()
            found.append(bits(driver.result(rid)))
            driver.flush()
    return found


@needs_kernels
@pytest.mark.parametrize("chunk", quick([16, 48, 512]))
@pytest.mark.parametrize("depth", [0, 1])
def test_beside_others_however_prompts_are_cut(case, alone, chunk, depth):
    with engine(case, chunked_prefill_size=chunk, pipeline_depth=depth) as driver:
        assert together(driver) == alone


@needs_kernels
def test_on_a_cached_prefix(case, alone):
    with engine(case) as driver:
        assert together(driver) == alone
        assert together(driver) == alone
        cached = [result[-1].cached_tokens for result in driver.results.values()]
        assert sum(cached) > 0, "nothing was shared"


@needs_kernels
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_across_pauses(case, alone, mode):
    with engine(case, chunked_prefill_size=32) as driver:
        rids = [start(driver, work) for work in WORK]
        for ticks in (1, 2, 3, 5, 8):
            driver.tick(ticks)
            driver.pause(mode)
            driver.go_on(torch_empty_cache=False)
        driver.run_until_idle()
        results = [driver.result(rid) for rid in rids]
        assert [bits(result) for result in results] == alone
        assert any(result.num_retractions for result in results) == (mode == "retract")


@needs_kernels
def test_when_preempted_for_want_of_memory(case, alone):
    with engine(case, kv_pool_tokens=208) as driver:
        rids = [start(driver, work) for work in WORK]
        driver.run_until_idle()
        results = [driver.result(rid) for rid in rids]
        assert [bits(result) for result in results] == alone
        assert any(result.num_retractions for result in results), "nothing was preempted"


@needs_kernels
def test_after_steps_that_ran_out_of_memory(case, alone):
    with engine(case, chunked_prefill_size=32) as driver:
        runner = driver.engine.runner
        with Fault(runner, "execute", NO_MEMORY[0], {3, 14, 15, 22}, after=True) as fault:
            assert together(driver) == alone
        assert fault.raised == 4


@needs_kernels
def test_on_any_number_of_threads(case, alone):
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            with engine(case) as driver:
                assert together(driver) == alone
    finally:
        torch.set_num_threads(before)


def test_refused_where_torch_computes(tiny_model, monkeypatch):
    monkeypatch.setenv("CAESURA_KERNELS", "torch")
    with pytest.raises(Unsupported, match="deterministic needs the compiled"):
        launch_scheduler(tiny_model, deterministic=True, device="cpu", log_level="ERROR")


@needs_kernels
@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("deepseek-v3", {"qk_nope_head_dim": 9}, "rows of 9"),
        ("qwen3", {"intermediate_size": 71}, "rows of 71"),
        ("qwen3-moe", {"moe_intermediate_size": 23}, "rows of 23"),
        ("qwen3.5", {"linear_value_head_dim": 257}, "more than 256 elements"),
    ],
)
def test_refused_where_a_part_is_computed_by_torch(tmp_path, family, sizes, reason):
    make_checkpoint(tmp_path, family, **sizes)
    with pytest.raises(Unsupported, match=reason):
        launch_scheduler(tmp_path, deterministic=True, dtype="bfloat16", device="cpu", log_level="ERROR")
