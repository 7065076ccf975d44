"""Sections about the card by itself: what is installed, and what it can do."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu.run import Link, Run
from harness.limits import measure_ceilings, seconds_of, synchronizer

from caesura.client import SamplingParams
from caesura.io_struct import CaesuraError
from caesura.scheduler.attention import flashinfer, paged_triton

TESTS_S = 140
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "sglang", "vllm", "msgspec", "pyzmq")


def versions(run: Run) -> dict[str, Any]:
    """Return versions, and for each attention backend why it would not serve the large model, or None."""
    found: dict[str, Any] = {
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
    }
    head_dim = run.plan.shape.head_dim
    found["why_not"] = {
        "flashinfer": flashinfer.why_not(run.device, torch.bfloat16, head_dim),
        "triton": paged_triton.why_not(run.device),
    }
    if run.on_card:
        properties = torch.cuda.get_device_properties(run.device)
        found["card"] = {
            "capability": list(torch.cuda.get_device_capability(run.device)),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "count": torch.cuda.device_count(),
        }
        found["nccl"] = list(torch.cuda.nccl.version())
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
        found["nvidia_smi"] = done.stdout.splitlines()
    return found


def answers(run: Run, backend: str) -> dict[str, Any]:
    """Let an engine with this attention backend, which compiles its kernels, answer one request."""
    try:
        with run.launch(run.small(), attention_backend=backend) as client:
            prompts = run.prompts(1, run.plan.prompt_tokens, 5, run.plan.small)
            results = client.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
            return {"tokens": len(results[0].output_ids), "says": _says(run)}
    except CaesuraError as error:  # that it cannot is the finding
        return {"why_not": f"{type(error).__name__}: {error}"[:1000]}


def engine_lines(text: str) -> list[str]:
    """Return the lines of an engine's log about how it computes."""
    return [
        line
        for line in text.splitlines()
        if "attention by" in line or "decode steps" in line or "kernels:" in line
    ]


def _says(run: Run) -> list[str]:
    return engine_lines(run.log_of(run.small()).read_text(encoding="utf-8"))


def ceilings(run: Run) -> dict[str, Any]:
    """Measure bandwidth, the peak of products, and the link to the host."""
    plan = run.plan
    run.ceilings = measure_ceilings(run.device, plan.buffer_bytes, plan.product_size)
    run.free()
    run.link = _measure_link(run.device, plan.link_bytes)
    return run.ceilings.as_dict() | {
        "host_to_device": run.link.host_to_device, "copy_on_device": run.link.on_device,
    }  # fmt: skip


def gpu_tests(run: Run) -> dict[str, Any]:
    """Run ``pytest -m gpu``; return the outcome of each test file and the end of the output."""
    if missing := [name for name in ("pytest", "hypothesis", "transformers") if find_spec(name) is None]:
        return {"left_out": f"not installed: {', '.join(missing)}"}
    selected = [] if run.on_card else ["--collect-only"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-p", "no:cacheprovider", "-rfEs",
         *selected],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TESTS_S, check=False,
    )  # fmt: skip
    return {"exit_status": done.returncode, "output": done.stdout.splitlines()[-60:]}


def _measure_link(device: torch.device, nbytes: int) -> Link:
    synchronize = synchronizer(device)
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    first, second = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    up = seconds_of(lambda: first.copy_(host, non_blocking=True), synchronize)
    within = seconds_of(lambda: second.copy_(first), synchronize)
    return Link(nbytes / up, nbytes / within)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
