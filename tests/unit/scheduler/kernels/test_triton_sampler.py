"""The Triton sampler against torch's, in Triton's interpreter, which runs it on the CPU; and compiled for a
device.

Triton decides when it is imported whether it interprets, hence a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support.recorded_graphs import RecordingDevice

from caesura.scheduler import kernels
from caesura.scheduler.execution import sampler as sampler_module
from caesura.scheduler.execution.forward import SamplingBatch
from caesura.scheduler.execution.logit_edits import SpecialSampler
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput
from caesura.scheduler.kernels import native

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETS, reason="run by test_the_kernels_in_the_interpreter")
installed = pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
# Infinities and NaN are as good as other numbers to a device; NumPy, which the interpreter computes with,
# warns.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
LARGEST_UNIFORM = float(np.nextafter(1.0, 0.0))
RESULTS = ("logprobs", "raw_logprobs", "sampled_logprobs")

if INTERPRETS:
    from caesura.scheduler.kernels import triton_sampler


@installed
@pytest.mark.skipif(INTERPRETS, reason="this is the interpreter")
def test_the_kernels_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def in_triton(monkeypatch):
    def make(vocab_size: int, rows: int, dtype: torch.dtype) -> Sampler:
        with monkeypatch.context() as patch:
            patch.setattr(sampler_module, "best", lambda *of: kernels.TRITON)
            made = Sampler(vocab_size, rows, "cpu", dtype)
        assert made._triton is not None
        return made

    return make


def batch_of(rows: int, vocab_size: int, **given: object) -> SamplingBatch:
    defaults = {
        "temperature": 1.0,
        "greedy": False,
        "top_k": vocab_size,
        "top_p": 1.0,
        "min_p": 0.0,
        "uniforms": 0.5,
    }
    dtypes = [torch.float32, torch.bool, torch.int64, torch.float32, torch.float32, torch.float64]
    columns = {
        name: torch.as_tensor(np.broadcast_to(np.asarray(given.get(name, value)), (rows,)).copy()).to(dtype)
        for (name, value), dtype in zip(defaults.items(), dtypes, strict=True)
    }
    columns["temperature"] = torch.where(columns["greedy"], 1.0, columns["temperature"])
    return SamplingBatch(**columns, any_sampled=True, any_filtered=True, want_raw=True, want_sampled=True)


def by_torch(logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
    with native.limited_to("torch"):
        return Sampler(logits.shape[1], len(logits), "cpu", logits.dtype).sample(logits, batch)


def assert_same(found: SamplerOutput, expected: SamplerOutput) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    for name in RESULTS:
        mine, theirs = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-6, equal_nan=True)


@interpreted
@pytest.mark.parametrize(
    "vocab_size,dtype",
    [(1, torch.float32), (257, torch.float16), (257, torch.float32), (5000, torch.bfloat16)],
)
def test_random_rows(in_triton, vocab_size, dtype):
    rng, rows = np.random.default_rng(vocab_size), 7
    logits = (torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    kind = np.arange(rows) % 7
    batch = batch_of(
        rows,
        vocab_size,
        temperature=np.where(kind % 2, 1.0, rng.uniform(0.3, 2, rows)),
        greedy=kind == 0,
        uniforms=rng.random(rows),
        top_k=np.where(
            (kind == 3) | (kind == 6), np.minimum(rng.integers(1, 200, rows), vocab_size), vocab_size
        ),
        top_p=np.where((kind == 4) | (kind == 6), rng.uniform(0.1, 1, rows), 1.0),
        min_p=np.where((kind == 5) | (kind == 6), rng.uniform(0, 0.5, rows), 0.0),
    )
    assert_same(in_triton(vocab_size, 4, dtype).sample(logits, batch), by_torch(logits, batch))


@interpreted
def test_equal_logits(in_triton):
    rng, rows, vocab_size = np.random.default_rng(3), 8, 300
    logits = torch.as_tensor(rng.integers(-2, 3, (rows, vocab_size))).float()
    logits[0] = 0.0
    logits[1] = torch.where(torch.arange(vocab_size) % 2 == 0, 0.0, -0.0)
    batch = batch_of(
        rows,
        vocab_size,
        uniforms=rng.random(rows),
        top_k=np.where(np.arange(rows) % 2, rng.integers(1, 250, rows), vocab_size),
        top_p=np.where(np.arange(rows) % 3, rng.uniform(0.05, 0.99, rows), 1.0),
        min_p=np.where(np.arange(rows) % 4, 0.0, 0.3),
    )
    assert_same(in_triton(vocab_size, rows, torch.float32).sample(logits, batch), by_torch(logits, batch))


@interpreted
@pytest.mark.parametrize("capacity", [64, 4096])
def test_more_candidates_than_there_is_room_for(in_triton, monkeypatch, capacity):
    monkeypatch.setattr(triton_sampler, "_CANDIDATES", capacity)
    rng, rows, vocab_size = np.random.default_rng(4), 4, 5000
    logits = torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(2)) * 0.5
    batch = batch_of(
        rows,
        vocab_size,
        temperature=np.linspace(0.7, 3, rows),
        uniforms=rng.random(rows),
        top_k=np.where(np.arange(rows) % 2, 1500, vocab_size),
        top_p=np.where(np.arange(rows) == 1, 1.0, 0.95),
        min_p=np.where(np.arange(rows) == 2, 0.02, 0.0),
    )
    assert_same(in_triton(vocab_size, rows, torch.float32).sample(logits, batch), by_torch(logits, batch))


FILTERS = [{}, {"greedy": True}, {"top_k": 5}, {"top_k": 650}, {"top_p": 0.9}, {"min_p": 0.01}]


@interpreted
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_rows_that_are_not_finite_and_rows_that_are_masked(in_triton, parameters):
    logits = torch.randn((8, 700), generator=torch.Generator().manual_seed(5))
    logits[0, 3] = torch.nan
    logits[2, 699] = torch.inf
    logits[3] = -torch.inf
    logits[4, :690] = -torch.inf
    logits[5, 1:] = -torch.inf
    logits[6, 9] = 3e38  # overflows at half the temperature
    temperature = [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0]
    batch = batch_of(8, 700, temperature=temperature, uniforms=0.7, **parameters)
    found = in_triton(700, 8, torch.float32).sample(logits, batch)
    assert_same(found, by_torch(logits, batch))
    assert found.token_ids[[0, 2, 3]].tolist() == [-1, -1, -1]
    assert (int(found.token_ids[6]) == -1) is not bool(parameters.get("greedy"))
    assert bool(found.logprobs[0].isnan())


@interpreted
@pytest.mark.parametrize("parameters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_the_ends_of_the_noise_give_tokens_of_some_probability(in_triton, parameters):
    logits = torch.full((4, 600), -200.0)
    logits[:, 300] = 0.0
    logits[:, 301] = -1.0
    logits[2:, :300] = -torch.inf
    batch = batch_of(4, 600, uniforms=[0.0, LARGEST_UNIFORM, 0.0, LARGEST_UNIFORM], **parameters)
    found = in_triton(600, 4, torch.float32).sample(logits, batch)
    assert found.token_ids.tolist() == [300, 301, 300, 301]


@interpreted
def test_a_raw_logprob_survives_underflow(in_triton):
    batch = batch_of(1, 2, temperature=1000.0, uniforms=0.99)
    found = in_triton(2, 1, torch.float32).sample(torch.tensor([[0.0, -300.0]]), batch)
    assert found.token_ids.tolist() == [1]
    assert found.raw_logprobs.tolist() == [-300.0]


@interpreted
def test_a_row_does_not_depend_on_its_neighbours(in_triton):
    rng, rows, vocab_size = np.random.default_rng(6), 4, 700
    logits = torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(7)) * 2
    given = {
        "uniforms": rng.random(rows),
        "top_k": [700, 30, 700, 9],
        "top_p": [1.0, 1.0, 0.8, 0.5],
    }
    sampler = in_triton(vocab_size, rows, torch.float32)
    together = sampler.sample(logits, batch_of(rows, vocab_size, **given))
    for row in range(rows):
        alone = {name: values[row] for name, values in given.items()}
        found = sampler.sample(logits[row : row + 1], batch_of(1, vocab_size, **alone))
        for name in ("token_ids", *RESULTS):
            assert torch.equal(getattr(found, name)[0], getattr(together, name)[row]), name


@interpreted
def test_only_requested_outputs_are_returned(in_triton):
    batch = batch_of(2, 10)
    batch.want_raw = batch.want_sampled = False
    batch.min_p = None
    sampler = in_triton(10, 2, torch.float32)
    found = sampler.sample(torch.zeros(2, 10), batch)
    assert found.raw_logprobs is found.sampled_logprobs is None
    assert (found.token_ids.dtype, found.logprobs.dtype) == (torch.int64, torch.float32)
    assert found.token_ids.tolist() == [5, 5]
    assert sampler.graph_serves(batch_of(2, 10)), "filters and raw logprobs included"


@torch.library.custom_op("caesura_tests::sample", mutates_args=["outputs"])
def sample_op(
    owner: int, logits: torch.Tensor, columns: list[torch.Tensor], outputs: list[torch.Tensor]
) -> None:
    names = ("temperature", "greedy", "top_k", "top_p", "uniforms", "min_p")
    batch = batch_of(0, logits.shape[1])
    for name, column in zip(names, columns, strict=True):
        setattr(batch, name, column)
    SAMPLERS[owner](logits, batch, *outputs)


SAMPLERS: list[Callable[..., None]] = []


@interpreted
def test_one_graph_serves_every_way_of_sampling(in_triton):
    rows, vocab_size = 3, 700
    sampler = in_triton(vocab_size, rows, torch.float32)
    SAMPLERS.append(sampler._triton.sample)
    owner = len(SAMPLERS) - 1
    sampler._triton.sample = lambda logits, b, *outputs: torch.ops.caesura_tests.sample(
        owner, logits, [b.temperature, b.greedy, b.top_k, b.top_p, b.uniforms, b.min_p], list(outputs)
    )
    logits = torch.zeros((rows, vocab_size))
    static = batch_of(rows, vocab_size, greedy=True)
    static.want_raw = static.want_sampled = static.any_filtered = static.any_sampled = False
    device = RecordingDevice()
    pool, graph = device.graph_pool_handle(), device.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    out = sampler.sample(logits, sampler.for_graph(static))
    graph.capture_end()
    rng, generator = np.random.default_rng(8), torch.Generator().manual_seed(8)
    for given in (
        {},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": [0.0, 0.1, 0.3]},
        {"greedy": True},
    ):
        batch = batch_of(rows, vocab_size, temperature=0.8, uniforms=rng.random(rows), **given)
        logits.copy_(torch.randn((rows, vocab_size), generator=generator) * 2)
        for name in ("temperature", "greedy", "top_k", "top_p", "uniforms", "min_p"):
            getattr(static, name).copy_(getattr(batch, name))
        with torch.inference_mode():
            graph.replay()
        assert_same(out, by_torch(logits, batch))


@interpreted
def test_the_warm_up_compiles_kernels_for_special_rows(in_triton, monkeypatch):
    ordinary = in_triton(50, 2, torch.bfloat16)
    special, compiled = SpecialSampler(ordinary, 50, torch.device("cpu")), []
    kernels_sample = triton_sampler.TritonSampler.sample

    def watched(self: object, logits: torch.Tensor, *rest: object) -> None:
        compiled.append((logits.dtype, tuple(logits.shape)))
        kernels_sample(self, logits, *rest)

    monkeypatch.setattr(triton_sampler.TritonSampler, "sample", watched)
    monkeypatch.setattr(sampler_module, "best", lambda *of: kernels.TRITON)
    special.warm_up(batch_of(1, 50))
    assert compiled == [(torch.float32, (1, 50))]
    assert special.exact is None
    monkeypatch.setattr(sampler_module, "best", lambda *of: kernels.TORCH)
    SpecialSampler(Sampler(50, 2, "cpu", torch.bfloat16), 50, torch.device("cpu")).warm_up(batch_of(1, 50))
    assert len(compiled) == 1, "torch compiles nothing"


@interpreted
def test_torch_samples_a_vocabulary_that_is_too_large(monkeypatch):
    monkeypatch.setattr(triton_sampler, "LARGEST_VOCABULARY", 9)
    monkeypatch.setattr(sampler_module, "best", lambda *of: kernels.TRITON)
    sampler = Sampler(10, 2, "cpu", torch.float32)
    assert sampler._triton is None
    assert sampler.sample(torch.zeros(2, 10), batch_of(2, 10)).token_ids.tolist() == [5, 5]
    assert not sampler.graph_serves(batch_of(2, 10))


ON_A_DEVICE = """
import inspect, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from caesura.scheduler.kernels import triton_sampler as kernels
POINTERS = {
    "greedy": "i1", "uniforms": "fp64", "top_k": "i64",
    "candidate_indices": "i32", "listed": "i32", "token_ids": "i64",
}
NUMBERS = ("row_stride", "vocab_size", "blocks")
SIZES = {
    "num_blocks": 1024, "capacity": kernels._CANDIDATES,
    "group": kernels._GROUP, "width": kernels._BLOCK, "tile": kernels._TILE,
}
for function, options in ((kernels._measure, {}), (kernels._draw, {"num_warps": kernels._WARPS})):
    names = inspect.signature(function.fn).parameters
    signature = {name: "*" + POINTERS.get(name, "fp32") for name in names}
    signature |= {name: "i32" for name in NUMBERS} | {name: "constexpr" for name in SIZES if name in names}
    signature["logits"] = "*bf16"
    constexprs = {name: SIZES[name] for name in SIZES if name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(function.fn.__name__, len(compiled.asm["cubin"]) > 0, compiled.metadata.shared < 100_000)
"""


@installed
@pytest.mark.skipif(INTERPRETS, reason="nothing is compiled in the interpreter")
def test_the_kernels_compile_for_a_device(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ON_A_DEVICE],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_measure", "True", "True", "_draw", "True", "True"]
