"""A whole engine whose decode steps are captured graphs, against one without."""

import pytest
import torch
from support import fake_elementwise, fake_flashinfer
from support.checkpoints import make_checkpoint
from support.drafting import draft_all
from support.faults import Fault
from support.lora import ALL_LINEAR, make_adapter
from support.recorded_graphs import record_graphs, without_compiled_kernels
from support.scripted import EngineDriver, tokens_of

from caesura.client.connection.results import read_floats
from caesura.io_struct import GenerateReqOutput, LoadAdapterReqInput, SamplingParams, UnloadAdapterReqInput
from caesura.scheduler.attention import backends, fused_store
from caesura.scheduler.execution.build import ADAPTERS
from caesura.scheduler.memory import residency
from caesura.scheduler.memory.storage import StorageComponent

PROMPTS = [[5, 6, 7], [3 + i * 7 % 90 for i in range(45)], [9], [11, 3, 96, 40, 12, 4, 8, 31, 60, 2]]
SIZES = 5
"""Rungs of the ladder up to 10 rows."""
GRAPHS = 2 * SIZES
"""Graphs of hidden states, and of head and sampler."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("captured") / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        make_checkpoint(folder, "qwen3", seed=seed)
    return [str(folder) for folder in folders]


@pytest.fixture(autouse=True)
def torch_only(monkeypatch):
    without_compiled_kernels(monkeypatch)


@pytest.fixture
def device(monkeypatch):
    return record_graphs(monkeypatch)


def driver_of(path: str, **options: object) -> EngineDriver:
    return EngineDriver(path, scripted=False, max_running_requests=10, chunked_prefill_size=32, **options)


def submit(driver: EngineDriver, adapters: str = "") -> list[str]:
    names = [*adapters, *[None] * len(PROMPTS)]
    rids = [
        driver.generate(prompt, 20, seed=5, return_logprob=True, adapter=name)
        for prompt, name in zip(PROMPTS, names, strict=False)
    ]
    driver.hear()
    return rids


def assert_same(
    found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]
) -> None:
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-4)


@pytest.fixture(scope="module")
def expected(paths):
    found = []
    with pytest.MonkeyPatch.context() as patch:
        without_compiled_kernels(patch)
        for path in paths:
            with driver_of(path) as driver:
                found.append(driver.finish(submit(driver)))
    return found


def test_captures_generate_pause_and_update_as_eager_does(paths, expected, device):
    with driver_of(paths[0], pipeline_depth=1) as driver:
        assert device.captures == GRAPHS
        assert_same(driver.finish(submit(driver)), expected[0])
        assert device.replays > 30
        driver.flush()
        rids = submit(driver)
        driver.tick(9)
        driver.pause("retract")
        replays = device.replays
        assert driver.update(paths[1]).written_tensors
        driver.tick(3)
        assert device.replays == replays, "a paused engine launches nothing"
        driver.go_on()
        driver.finish(rids)
        driver.flush()
        assert_same(driver.finish(submit(driver)), expected[1])
        assert device.captures == GRAPHS, "an update in place needs no new capture"


def test_captured_steps_have_adapters_as_eager_ones_do(paths, device, tmp_path):
    folders = [
        make_adapter(paths[0], tmp_path / str(i), [*ALL_LINEAR, "lm_head"], rank=2 + i, seed=i)
        for i in range(3)
    ]
    found, replayed = {}, device.replays
    for graphs in (False, True):
        options = {"pipeline_depth": 1, "enable_lora": True, "max_loras": 2, "cuda_graphs": graphs}
        with driver_of(paths[0], **options) as driver:
            for name, folder in zip("ab", folders, strict=False):
                driver.call(LoadAdapterReqInput(name=name, path=str(folder)))
            results = [driver.finish(submit(driver, adapters)) for adapters in ("ab", "", "bbb")]
            driver.call(LoadAdapterReqInput(name="a", path=str(folders[2])))
            driver.call(UnloadAdapterReqInput(name="b"))
            found[graphs] = [*results, driver.finish(submit(driver, "a"))]
        assert (device.replays > replayed + 100) == graphs
    for captured, eager in zip(found[True], found[False], strict=True):
        assert_same(captured, eager)
    assert found[True][0] != found[True][3]


class Elsewhere(StorageComponent):
    """Memory that comes back at other addresses."""

    def release(self):
        self._places, self._occupied = [tensor.data_ptr() for tensor in self.tensors], []
        yield from super().release()

    def resume(self):
        for tensor, place in zip(self.tensors, self._places, strict=True):
            storage, nbytes = tensor.untyped_storage(), tensor.nbytes
            while not storage.nbytes() or tensor.data_ptr() == place:
                storage.resize_(0)
                self._occupied.append(torch.empty(nbytes, dtype=torch.uint8))
                storage.resize_(nbytes)
            tensor.zero_()
            yield


@pytest.mark.parametrize("moves", [False, True])
def test_only_memory_that_moved_is_captured_again(paths, expected, device, monkeypatch, moves):
    if moves:
        monkeypatch.setattr(residency, "_plain", lambda device: Elsewhere)
    with driver_of(paths[0], pipeline_depth=1) as driver:
        driver.finish(submit(driver))
        driver.pause("abort")
        for first, second in (("weights", "kv_cache"), ("kv_cache", "weights")):
            driver.release(first, second)
            driver.resume(first)
            driver.resume(second)
        driver.release("kv_cache")
        driver.resume("kv_cache")
        assert driver.engine.runner.graphs.are_captured
        assert device.captures == GRAPHS * (4 if moves else 1)
        driver.update(paths[1])
        driver.go_on()
        replays = device.replays
        assert_same(driver.finish(submit(driver)), expected[1])
        assert device.replays > replays + 30


def test_steps_above_the_largest_captured_size_run_eagerly(paths, expected, device):
    with driver_of(paths[0], cuda_graph_max_bs=4) as driver:
        assert device.captures == 2 * len((1, 2, 4))
        rids = [rid for _ in range(2) for rid in submit(driver)]
        driver.tick(12)
        assert device.replays == 0
        assert_same(driver.finish(rids), expected[0] * 2)
        assert_same(driver.finish(submit(driver)), expected[0])
        assert device.replays > 30


def test_adapters_that_moved_are_captured_again(paths, device, monkeypatch):
    monkeypatch.setattr(residency, "_plain", lambda device: Elsewhere)
    with driver_of(paths[0], enable_lora=True) as driver:
        memory = driver.engine.residency
        before = driver.engine.loaded.addresses()
        factors = [tensor.data_ptr() for tensor in memory.registered[ADAPTERS].tensors]
        assert factors
        assert before[-len(factors) :] == tuple(factors)
        driver.pause("abort")
        driver.release("weights")
        driver.resume("weights")
        after = driver.engine.loaded.addresses()
        assert not any(old == new for old, new in zip(before, after, strict=True) if old in factors)
        assert device.captures == 2 * GRAPHS


def test_the_tag_of_graphs_releases_and_resumes_them(paths, expected, device):
    with driver_of(paths[0], pipeline_depth=1) as driver:
        driver.pause("abort")
        reply = driver.release("cuda_graph")
        assert reply.freed_bytes == {"cuda_graph": 1000 * GRAPHS}
        assert reply.released_tags == driver.status().released_tags == ["cuda_graph"]
        graphs = driver.engine.runner.graphs
        assert not graphs.are_captured
        reply = driver.resume()
        assert reply.resumed_bytes == {"cuda_graph": 1000 * GRAPHS}
        assert graphs.are_captured
        driver.go_on()
        assert_same(driver.finish(submit(driver)), expected[0])


def test_an_engine_starts_without_a_compiler_of_kernels(paths, expected, device, caplog):
    kernels, error = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, RuntimeError("Could not find nvcc")
    backends.failure_of.cache_clear()
    with Fault(kernels, "plan", error, range(1000)), driver_of(paths[0], pipeline_depth=1) as driver:
        assert "flashinfer: a step with it fails: RuntimeError: Could not find nvcc" in caplog.text
        assert driver.status().kernels["attention"] == "torch"
        assert_same(driver.finish(submit(driver)), expected[0])
    backends.failure_of.cache_clear()


def test_latent_attention_is_captured_too(tmp_path, device):
    """FlashInfer's kernels for latents serve prompts as well, since 128 is a multiple of the heads."""
    make_checkpoint(tmp_path, "deepseek-v3", seed=2)
    found = {}
    for wanted in ("sdpa", "auto"):
        fake_flashinfer.CALLS.clear()
        with driver_of(str(tmp_path), pipeline_depth=1, attention_backend=wanted) as driver:
            found[wanted] = driver.finish(submit(driver))
            assert driver.status().kernels["attention"] == ("flashinfer" if wanted == "auto" else "torch")
        planned = {call.rpartition(" for a graph")[1] or call.split()[2] for call in fake_flashinfer.CALLS}
        assert planned == ({" for a graph", "decode", "prefill"} if wanted == "auto" else set())
    assert device.replays > 15
    assert_same(found["auto"], found["sdpa"])


def test_captures_edit_logits_as_eager_does(paths, monkeypatch):
    def run(driver: EngineDriver) -> list[GenerateReqOutput]:
        params = SamplingParams(
            max_new_tokens=20, temperature=0.8, seed=5, ignore_eos=True, min_p=0.02, frequency_penalty=0.9,
            repetition_penalty=1.3, logit_bias={7: 1.5}, min_new_tokens=4, stop_token_ids=[11],
        )  # fmt: skip
        rids = [
            driver.generate(
                prompt, sampling_params=params, return_logprob=True, return_raw_logprob=True,
                top_logprobs_num=number, token_ids_logprob=[4, 9], logprob_start_len=0,
            )
            for number, prompt in enumerate(PROMPTS)
        ]  # fmt: skip
        driver.run_until_idle()
        return [driver.result(rid) for rid in rids]

    with driver_of(paths[0], pipeline_depth=0) as driver:
        expected = run(driver)
    device = record_graphs(monkeypatch)
    with driver_of(paths[0], pipeline_depth=1) as driver:
        found = run(driver)
        assert device.replays > 10
        driver.engine.runner._special.sample = None
        driver.finish(submit(driver))  # which would fail, were anything special in these
    for mine, theirs in zip(found, expected, strict=True):
        assert tokens_of(mine) == tokens_of(theirs)
        for name in ("output_logprobs", "raw_logprobs", "input_logprobs"):
            values, others = read_floats(getattr(mine, name)), read_floats(getattr(theirs, name))
            assert values == pytest.approx(others, abs=1e-4, nan_ok=True), name
        for name in ("top", "token_ids"):
            for kind in ("output", "input"):
                field = f"{kind}_{name}_logprobs"
                rows, others = getattr(mine, field), getattr(theirs, field)
                assert (rows is None) == (others is None)
                if rows is not None:
                    assert read_floats(rows.logprobs) == pytest.approx(read_floats(others.logprobs), abs=1e-4)


def test_a_kernel_that_stores_reads_each_steps_slots(paths, expected, device, monkeypatch):
    monkeypatch.setattr(fused_store, "elementwise_for", lambda *of: fake_elementwise)
    monkeypatch.setattr(fake_flashinfer, "append_paged_kv_cache", None)
    backends.failure_of.cache_clear()
    fake_elementwise.CALLS.clear()
    with driver_of(paths[0]) as driver:
        assert device.captures == GRAPHS
        layers = 2
        assert len(fake_elementwise.CALLS) == layers * (2 * SIZES + 2), (
            "before and in each graph, warm-up, largest step"
        )
        assert_same(driver.finish(submit(driver)), expected[0])
        assert device.replays > 15


def test_captured_steps_take_drafted_tokens(paths, expected, device, monkeypatch):
    draft_all(monkeypatch)
    with driver_of(paths[0], speculation="suffix") as driver:
        for _ in range(2):
            assert_same(driver.finish(submit(driver)), expected[0])
        assert driver.status().totals.accepted_tokens > 20
