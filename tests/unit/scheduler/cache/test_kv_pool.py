"""KV pool: what is stored where, against a dense reference."""

import pytest
import torch

from caesura.scheduler.cache.pool import MHAPool, MLAPool
from caesura.scheduler.memory.residency import ComponentResidencyManager

LAYERS, PAGES, HEADS, SIZE, PAGE = 3, 7, 2, 4, 16


def make_pool(dtype=torch.float32):
    return MHAPool(num_layers=LAYERS, num_pages=PAGES, kv_heads=HEADS, head_size=SIZE, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 90])
@pytest.mark.parametrize("presplit", [False, True])
def test_store_matches_a_loop(dtype, tokens, presplit):
    generator = torch.Generator().manual_seed(tokens)
    pool = make_pool(dtype)
    expected = torch.zeros(LAYERS, 2, PAGES, HEADS, PAGE, SIZE, dtype=dtype)
    for layer in range(LAYERS):
        fused = torch.randn(tokens, 3 * HEADS, SIZE, generator=generator).to(dtype)
        k, v = fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :]  # strided, as slices of a fused qkv are
        slots = torch.randperm(PAGES * PAGE, generator=generator)[:tokens]
        if presplit:
            pool.store_at(layer, k, v, *pool.split_slots(slots))
        else:
            pool.store(layer, k, v, slots)
        for t, slot in enumerate(slots.tolist()):
            expected[layer, 0, slot // PAGE, :, slot % PAGE] = k[t]
            expected[layer, 1, slot // PAGE, :, slot % PAGE] = v[t]
    for layer in range(LAYERS):
        assert torch.equal(pool.layer(layer)[0], expected[layer, 0])
        assert torch.equal(pool.layer(layer)[1], expected[layer, 1])


def test_split_slots():
    pages, offsets = make_pool().split_slots(torch.tensor([0, 15, 16, 33, 111]))
    assert pages.tolist() == [0, 0, 1, 2, 6]
    assert offsets.tolist() == [0, 15, 0, 1, 15]
    assert pages.dtype == offsets.dtype == torch.int64


def test_storage_is_zero_stays_in_place_and_has_the_kernel_layout():
    pool = make_pool()
    addresses = [tensor.data_ptr() for tensor in pool.layer(1)]
    for tensor in pool.layer(1):
        assert tensor.shape == (PAGES, HEADS, PAGE, SIZE)
        assert tensor.is_contiguous()
        assert not tensor.any()
    pool.store(1, torch.ones(1, HEADS, SIZE), torch.ones(1, HEADS, SIZE), torch.tensor([40]))
    assert [tensor.data_ptr() for tensor in pool.layer(1)] == addresses
    assert not pool.layer(0)[0].any()
    assert not pool.layer(2)[1].any()


def test_sizes_agree_with_the_storage():
    pool = make_pool(torch.bfloat16)
    per_token = MHAPool.bytes_per_token(LAYERS, HEADS, SIZE, torch.bfloat16)
    assert per_token == 2 * LAYERS * HEADS * SIZE * 2
    assert pool.nbytes == per_token * PAGES * PAGE
    assert pool.nbytes == sum(t.untyped_storage().nbytes() for i in range(LAYERS) for t in pool.layer(i))
    assert pool.num_layers == LAYERS


def test_the_protocol_is_satisfied():
    pool = make_pool()
    assert (pool.num_pages, pool.page_size) == (PAGES, PAGE)


@pytest.mark.parametrize("name", ["num_layers", "num_pages", "kv_heads", "head_size", "page_size"])
def test_empty_sizes_are_refused(name):
    sizes = {"num_layers": 1, "num_pages": 2, "kv_heads": 1, "head_size": 4, "page_size": 16, name: 0}
    with pytest.raises(ValueError, match="at least 1"):
        MHAPool(**sizes, dtype=torch.float32)


@pytest.mark.parametrize("make", [
    lambda: MHAPool(num_layers=3, num_pages=1001, kv_heads=2, head_size=64, dtype=torch.bfloat16),
    lambda: MLAPool(num_layers=3, num_pages=1001, width=96, dtype=torch.bfloat16),
])  # fmt: skip
def test_the_first_pages_can_be_there_before_they_are_used(make):
    residency = ComponentResidencyManager("cpu")
    with residency.component("kv_cache"):
        pool = make()
    assert residency.occupied_bytes("kv_cache") == 0
    pool.touch(pool.nbytes // 2)
    assert residency.occupied_bytes("kv_cache") == pytest.approx(pool.nbytes / 2, rel=0.05)
    pool.touch(10 * pool.nbytes)
    assert residency.occupied_bytes("kv_cache") == pytest.approx(pool.nbytes, rel=0.05)
