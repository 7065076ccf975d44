"""Latent attention by the real FlashInfer against the torch backend, on the same pages."""

from importlib.util import find_spec

import pytest
import torch
from support.forward_batches import Row, attention_shape, forward_batch

from caesura.scheduler.attention.flashinfer_mla import FlashInferLatentBackend, kernels_of
from caesura.scheduler.attention.mla import LatentBackend
from caesura.scheduler.cache.pool import MLAPool
from caesura.scheduler.execution.forward import ForwardBatch, StepLimits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer"),
]

DEVICE = torch.device("cuda", 0)
PAGES, LATENT, ROPE, SCALE = 120, 512, 64, 192**-0.5
KERNELS = kernels_of(DEVICE) if torch.cuda.is_available() else ("fa2",)


def batch_of(rows: list[tuple[int, int]], num_decode: int, seed: int) -> ForwardBatch:
    ids = (torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    made = [Row([0] * new, start, [ids.pop() for _ in range(-(-(start + new) // 16))]) for start, new in rows]
    batch = forward_batch(made, num_decode)
    for name in ("input_ids", "positions", "kv_slots", "kv_lens", "slots", "sample_tokens", "sample_slots"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    batch.page_table_host = batch.page_table.numpy()
    batch.page_table = batch.page_table.to(DEVICE)
    return batch


def backends(heads: int, kernels: str) -> tuple[FlashInferLatentBackend, LatentBackend]:
    pools = [
        MLAPool(num_layers=1, num_pages=PAGES, width=LATENT + ROPE, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(2)
    ]
    torch.manual_seed(1)
    pools[0].layer(0).normal_()
    pools[1].layer(0).copy_(pools[0].layer(0))
    shape = attention_shape(pools[0], heads, SCALE, latent=LATENT)
    limits = StepLimits(rows=8, tokens=300, context_len=20 * 16)
    return FlashInferLatentBackend(pools[0], shape, limits, kernels), LatentBackend(pools[1], shape)


def inputs(tokens: int, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn((tokens, heads, LATENT + ROPE), dtype=torch.bfloat16, device=DEVICE)
    k = torch.randn((tokens, 1, LATENT + ROPE), dtype=torch.bfloat16, device=DEVICE)
    return q, k, k[..., :LATENT]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("heads", [16, 128, 20])
@pytest.mark.parametrize(
    "rows,num_decode",
    [([(200, 1), (15, 1), (16, 1), (0, 1)], 4), ([(0, 130), (33, 47)], 0), ([(250, 1), (0, 60), (7, 9)], 1)],
)
@torch.inference_mode()
def test_every_kind_of_step_agrees_with_torch(heads, kernels, rows, num_decode):
    ours, reference = backends(heads, kernels)
    batch = batch_of(rows, num_decode, seed=3)
    q, k, v = inputs(sum(new for _, new in rows), heads)
    for backend in (ours, reference):
        backend.plan(batch)
    found, expected = ours.forward(q, k, v, 0), reference.forward(q, k, v, 0)
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    assert torch.equal(ours._pool.layer(0), reference._pool.layer(0))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("heads", [16, 128, 20])
@torch.inference_mode()
def test_a_captured_decode_follows_each_plan(heads, kernels):
    ours, reference = backends(heads, kernels)
    rows = 4
    attention = ours.for_decode(rows)
    q, k, v = inputs(rows, heads)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    static = batch_of([(0, 1)] * rows, rows, seed=0)
    with torch.cuda.stream(stream):
        attention.plan(static)
        attention.forward(q, k, v, 0)
        graph.capture_begin(capture_error_mode="thread_local")
        out = attention.forward(q, k, v, 0)
        graph.capture_end()
    stream.synchronize()
    reference._pool.layer(0).copy_(ours._pool.layer(0))
    for seed, lengths in enumerate([(300, 3, 17, 90), (15, 16, 31, 32), (0, 310, 1, 200)]):
        batch = batch_of([(length, 1) for length in lengths], rows, seed)
        fresh = inputs(rows, heads)
        q.copy_(fresh[0])
        k.copy_(fresh[1])
        static.kv_slots.copy_(batch.kv_slots)  # a graph reads slots where they were, as staging has them
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            attention.plan(batch)
            graph.replay()
        stream.synchronize()
        reference.plan(batch)
        expected = reference.forward(q, k, v, 0)
        torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
