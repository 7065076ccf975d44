"""The real FlashInfer against the torch backends, on the same pages: eager, mixed and captured."""

from importlib.util import find_spec

import pytest
import torch
from support.forward_batches import attention_shape, scattered_batch

from caesura.scheduler.attention.flashinfer import FlashInferBackend
from caesura.scheduler.attention.flashinfer_mla import FlashInferLatentBackend, kernels_of
from caesura.scheduler.attention.mla import LatentBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.cache.pool import MHAPool, MLAPool
from caesura.scheduler.execution.forward import ForwardBatch, StepLimits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer"),
]

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


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


class Heads:
    """Keys and values of heads."""

    def __init__(self, heads: int, kv_heads: int, size: int) -> None:
        self.sizes = heads, kv_heads, size
        made = {"num_layers": 1, "num_pages": PAGES, "kv_heads": kv_heads, "head_size": size}
        pools = [MHAPool(**made, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        shape = attention_shape(pools[0], heads)
        self.ours, self.reference = FlashInferBackend(pools[0], shape, LIMITS), SdpaBackend(pools[1], shape)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, ...]:
        heads, kv_heads, size = self.sizes
        return random(tokens, heads + 2 * kv_heads, size).split([heads, kv_heads, kv_heads], 1)

    def captured_inputs(self, rows: int) -> tuple[torch.Tensor, ...]:
        return tuple(each.contiguous() for each in self.inputs(rows))


class Latents:
    """Latents, of which the values are a part."""

    def __init__(self, heads: int, kernels: str) -> None:
        self.heads = heads
        made = {"num_layers": 1, "num_pages": PAGES, "width": LATENT + ROPE}
        pools = [MLAPool(**made, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
        shape = attention_shape(pools[0], heads, SCALE, latent=LATENT)
        self.ours = FlashInferLatentBackend(pools[0], shape, LIMITS, kernels)
        self.reference = LatentBackend(pools[1], shape)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, ...]:
        q, k = random(tokens, self.heads, LATENT + ROPE), random(tokens, 1, LATENT + ROPE)
        return q, k, k[..., :LATENT]

    captured_inputs = inputs


SCENES = [
    *[(Heads, sizes) for sizes in [(32, 8, 128), (8, 8, 64), (4, 2, 128), (16, 2, 256)]],
    *[(Latents, (heads, kernels)) for heads in (16, 128, 20) for kernels in KERNELS],
]


@pytest.fixture(params=SCENES, ids=lambda scene: f"{scene[0].__name__}-{scene[1]}")
def scene(request):
    torch.manual_seed(1)
    kind, sizes = request.param
    made = kind(*sizes)
    for mine, theirs in storage(made):
        theirs.copy_(mine.normal_())
    return made


def storage(scene: Heads | Latents) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pages of both, layer 0."""
    return list(zip(scene.ours.pool.layer(0), scene.reference.pool.layer(0), strict=True))


@pytest.mark.parametrize(
    "rows,num_decode",
    [([(200, 1), (15, 1), (16, 1), (0, 1)], 4), ([(0, 130), (33, 47)], 0), ([(250, 1), (0, 60), (7, 9)], 1)],
)
@torch.inference_mode()
def test_every_kind_of_step_agrees_with_torch(scene, rows, num_decode):
    batch = batch_of(rows, num_decode, seed=3)
    qkv = scene.inputs(sum(new for _, new in rows))
    for backend in (scene.ours, scene.reference):
        backend.plan(batch)
    found, expected = scene.ours.forward(*qkv, 0), scene.reference.forward(*qkv, 0)
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)
    for mine, theirs in storage(scene):
        assert torch.equal(mine, theirs)


@torch.inference_mode()
def test_a_captured_decode_follows_each_plan(scene):
    rows, reference = 4, scene.reference
    attention, qkv = scene.ours.for_decode(rows), scene.captured_inputs(rows)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    static = batch_of([(0, 1)] * rows, rows, seed=0)
    with torch.cuda.stream(stream):
        attention.plan(static)
        attention.forward(*qkv, 0)
        graph.capture_begin(capture_error_mode="thread_local")
        out = attention.forward(*qkv, 0)
        graph.capture_end()
    stream.synchronize()
    for mine, theirs in storage(scene):
        theirs.copy_(mine)
    for seed, lengths in enumerate([(300, 3, 17, 90), (15, 16, 31, 32), (0, 310, 1, 200)]):
        batch = batch_of([(length, 1) for length in lengths], rows, seed)
        for before, new in zip(qkv, scene.inputs(rows), strict=True):
            before.copy_(new)
        static.kv_slots.copy_(batch.kv_slots)  # a graph reads slots where they were, as staging has them
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            attention.plan(batch)
            graph.replay()
        stream.synchronize()
        reference.plan(batch)
        expected = reference.forward(*qkv, 0)
        torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2)
