"""The real FlashInfer against the torch backend, on the same pages: eager, mixed and captured."""

from importlib.util import find_spec

import pytest
import torch
from support.forward_batches import Row, attention_shape, forward_batch

from caesura.scheduler.attention.flashinfer import FlashInferBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.execution.forward import ForwardBatch, StepLimits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer"),
]

DEVICE = torch.device("cuda", 0)
PAGES = 120


def to_device(batch: ForwardBatch) -> ForwardBatch:
    for name in ("input_ids", "positions", "kv_slots", "kv_lens", "slots", "sample_tokens", "sample_slots"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    batch.page_table_host = batch.page_table.numpy()
    batch.page_table = batch.page_table.to(DEVICE)
    return batch


def batch_of(rows: list[tuple[int, int]], num_decode: int, seed: int) -> ForwardBatch:
    ids = (torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    made = [Row([0] * new, start, [ids.pop() for _ in range(-(-(start + new) // 16))]) for start, new in rows]
    return to_device(forward_batch(made, num_decode))


def backends(heads: int, kv_heads: int, size: int) -> tuple[FlashInferBackend, SdpaBackend]:
    pools = []
    for _ in range(2):
        pool = MHAPool(
            num_layers=1,
            num_pages=PAGES,
            kv_heads=kv_heads,
            head_size=size,
            dtype=torch.bfloat16,
            device=DEVICE,
        )
        torch.manual_seed(1)
        for storage in pool.layer(0):
            storage.normal_()
        pools.append(pool)
    shape, limits = attention_shape(pools[0], heads), StepLimits(rows=8, tokens=300, context_len=20 * 16)
    return FlashInferBackend(pools[0], shape, limits), SdpaBackend(pools[1], shape)


def inputs(tokens: int, heads: int, kv_heads: int, size: int) -> tuple[torch.Tensor, ...]:
    qkv = torch.randn((tokens, heads + 2 * kv_heads, size), dtype=torch.bfloat16, device=DEVICE)
    return qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]


SHAPES = [(32, 8, 128), (8, 8, 64), (4, 2, 128), (16, 2, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "rows,num_decode",
    [([(200, 1), (15, 1), (16, 1), (0, 1)], 4), ([(0, 130), (33, 47)], 0), ([(250, 1), (0, 60), (7, 9)], 1)],
)
@torch.inference_mode()
def test_every_kind_of_step_agrees_with_torch(shape, rows, num_decode):
    ours, reference = backends(*shape)
    batch = batch_of(rows, num_decode, seed=3)
    q, k, v = inputs(sum(new for _, new in rows), *shape)
    for backend in (ours, reference):
        backend.plan(batch)
    found, expected = ours.forward(q, k, v, 0), reference.forward(q, k, v, 0)
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    for mine, theirs in zip(ours._pool.layer(0), reference._pool.layer(0), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_captured_decode_follows_each_plan(shape):
    ours, reference = backends(*shape)
    rows = 4
    attention = ours.for_decode(rows)
    q, k, v = (tensor.contiguous() for tensor in inputs(rows, *shape))
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        attention.plan(batch_of([(0, 1)] * rows, rows, seed=0))
        attention.forward(q, k, v, 0)
        graph.capture_begin(capture_error_mode="thread_local")
        out = attention.forward(q, k, v, 0)
        graph.capture_end()
    stream.synchronize()
    for mine, theirs in zip(ours._pool.layer(0), reference._pool.layer(0), strict=True):
        theirs.copy_(mine)
    for seed, lengths in enumerate([(300, 3, 17, 90), (15, 16, 31, 32), (0, 310, 1, 200)]):
        batch = batch_of([(length, 1) for length in lengths], rows, seed)
        fresh = inputs(rows, *shape)
        for static, new in zip((q, k, v), fresh, strict=True):
            static.copy_(new)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            attention.plan(batch)
            graph.replay()
        stream.synchronize()
        reference.plan(batch)
        expected = reference.forward(q, k, v, 0)
        torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
