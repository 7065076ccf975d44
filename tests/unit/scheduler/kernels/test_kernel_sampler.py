"""The compiled sampler against the one in torch, against exact distributions, and on constructed rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.properties import examples

from caesura.scheduler.execution.forward import SamplingBatch
from caesura.scheduler.execution.sampler import Sampler, noise
from caesura.scheduler.kernels import native
from caesura.scheduler.kernels.sampling import RowSampler

LARGEST_UNIFORM = float(np.nextafter(1.0, 0.0))
DTYPES = native.FLOATS


@pytest.fixture(params=native.ISAS[1 : native.ISAS.index(native.isa()) + 1] or [native.ISAS[1]])
def isa(request):
    with native.limited_to(request.param) as possible:
        if not possible:
            pytest.skip(
                f"{request.param} is not to be had here: {native.why_not() or 'the processor lacks it'}"
            )
        yield request.param


def uniforms(count: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(
        noise(np.full(count, seed, np.uint64), np.zeros(count, np.int64), np.arange(count))
    )


def sample(logits, *, temperature=None, greedy=False, u=0.5, raw=True, sampler=None):
    rows = len(logits)
    tokens = torch.full((rows,), -7)
    logprobs, raw_logprobs = torch.full((2, rows), 7.0).unbind(0)
    (sampler or RowSampler(logits.shape[1])).sample(
        logits,
        None
        if temperature is None
        else torch.as_tensor(temperature, dtype=torch.float32).expand(rows).contiguous(),
        torch.as_tensor(greedy).expand(rows).contiguous(),
        torch.as_tensor(u, dtype=torch.float64).expand(rows).contiguous(),
        tokens,
        logprobs,
        raw_logprobs if raw else None,
    )
    return tokens, logprobs, raw_logprobs


def in_torch(logits, temperature, greedy, u):
    rows, vocab_size = logits.shape
    batch = SamplingBatch(
        temperature=torch.where(greedy, 1.0, temperature),
        greedy=greedy,
        top_k=torch.full((rows,), vocab_size),
        top_p=torch.ones(rows),
        uniforms=u,
        any_sampled=not bool(greedy.all()),
        any_filtered=False,
        want_raw=True,
        want_sampled=False,
    )
    return Sampler(vocab_size, rows, "cpu", logits.dtype).sample(logits, batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 97, 256, 257, 1000, 30_001])
def test_agrees_with_torch(isa, dtype, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    rows = 64
    logits = (torch.randn(rows, vocab_size, generator=generator) * 4).to(dtype)
    temperature = torch.linspace(0.2, 3, rows)
    greedy = torch.arange(rows) % 4 == 0
    expected = in_torch(logits, temperature, greedy, uniforms(rows))
    tokens, logprobs, raw = sample(logits, temperature=temperature, greedy=greedy, u=uniforms(rows))
    # float32 sums in another order move the boundaries between tokens by about 1e-7, so nearly no uniform can
    # tell.
    assert torch.equal(tokens, expected.token_ids)
    torch.testing.assert_close(logprobs, expected.logprobs, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(raw, expected.raw_logprobs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_match_float64(isa, dtype):
    logits = (torch.randn(40, 5000, generator=torch.Generator().manual_seed(3)) * 10).to(dtype)
    tokens, logprobs, raw = sample(logits, temperature=0.7, u=uniforms(40))
    chosen = (torch.arange(40), tokens)
    torch.testing.assert_close(
        logprobs.double(), (logits.double() / np.float32(0.7)).log_softmax(1)[chosen], atol=1e-5, rtol=2e-6
    )
    torch.testing.assert_close(raw.double(), logits.double().log_softmax(1)[chosen], atol=1e-5, rtol=2e-6)


def test_draws_follow_the_distribution(isa):
    draws = 20_000
    logits = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, -1.0, 2.0] * 60)  # two blocks
    tokens, *_ = sample(logits.expand(draws, -1).contiguous(), temperature=1.5, u=uniforms(draws))
    expected = (logits.double() / 1.5).softmax(0).numpy() * draws
    observed = np.bincount(tokens.numpy(), minlength=len(logits))
    assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("vocab_size", [5, 300])
def test_the_inverse_of_a_known_distribution(isa, vocab_size):
    step = 1 / vocab_size
    u = torch.tensor([0.0, 0.25 * step, 1.25 * step, (vocab_size - 0.5) * step, LARGEST_UNIFORM])
    tokens, logprobs, _ = sample(torch.zeros(5, vocab_size), u=u)
    assert tokens.tolist() == [0, 0, 1, vocab_size - 1, vocab_size - 1]
    torch.testing.assert_close(logprobs, torch.full((5,), -float(np.log(vocab_size))))


@pytest.mark.parametrize("place", [0, 1, 255, 256, 300, 511, 599])
@pytest.mark.parametrize("u", [0.0, 0.5, LARGEST_UNIFORM, 1.0])  # 1 is no uniform, and still harmless
def test_the_only_possible_token_is_drawn(isa, place, u):
    for dtype in DTYPES:
        logits = torch.full((1, 600), -torch.inf, dtype=dtype)
        logits[0, place] = 3
        tokens, logprobs, raw = sample(logits, temperature=0.5, u=u)
        assert (tokens.item(), logprobs.item(), raw.item()) == (place, 0.0, 0.0)


@settings(max_examples=examples(60))
@given(st.integers(1, 700), st.integers(0, 999), st.sampled_from([0.0, 1e-300, 1e-17, 0.3, LARGEST_UNIFORM]))
def test_no_token_of_probability_zero(vocab_size, seed, u):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, vocab_size, generator=generator) * 3
    logits[torch.rand(4, vocab_size, generator=generator) < 0.9] = -torch.inf
    logits[:, int(torch.randint(vocab_size, (1,), generator=generator))] = 0.0
    for name in native.ISAS[1:]:
        with native.limited_to(name) as possible:
            if possible:
                tokens, *_ = sample(logits, u=u)
                assert (logits.gather(1, tokens[:, None]) > -torch.inf).all(), name


def test_greedy_takes_the_lowest_index_of_equal_ones(isa):
    for dtype in DTYPES:
        logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(4)).to(dtype)
        logits[0, [700, 300, 301]] = 9
        logits[1, [999, 256]] = 9
        logits[2, [255, 512]] = 9
        tokens, logprobs, raw = sample(logits, greedy=True, temperature=5.0)
        assert tokens.tolist() == [300, 256, 255]
        assert torch.equal(logprobs, raw)  # greedy is unscaled


def test_rows_that_are_not_finite_disturb_no_other(isa):
    logits = torch.randn(7, 600, generator=torch.Generator().manual_seed(5))
    good = sample(logits, u=uniforms(7))
    logits[1, 599] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, 0] = torch.nan
    logits[4, 1] = torch.inf
    bad = [1, 2, 3, 4]
    for greedy in (False, torch.tensor([False, True] * 3 + [False])):
        tokens, logprobs, raw = sample(logits, greedy=greedy, u=uniforms(7))
        assert tokens[bad].tolist() == [-1] * 4
        assert logprobs[bad].isnan().all()
        assert raw[bad].isnan().all()
    tokens, logprobs, raw = sample(logits, u=uniforms(7))
    for one, other in zip((tokens, logprobs, raw), good):
        assert torch.equal(one[[0, 5, 6]], other[[0, 5, 6]])


def test_a_scaled_logit_beyond_float32_is_not_finite(isa):
    logits = torch.zeros(2, 300)
    logits[0, 7], logits[1, 7] = 3e38, -3e38
    tokens, logprobs, _ = sample(logits, temperature=1e-3)
    assert tokens[0].item() == -1
    assert logprobs[0].isnan()
    assert tokens[1].item() not in (-1, 7)


def test_a_row_does_not_depend_on_the_others_or_on_threads(isa):
    logits = (torch.randn(50, 3000, generator=torch.Generator().manual_seed(6)) * 3).bfloat16()
    u = uniforms(50)
    sampler = RowSampler(3000)
    alone = [sample(logits[i : i + 1], temperature=0.9, u=u[i], sampler=sampler) for i in range(50)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            together = sample(logits, temperature=0.9, u=u, sampler=sampler)
            for column, values in enumerate(together):
                assert torch.equal(values, torch.cat([row[column] for row in alone]))
    finally:
        torch.set_num_threads(before)


def test_rows_may_have_a_stride_and_raw_may_be_left_out(isa):
    wide = torch.randn(6, 1000, generator=torch.Generator().manual_seed(7))
    view = wide[:, 3:700]
    expected = sample(view.contiguous(), temperature=0.8, u=uniforms(6))
    tokens, logprobs, _ = sample(view, temperature=0.8, u=uniforms(6), raw=False)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(logprobs, expected[1])


@pytest.mark.parametrize("change", [
    {"logits": torch.zeros(3, 9)}, {"logits": torch.zeros(3, 10).double()}, {"logits": torch.zeros(10, 3).T},
    {"temperature": torch.ones(2)}, {"greedy": torch.zeros(3)}, {"uniforms": torch.zeros(3)},
    {"token_ids": torch.zeros(3, dtype=torch.int32)}, {"logprobs": torch.zeros(6)[::2]},
])  # fmt: skip
def test_oversized_requests_are_refused(change):
    given = {
        "logits": torch.zeros(3, 10), "temperature": torch.ones(3), "greedy": torch.zeros(3, dtype=torch.bool),
        "uniforms": torch.zeros(3).double(), "token_ids": torch.zeros(3, dtype=torch.int64),
        "logprobs": torch.zeros(3), "raw_logprobs": None,
    }  # fmt: skip
    with pytest.raises(ValueError, match="do not fit"):
        RowSampler(10).sample(**(given | change))
