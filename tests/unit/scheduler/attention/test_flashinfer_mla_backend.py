"""Latent attention by FlashInfer's plans, against torch's."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import fake_flashinfer
from support.forward_batches import Row, attention_shape, forward_batch
from support.properties import examples
from torch import Tensor

from caesura.scheduler.attention import flashinfer, flashinfer_mla
from caesura.scheduler.attention.flashinfer_mla import FlashInferLatentBackend, serves_prefill, why_not
from caesura.scheduler.attention.mla import LatentBackend
from caesura.scheduler.attention.shape import Shape
from caesura.scheduler.cache.pool import MLAPool
from caesura.scheduler.execution.forward import StepLimits

LATENT, ROPE, SCALE = 8, 4, 0.3
LIMITS = StepLimits(rows=8, tokens=200, context_len=8 * 16)


def filled_pool() -> MLAPool:
    pool = MLAPool(num_layers=2, num_pages=60, width=LATENT + ROPE, dtype=torch.float32)
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        pool.layer(layer).copy_(torch.randn(pool.layer(layer).shape, generator=generator))
    return pool


def backend_over(pool: MLAPool, heads: int) -> FlashInferLatentBackend:
    return FlashInferLatentBackend(pool, shape_over(pool, heads), LIMITS, "fa2", fake_flashinfer)


def shape_over(pool: MLAPool, heads: int) -> Shape:
    return attention_shape(pool, heads, SCALE, latent=LATENT)


def batch_of(rows: list[tuple[int, int]], num_decode: int, seed: int = 0):
    ids = (torch.randperm(59, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    made = [Row([0] * new, start, [ids.pop() for _ in range(-(-(start + new) // 16))]) for start, new in rows]
    return forward_batch(made, num_decode)


def inputs(tokens: int, heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn((tokens, heads, LATENT + ROPE), generator=generator)
    k = torch.randn((tokens, 1, LATENT + ROPE), generator=generator)
    return q, k, k[..., :LATENT]


@settings(max_examples=examples(40))
@given(
    heads=st.sampled_from([1, 2, 16, 3]),
    decode=st.lists(st.integers(0, 90), max_size=3),
    prefill=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=3),
    seed=st.integers(0, 99),
)
@example(heads=4, decode=[15, 16, 0], prefill=[(0, 16), (16, 16), (0, 1)], seed=0)
@example(heads=3, decode=[15], prefill=[(0, 16)], seed=0)
def test_mixed_steps_agree_with_the_torch_backend(heads, decode, prefill, seed):
    rows = [(start, 1) for start in decode] + prefill
    if not rows:
        return
    batch = batch_of(rows, len(decode), seed)
    given_inputs = inputs(len(batch.input_ids), heads, seed)
    ours, theirs = filled_pool(), filled_pool()
    with torch.inference_mode():
        planned = backend_over(ours, heads), LatentBackend(theirs, shape_over(theirs, heads))
        for each in planned:
            each.plan(batch)
        for layer in range(2):
            found, expected = (each.forward(*given_inputs, layer) for each in planned)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
            assert torch.equal(ours.layer(layer), theirs.layer(layer)), "latents went elsewhere"


@pytest.mark.parametrize(
    "heads,expected",
    [(16, ["plan latent decode 2", "plan latent prefill 1"]), (3, [])],
    ids=["fits", "torch"],
)
def test_prefill_is_torchs_where_a_tile_would_cut_a_query(heads, expected):
    backend = backend_over(filled_pool(), heads)
    fake_flashinfer.CALLS.clear()
    backend.plan(batch_of([(20, 1), (3, 1), (0, 40)], 2))
    backend.forward(*inputs(42, heads, 0), 0)
    assert expected == fake_flashinfer.CALLS
    assert backend.reads_page_table is not bool(expected)
    fake_flashinfer.CALLS.clear()
    backend.plan(batch_of([(20, 1), (3, 1)], 2))
    assert fake_flashinfer.CALLS == ["plan latent decode 2"], "decode steps are the library's either way"


def test_captured_decode_keeps_its_buffers_and_follows_each_plan():
    pool, reference = filled_pool(), filled_pool()
    captured, torch_backend = (
        backend_over(pool, 4).for_decode(3),
        LatentBackend(reference, shape_over(reference, 4)),
    )
    buffers = None
    for seed in range(4):
        batch, given_inputs = batch_of([(seed * 15, 1), (89, 1), (3 + seed, 1)], 3, seed), inputs(3, 4, seed)
        captured.plan(batch)
        torch_backend.plan(batch)
        found = [t.data_ptr() for t in captured.decode._plans]
        assert found == (buffers or found)
        buffers = found
        expected = torch_backend.forward(*given_inputs, 0)
        torch.testing.assert_close(captured.forward(*given_inputs, 0), expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(AssertionError, match="another number of rows"):
        captured.plan(batch_of([(3, 1)], 1))


@pytest.mark.parametrize(
    "device,dtype,latent,rope,reason",
    [
        ("cpu", torch.bfloat16, 512, 64, "not on cpu"),
        ("cuda", torch.float32, 512, 64, "not float32"),
        ("cuda", torch.bfloat16, 96, 64, "latents of 96"),
        ("cuda", torch.bfloat16, 512, 32, "rotated keys of 32"),
    ],
)
def test_backend_says_why_it_cannot_serve(device, dtype, latent, rope, reason):
    assert reason in (why_not(torch.device(device), dtype, latent, rope) or "")


def test_deepseeks_sizes_are_served(monkeypatch):
    monkeypatch.setattr(flashinfer, "find_spec", lambda name: object())
    assert why_not(torch.device("cuda"), torch.bfloat16, 512, 64) is None
    monkeypatch.setattr(flashinfer_mla, "multiprocessors", lambda device: 132)
    cuda = torch.device("cuda")
    assert all(serves_prefill(heads, 1024, 9216, cuda) for heads in (16, 128))
    assert not serves_prefill(20, 64, 512, cuda), "a tile of 128 ends within a query of 20 heads"
    assert not serves_prefill(128, 1024, 32768, cuda), "more tiles than the planner has room for"
