"""Expert ids from a step's record over the pool to the client's array, without an engine."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_scheduler import finished

from caesura.client.connection.results import decode_output
from caesura.client.exceptions import InternalError
from caesura.io_struct import RoutedExperts
from caesura.scheduler.cache import pool as pools
from caesura.scheduler.cache.pool import RoutingPool
from caesura.scheduler.layers.moe import RoutedExperts as Record
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.memory.residency import ComponentResidencyManager

LAYERS, TOP_K, PAGES = 3, 2, 40


def pool_of(dtype: torch.dtype = torch.uint8) -> RoutingPool:
    return RoutingPool(num_layers=LAYERS, top_k=TOP_K, dtype=dtype, num_pages=PAGES)


@pytest.mark.parametrize(("num_experts", "width"), [(256, 1), (257, 2)])
def test_every_id_fits(num_experts, width):
    record = Record(LAYERS, TOP_K, num_experts, place=Placement(torch.float32, torch.device("cpu")))
    last = torch.full((4, TOP_K), num_experts - 1)
    record.of_layer(2, 4).copy_(last)
    pool = pool_of(record.dtype)
    pool.store(torch.arange(16, 20), record.rows(4))
    rows = pool.read(np.array([1], np.int32), 0, 4)
    assert rows.dtype.itemsize == width
    assert (rows[:, 2] == num_experts - 1).all()
    assert not rows[:, :2].any(), "layers that recorded nothing are zeros"


def test_a_record_grows_and_shows_the_last_step_only():
    record = Record(LAYERS, TOP_K, 9, place=Placement(torch.float32, torch.device("cpu")))
    for tokens in (2, 5, 1):
        for layer in (0, 2):
            record.of_layer(layer, tokens).fill_(layer + tokens)
        rows = record.rows(tokens)
        assert rows.shape == (tokens, LAYERS, TOP_K)
        assert (rows[:, 0] == tokens).all()
        assert (rows[:, 2] == tokens + 2).all()


@given(data=st.data(), staged=st.integers(1, 5))
def test_reading_is_indexing(data, staged):
    before = pools.STAGED_PAGES
    pools.STAGED_PAGES = staged
    try:
        pool = pool_of()
        pages = np.array(data.draw(st.lists(st.integers(1, PAGES - 1), min_size=1, max_size=12, unique=True)))
        length = data.draw(st.integers((len(pages) - 1) * 16 + 1, len(pages) * 16))
        start = data.draw(st.integers(0, length))
        positions = np.arange(length)
        rows = torch.randint(0, 256, (length, LAYERS, TOP_K), dtype=torch.uint8)
        pool.store(torch.from_numpy(pages[positions // 16] * 16 + positions % 16), rows)
        np.testing.assert_array_equal(pool.read(pages, start, length), rows[start:].numpy())
    finally:
        pools.STAGED_PAGES = before


def test_routing_pool_is_released_with_the_kv():
    manager = ComponentResidencyManager("cpu")
    with manager.component("kv_cache"):
        pool = pool_of()
    assert manager.nbytes("kv_cache") == pool.nbytes == 2 * PAGES * 16 * LAYERS * TOP_K + 8 * PAGES
    assert RoutingPool.bytes_per_token(LAYERS, TOP_K, torch.int16) == 2 * LAYERS * TOP_K
    pool.store(torch.tensor([20]), torch.ones(1, LAYERS, TOP_K, dtype=torch.uint8))
    assert pool.read(np.array([1]), 4, 5).all()
    for _ in manager.release(["kv_cache"]):
        pass
    assert not pool.read(np.array([1]), 4, 5).any()


def wire(rows: int, start: int = 0, **fields: object) -> RoutedExperts:
    ids = np.arange(rows * LAYERS * TOP_K, dtype="u1").tobytes()
    values = {"data": ids, "shape": [rows, LAYERS, TOP_K], "dtype": "U8", "start": start, **fields}
    return RoutedExperts(**values)


def test_a_client_reads_an_array_without_a_copy():
    sent = wire(5, start=1)
    got = decode_output(finished("r", [7, 8, 9, 10], routed_experts=sent)).routed_experts
    array = np.asarray(got)
    assert (array.shape, array.dtype, array[1, 2, 1]) == ((5, LAYERS, TOP_K), np.uint8, 11)
    assert np.shares_memory(array, np.frombuffer(got.data, np.uint8))
    wide = np.array([[[258, 3]]], "<u2")
    two_bytes = RoutedExperts(data=wide.tobytes(), shape=[1, 1, 2], dtype="U16", start=0)
    assert np.asarray(two_bytes).tolist() == wide.tolist()
    without_tokens = decode_output(finished("r", [], routed_experts=wire(0))).routed_experts
    assert np.asarray(without_tokens).shape == (0, LAYERS, TOP_K)


@pytest.mark.parametrize(
    "broken",
    [wire(4), wire(6), wire(5, start=1), wire(5, data=b"\0" * 29), wire(5, dtype="U16")],
    ids=["short", "long", "start", "bytes", "width"],
)
def test_rows_that_do_not_match_the_tokens_are_refused(broken):
    decode_output(finished("r", [7, 8, 9], routed_experts=wire(5)))
    with pytest.raises(InternalError, match="routed experts"):
        decode_output(finished("r", [7, 8, 9], routed_experts=broken))
