"""Min-p against its definition, alone and behind top-k and top-p, by both samplers."""

import numpy as np
import pytest
import torch
from scipy import stats
from support.lanes import every

from caesura.scheduler.execution import sampler as sampler_module
from caesura.scheduler.execution.forward import SamplingBatch
from caesura.scheduler.execution.sampler import Sampler
from caesura.scheduler.kernels import native

VOCAB = 700


@pytest.fixture(params=["compiled", "torch", "torch that reads no values"], autouse=True)
def implementation(request):
    if request.param == "compiled" and native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    with pytest.MonkeyPatch.context() as patch:
        if request.param not in ("compiled", "torch"):
            patch.setattr(sampler_module, "_reading_is_free", lambda device: False)
        with native.limited_to(native.isa() if request.param == "compiled" else "torch"):
            yield


def batch_of(rows: int, uniforms: np.ndarray, **given: object) -> SamplingBatch:
    values = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0, "greedy": False, **given}

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.broadcast_to(np.asarray(values[name]), (rows,)).copy()).to(dtype)

    return SamplingBatch(
        temperature=column("temperature", torch.float32),
        greedy=column("greedy", torch.bool),
        top_k=column("top_k", torch.int64),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        uniforms=torch.as_tensor(uniforms),
        any_sampled=True,
        any_filtered=True,
        want_raw=False,
        want_sampled=True,
    )


def kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution [V] that is drawn from, in float64."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")[:top_k]
    before = np.concatenate([[0.0], (probs[order] / probs[order].sum()).cumsum()[:-1]])
    order = order[(before < top_p) & (probs[order] >= np.float64(np.float32(min_p)) * probs.max())]
    found = np.zeros_like(probs)
    found[order] = probs[order] / probs[order].sum()
    return found


CASES = [
    (1.0, VOCAB, 1.0, 0.05),
    (1.0, VOCAB, 1.0, 0.0005),
    (1.6, VOCAB, 1.0, 0.3),
    (0.8, VOCAB, 0.9, 0.02),
    (1.0, 30, 1.0, 0.1),
    (1.0, 5, 0.99, 0.001),
    (1.0, VOCAB, 1.0, 1.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), every(CASES, 4))
def test_draws_follow_the_definition(dtype, temperature, top_k, top_p, min_p):
    draws = 4000
    row = (1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(5))).to(dtype)
    uniforms = np.random.default_rng(7).random(draws)
    batch = batch_of(draws, uniforms, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    out = Sampler(VOCAB, 64, "cpu", dtype).sample(row.repeat(draws, 1), batch)
    expected = kept(row.float().numpy(), temperature, top_k, top_p, min_p)
    tokens = out.token_ids.numpy()
    assert (expected[tokens] > 0).all(), "a token was drawn that min-p drops"
    assert out.sampled_logprobs.numpy() == pytest.approx(np.log(expected[tokens]), abs=2e-5)
    counts, mean = np.bincount(tokens, minlength=VOCAB), expected * draws
    many = mean >= 10
    observed = np.append(counts[many], counts[~many].sum())
    wanted = np.append(mean[many], mean[~many].sum())
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


def test_rows_with_and_without_min_p_do_not_meet():
    logits = torch.randn((6, VOCAB), generator=torch.Generator().manual_seed(6))
    uniforms = np.random.default_rng(8).random(6)
    sampler = Sampler(VOCAB, 4, "cpu", torch.float32)
    min_p = np.asarray([0.0, 0.2, 0.0, 0.01, 0.9, 0.0])
    greedy = np.asarray([False, False, False, False, True, True])
    together = sampler.sample(logits, batch_of(6, uniforms, min_p=min_p, greedy=greedy))
    for row in range(6):
        alone = batch_of(1, uniforms[row : row + 1], min_p=min_p[row], greedy=greedy[row])
        if not min_p[row]:
            alone.min_p = None
        out = sampler.sample(logits[row : row + 1], alone)
        assert out.token_ids[0] == together.token_ids[row]
        assert out.logprobs[0] == together.logprobs[row]
    assert together.token_ids[4] == logits[4].argmax()


def test_a_row_without_numbers_is_marked():
    logits = torch.randn((2, VOCAB))
    logits[0, 3] = torch.nan
    out = Sampler(VOCAB, 4, "cpu", torch.float32).sample(logits, batch_of(2, np.full(2, 0.4), min_p=0.1))
    assert out.token_ids[0] == -1
    assert out.token_ids[1] >= 0
