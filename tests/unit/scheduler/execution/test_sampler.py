"""The sampler, compiled and in torch, against exact distributions and float64."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.forward_batches import sampling_rows
from support.kernels import threads
from support.lanes import quick
from support.properties import examples

from caesura.scheduler.execution import sampler as sampler_module
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput, noise, noise_stream
from caesura.scheduler.kernels import native

DRAWS = 20_000
LARGEST_UNIFORM = float(np.nextafter(1.0, 0.0))


WAYS = [*native.ISAS[1:], pytest.param("torch", marks=pytest.mark.long), "torch that reads no values"]
"""The last one is that of accelerators, of which the one before is a part."""


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def implementation(request):
    compiled = request.param in native.ISAS
    with (
        pytest.MonkeyPatch.context() as patch,
        native.limited_to(request.param if compiled else "torch") as possible,
    ):
        if compiled and not possible:
            pytest.skip(f"no {request.param} here: {native.why_not() or 'the processor lacks it'}")
        if request.param == "torch that reads no values":
            patch.setattr(sampler_module, "reading_is_free", lambda device: False)
        yield


def uniforms(count: int, seed: int = 1) -> np.ndarray:
    return noise(noise_stream(np.full(count, seed), 0), np.arange(count))


def sample(logits: torch.Tensor, max_rows: int = 64, **parameters) -> SamplerOutput:
    rows, vocab_size = logits.shape
    sampler = Sampler(vocab_size, max_rows, "cpu", logits.dtype)
    return sampler.sample(logits, sampling_rows(rows, vocab_size, **parameters))


@dataclass
class Exact:
    """The definition, in float64 and one row at a time."""

    full: np.ndarray
    """Softmax after temperature."""
    kept: np.ndarray
    """Filtered and renormalised."""

    @classmethod
    def of(cls, logits: torch.Tensor, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0) -> "Exact":
        scaled = logits.double().numpy() / np.float64(np.float32(temperature))
        full = np.exp(scaled - scaled.max())
        full /= full.sum()
        order = np.argsort(-scaled, kind="stable")[:top_k]
        renormalised = full[order] / full[order].sum()
        before = np.concatenate([[0.0], renormalised.cumsum()[:-1]])
        likely = full[order] >= np.float64(np.float32(min_p)) * full.max()
        order = order[(before < np.float64(np.float32(top_p))) & likely | (np.arange(len(order)) == 0)]
        kept = np.zeros_like(full)
        kept[order] = full[order] / full[order].sum()
        return cls(full, kept)


def chi_square_p(tokens: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    order = np.argsort(-expected)
    mean = expected[order] * len(tokens)
    pool = np.minimum(np.arange(len(mean)), np.cumsum(mean >= 10)[-1])
    observed, mean = np.bincount(pool, counts[order]), np.bincount(pool, mean)
    positive = mean > 0
    if positive.sum() == 1:
        return 1.0
    return float(stats.chisquare(observed[positive], mean[positive] * observed.sum() / mean.sum()).pvalue)


DISTRIBUTIONS = [
    (700, torch.bfloat16, {"temperature": 1.3, "top_k": 90, "top_p": 0.9}),
    (700, torch.float32, {"top_k": 5, "top_p": 0.99, "min_p": 0.001}),
    (700, torch.bfloat16, {"temperature": 1.6, "min_p": 0.3}),
    (257, torch.float32, {"temperature": 4.0}),  # a block of one
    (1, torch.float32, {"top_p": 0.5}),
    (20_011, torch.bfloat16, {}),
    (500, torch.float32, {}),
    (500, torch.bfloat16, {"temperature": 0.7}),
    (1000, torch.float32, {"temperature": 1.7, "top_k": 40}),
    (1000, torch.float32, {"top_p": 0.8}),
    (2000, torch.float32, {"temperature": 5.0, "top_p": 0.999}),  # a full sort
    (700, torch.float32, {"min_p": 0.05}),
    (700, torch.bfloat16, {"min_p": 0.0005}),
    (700, torch.float32, {"min_p": 1.0}),
    (700, torch.float32, {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02}),
    (700, torch.bfloat16, {"top_k": 30, "min_p": 0.1}),
    (7, torch.float32, {}),  # less than a block
    (1, torch.float32, {}),
]


@pytest.mark.parametrize(("vocab_size", "dtype", "parameters"), quick(DISTRIBUTIONS, 6), ids=str)
def test_draws_follow_the_exact_distribution(vocab_size, dtype, parameters):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(vocab_size, generator=generator) * 2).to(dtype)
    expected = Exact.of(logits, **parameters).kept
    parameters = parameters | {"want_raw": False, "want_sampled": False}
    tokens = sample(logits.expand(DRAWS, -1), 512, uniforms=uniforms(DRAWS), **parameters).token_ids.numpy()
    assert chi_square_p(tokens, expected) > 1e-3


@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("vocab_size", quick([1, 300, 151_936, 4096], 3))
def test_logprobs_match_float64(vocab_size, dtype):
    generator = torch.Generator().manual_seed(3)
    rows = 12
    logits = (torch.randn(rows, vocab_size, generator=generator) * 8).to(dtype)
    temperature = np.linspace(0.3, 3.0, rows)
    greedy = np.arange(rows) % 3 == 0
    top_k = np.where(np.arange(rows) % 4 == 1, min(20, vocab_size), vocab_size)
    top_p = np.where(np.arange(rows) % 4 == 2, 0.6, 1.0)
    u = uniforms(rows)
    out = sample(logits, temperature=temperature, greedy=greedy, top_k=top_k, top_p=top_p, uniforms=u)
    for row in range(rows):
        t, token = 1.0 if greedy[row] else temperature[row], int(out.token_ids[row])
        exact = Exact.of(logits[row], t, top_k[row], top_p[row])
        raw = torch.log_softmax(logits[row].double(), 0)
        scaled = torch.log_softmax(logits[row].double() / np.float64(np.float32(t)), 0)
        assert float(out.logprobs[row]) == pytest.approx(float(scaled[token]), abs=1e-5)
        assert float(out.raw_logprobs[row]) == pytest.approx(float(raw[token]), abs=1e-5)
        sampled = 0.0 if greedy[row] else np.log(exact.kept[token])
        assert float(out.sampled_logprobs[row]) == pytest.approx(sampled, abs=1e-5)
        if greedy[row]:
            assert token == int(logits[row].float().argmax())


def test_raw_logprob_survives_underflow():
    logits = torch.tensor([[0.0, -300.0]])
    out = sample(logits, temperature=1000.0, uniforms=0.99)
    assert out.token_ids.tolist() == [1]
    assert out.raw_logprobs.tolist() == [-300.0]


def test_optional_outputs_are_absent_unless_wanted():
    out = sample(torch.zeros(2, 10), want_raw=False, want_sampled=False)
    assert out.raw_logprobs is None
    assert out.sampled_logprobs is None
    assert (out.token_ids.dtype, out.logprobs.dtype) == (torch.int64, torch.float32)


def test_greedy_takes_the_lowest_index_of_equals():
    logits = torch.zeros(3, 1000)
    logits[0, [300, 700]] = 1.0
    logits[1, [511, 512]] = 1.0
    assert sample(logits, greedy=True).token_ids.tolist() == [300, 511, 0]
    # 1e-10 apart: different logits whose probabilities are the same float
    close = torch.tensor([[1e-3, 1e-3 + 2e-10]])
    assert close[0, 0] != close[0, 1]
    assert sample(close, greedy=True).token_ids.tolist() == [1]


def kept_set(logits: torch.Tensor, points: int, **parameters) -> set[int]:
    u = (np.arange(points) + 0.5) / points
    return set(sample(logits.expand(points, -1), uniforms=u, **parameters).token_ids.tolist())


def test_top_p_keeps_the_shortest_prefix_that_reaches_it():
    logits = torch.log(torch.tensor([0.25, 0.125, 0.5, 0.125]))
    kept = [kept_set(logits, 64, top_p=top_p) for top_p in (1e-6, 0.4, 0.5, 0.51, 0.75, 0.76, 1.0)]
    assert kept == [{2}, {2}, {2}, {2, 0}, {2, 0}, {2, 0, 1}, {0, 1, 2, 3}]


def test_top_k_breaks_ties_by_index():
    sizes = [*product((50, 64, 65, 300, 3000), (1, 7, 49)), *product((65, 300, 40_000), (64,))]
    for vocab_size, top_k in (*sizes, *product((300, 3000, 40_000), (70,)), (3000, 1500)):
        logits = torch.zeros(vocab_size)
        logits[-3:] = 1.0
        better = [vocab_size - 3, vocab_size - 2, vocab_size - 1][:top_k]
        expected = {*better, *range(top_k - len(better))}
        assert kept_set(logits, 3 * top_k + 10, top_k=top_k) == expected, (vocab_size, top_k)


def test_top_p_ties_across_shortlists():
    logits = torch.zeros(3000)
    for kept in (10, 200, 2000):
        assert kept_set(logits, 3 * kept, top_p=(kept - 0.5) / 3000) == set(range(kept))


@settings(max_examples=examples(150))
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    top_k=st.integers(1, 40),
    top_p=st.sampled_from([0.1, 0.3, 0.5, 0.77, 0.95, 1.0]),
    min_p=st.sampled_from([None, 0.01, 0.2, 0.9]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_filters_match_the_definition(values, top_k, top_p, min_p, temperature):
    logits = torch.tensor(values, dtype=torch.float32)
    top_k = min(top_k, len(values))
    exact = Exact.of(logits, temperature, top_k, top_p, min_p or 0.0)
    points = 400
    u = (np.arange(points) + 0.5) / points
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    out = sample(logits.expand(points, -1), temperature=temperature, uniforms=u, **filters)
    tokens = out.token_ids.numpy()
    # An evenly spaced grid gives every token its share to within one point: an exact test of the whole
    # distribution.
    counts = np.bincount(tokens, minlength=len(values))
    assert np.abs(counts - exact.kept * points).max() <= 1.001
    np.testing.assert_allclose(out.sampled_logprobs.numpy(), np.log(exact.kept[tokens]), atol=1e-5)


@pytest.mark.parametrize("parameters", [{}, {"top_k": 200}, {"top_p": 0.999}, {"temperature": 0.01}])
def test_zero_probability_is_never_drawn(parameters):
    places = ([0], [999], [255, 256], [300, 700], [5, 6, 600])
    for possible, fill in product(places, (-torch.inf, -500.0)):
        logits = torch.full((4, 1000), fill)
        logits[:, possible] = torch.linspace(0.0, 1e-3, len(possible))
        out = sample(logits, uniforms=[0.0, 1e-300, LARGEST_UNIFORM, 0.5], **parameters)
        assert set(out.token_ids.tolist()) <= set(possible)
        np.testing.assert_allclose(out.logprobs, -np.log(len(possible)), atol=0.2)


def test_rounding_of_sums_does_not_push_the_draw_past_the_end():
    logits = torch.randn(500, 256, generator=torch.Generator().manual_seed(2))
    logits[:, 200:] = -torch.inf
    for parameters in ({}, {"top_p": 0.9999}, {"top_k": 205}):
        assert int(sample(logits, uniforms=LARGEST_UNIFORM, **parameters).token_ids.max()) < 200


def test_extreme_noise_reaches_both_ends():
    logits = torch.zeros(2, 1000)
    assert sample(logits, uniforms=[0.0, LARGEST_UNIFORM]).token_ids.tolist() == [0, 999]


@pytest.mark.parametrize("parameters", [{}, {"greedy": True}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_rows_that_are_not_finite(parameters):
    generator = torch.Generator().manual_seed(5)
    clean = torch.randn(6, 700, generator=generator)
    broken = clean.clone()
    broken[0, 3] = torch.nan
    broken[2, 699] = torch.inf
    broken[3] = -torch.inf
    broken[4, 0] = -torch.inf  # an ordinary mask: this row is fine
    clean[4, 0] = -torch.inf
    sampler = Sampler(700, 8, "cpu", torch.float32)
    batch = sampling_rows(6, 700, uniforms=uniforms(6), **parameters)
    expected, got = sampler.sample(clean, batch), sampler.sample(broken, batch)
    assert got.token_ids[[0, 2, 3]].tolist() == [-1, -1, -1]
    for values, reference in (
        (got.logprobs, expected.logprobs),
        (got.raw_logprobs, expected.raw_logprobs),
        (got.sampled_logprobs, expected.sampled_logprobs),
    ):
        assert values[[0, 2, 3]].isnan().all()
        assert torch.equal(values[[1, 4, 5]], reference[[1, 4, 5]])
    assert torch.equal(got.token_ids[[1, 4, 5]], expected.token_ids[[1, 4, 5]])
    # Nothing is left behind in the workspaces.
    again = sampler.sample(clean, batch)
    assert torch.equal(again.token_ids, expected.token_ids)
    assert torch.equal(again.logprobs, expected.logprobs)


@pytest.mark.parametrize("vocab_size", quick([33, 4097, 151_936], 2))
@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("filters", [[], ["top_k", "top_p"], ["top_k", "top_p", "min_p"]], ids=" ".join)
def test_a_row_does_not_depend_on_its_neighbours(vocab_size, dtype, filters):
    rows = 9
    logits = (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(11)) * 4).to(dtype)
    number = np.arange(rows)
    given = {
        "top_k": np.where(number % 3 == 1, min(20, vocab_size), vocab_size),
        "top_p": np.where(number % 5 == 2, 0.7, 1.0),
        "min_p": np.where(number % 3 == 2, 0.2, 0.0),
    }
    parameters = {name: given[name] for name in filters} | {
        "temperature": np.linspace(0.5, 2.0, rows), "greedy": number % 4 == 3, "uniforms": uniforms(rows)
    }  # fmt: skip

    def run(index: list[int], max_rows: int = 64) -> list[list]:
        options = {name: value[index] for name, value in parameters.items()}
        out = sample(logits[index], max_rows, **options)
        # As integers: equality of bits.
        floats = (out.logprobs, out.raw_logprobs, out.sampled_logprobs)
        return [out.token_ids.tolist(), *(f.view(torch.int32).tolist() for f in floats)]

    everything = number.tolist()
    together = run(everything)
    assert run(everything, 2) == together
    assert [column[::-1] for column in run(everything[::-1])] == together
    times = min(50_000 // vocab_size, 20)  # rows enough for every thread
    for count in (1, 2, 3) if times else ():
        with threads(count):
            assert run(everything * times) == [column * times for column in together]
    for row in everything:
        assert run([row]) == [[column[row]] for column in together]


@pytest.mark.parametrize("vocab_size", [33, 4097])
@pytest.mark.parametrize("dtype", native.FLOATS)
@pytest.mark.parametrize("filters", [[], ["top_k", "top_p", "min_p"]], ids=" ".join)
def test_a_given_token_has_the_numbers_of_a_drawn_one(vocab_size, dtype, filters):
    rows = 24
    logits = (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    number = np.arange(rows)
    values = {
        "top_k": np.where(number % 3 == 1, 20, vocab_size),
        "top_p": np.where(number % 5 == 2, 0.7, 1.0),
        "min_p": np.where(number % 3 == 2, 0.2, 0.0),
    }
    parameters = {name: values[name] for name in filters} | {
        "temperature": np.linspace(0.5, 2.0, rows), "greedy": number % 4 == 3
    }  # fmt: skip

    def numbers(out: SamplerOutput) -> list[torch.Tensor]:
        floats = (out.logprobs, out.raw_logprobs, out.sampled_logprobs)
        return [out.token_ids, *(values.view(torch.int32) for values in floats)]

    drawn = sample(logits, uniforms=uniforms(rows), **parameters)
    forced = np.where(number % 2 == 0, drawn.token_ids.numpy(), -1)
    again = sample(logits, uniforms=uniforms(rows), given=forced, **parameters)
    assert all(map(torch.equal, numbers(again), numbers(drawn)))
    other = sample(logits, uniforms=uniforms(rows, 2), given=drawn.token_ids.numpy(), **parameters)
    assert all(map(torch.equal, numbers(other), numbers(drawn)))

    worst = logits.argmin(1)
    never = sample(logits, uniforms=uniforms(rows), given=worst.numpy(), **parameters)
    assert torch.equal(never.token_ids, worst)
    assert never.logprobs.isfinite().all()
    exact = [
        Exact.of(logits[row], float(parameters["temperature"][row]), *(values[name][row] for name in filters))
        for row in range(rows)
    ]
    unfiltered = (number % 3 == 0) & (number % 5 != 2) | (
        not filters
    )  # rounding may drop the last in `exact`
    could = [
        bool(unfiltered[row] or exact[row].kept[worst[row]]) and not parameters["greedy"][row]
        for row in range(rows)
    ]
    assert never.sampled_logprobs.isfinite().tolist() == could


def test_no_rows():
    out = sample(torch.zeros(0, 10))
    assert out.token_ids.shape == (0,)


def test_unexpected_logits_are_refused():
    for logits in (torch.zeros(2, 11), torch.zeros(2, 10, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"expected torch\.float32"):
            Sampler(10, 4, "cpu", torch.float32).sample(logits, sampling_rows(2, 10))
