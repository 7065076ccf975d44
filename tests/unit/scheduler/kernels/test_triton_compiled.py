"""The kernels of ``triton_*.py``, compiled for sm_90 as published models launch them, or interpreted."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.compiled_triton import compiling
from support.interpreted_triton import compiled

pytestmark = [pytest.mark.long, compiled]
HERE = Path(__file__).parent

BF16 = torch.bfloat16


@pytest.mark.timeout(900)  # a whole file, by an interpreter
@pytest.mark.parametrize(
    "file", ["test_triton_layers", "test_triton_sampler", "../attention/test_triton_decode"]
)
def test_the_kernels_in_the_interpreter(file):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / f"{file}.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def norms() -> None:
    from caesura.scheduler.kernels.triton_elementwise import rms_norm

    for size in (1024, 7168, 16384):
        rms_norm(zeros(2, size), zeros(size), 1e-6, residual=zeros(2, size))
    rms_norm(zeros(2, 3000)[:, :1536], zeros(1536), 1e-6)


def gates() -> None:
    from caesura.scheduler.kernels.triton_elementwise import gate_mul

    for bend in ("silu", "gelu_tanh", "clamped"):
        gate_mul(zeros(3, 2 * 18944), bend=bend)


def rotations() -> None:
    from caesura.scheduler.kernels.attention_form import HeadNorms
    from caesura.scheduler.kernels.triton_elementwise import rope_store

    for heads, kv_heads, size, norm in [
        (32, 8, 128, True), (28, 4, 128, False), (14, 2, 64, False), (16, 2, 256, True), (32, 32, 96, False)
    ]:  # fmt: skip
        qkv, angle = zeros(5, heads + 2 * kv_heads, size), zeros(5, 1, size // 2)
        weights = HeadNorms(zeros(size), zeros(size), 1e-6) if norm else None
        keys, slots = zeros(9, kv_heads, 16, size), zeros(5, dtype=torch.int64)
        rope_store(qkv, heads, angle, angle, slots, keys, keys, out=qkv[:, :heads], norm=weights)


def latents() -> None:
    from caesura.scheduler.kernels.triton_elementwise import store_latents

    for tokens, heads in ((3, 16), (100, 128)):
        q, angle, pool = zeros(tokens, heads, 192), zeros(tokens, 1, 32), zeros(9, 16, 576)
        w_kc, slots = zeros(heads, 128, 512), zeros(tokens, dtype=torch.int64)
        kv, norm = zeros(tokens, 2112)[:, 1536:], (zeros(512), 1e-6)
        store_latents(q, w_kc, kv, angle, angle, norm, pool, slots, interleaved=True)


def choices() -> None:
    from caesura.scheduler.kernels.decoder_layers import GroupRouting
    from caesura.scheduler.kernels.triton_experts import route

    record = zeros(3, 48, 8, dtype=torch.uint8)
    route(zeros(3, 128), 8, normalize=True, record=record[:, 7])
    route(zeros(3, 512), 10, normalize=True)
    for sigmoid, experts in ((True, 256), (False, 160)):
        by = GroupRouting(groups=8, top_groups=4, sigmoid=sigmoid, best_two=sigmoid, scale=2.5)
        bias = zeros(experts, dtype=torch.float32) if sigmoid else None
        logits = zeros(3, experts, dtype=torch.float32)
        route(logits, 8, normalize=True, by=by, bias=bias, record=record[:, 0])


def sums() -> None:
    from caesura.scheduler.kernels.triton_experts import combine

    for hidden, top_k in ((2048, 8), (7168, 6)):
        ids, weights = zeros(3, top_k, dtype=torch.int32), zeros(3, top_k, dtype=torch.float32)
        combine(zeros(3 * top_k, hidden), ids, range(128), weights, zeros(3, hidden))
        combine(zeros(3 * top_k, hidden), ids.long(), range(64), weights, None, ids.long())


def products() -> None:
    from caesura.scheduler.kernels.triton_experts import product

    fp8, floats = torch.float8_e4m3fn, torch.float32
    for tokens in (3, 1000):
        for hidden, width, count, top_k, scaled in (
            (2048, 768, 128, 8, False), (2880, 2880, 32, 4, False), (7168, 2048, 64, 8, True)
        ):  # fmt: skip
            ids, dtype = zeros(tokens, top_k, dtype=torch.int32), fp8 if scaled else BF16
            x, gated = zeros(tokens, hidden), zeros(tokens * top_k, width)
            for rows, outputs, inputs, bend in ((x, 2 * width, hidden, "silu"), (gated, hidden, width, None)):
                weight = zeros(count, outputs, inputs, dtype=dtype)
                scales = zeros(count, outputs // 128, inputs // 128, dtype=floats) if scaled else None
                bias = zeros(count, outputs) if top_k == 4 else None
                product(rows, ids, range(count), weight, scales, bias, bend=bend)


def fp8_rows() -> None:
    from caesura.scheduler.kernels.triton_fp8 import quantize, rms_norm, spread

    for hidden in (2048, 7168):
        quantize(zeros(3, hidden), 4, columns_contiguous=True)
        quantize(zeros(3, 2 * hidden), 4, bend="silu")
        rms_norm(zeros(3, hidden), zeros(hidden), 1e-6, 4, residual=zeros(3, hidden), columns_contiguous=True)
        spread(zeros(3, hidden), zeros(128, dtype=torch.int32), 128, 512)


@pytest.mark.parametrize("launch", [norms, gates, rotations, latents, choices, sums, products, fp8_rows])
def test_kernel_compiles_for_hopper_within_its_registers(launch, tmp_path):
    with compiling(tmp_path) as found:
        launch()
    assert found
    for kernel in found:
        usage = kernel.usage
        assert (usage["STACK"], usage["LOCAL"]) == (0, 0), f"{kernel.name} spills: {usage}"
    assert any("v4.b32" in kernel.ptx for kernel in found) or launch is choices, "16 bytes are read at a time"


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_the_sampler_compiles_for_hopper(dtype, tmp_path):
    from caesura.scheduler.kernels.triton_sampler import LARGEST_VOCABULARY, TritonSampler

    sampler = TritonSampler(LARGEST_VOCABULARY, 2, torch.device("meta"))
    floats = zeros(2, dtype=torch.float32)
    batch = SimpleNamespace(
        temperature=floats, greedy=zeros(2, dtype=torch.bool), top_k=zeros(2, dtype=torch.int64),
        top_p=floats, uniforms=zeros(2, dtype=torch.float64), min_p=None,
    )  # fmt: skip
    token_ids = zeros(2, dtype=torch.int64)
    with compiling(tmp_path) as found:
        sampler.sample(zeros(2, LARGEST_VOCABULARY, dtype=dtype), batch, token_ids, floats, floats, floats)
    assert [kernel.name for kernel in found] == ["_measure", "_draw"]
    assert all(len(kernel.cubin) > 0 and kernel.shared < 100_000 for kernel in found)


def launches(tokens: int) -> None:
    from caesura.scheduler.kernels import triton_elementwise, triton_experts, triton_fp8

    angles = triton_elementwise.angles(
        zeros(tokens, dtype=torch.int64), zeros(32, dtype=torch.float32), 1.0, BF16
    )
    triton_elementwise.rms_norm(zeros(tokens, 64), zeros(64), 1e-6, residual=zeros(tokens, 64))
    triton_elementwise.gate_mul(zeros(tokens, 64))
    qkv, keys, slots = zeros(tokens, 4, 64), zeros(9, 1, 16, 64), zeros(tokens, dtype=torch.int64)
    triton_elementwise.rope_store(qkv, 2, *angles, slots, keys, keys, out=qkv[:, :2])
    down, norm, q = zeros(tokens, 256), (zeros(32), 1e-6), zeros(tokens, 2, 80)
    queries = triton_elementwise.store_latents(
        q, zeros(2, 16, 32), down[:, -96:], *angles, norm, zeros(9, 16, 96), slots, interleaved=True
    )
    record = zeros(tokens, 3, 2, dtype=torch.uint8)[:, 1]
    ids, weights = triton_experts.route(zeros(tokens, 8), 2, normalize=True, record=record)
    rows = triton_experts.product(zeros(tokens, 256), ids, range(80), zeros(80, 96, 256))
    triton_experts.combine(rows, ids, range(80), weights, queries[:, 0])
    triton_fp8.quantize(zeros(tokens, 256), tokens + 3)
    triton_fp8.rms_norm(zeros(tokens, 256), zeros(256), 1e-6, tokens + 3, residual=zeros(tokens, 256))
    triton_fp8.spread(zeros(tokens, 256), zeros(8, dtype=torch.int32), 4, tokens + 24)


def test_no_number_of_tokens_has_a_variant_of_its_own(tmp_path):
    """Or a kernel would be compiled in the middle of serving."""
    with compiling(tmp_path) as found:
        for tokens in (1, 2, 16, 17, 700):
            launches(tokens)
    variants = {(kernel.name, kernel.cubin) for kernel in found}
    assert len(variants) == len({kernel.name for kernel in found}) == len(found) / 5


class Kernel:
    """Stands for what ``triton.jit`` makes, of two tensors and two numbers."""

    def __init__(self) -> None:
        specialized = SimpleNamespace(do_not_specialize=False, do_not_specialize_on_alignment=False)
        self.params = [specialized] * 3 + [SimpleNamespace(do_not_specialize=True)]
        self.calls: list[tuple[Any, ...]] = []
        self.variant_calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.calls.append((grid, *args, options))
            return Variant(self.variant_calls)

        return launch


class Variant:
    """Stands for what it compiles to."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *args: self.calls.append((grid, *args))


def test_triton_looks_at_arguments_once_for_each_kind_of_launch():
    from caesura.scheduler.kernels.triton_launch import Launcher

    kernel = Kernel()
    launch = Launcher(kernel, tensors=2, numbers=2)
    x, y = torch.zeros(64, dtype=BF16), torch.zeros(64)
    launch((1, 1, 1), (x, y), (8, 5), (16, True), 4)
    assert kernel.calls == [((1, 1, 1), x, y, 8, 5, 16, True, {"num_warps": 4})]
    for grid, number in (((2, 1, 1), 5), ((3, 1, 1), 1)):  # another number of tokens
        launch(grid, (x, y), (8, number), (16, True), 4)
    assert len(kernel.calls) == 1
    assert kernel.variant_calls == [((2, 1, 1), x, y, 8, 5, 16, True), ((3, 1, 1), x, y, 8, 1, 16, True)]
    launch((1, 1, 1), (x, x), (8, 5), (16, True), 4)  # another dtype
    launch((1, 1, 1), (x, y), (9, 5), (16, True), 4)  # another stride
    launch((1, 1, 1), (x, y), (8, 5), (32, True), 4)
    for _ in range(2):
        launch((1, 1, 1), (x[1:], y), (8, 5), (16, True), 4)  # an address that is no multiple of 16
    assert (len(kernel.calls), len(kernel.variant_calls)) == (6, 2)
