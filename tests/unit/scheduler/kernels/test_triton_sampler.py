"""The Triton sampler against torch's, in Triton's interpreter, which runs it on the CPU."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from support.forward_batches import sampling_rows
from support.interpreted_triton import INTERPRETS, interpreted
from support.recorded_graphs import RecordingDevice

from caesura.scheduler import kernels
from caesura.scheduler.execution import sampler as sampler_module
from caesura.scheduler.execution.forward import SamplingBatch
from caesura.scheduler.execution.logit_edits import SpecialSampler
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput

# Infinities and NaN are as good as other numbers to a device; NumPy, which the interpreter computes with,
# warns.
pytestmark = [pytest.mark.long, interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
LARGEST_UNIFORM = float(np.nextafter(1.0, 0.0))
RESULTS = ("logprobs", "raw_logprobs", "sampled_logprobs")

if INTERPRETS:
    from caesura.scheduler.kernels import triton_sampler


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "best", lambda *of: kernels.TRITON)


def in_triton(vocab_size: int, rows: int, dtype: torch.dtype) -> Sampler:
    made = Sampler(vocab_size, rows, "cpu", dtype)
    assert made._triton is not None
    return made


batch_of = partial(sampling_rows, min_p=0.0, any_sampled=True, any_filtered=True)


def by_torch(logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
    sampler = Sampler(logits.shape[1], len(logits), "cpu", logits.dtype, in_torch=True)
    return sampler.sample(logits, batch)


def assert_same(found: SamplerOutput, expected: SamplerOutput) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    for name in RESULTS:
        mine, theirs = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize(
    "vocab_size,dtype",
    [(1, torch.float32), (257, torch.float16), (257, torch.float32), (5000, torch.bfloat16)],
)
def test_random_rows(vocab_size, dtype):
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


def test_given_tokens():
    rows, vocab_size = 6, 257
    logits = torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(2)) * 3
    options = {
        "temperature": 1.3,
        "top_k": [9, 257] * 3,
        "greedy": [True] + [False] * 5,
        "uniforms": np.linspace(0, 0.9, 6),
    }
    batch = batch_of(rows, vocab_size, given=[-1, 7, -1, 200, -1, 0], **options)
    found = in_triton(vocab_size, 4, torch.float32).sample(logits, batch)
    assert found.token_ids[1::2].tolist() == [7, 200, 0]
    assert_same(found, by_torch(logits, batch))


def test_equal_logits():
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


@pytest.mark.parametrize("spread", [0.5, 1.2])
def test_more_candidates_than_there_is_room_for(spread):
    rng, rows, vocab_size = np.random.default_rng(4), 4, 20_000
    logits = torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(2)) * spread
    batch = batch_of(
        rows,
        vocab_size,
        temperature=np.linspace(0.7, 3, rows),
        uniforms=rng.random(rows),
        top_k=np.where(np.arange(rows) % 2, 9000, vocab_size),
        top_p=np.where(np.arange(rows) == 1, 1.0, 0.95),
        min_p=np.where(np.arange(rows) == 2, 0.02, 0.0),
    )
    assert_same(in_triton(vocab_size, rows, torch.float32).sample(logits, batch), by_torch(logits, batch))


FILTERS = [{}, {"greedy": True}, {"top_k": 5}, {"top_k": 650}, {"top_p": 0.9}, {"min_p": 0.01}]


@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_rows_that_are_not_finite_and_rows_that_are_masked(parameters):
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


@pytest.mark.parametrize("parameters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_the_ends_of_the_noise_give_tokens_of_some_probability(parameters):
    logits = torch.full((4, 600), -200.0)
    logits[:, 300] = 0.0
    logits[:, 301] = -1.0
    logits[2:, :300] = -torch.inf
    batch = batch_of(4, 600, uniforms=[0.0, LARGEST_UNIFORM, 0.0, LARGEST_UNIFORM], **parameters)
    found = in_triton(600, 4, torch.float32).sample(logits, batch)
    assert found.token_ids.tolist() == [300, 301, 300, 301]


def test_a_raw_logprob_survives_underflow():
    batch = batch_of(1, 2, temperature=1000.0, uniforms=0.99)
    found = in_triton(2, 1, torch.float32).sample(torch.tensor([[0.0, -300.0]]), batch)
    assert found.token_ids.tolist() == [1]
    assert found.raw_logprobs.tolist() == [-300.0]


def test_a_row_does_not_depend_on_its_neighbours():
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


def test_only_requested_outputs_are_returned():
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


def test_one_graph_serves_every_way_of_sampling():
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


def test_the_warm_up_compiles_kernels_for_special_rows(monkeypatch):
    special, compiled = SpecialSampler(in_triton(50, 2, torch.bfloat16), 50, torch.device("cpu")), []
    kernels_sample = triton_sampler.TritonSampler.sample

    def watched(self: object, logits: torch.Tensor, *rest: object) -> None:
        compiled.append((logits.dtype, tuple(logits.shape)))
        kernels_sample(self, logits, *rest)

    monkeypatch.setattr(triton_sampler.TritonSampler, "sample", watched)
    special.warm_up(batch_of(1, 50))
    assert compiled == [(torch.float32, (1, 50))]
    assert special.exact is None
    by_torch = Sampler(50, 2, "cpu", torch.bfloat16, in_torch=True)
    SpecialSampler(by_torch, 50, torch.device("cpu")).warm_up(batch_of(1, 50))
    assert len(compiled) == 1, "torch compiles nothing"


def test_torch_samples_a_vocabulary_that_is_too_large():
    size = triton_sampler.LARGEST_VOCABULARY + 1
    sampler = Sampler(size, 2, "cpu", torch.float32)
    assert sampler._triton is None
    assert sampler.sample(torch.zeros(2, size), batch_of(2, size)).token_ids.tolist() == [size // 2] * 2
    assert not sampler.graph_serves(batch_of(2, size))
