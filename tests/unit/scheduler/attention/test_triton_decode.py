"""The Triton decode kernel against the torch backend, in Triton's interpreter, which runs it on the CPU.

Triton decides when it is imported whether it interprets, hence a process of its own.
"""

import os
import random
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from support.forward_batches import Row, forward_batch

from caesura.scheduler.attention import paged_triton
from caesura.scheduler.attention.paged_triton import PagedTritonBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.cache.pool import MHAPool

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETS, reason="run by test_the_kernel_in_the_interpreter")
PAGES = 60


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
@pytest.mark.skipif(INTERPRETS, reason="this is the interpreter")
def test_the_kernel_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout


def filled_pool(kv_heads: int, size: int) -> MHAPool:
    """Random where rows may have KV, NaN in the scratch page."""
    pool = MHAPool(num_layers=1, num_pages=PAGES, kv_heads=kv_heads, head_size=size, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for storage in pool.layer(0):
        storage.copy_(torch.randn(storage.shape, generator=generator))
        storage[0] = torch.nan
    return pool


def batch_of(lengths: list[int], seed: int):
    """Decode rows of these lengths before this step, on scattered pages."""
    ids = list(range(1, PAGES))
    random.Random(seed).shuffle(ids)
    rows = [Row([0], length, [ids.pop() for _ in range(length // 16 + 1)]) for length in lengths]
    return forward_batch(rows, len(rows))


@interpreted
@pytest.mark.parametrize("heads,kv_heads,size", [(4, 2, 16), (3, 3, 12), (20, 1, 8)])
@pytest.mark.parametrize("multiprocessors", [1, 20])
def test_planned_decode_agrees_with_the_torch_backend(heads, kv_heads, size, multiprocessors):
    """Any group and head size, rows shorter and longer than a part, over several plans of one kernel."""
    pool, reference = filled_pool(kv_heads, size), filled_pool(kv_heads, size)
    backend = PagedTritonBackend(pool, heads, kv_heads, size, 0.3, max_rows=5, max_pages=20)
    backend._multiprocessors = multiprocessors
    decode = backend.for_decode(3)
    torch_backend = SdpaBackend(reference, heads, kv_heads, size, 0.3)
    generator = torch.Generator().manual_seed(2)
    for seed, lengths in enumerate([[0, 300, 63], [15, 64, 127]]):
        batch = batch_of(lengths, seed)
        qk = torch.randn((3, heads + kv_heads, size), generator=generator)
        qkv = torch.randn(
            (3, heads + 2 * kv_heads, size), generator=generator
        )  # other strides, as v has them
        q, k, v = qk[:, :heads], qk[:, heads:], qkv[:, -kv_heads:]
        decode.plan(batch)
        torch_backend.plan(batch)
        with torch.inference_mode():
            found, expected = decode.forward(q, k, v, 0), torch_backend.forward(q, k, v, 0)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        for mine, theirs in zip(pool.layer(0), reference.layer(0), strict=True):
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), "stored elsewhere"


def dense(pool: MHAPool, q: torch.Tensor, pages: list[int], length: int) -> torch.Tensor:
    """One token's attention, [kv heads, group, size]."""
    keys, values = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in pool.layer(0))
    scores = torch.einsum("hgd,hnd->hgn", q.view(2, 2, 16), keys) * 16**-0.5
    return torch.einsum("hgn,hnd->hgd", scores.softmax(-1), values)


@interpreted
def test_stale_pages_and_padding_rows_disturb_nobody():
    pool = filled_pool(2, 16)
    backend = PagedTritonBackend(pool, 4, 2, 16, max_rows=3, max_pages=20)
    decode = backend.for_decode(3)
    q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    decode.plan(batch_of([100, 50, 7], 0))  # leaves page numbers behind
    decode.forward(q, k, v, 0)
    batch = batch_of([20, 0, 0], 1)
    batch.page_table[1:] = 0  # padding: one token on the scratch page
    row = batch.page_table[0].tolist()
    for storage in pool.layer(0):
        storage[row[1], :, 5:] = torch.nan  # beyond this step's token
    decode.plan(batch)
    found = decode.forward(q, k, v, 0)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0].view(2, 2, 16), dense(pool, q[0], row, 21))


@interpreted
def test_small_steps_are_divided_and_large_ones_are_not():
    from caesura.scheduler.kernels.triton_decode import num_splits

    assert {rows: num_splits(rows, 8, 132) for rows in (1, 8, 64, 256)} == {1: 64, 8: 8, 64: 1, 256: 1}
    assert num_splits(1, 1, 500) == 64


@pytest.mark.parametrize("device,installed,reason", [
    ("cpu", True, "not on cpu"), ("cuda", False, "not installed"), ("cuda", True, None),
])  # fmt: skip
def test_it_says_why_it_cannot_serve(monkeypatch, device, installed, reason):
    monkeypatch.setattr(paged_triton, "find_spec", lambda name: object() if installed else None)
    found = paged_triton.why_not(torch.device(device))
    assert found is None if reason is None else reason in found
