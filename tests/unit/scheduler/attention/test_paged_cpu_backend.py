"""The compiled attention backend beside the torch one, under whole models, and its fused entry."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint
from support.forward_batches import PagedModel, Row, Sequence, attention_shape, forward_batch, load_model
from support.kernels import instruction_sets
from support.properties import examples
from torch import Tensor

from caesura.scheduler.attention.paged_cpu import PagedCpuBackend
from caesura.scheduler.attention.sdpa import SdpaBackend
from caesura.scheduler.cache.pool import MHAPool
from caesura.scheduler.kernels.attention_form import HeadNorms
from caesura.scheduler.layers.norm import normalize
from caesura.scheduler.layers.rotary import rotate

PAGE = 16
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = tuple(TOLERANCE)


def make_pool(num_pages: int, kv_heads: int, size: int, dtype: torch.dtype, layers: int = 1) -> MHAPool:
    pool = MHAPool(num_layers=layers, num_pages=num_pages, kv_heads=kv_heads, head_size=size, dtype=dtype)
    for layer in range(layers):
        for storage in pool.layer(layer):
            storage.fill_(torch.nan)
    return pool


class Scene:
    """Rows of (earlier tokens, new tokens), the earlier ones' K and V in two equal pools."""

    def __init__(self, rows: list[tuple[int, int]], num_decode: int, dtype: torch.dtype, seed: int = 0):
        self.heads, self.kv_heads, self.size, self.dtype = 6, 2, 20, dtype
        generator = torch.Generator().manual_seed(seed)
        ids = list(range(1, 100))
        random.Random(seed).shuffle(ids)
        pages = [[ids.pop() for _ in range(-(-(start + new) // PAGE))] for start, new in rows]
        self.pools = [make_pool(100, self.kv_heads, self.size, dtype) for _ in range(2)]
        for (start, _), row in zip(rows, pages):
            k, v = torch.randn((2, start, self.kv_heads, self.size), generator=generator).to(dtype)
            slots = torch.tensor([row[p // PAGE] * PAGE + p % PAGE for p in range(start)], dtype=torch.int64)
            for pool in self.pools:
                pool.store(0, k, v, slots)
        self.batch = forward_batch(
            [Row([0] * new, start, row) for (start, new), row in zip(rows, pages)], num_decode
        )
        tokens = sum(new for _, new in rows)
        self.qkv = torch.randn((tokens, self.heads + 2 * self.kv_heads, self.size), generator=generator).to(
            dtype
        )

    def backends(self) -> tuple[PagedCpuBackend, SdpaBackend]:
        shape = attention_shape(self.pools[0], self.heads)
        own, other = PagedCpuBackend(self.pools[0], shape), SdpaBackend(self.pools[1], shape)
        own.plan(self.batch)
        other.plan(self.batch)
        return own, other

    def parts(self) -> tuple[Tensor, ...]:
        q, k, v = self.qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v


@settings(max_examples=examples(30))
@given(
    dtype=st.sampled_from(DTYPES),
    decode=st.lists(st.tuples(st.integers(0, 140), st.just(1)), max_size=5),
    prefill=st.lists(
        st.tuples(st.sampled_from([0, 0, 1, 16, 70]), st.sampled_from([1, 15, 16, 67])),
        min_size=1,
        max_size=3,
    ),
    seed=st.integers(0, 1000),
)
def test_agrees_with_the_torch_backend(dtype, decode, prefill, seed) -> None:
    for _ in instruction_sets():
        scene = Scene(decode + prefill, len(decode), dtype, seed)
        own, other = scene.backends()
        with torch.inference_mode():
            got, want = (backend.forward(*scene.parts(), 0) for backend in (own, other))
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for mine, its in zip(scene.pools[0].layer(0), scene.pools[1].layer(0)):
            assert torch.equal(mine.nan_to_num(7), its.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
def test_the_fused_entry_is_the_layer_s_sequence(dtype: torch.dtype, with_norm: bool) -> None:
    for _ in instruction_sets():
        scene = Scene([(33, 1), (0, 1), (20, 30), (0, 17)], 2, dtype)
        own, other = scene.backends()
        generator = torch.Generator().manual_seed(1)
        angles = torch.randn((len(scene.qkv), 1, scene.size // 2), generator=generator)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        q_weight, k_weight = torch.randn((2, scene.size), generator=generator).to(dtype)
        qk, v = scene.qkv[:, : -scene.kv_heads], scene.qkv[:, -scene.kv_heads :]
        if with_norm:
            qk = normalize(qk, 1e-6)
            qk[:, : scene.heads].mul_(q_weight)
            qk[:, scene.heads :].mul_(k_weight)
        qk = rotate(qk, cos, sin)
        with torch.inference_mode():
            want = other.forward(qk[:, : scene.heads], qk[:, scene.heads :], v, 0)
            norm = HeadNorms(q_weight, k_weight, 1e-6) if with_norm else None
            got = own.store_and_attend(scene.qkv, cos, sin, 0, norm)
        torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_plan_serves_every_layer_and_the_workspace_only_grows() -> None:
    for _ in instruction_sets():
        big, small = Scene([(40, 1), (0, 50)], 1, torch.float32), Scene([(5, 1)], 1, torch.float32)
        backend = PagedCpuBackend(big.pools[0], attention_shape(big.pools[0], 6))
        with torch.inference_mode():
            backend.plan(big.batch)
            first = backend.forward(*big.parts(), 0)
            address, once = first.data_ptr(), first.clone()
            assert torch.equal(backend.forward(*big.parts(), 0), once)
            backend.plan(small.batch)
            again = backend.forward(*small.parts(), 0)
        assert again.shape == (1, 120)
        assert again.data_ptr() == address


def test_pages_of_another_size_are_refused() -> None:
    pool = MHAPool(num_layers=1, num_pages=3, kv_heads=1, head_size=8, dtype=torch.float32, page_size=8)
    with pytest.raises(ValueError, match="pages of 16"):
        PagedCpuBackend(pool, attention_shape(pool, 1))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_on_it_says_what_it_says_on_torch(family: str, tmp_path) -> None:
    make_checkpoint(tmp_path, family)
    model = load_model(str(tmp_path), torch.float32)
    tokens = torch.randint(3, 97, (2, 90), generator=torch.Generator().manual_seed(0)).tolist()
    for _ in instruction_sets():
        logits = []
        for compiled in (False, True):
            paged = PagedModel(model, torch.float32)
            if compiled:
                shape = attention_shape(paged.pool, model.config.num_heads)
                paged.backend = PagedCpuBackend(paged.pool, shape)
            first, second = Sequence(list(tokens[0])), Sequence(list(tokens[1]))
            parts = paged.step([], [(first, 70)])
            for chunk in (20, 45, 1):
                parts += paged.step([first], [(second, chunk)])
            parts += paged.step([first, second])
            logits.append(torch.cat(parts))
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
