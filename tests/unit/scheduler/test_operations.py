"""Choice of the implementation that serves each operation of a model."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.architectures import tiny_model as tiny_architecture
from support.checkpoints import make_checkpoint, make_fp8_checkpoint

from caesura.client import launch_scheduler
from caesura.scheduler.execution import kernel_report as operations
from caesura.scheduler.execution.build import load_model
from caesura.scheduler.execution.kernel_report import Serving, what_serves
from caesura.scheduler.kernels import OPERATIONS, TORCH, native
from caesura.scheduler.runtime import libraries
from caesura.scheduler.runtime.engine_config import EngineConfig

needs_kernels = pytest.mark.skipif(native.why_not() is not None, reason=f"no kernels: {native.why_not()}")
ISA = native.isa()
WITH_EXPERTS = dict.fromkeys(set(OPERATIONS) - {"linear_attention"}, ISA)
DENSE = dict.fromkeys(set(WITH_EXPERTS) - {"experts"}, ISA)


def served(path, *, dtype="float32", **options) -> Serving:
    config = EngineConfig(model_path=str(path), dtype=dtype, device="cpu", **options).resolve()
    return what_serves(config, load_model(config))


@needs_kernels
def test_kernels_serve_every_operation_that_a_model_has(tiny_model, tmp_path):
    assert served(tiny_model) == Serving(DENSE, None)
    for family in ("qwen3-moe", "deepseek-v3", "gpt-oss"):
        make_checkpoint(tmp_path / family, family)
        assert served(tmp_path / family) == Serving(WITH_EXPERTS, None)
    assert served(tiny_model, dtype="fp16") == Serving(DENSE, None)
    by = DENSE | {"attention": TORCH, "decoder": TORCH}
    assert served(tiny_model, attention_backend="sdpa") == Serving(by, "attention_backend = 'sdpa'")


@needs_kernels
def test_operations_computed_by_torch_are_reported(tmp_path):
    make_checkpoint(tmp_path / "many", "deepseek-v3", n_routed_experts=130, n_group=65)
    many = served(tmp_path / "many")
    assert "decoder" not in many.by
    assert many.reason == "experts are chosen from 65 groups, which torch does"
    make_checkpoint(tmp_path / "plain", "qwen3")
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", (16, 16))
    assert served(tmp_path / "fp8") == Serving(DENSE, None)
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "odd", (16, 18))
    quantised = served(tmp_path / "odd")
    assert quantised.by == DENSE | {"linear": TORCH, "decoder": TORCH}
    assert quantised.reason is not None
    assert "that cannot be packed" in quantised.reason
    make_checkpoint(tmp_path / "narrow", "qwen3", intermediate_size=71, dtype=torch.bfloat16)
    unpacked = served(tmp_path / "narrow", dtype="auto")
    assert unpacked == Serving(DENSE | {"linear": TORCH, "decoder": TORCH}, "rows of 71 cannot be packed")


@needs_kernels
def test_operations_that_transformers_leaves_to_kernels(tmp_path):
    make_checkpoint(tmp_path / "qwen3", "qwen3")
    assert served(tmp_path / "qwen3", model_backend="transformers") == Serving(DENSE, None)
    tiny_architecture("GlmForCausalLM", 1).save_pretrained(tmp_path / "glm")
    glm = served(tmp_path / "glm", model_backend="transformers")
    assert glm.by == {name: ISA for name in DENSE if name != "decoder"} | {"elementwise": TORCH}
    assert glm.reason == "transformers computes some of what lies between the products"


def test_fp8_on_an_accelerator_is_a_librarys(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "plain", "qwen3-moe")
    make_fp8_checkpoint(tmp_path / "plain", tmp_path / "fp8", (16, 16))
    config = EngineConfig(model_path=str(tmp_path / "fp8"), dtype="float32", device="cpu").resolve()
    elsewhere = dataclasses.replace(load_model(config), device=torch.device("meta"))
    for name, by in (("dense_for", "flashinfer"), ("experts_for", "deep_gemm")):
        monkeypatch.setattr(operations, name, lambda device, by=by: SimpleNamespace(by=by))
    found = what_serves(config, elsewhere).by
    assert (found["linear"], found["experts"]) == ("flashinfer", "deep_gemm")


def test_on_another_device_nothing_is_missing(tiny_model):
    config = EngineConfig(model_path=str(tiny_model), dtype="float32", device="cpu").resolve()
    elsewhere = dataclasses.replace(load_model(config), device=torch.device("meta"))
    assert what_serves(config, elsewhere) == Serving(dict.fromkeys(DENSE, TORCH), None)


@pytest.mark.parametrize(
    "serving,level",
    [
        (Serving({"linear": TORCH, "attention": TORCH}, "the extension was not built"), logging.WARNING),
        (Serving({"linear": "avx2", "attention": TORCH}, "attention_backend = 'sdpa'"), logging.INFO),
        (Serving({"linear": TORCH, "attention": "triton"}, None), logging.INFO),
    ],
)
def test_only_an_engine_without_kernels_warns(caplog, serving, level):
    with caplog.at_level(logging.INFO):
        serving.log()
    (record,) = caplog.records
    assert record.levelno == level
    assert (serving.reason or "torch: linear; triton: attention") in record.getMessage()


def test_an_engine_without_kernels_says_so(tiny_model, monkeypatch, capfd):
    monkeypatch.setenv(native.VARIABLE, "torch")
    with launch_scheduler(tiny_model, dtype="float32", num_threads=1, kv_pool_tokens=256) as engine:
        status = engine.status()
    assert set(status.kernels.values()) == {TORCH}
    assert status.kernels_reason == "CAESURA_KERNELS=torch"
    (line,) = [line for line in capfd.readouterr().err.splitlines() if " WARNING " in line]
    assert "compiled kernels do not serve" in line
    assert line.endswith(": CAESURA_KERNELS=torch")


@pytest.mark.parametrize(
    "value,code", [("torch", 1), pytest.param("avx2", 0, marks=needs_kernels)], ids=["without", "with"]
)
@pytest.mark.long
def test_a_build_can_ask_for_the_kernels(value, code):
    program, environment = (
        [sys.executable, "-m", "caesura.scheduler.kernels"],
        os.environ | {native.VARIABLE: value},
    )
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (code, "" if code else "compiled kernels: avx2\n"), done.stderr


def test_a_processor_without_avx2_does_not_fail_the_build(monkeypatch, capsys):
    from caesura.scheduler.kernels import __main__ as command

    monkeypatch.setattr(native, "why_not", lambda: native.NO_AVX2)
    assert command.main() == 0
    assert native.NO_AVX2 in capsys.readouterr().err


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ADVISED = """
import numpy as np
array = np.ones(32 << 20, np.uint8)
print(any(line.startswith("VmFlags:") and " hg" in line for line in open("/proc/self/smaps")))
"""


def advised(**settings: str) -> bool:
    environment = {name: value for name, value in os.environ.items() if name not in libraries._SETTINGS}
    found = subprocess.check_output([sys.executable, "-c", ADVISED], text=True, env=environment | settings)
    return found.strip() == "True"


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason="this kernel has no transparent huge pages")
def test_numpy_asks_for_no_huge_pages(monkeypatch):
    """The kernel would fill again what malloc_trim gave back."""
    for name in libraries._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert advised()
    assert not advised(**libraries.settings())
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert "GOMP_SPINCOUNT" not in libraries.settings(), "what the user has set stays"
