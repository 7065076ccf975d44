"""The choice of an attention backend."""

import importlib
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import fake_flashinfer
from support.checkpoints import make_checkpoint

from caesura.io_struct import CaesuraError
from caesura.scheduler.attention import backends, flashinfer, flashinfer_mla, paged_triton
from caesura.scheduler.attention.backends import Choice, choose
from caesura.scheduler.attention.shape import Shape
from caesura.scheduler.execution.build import load_model
from caesura.scheduler.execution.kernel_report import what_serves
from caesura.scheduler.kernels import TORCH
from caesura.scheduler.runtime.engine_config import EngineConfig

CPU = torch.device("cpu")
HEADS = Shape(device=CPU, dtype=torch.float32, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
LATENTS = replace(HEADS, num_kv_heads=1, head_dim=24, latent=16)
SHAPES = pytest.mark.parametrize("shape", [HEADS, LATENTS], ids=["heads", "latents"])


class CompileError(Exception):
    """Stand-in for Triton's error of the same name, which is no RuntimeError."""


@pytest.fixture(autouse=True)
def untried():
    backends.failure_of.cache_clear()
    yield
    backends.failure_of.cache_clear()


@pytest.fixture
def library(monkeypatch):
    made = SimpleNamespace(**vars(fake_flashinfer))

    def import_module(name, package=None):
        return made if name == "flashinfer" else importlib.import_module(name, package)

    for module in (flashinfer, flashinfer_mla):
        for name, function in (("why_not", lambda *of: None), ("import_module", import_module)):
            monkeypatch.setattr(module, name, function)
    return made


def config(wanted: str = "auto") -> EngineConfig:
    return EngineConfig(model_path="m", device="cpu", attention_backend=wanted)


def raising(method: str, error: Exception):
    def fail(self: object, *of: object, **options: object) -> None:
        raise error

    return lambda kind: type(kind.__name__, (kind,), {method: fail})


def filled(value: float):
    def wrong(kind: type) -> type:
        def run(self, *of, **named):
            return kind.run(self, *of, **named).fill_(value)

        return type(kind.__name__, (kind,), {"run": run})

    return wrong


@SHAPES
def test_kernels_that_agree_with_torch_serve(library, shape):
    found = choose(config(), shape)
    assert (found.by, found.reason) == ("flashinfer", None)
    assert found.kernels == ("" if shape.latent is None else "fa2")
    assert choose(config("sdpa"), shape) == Choice(TORCH)


NO_COMPILER = RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda'\n  in build")
WRAPPERS = {
    HEADS: ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"),
    LATENTS: ("BatchMLAPagedAttentionWrapper",),
}


ERRORS = [NO_COMPILER, CompileError("at 12:3: no such type"), OSError("ninja")]


@SHAPES
@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        *(
            (raising(method, error), f"fails: {type(error).__name__}: {str(error).splitlines()[0]}")
            for method in ("plan", "run")
            for error in ERRORS
        ),
        *((filled(value), "is off by") for value in (0.0, torch.nan)),
    ],
)
def test_a_library_that_fails_or_is_wrong_gives_way(library, caplog, shape, spoilt, said):
    for name in WRAPPERS[shape]:
        setattr(library, name, spoilt(getattr(fake_flashinfer, name)))
        with caplog.at_level(logging.WARNING):
            assert choose(config(), shape).by != "flashinfer"
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert f"a step with it {said}" in record.getMessage()
        with pytest.raises(CaesuraError, match="attention_backend = 'flashinfer'") as caught:
            choose(config("flashinfer"), shape)
        assert f"a step with it {said}" in str(caught.value)
        assert caught.value.detail["field"] == "attention_backend"
        caplog.clear()
        setattr(library, name, getattr(fake_flashinfer, name))
        backends.failure_of.cache_clear()


def test_a_library_is_tried_once(library):
    fake_flashinfer.CALLS.clear()
    choose(config(), HEADS)
    tried = len(fake_flashinfer.CALLS)
    assert "plan decode 2 for a graph" in fake_flashinfer.CALLS
    for _ in range(3):
        choose(config(), HEADS)
    assert len(fake_flashinfer.CALLS) == tried > 2
    choose(config(), replace(HEADS, num_heads=8))
    assert len(fake_flashinfer.CALLS) == 2 * tried


class Kernel:
    """Triton's decode kernel, as far as its backend calls it, failing at its first launch."""

    def __init__(self, *of: object, **sizes: object) -> None: ...

    def __getattr__(self, name: str) -> object:
        raise CompileError("out of resource: shared memory, Required: 263168, Hardware limit: 232448.")


def test_a_kernel_that_does_not_compile_is_not_chosen(library, monkeypatch, caplog):
    kernels = SimpleNamespace(PagedDecode=Kernel, num_splits=lambda *of: 1)
    monkeypatch.setattr(flashinfer, "why_not", lambda *of: "it is not installed")
    monkeypatch.setattr(paged_triton, "why_not", lambda device: None)
    monkeypatch.setattr(paged_triton, "import_module", lambda *of: kernels)
    assert choose(config(), HEADS).by not in ("flashinfer", "triton")
    assert "CompileError: out of resource: shared memory" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there CUDA works")
@pytest.mark.parametrize("mla", [False, True])
def test_status_says_why_no_better_backend_serves(tmp_path, monkeypatch, mla):
    """torch without CUDA fails at the first tensor, as a broken installation would."""
    for module in (flashinfer, paged_triton):
        monkeypatch.setattr(module, "find_spec", lambda name: object())
    if mla:
        make_checkpoint(tmp_path, "deepseek-v3", kv_lora_rank=128, qk_rope_head_dim=64)
        monkeypatch.setattr(flashinfer_mla, "kernels_of", lambda device: ("fa3", "fa2"))
    else:
        make_checkpoint(tmp_path, "qwen3", head_dim=min(flashinfer._HEAD_SIZES))
    wanted = EngineConfig(model_path=str(tmp_path), dtype="bfloat16", device="cpu").resolve()
    there = replace(load_model(wanted), device=torch.device("cuda"))
    serving = what_serves(wanted, there)
    assert serving.by["attention"] == TORCH
    assert serving.reason is not None
    attention, _, between = serving.reason.partition("; torch instead of Triton, as ")
    assert attention.startswith("attention by torch, as flashinfer: ")
    assert attention.count("Torch not compiled with CUDA enabled") == 2
    assert "Torch not compiled with CUDA enabled" in between or between == "Triton is not installed"
    assert serving.by["elementwise"] == TORCH
    assert ("fa3: a step with it fails" in serving.reason) == mla
    assert ("triton: it does not serve latent attention" in serving.reason) == mla
