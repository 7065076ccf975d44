"""Warm-up: it computes no logits beyond its bound, and leaves no trace."""

import contextlib
import logging
import threading
from dataclasses import replace

import pytest
import torch
from support import fake_flashinfer
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.forward_batches import attention_shape, load_model
from support.recorded_graphs import RecordingDevice
from support.scripted import EngineDriver, tokens_of
from support.workspaces import memory_of

from caesura.io_struct import GenerateReqInput, SamplingParams
from caesura.scheduler.attention.flashinfer import FlashInferBackend
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.execution.build import build_components, build_runner, warm_up_rows
from caesura.scheduler.execution.forward import StepLimits
from caesura.scheduler.execution.model_runner import ModelRunner
from caesura.scheduler.execution.sampler import Sampler
from caesura.scheduler.layers.logits_processor import LogitsProcessor, autotune_dummy_run_mode
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.memory.residency import ComponentResidencyManager
from caesura.scheduler.memory.workspace import Workspace
from caesura.scheduler.runtime.engine_config import EngineConfig

CPU = torch.device("cpu")
ROWS = 7
FAMILIES = ["qwen3", "qwen3-fp8", "qwen3-moe", "deepseek-v3", "deepseek-v3-fp8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made: dict[str, str] = {}

    def make(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp("autotune")
            plain = family.removesuffix("-fp8")
            make_checkpoint(folder / "plain", plain, seed=1)
            if family != plain:
                make_fp8_checkpoint(folder / "plain", folder / "fp8", (8, 16))
            made[family] = str(folder / ("plain" if family == plain else "fp8"))
        return made[family]

    return make


def config_of(path: str, **options: object) -> EngineConfig:
    options = {"dtype": "float32", "max_running_requests": ROWS, "kv_pool_tokens": 256, **options}
    return EngineConfig(model_path=path, device="cpu", endpoint="ipc:///unused", **options)


class Head:
    """Counts the rows that come to an output head."""

    def __init__(self, runner: ModelRunner) -> None:
        self.rows: list[int] = []
        processor = runner.model.logits_processor
        self.project = processor.project
        processor.project = self

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return self.project(hidden, out)


def cold_runner(path: str, **options: object) -> ModelRunner:
    config = config_of(path, autotune=False, **options)
    loaded, pool, routing, _ = build_components(config, ComponentResidencyManager("cpu"))
    return build_runner(config, loaded, pool, routing)


# The mode


def gathering_processor() -> tuple[LogitsProcessor, Workspace]:
    weight = torch.randn(50, 4)

    def project(hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        part = hidden @ weight.t()
        torch.distributed.all_gather([out], part)
        return out

    place = Placement(torch.float32, CPU)
    return LogitsProcessor(project, 50, place=place), place.workspace


def test_a_dummy_run_has_no_head_and_no_collective():
    (processor, workspace), hidden = gathering_processor(), torch.randn(3, 4)
    with contextlib.suppress(KeyError), autotune_dummy_run_mode():
        with contextlib.suppress(IndexError), autotune_dummy_run_mode():
            raise IndexError
        assert processor.forward(hidden) is None, "the outer block goes on"
        with autotune_dummy_run_mode():
            pass
        assert processor.forward(hidden) is None
        raise KeyError
    assert memory_of(workspace, "logits") is None, "not even its memory is taken"
    with pytest.raises(ValueError, match="process group"):
        processor.forward(hidden)


def test_other_threads_are_not_in_it():
    (processor, _), errors = gathering_processor(), []

    def forward() -> None:
        try:
            processor.forward(torch.randn(3, 4))
        except ValueError as error:
            errors.append(error)

    with autotune_dummy_run_mode():
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    assert len(errors) == 1


# The dummy run


@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_up_leaves_no_trace(checkpoint, family):
    config = config_of(checkpoint(family), autotune=False)
    loaded, pool, routing, _ = build_components(config, ComponentResidencyManager("cpu"))
    runner = build_runner(config, loaded, pool, routing)
    layers = [pool.layer(layer) for layer in range(loaded.config.num_layers)]
    kv = [tensor for layer in layers for tensor in (layer if isinstance(layer, tuple) else (layer,))]
    for tensor in kv:
        tensor.fill_(7.0)
    if routing is not None:
        routing.pages.fill_(99)
    runner.last_tokens[:ROWS] = torch.arange(ROWS) + 3
    weights = {name: tensor.clone() for name, tensor in loaded.model.named_storage()}

    runner.autotune(ROWS, 3)

    assert any((tensor[0] != 7.0).any() for tensor in kv), "it did run, on the scratch page"
    assert all((tensor[1:] == 7.0).all() for tensor in kv)
    if routing is not None:
        assert (routing.pages[0] != 99).any()
        assert (routing.pages[1:] == 99).all()
    assert runner.last_tokens[:ROWS].tolist() == list(range(3, 3 + ROWS))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.model.named_storage())
    assert not runner.stages.totals()


@pytest.mark.parametrize("head_rows,expected", [(0, []), (3, [3]), (ROWS, [ROWS]), (64, [ROWS])])
def test_the_head_meets_a_bounded_number_of_rows(checkpoint, head_rows, expected):
    runner = cold_runner(checkpoint("qwen3"))
    head, sampled, batches = Head(runner), [], []
    sample, forward = runner.sampler.sample, runner.model.forward
    runner.sampler.sample = lambda logits, batch: sampled.append(sample(logits, batch))
    runner.model.forward = lambda batch, backend: batches.append(batch) or forward(batch, backend)
    runner.autotune(ROWS, head_rows)
    assert [(batch.num_rows, batch.num_decode) for batch in batches] == [(ROWS, ROWS)]
    assert head.rows == [len(output.token_ids) for output in sampled] == expected
    assert all((output.token_ids >= 0).all() for output in sampled)


@pytest.mark.parametrize("on", [True, False])
def test_an_engine_is_warm_as_configured(checkpoint, on):
    config = config_of(checkpoint("qwen3"), autotune=on)
    loaded, pool, routing, _ = build_components(config, ComponentResidencyManager("cpu"))
    build_runner(config, loaded, pool, routing)
    assert bool(pool.layer(0)[0][0].any()) is on, "a step has written to the scratch page"


def test_warm_up_rows_where_kernels_are_chosen_by_size(checkpoint):
    config = config_of(checkpoint("qwen3"), max_running_requests=512)
    loaded, *_ = build_components(config, ComponentResidencyManager("cpu"))
    assert warm_up_rows(config, loaded) == (16, 16)
    assert warm_up_rows(config, replace(loaded, device=torch.device("cuda"))) == (512, 64)


def test_a_warm_engine_is_as_one_that_starts_cold(checkpoint):
    found = []
    for on in (True, False):
        with EngineDriver(checkpoint("qwen3-moe"), scripted=False, autotune=on) as driver:
            status = driver.status()
            before = status.step, status.kv, [stage.name for stage in status.stages]
            params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
            message = GenerateReqInput(input_ids=[5, 6, 7], sampling_params=params, return_logprob=True)
            driver.send(message)
            driver.run_until_idle()
            result = driver.result(message.id)
            found.append((before, tokens_of(result), bytes(result.output_logprobs)))
    assert found[0] == found[1]
    assert found[0][0][0] == 0


def test_running_out_of_memory_is_a_warning(checkpoint, caplog):
    runner = cold_runner(checkpoint("qwen3"))

    def fail(batch: object) -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 3 GiB")

    runner.backend.plan = fail
    with caplog.at_level(logging.WARNING):
        runner.autotune(ROWS, 1)
    assert "starts cold" in caplog.text

    def break_down(batch: object) -> None:
        raise RuntimeError("a bug")

    runner.backend.plan = break_down
    with pytest.raises(RuntimeError, match="a bug"):
        runner.autotune(ROWS, 1)


def streaming_runner(path: str) -> tuple[ModelRunner, RecordingDevice]:
    model, device = load_model(path, torch.float32), RecordingDevice()
    limits = StepLimits.of(max_rows=ROWS, chunk_tokens=8, context_len=64)
    pool = MHAPool(num_layers=2, num_pages=9, kv_heads=2, head_size=12, dtype=torch.float32)
    backend = FlashInferBackend(pool, attention_shape(pool, 4), limits, fake_flashinfer)
    sampler = Sampler(97, ROWS, CPU, torch.float32)
    return ModelRunner(model, backend, sampler, limits=limits, device=CPU, device_module=device), device


def test_a_warm_up_runs_on_the_forward_stream(checkpoint):
    runner, device = streaming_runner(checkpoint("qwen3"))
    head = Head(runner)
    fake_flashinfer.CALLS.clear()
    forward, project = runner.model.forward, head.project
    runner.model.forward = lambda *of: device.log.append("decoder") or forward(*of)
    head.project = lambda *of: device.log.append("head") or project(*of)

    runner.autotune(ROWS, 2)
    assert device.log == ["wait", "enter", "decoder", "head", "leave", "wait"]
    assert [f"plan decode {ROWS}"] == fake_flashinfer.CALLS
    assert head.rows == [2]
