"""The compiled sampler and its filters: against torch, the definition in float64, and on constructed rows."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forward_batches import sampling_rows
from support.kernels import instruction_sets, threads
from support.properties import examples

from caesura.scheduler.execution.forward import SamplingBatch
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput
from caesura.scheduler.kernels import native
from caesura.scheduler.kernels.sampler import RowSampler

LARGEST_UNIFORM = float(np.nextafter(1.0, 0.0))
DTYPES = native.FLOATS
TOLERANCE = 2e-6
"""Relative tolerance of weights and of their sums in float32."""


@dataclass
class Rows:
    """Logits [S, V] and what they are sampled with."""

    logits: torch.Tensor
    batch: SamplingBatch

    @classmethod
    def of(cls, logits: torch.Tensor, uniforms, **options) -> "Rows":
        return cls(logits, sampling_rows(*logits.shape, uniforms=uniforms, **options))

    def sample(self, sampler: Sampler, *, filtered=True) -> SamplerOutput:
        return sampler.sample(self.logits, replace(self.batch, any_filtered=filtered))

    def compiled(self, *, filtered=True) -> SamplerOutput:
        return self.sample(Sampler(self.logits.shape[1], 64, "cpu", self.logits.dtype), filtered=filtered)

    def in_torch(self, *, filtered=True) -> SamplerOutput:
        sampler = Sampler(self.logits.shape[1], 64, "cpu", self.logits.dtype, in_torch=True)
        return self.sample(sampler, filtered=filtered)

    def tokens(self) -> list[int]:
        return self.compiled().token_ids.tolist()


@dataclass
class Exact:
    """One row by the definition, in float64, and what float32 may make of it."""

    order: np.ndarray
    cumulative: np.ndarray
    """Cumulative probabilities in this order."""
    ends: tuple[int, int]
    """The last kept position, at least and at most."""
    drawn: tuple[int, int]
    """Drawn position, at least and at most: several where a sum meets its target within the tolerance."""

    @classmethod
    def of(cls, rows: Rows, row: int) -> "Exact":
        batch = rows.batch
        top_p, min_p = float(batch.top_p[row]), 0.0 if batch.min_p is None else float(batch.min_p[row])
        scaled = (rows.logits[row].float() / batch.temperature[row]).numpy()
        order = np.argsort(-scaled, kind="stable")
        weights = np.exp(scaled[order].astype(np.float64) - np.float64(scaled[order[0]]))
        cumulative = weights.cumsum() / weights.sum()
        top_k = max(int(batch.top_k[row]), 1)
        by_k = top_k < len(order)
        threshold = top_p * (cumulative[top_k - 1] if by_k else 1.0)
        before = np.concatenate([[0.0], cumulative[:-1]])

        def end(slack: float) -> int:
            by_p = int((before < threshold * (1 + slack)).sum()) if top_p < 1 or by_k else len(order)
            likely = int((weights >= min_p * (1 - slack)).sum())
            return max(min(by_p, likely, top_k) - 1, 0)

        ends = end(-TOLERANCE), end(TOLERANCE)
        target = float(batch.uniforms[row]) * cumulative[list(ends)] * [1 - TOLERANCE, 1 + TOLERANCE]
        low, high = (min(int(np.searchsorted(cumulative, t, "right")), ends[1]) for t in target)
        return cls(order, cumulative, ends, (low, high))


def check_against_torch(rows: Rows) -> None:
    expected, batch = rows.in_torch(), rows.batch
    exact = {}
    for row in range(len(rows.logits)):
        if expected.token_ids[row] >= 0 and not batch.greedy[row]:
            exact[row] = Exact.of(rows, row)
    filtered = (batch.top_k < rows.logits.shape[1]) | (batch.top_p < 1)
    filtered |= torch.tensor(False) if batch.min_p is None else batch.min_p > 0
    for isa in instruction_sets():
        got = rows.compiled()
        for row in range(len(rows.logits)):
            token, other = int(got.token_ids[row]), int(expected.token_ids[row])
            if row in exact and filtered[row]:
                low, high = exact[row].drawn
                assert token in exact[row].order[low : high + 1], (isa, row)
            if token != other:  # an unfiltered row is drawn in the vocabulary's order
                close = not filtered[row] or (row in exact and exact[row].drawn[0] < exact[row].drawn[1])
                assert close, (isa, row, token, other)
                continue
            same_end = row not in exact or exact[row].ends[0] == exact[row].ends[1]
            for name in ("logprobs", "raw_logprobs", "sampled_logprobs")[: 3 if same_end else 2]:
                one, two = getattr(got, name)[row], getattr(expected, name)[row]
                torch.testing.assert_close(
                    one, two, atol=5e-6, rtol=5e-6, equal_nan=True, msg=f"{isa} {row} {name}"
                )


@settings(max_examples=examples(120))
@given(
    vocab_size=st.sampled_from([1, 5, 255, 256, 257, 1000, 32_000]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    rounded=st.booleans(),
)
def test_agrees_with_torch(vocab_size, dtype, seed, spread, rounded):
    rng, count = np.random.default_rng(seed), 12
    logits = torch.from_numpy(rng.standard_normal((count, vocab_size)) * spread)
    logits = logits.bfloat16().to(dtype) if rounded else logits.to(dtype)
    logits[torch.from_numpy(rng.random((count, vocab_size)) < rng.choice([0.0, 0.5, 0.99]))] = -torch.inf
    logits[:, int(rng.integers(vocab_size))] = spread
    logits[3, int(rng.integers(vocab_size))] = torch.nan
    logits[5, int(rng.integers(vocab_size))] = torch.inf
    logits[7] = -torch.inf
    uniforms = rng.random(count)
    uniforms[:2] = 0.0, LARGEST_UNIFORM
    rows = Rows.of(
        logits,
        uniforms,
        temperature=rng.choice([0.05, 0.7, 1.0, 3.0, 50.0], count),
        top_k=rng.choice([1, 2, 50, vocab_size, vocab_size + 7], count),
        top_p=rng.choice([0.0, 1e-9, 0.1, 0.9, 0.999999, 1.0], count),
        min_p=rng.choice([0.0, 0.0, 1e-20, 0.003, 0.2, 1.0], count),
        greedy=rng.random(count) < 0.15,
    )
    check_against_torch(rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_agrees_with_torch_at_a_large_vocabulary(dtype, spread):
    vocab_size, rng = 151_936, np.random.default_rng(5)
    logits = torch.from_numpy(rng.standard_normal((8, vocab_size)) * spread).to(dtype)
    rows = Rows.of(
        logits,
        rng.random(8),
        top_k=[vocab_size, vocab_size, vocab_size, 50, 700, 100_000, 50, vocab_size],
        top_p=[0.95, 0.9999999, 0.1, 1.0, 0.8, 0.999, 0.5, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.02],
    )
    check_against_torch(rows)


def test_order_is_that_of_scaled_logits():
    low = np.float32(1.6)
    while low / np.float32(1.5) != (high := np.nextafter(low, np.float32(2))) / np.float32(1.5):
        low = high
    for isa in instruction_sets():
        logits = torch.zeros(1, 2000)
        logits[0, 5], logits[0, 1500] = float(low), float(high)
        assert Rows.of(logits, 0.5, top_k=1, temperature=1.5).tokens() == [5], isa
        logits = torch.full((1, 2000), -3.0)
        logits[0, 7], logits[0, 900], logits[0, 1700] = 1e-3, 5.0, float(np.float32(1e-3) + np.float32(2e-10))
        assert 5.0 - logits[0, 7] == 5.0 - logits[0, 1700]
        assert logits[0, 7] != logits[0, 1700]
        assert Rows.of(logits, LARGEST_UNIFORM, top_k=2).tokens() == [1700], isa
        zeros = torch.full((1, 600), -1.0)
        zeros[0, 3], zeros[0, 500] = -0.0, 0.0
        assert Rows.of(zeros, LARGEST_UNIFORM, top_k=1).tokens() == [3], isa


def test_the_largest_uniform_draws_the_last_kept_token():
    rng = np.random.default_rng(4)
    groups = np.stack([rng.permutation(np.arange(300) % 10) for _ in range(200)])
    logits = torch.from_numpy(-1.7 * groups - rng.random((200, 1))).float()
    weights = np.exp(-1.7 * np.arange(10))
    for isa in instruction_sets():
        for kept in (1, 3, 5):
            last = [int(np.flatnonzero(row == kept - 1)[-1]) for row in groups]
            assert Rows.of(logits, LARGEST_UNIFORM, top_k=30 * kept).tokens() == last, isa
            half_of_it = (30 * weights[:kept].sum() - 0.5 * weights[kept - 1]) / (30 * weights.sum())
            assert Rows.of(logits, LARGEST_UNIFORM, top_p=half_of_it).tokens() == last, isa


def mixed(vocab_size: int, dtype: torch.dtype) -> Rows:
    rng, count = np.random.default_rng(9), 24
    kind = np.arange(count) % 4
    return Rows.of(
        torch.from_numpy(rng.standard_normal((count, vocab_size)) * 2).to(dtype),
        rng.random(count),
        temperature=rng.uniform(0.3, 2.0, count),
        top_k=np.where(kind == 1, 40, vocab_size),
        top_p=np.where(kind >= 2, rng.uniform(0.2, 1.0, count), 1.0),
        min_p=np.where(kind == 3, 0.01, 0.0),
        greedy=np.arange(count) >= count - 2,
    )


def bits(out: SamplerOutput) -> torch.Tensor:
    """[S, 4]"""
    floats = (out.logprobs, out.raw_logprobs, out.sampled_logprobs)
    return torch.stack([out.token_ids, *(f.view(torch.int32).long() for f in floats)], 1)


def test_unfiltered_and_greedy_rows_do_not_notice_filters():
    rows = mixed(3000, torch.bfloat16)
    untouched = (torch.arange(len(rows.logits)) % 4 == 0) | rows.batch.greedy
    for isa in instruction_sets():
        with_filters, without = bits(rows.compiled()), bits(rows.compiled(filtered=False))
        assert torch.equal(with_filters[untouched], without[untouched]), isa
        assert not torch.equal(with_filters, without), isa


def test_a_workspace_serves_more_threads_than_it_was_made_for():
    rows = mixed(3000, torch.float32)
    for isa in instruction_sets():
        sampler = Sampler(3000, 64, "cpu", torch.float32)
        with threads(1):
            expected = bits(rows.sample(sampler))
        with threads(3):
            assert torch.equal(bits(rows.sample(sampler)), expected), isa


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 97, 256, 257, 1000, 30_001])
def test_unfiltered_rows_draw_the_tokens_of_torch(dtype, vocab_size):
    rng, count = np.random.default_rng(vocab_size), 64
    logits = torch.from_numpy(rng.standard_normal((count, vocab_size)) * 4).to(dtype)
    temperature, greedy = np.linspace(0.2, 3, count), np.arange(count) % 4 == 0
    rows = Rows.of(logits, rng.random(count), temperature=temperature, greedy=greedy)
    expected = rows.in_torch(filtered=False)
    for _ in instruction_sets():
        found = rows.compiled(filtered=False)
        # float32 sums in another order move the bounds of tokens by about 1e-7: hardly a uniform can tell.
        assert torch.equal(found.token_ids, expected.token_ids)
        for name in ("logprobs", "raw_logprobs"):
            mine, theirs = getattr(found, name), getattr(expected, name)
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)


def test_a_scaled_logit_beyond_float32_is_not_finite():
    logits = torch.zeros(2, 300)
    logits[0, 7], logits[1, 7] = 3e38, -3e38
    for _ in instruction_sets():
        found = Rows.of(logits, 0.5, temperature=1e-3).compiled(filtered=False)
        assert found.token_ids[0].item() == -1
        assert found.logprobs[0].isnan()
        assert found.token_ids[1].item() not in (-1, 7)


@pytest.mark.parametrize("spread,temperature", [(3e38, 1e-3), (30.0, 1e-3), (1e-3, 1e30)])
def test_extreme_scales_give_a_token_or_none(spread, temperature):
    for dtype in DTYPES:
        logits = torch.randn((9, 1001), generator=torch.Generator().manual_seed(1)).mul(spread).to(dtype)
        top_p, min_p = [1.0, 0.0, 0.5] * 3, [0.0] * 5 + [0.1] * 4
        for _ in instruction_sets():
            for top_k in (0, 1, 50, 1001):
                rows = Rows.of(logits, 0.7, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
                assert all(-1 <= token < 1001 for token in rows.tokens())


def test_rows_may_have_a_stride():
    view = torch.randn(6, 1000, generator=torch.Generator().manual_seed(7))[:, 3:700]
    u = np.random.default_rng(7).random(6)
    for _ in instruction_sets():
        found, expected = (
            Rows.of(logits, u, temperature=0.8).compiled(filtered=False)
            for logits in (view, view.contiguous())
        )
        assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("change", [
    {"top_k": None}, {"top_p": None}, {"top_k": None, "top_p": None}, {"top_k": torch.ones(3)},
    {"top_p": torch.ones(2)}, {"min_p": torch.zeros(3).double()}, {"sampled_logprobs": torch.zeros(6)[::2]},
    {"logits": torch.zeros(3, 9)}, {"logits": torch.zeros(3, 10).double()}, {"logits": torch.zeros(10, 3).T},
    {"temperature": torch.ones(2)}, {"greedy": torch.zeros(3)}, {"uniforms": torch.zeros(3)},
    {"token_ids": torch.zeros(3, dtype=torch.int32)}, {"logprobs": torch.zeros(6)[::2]},
])  # fmt: skip
@pytest.mark.parametrize("filtered", [False, True])
def test_tensors_that_do_not_fit_are_refused(change, filtered):
    given = {
        "logits": torch.zeros(3, 10),
        "temperature": torch.ones(3), "greedy": torch.zeros(3, dtype=torch.bool),
        "uniforms": torch.zeros(3).double(), "token_ids": torch.zeros(3, dtype=torch.int64),
        "logprobs": torch.zeros(3), "raw_logprobs": None,
    }  # fmt: skip
    filters = {
        "top_k": torch.full((3,), 4),
        "top_p": torch.ones(3),
        "min_p": torch.zeros(3),
        "sampled_logprobs": None,
    }
    if not filtered and change.keys() & filters.keys():
        pytest.skip("it has no filters")
    with pytest.raises(ValueError, match="do not fit"):
        RowSampler(10).arguments(**(given | (filters if filtered else {}) | change))


@pytest.mark.parametrize("change", [
    {"places": torch.zeros(3)}, {"counters": torch.zeros(3, dtype=torch.int64)},
    {"counters": torch.zeros(2, dtype=torch.int32)}, {"counts": torch.zeros((5, 9), dtype=torch.int32)},
    {"counts": torch.zeros((10, 5), dtype=torch.int32).T}, {"penalties": [torch.ones(3)] * 3},
    {"biases": (torch.zeros((2, 3), dtype=torch.int64), torch.zeros(2, 2))},
    {"biases": (torch.zeros((1, 3), dtype=torch.int64), torch.zeros(1, 3))},
    {"allowed": (torch.zeros((2, 3), dtype=torch.int64), torch.zeros(1, dtype=torch.bool))},
    {"allowed": (torch.zeros((3, 3), dtype=torch.int64), torch.zeros(2, dtype=torch.bool))},
])  # fmt: skip
def test_edits_that_do_not_fit_are_refused(change):
    none = torch.zeros((2, 0), dtype=torch.int64)
    given = {
        "places": torch.tensor([0, -1, 1]), "penalties": [torch.ones(2), torch.zeros(2), torch.zeros(2)],
        "counters": torch.tensor([4, 0]), "counts": torch.zeros((5, 10), dtype=torch.int32),
        "biases": (none, torch.zeros(2, 0)), "allowed": (none, torch.zeros(2, dtype=torch.bool)),
    }  # fmt: skip
    sampler = RowSampler(10)
    with pytest.raises(ValueError, match="do not fit"):
        sampler.edits(**(given | change))
    rows = torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.zeros(2).double()
    results = torch.zeros(2, dtype=torch.int64), torch.zeros(2), None
    with pytest.raises(ValueError, match="edits of 3 rows do not fit"):
        sampler.arguments(torch.zeros(2, 10), *rows, *results, edits=sampler.edits(**given))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_tokens_are_those_of_all(dtype, spread):
    generator = torch.Generator().manual_seed(round(spread))
    for vocabulary, tops in ((1, (0, 1)), (97, (1, 5, 97)), (700, (3, 400)), (5000, (20, 1000))):
        logits = (spread * torch.randn((4, vocabulary), generator=generator)).to(dtype)
        logits[1, 1:] = -torch.inf
        logits[2, vocabulary // 2] = torch.nan
        rows, temperature = torch.tensor([3, 1, 0, 2]), torch.tensor([0.7, 1.0, 2.0, 1.0])
        ids = torch.randint(0, vocabulary, (4, 3), generator=generator)
        scaled = logits[rows].double() / temperature[:, None]
        expected = torch.log_softmax(scaled, 1)
        best = expected[:3].sort(dim=1, descending=True, stable=True).values
        for _ in instruction_sets():
            for top in tops:
                found_ids, found, of_ids, _ = RowSampler(vocabulary).further(
                    logits, rows, temperature, top, ids
                )
                assert_near(of_ids, expected.gather(1, ids))
                assert found[3].isnan().all()
                assert_near(found[:3], best[:, :top])
                assert_near(found[:3], expected[:3].gather(1, found_ids[:3].long()))
                for row in zip((-found[:3]).tolist(), found_ids[:3].tolist(), strict=True):
                    pairs = list(zip(*row, strict=True))
                    assert pairs == sorted(set(pairs)), "descending, by id where equal, each once"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_are_the_tokens_up_to_the_last(dtype):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randint(-4, 4, (5, 1000), generator=generator).to(dtype)
    logits[2, 10:] = -torch.inf
    rows, temperature = torch.tensor([4, 2, 2, 0, 1]), torch.tensor([0.7, 1.0, 1.0, 1.9, 1.0])
    last = torch.tensor([600, 9, -1, -1, 999])
    none = torch.empty((5, 0), dtype=torch.int64)
    for _ in instruction_sets():
        *_, kept = RowSampler(1000).further(logits, rows, temperature, 0, none, last)
        for row, end, found in zip(rows.tolist(), last.tolist(), kept.tolist(), strict=True):
            values = logits[row].tolist()
            place = [(-value, token) for token, value in enumerate(values)]
            border = (math.inf, 0) if end < 0 else place[end]
            assert found == [at <= border and values[at[1]] > -math.inf for at in place]


def test_a_logprob_of_zero_has_no_sign():
    logits = torch.full((63, 64), -1.0)
    logits[:, 0] = -0.0
    logits[torch.arange(63), torch.arange(63) + 1] = 0.0
    for _ in instruction_sets():
        found = Rows.of(logits, np.full(63, 0.3), top_k=1).compiled()
        assert found.token_ids.tolist() == [0] * 63
        assert not found.sampled_logprobs.any() and not found.sampled_logprobs.signbit().any()


def test_fewer_likeliest_tokens_are_the_first_of_more():
    logits = torch.randint(-3, 3, (6, 3000), generator=torch.Generator().manual_seed(1)).float() + 1e7
    none = torch.empty((6, 0), dtype=torch.int64)
    sampler, rows = RowSampler(3000), torch.arange(6)
    many = sampler.further(logits, rows, torch.full((6,), 3.0), 2000, none)
    for top in (1, 7, 300):
        few = sampler.further(logits, rows, torch.full((6,), 3.0), top, none)
        assert all(torch.equal(one, all_of[:, :top]) for one, all_of in zip(few[:2], many[:2], strict=True))


@pytest.mark.parametrize("change", [
    {"rows": torch.zeros(2, dtype=torch.int32)}, {"temperature": torch.ones(3)}, {"top": 11}, {"top": -1},
    {"ids": torch.zeros((3, 1), dtype=torch.int64)}, {"logits": torch.zeros(4, 9)},
    {"last_kept": torch.zeros(1, dtype=torch.int64)},
])  # fmt: skip
def test_further_logprobs_that_do_not_fit_are_refused(change):
    given = {
        "logits": torch.zeros(4, 10), "rows": torch.tensor([1, 3]), "temperature": torch.ones(2), "top": 3,
        "ids": torch.zeros((2, 1), dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(ValueError, match="do not fit"):
        RowSampler(10).further(**(given | change))
