"""FlashInfer against the torch backend on the same pages: heads and latents; eager, mixed, captured."""

from importlib.util import find_spec

import pytest
import torch
from support.forward_batches import attention_shape, scattered_batch
from torch import Tensor

from caesura.scheduler.attention.flashinfer import FlashInferBackend
from caesura.scheduler.attention.flashinfer_mla import FlashInferLatentBackend, kernels_of
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.attention.sdpa_mla import LatentBackend
from caesura.scheduler.cache.pool import MHAPool, MLAPool
from caesura.scheduler.execution.forward import ForwardBatch, StepLimits

pytestmark = pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")

DEVICE = torch.device("cuda", 0)
PAGES, LATENT, ROPE, SCALE = 120, 512, 64, 192**-0.5
LIMITS = StepLimits(rows=8, tokens=300, context_len=20 * 16)
KERNELS = kernels_of(DEVICE) if torch.cuda.is_available() else ("fa2",)


def batch_of(rows: list[tuple[int, int]], num_decode: int, seed: int) -> ForwardBatch:
    batch = scattered_batch(rows, num_decode, PAGES, seed)
    for name in ("input_ids", "positions", "kv_slots", "kv_lens", "slots", "sample_tokens", "sample_slots"):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    batch.page_table_host = batch.page_table.numpy()
    batch.page_table = batch.page_table.to(DEVICE)
    return batch


class Heads:
    def __init__(self, heads: int, kv_heads: int, size: int) -> None:
        self.shape = (heads, kv_heads, size)
        sizes = {"num_layers": 1, "num_pages": PAGES, "kv_heads": kv_heads, "head_size": size}
        self.pools = [MHAPool(**sizes, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        shape = attention_shape(self.pools[0], heads)
        self.ours = FlashInferBackend(self.pools[0], shape, LIMITS)
        self.reference = SdpaBackend(self.pools[1], shape)

    def stored(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*(pool.layer(0) for pool in self.pools), strict=True))

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        heads, kv_heads, size = self.shape
        qkv = torch.randn((tokens, heads + 2 * kv_heads, size), dtype=torch.bfloat16, device=DEVICE)
        return qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]


class Latents:
    def __init__(self, heads: int, kernels: str) -> None:
        self.heads = heads
        sizes = {"num_layers": 1, "num_pages": PAGES, "width": LATENT + ROPE}
        self.pools = [MLAPool(**sizes, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        shape = attention_shape(self.pools[0], heads, SCALE, latent=LATENT)
        self.ours = FlashInferLatentBackend(self.pools[0], shape, LIMITS, kernels)
        self.reference = LatentBackend(self.pools[1], shape)

    def stored(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.pools[0].layer(0), self.pools[1].layer(0))]

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        q = torch.randn((tokens, self.heads, LATENT + ROPE), dtype=torch.bfloat16, device=DEVICE)
        k = torch.randn((tokens, 1, LATENT + ROPE), dtype=torch.bfloat16, device=DEVICE)
        return q, k, k[..., :LATENT]


@pytest.fixture(
    params=[
        *((Heads, shape) for shape in [(32, 8, 128), (8, 8, 64), (4, 2, 128), (16, 2, 256)]),
        *((Latents, (heads, kernels)) for heads in (16, 128, 20) for kernels in KERNELS),
    ],
    ids=lambda param: f"{param[0].__name__}-{'-'.join(map(str, param[1]))}",
)
def scene(request):
    kind, shape = request.param
    made = kind(*shape)
    torch.manual_seed(1)
    for mine, theirs in made.stored():
        theirs.copy_(mine.normal_())
    return made


@pytest.mark.parametrize(
    "rows,num_decode",
    [([(200, 1), (15, 1), (16, 1), (0, 1)], 4), ([(0, 130), (33, 47)], 0), ([(250, 1), (0, 60), (7, 9)], 1)],
)
@torch.inference_mode()
def test_every_kind_of_step_agrees_with_torch(scene, rows, num_decode):
    batch = batch_of(rows, num_decode, seed=3)
    q, k, v = scene.inputs(sum(new for _, new in rows))
    for backend in (scene.ours, scene.reference):
        backend.plan(batch)
    found, expected = scene.ours.forward(q, k, v, 0), scene.reference.forward(q, k, v, 0)
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    for mine, theirs in scene.stored():
        assert torch.equal(mine, theirs)


@torch.inference_mode()
def test_a_captured_decode_follows_each_plan(scene):
    rows = 4
    attention = scene.ours.for_decode(rows)
    given = scene.inputs(rows)
    static = given if isinstance(scene, Latents) else tuple(tensor.contiguous() for tensor in given)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    first = batch_of([(0, 1)] * rows, rows, seed=0)
    with torch.cuda.stream(stream):
        attention.plan(first)
        attention.forward(*static, 0)
        graph.capture_begin(capture_error_mode="thread_local")
        out = attention.forward(*static, 0)
        graph.capture_end()
    stream.synchronize()
    for mine, theirs in scene.stored():
        theirs.copy_(mine)
    for seed, lengths in enumerate([(300, 3, 17, 90), (15, 16, 31, 32), (0, 310, 1, 200)]):
        batch = batch_of([(length, 1) for length in lengths], rows, seed)
        for tensor, new in zip(static, scene.inputs(rows), strict=True):
            if not isinstance(scene, Latents) or tensor is not static[2]:  # its values are a view of its keys
                tensor.copy_(new)
        if isinstance(scene, Latents):
            first.kv_slots.copy_(batch.kv_slots)  # a graph reads slots where they were, as staging has them
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            attention.plan(batch)
            graph.replay()
        stream.synchronize()
        scene.reference.plan(batch)
        expected = scene.reference.forward(*static, 0)
        torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
