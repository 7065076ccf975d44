"""The sampler on a real device: torch and Triton draw the CPU's tokens, and neither waits."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from support.forward_batches import sampling_rows

from caesura.scheduler import kernels
from caesura.scheduler.execution import sampler as sampler_module
from caesura.scheduler.execution.forward import SamplingBatch, moved
from caesura.scheduler.execution.sampler import Sampler, SamplerOutput

ROWS = 40
RESULTS = ("logprobs", "raw_logprobs", "sampled_logprobs")


@pytest.fixture(params=[kernels.TORCH, kernels.TRITON])
def by(request, monkeypatch):
    if request.param == kernels.TRITON and find_spec("triton") is None:
        pytest.skip("needs Triton")
    best = sampler_module.best
    monkeypatch.setattr(
        sampler_module,
        "best",
        lambda operation, device, dtype: (
            request.param if torch.device(device).type == "cuda" else best(operation, device, dtype)
        ),
    )
    return request.param


def batch_of(vocab_size: int) -> SamplingBatch:
    rng, kind = np.random.default_rng(vocab_size), np.arange(ROWS) % 7
    temperature = np.where(kind % 2, 1.0, rng.uniform(0.4, 2, ROWS))
    some_k = np.minimum(rng.integers(1, 3000, ROWS), vocab_size)
    return sampling_rows(
        ROWS,
        vocab_size,
        temperature=temperature,
        greedy=kind == 0,
        top_k=np.where((kind == 3) | (kind == 6), some_k, vocab_size),
        top_p=np.where(kind % 3 == 1, rng.uniform(0.3, 1, ROWS), 1.0),
        min_p=np.where(kind == 5, rng.uniform(0, 0.2, ROWS), 0.0),
        uniforms=rng.random(ROWS),
    )


def on_device(logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
    sampler = Sampler(logits.shape[1], 32, "cuda", logits.dtype)
    there, rows = logits.cuda(), moved(batch, torch.Tensor.cuda)
    sampler.sample(there, rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return sampler.sample(there, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [97, 32_000, 151_936, 262_144])
def test_one_uniform_means_the_token_of_the_cpu(by, vocab_size, dtype):
    logits = (torch.randn((ROWS, vocab_size), generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    batch = batch_of(vocab_size)
    expected = Sampler(vocab_size, ROWS, "cpu", dtype).sample(logits, batch)
    found = on_device(logits, batch)
    same = found.token_ids.cpu() == expected.token_ids
    assert int(same.sum()) >= ROWS - 1
    for name in RESULTS:
        mine, theirs = getattr(found, name).cpu()[same], getattr(expected, name)[same]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)


def test_broken_rows_are_marked_and_disturb_no_other(by):
    logits = torch.randn((ROWS, 5000), generator=torch.Generator().manual_seed(2))
    clean = on_device(logits, batch_of(5000))
    logits[3, 7], logits[9, 4999], logits[20] = torch.nan, torch.inf, -torch.inf
    found = on_device(logits, batch_of(5000))
    broken = torch.zeros(ROWS, dtype=torch.bool)
    broken[[3, 9, 20]] = True
    assert (found.token_ids.cpu() == -1).tolist() == broken.tolist()
    for name in RESULTS:
        mine, theirs = getattr(found, name).cpu(), getattr(clean, name).cpu()
        assert torch.equal(mine.isnan(), broken)
        assert torch.equal(mine[~broken], theirs[~broken])


def test_triton_rows_do_not_depend_on_their_batch(by):
    if by != kernels.TRITON:
        pytest.skip("torch chooses its reductions by shape")
    logits, batch = torch.randn((ROWS, 32_000), generator=torch.Generator().manual_seed(3)), batch_of(32_000)
    together = on_device(logits, batch)
    for row in range(ROWS):
        alone = on_device(logits[row : row + 1], batch.select(torch.tensor([row])))
        for name in ("token_ids", *RESULTS):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), name
