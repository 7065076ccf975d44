"""The compiled sampler against the one in torch, against exact distributions, and on constructed rows."""

import numpy as np
import pytest
import torch

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


def test_a_scaled_logit_beyond_float32_is_not_finite(isa):
    logits = torch.zeros(2, 300)
    logits[0, 7], logits[1, 7] = 3e38, -3e38
    tokens, logprobs, _ = sample(logits, temperature=1e-3)
    assert tokens[0].item() == -1
    assert logprobs[0].isnan()
    assert tokens[1].item() not in (-1, 7)


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
