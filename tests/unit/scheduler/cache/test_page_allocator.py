"""Pages, rows of states and the pools of K and V."""

import numpy as np
import pytest
import torch

from caesura.scheduler.cache.allocator import LedgerError, PageAllocator
from caesura.scheduler.cache.layer_ledgers import NO_ROW, StateRows
from caesura.scheduler.cache.pool import MHAPool, MLAPool
from caesura.scheduler.memory.residency import ComponentResidencyManager


def test_pages_handed_out_are_a_copy():
    allocator = PageAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert first is not None
    assert second is not None
    before = second.tolist()
    allocator.free(first)  # reuses the part of the stack that `second` came from
    assert second.tolist() == before


def test_a_bad_free_names_the_pages_and_frees_nothing():
    allocator = PageAllocator(40)
    taken = allocator.allocate(38)
    assert taken is not None
    (left,) = allocator.free_pages().tolist()
    assert sorted([*taken.tolist(), left]) == [*range(1, 40)]
    for bad, named in (
        ([left], f"freed while free: {left}"), ([*taken[:1]], "twice in one call"), ([0], "0"), ([-1], "-1"),
        ([40], "40"),
    ):  # fmt: skip
        with pytest.raises(LedgerError, match=named):
            allocator.free(np.array([*taken[:3], *bad], dtype=np.int32))
        assert allocator.num_free == 1
    assert allocator.allocate(2) is None
    allocator.free(taken)
    assert sorted(allocator.free_pages().tolist()) == [*range(1, 40)]
    with pytest.raises(LedgerError, match="38 in all"):
        allocator.free(taken)


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_of_scratch_only_is_refused(num_pages):
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(num_pages)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(4).allocate(-1)


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


def test_storage_is_zero_and_has_the_kernel_layout():
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


NO_PAGES = np.empty(0, np.int32)


def pages(*numbers):
    return np.asarray(numbers, np.int32)


def kept(rows, *numbers):
    for number in numbers:
        state = rows.open(NO_PAGES, 0)
        assert rows.promise(state, 0) is not None
        rows.keep(state, pages(number), 1, 0)
        rows.close(state)
    return rows


def test_the_state_kept_longest_ago_makes_room():
    rows = kept(StateRows(10, 6), 3, 4, 5)
    assert rows.shareable(pages(3, 4, 5)) == 3
    first = rows.open(NO_PAGES, 0)
    second = rows.open(pages(3), 1)  # pins what would go next
    third = rows.open(NO_PAGES, 0)
    assert rows.shareable(pages(3, 4, 5)) == 3
    assert rows.shareable(pages(3, 4)) == 1
    assert rows.usage() == (0, 2, 3, 5)
    rows.check([first, second, third], pages(3, 5))


def test_initial_state_stays_until_a_step_has_read_it():
    rows = kept(StateRows(10, 4), 3)
    state = rows.open(pages(3), 1)
    other = rows.open(NO_PAGES, 0)
    assert rows.available == 0
    with pytest.raises(LedgerError, match="all 3 rows"):
        rows.open(NO_PAGES, 0)
    rows.launched(state, from_start=False)
    assert rows.available == 1
    rows.open(NO_PAGES, 0)
    assert rows.behind[3] == NO_ROW
    rows.close(other)


def test_the_last_row_is_taken_over_with_what_it_holds():
    rows = kept(StateRows(10, 3), 3)
    row = int(rows.behind[3])
    other = rows.open(NO_PAGES, 0)
    state = rows.open(pages(3), 1)
    assert (state.row, state.source, rows.behind[3]) == (row, 0, NO_ROW)
    rows.check([other, state], pages(3))
    rows.close(state)
    rows.close(other)
    assert rows.usage() == (2, 0, 0, 2)


def test_a_step_that_writes_to_a_spare_row_is_rolled_back():
    rows = StateRows(10, 8)
    state = rows.open(NO_PAGES, 0)
    first = state.row
    rows.launched(state, from_start=True)
    rows.completed(state)
    written = []
    for _ in range(2):
        rows.reserve(state, take_kept=False)
        rows.launched(state, from_start=False)
        written.append(state.row)
        rows.check([state], NO_PAGES)
    assert len({first, *written}) == 3
    rows.rolled_back(state)
    assert (state.row, state.lost, list(state.before)) == (written[0], False, [first])
    rows.rolled_back(state)
    assert (state.row, state.lost, rows.usage().held) == (first, False, 1)
    rows.reserve(state, take_kept=False)
    rows.launched(state, from_start=False)
    rows.completed(state)
    assert (state.row != first, rows.usage().held) == (True, 1)
    rows.check([state], NO_PAGES)


def test_only_a_step_that_overwrites_a_state_loses_it():
    rows = StateRows(10, 8)
    state = rows.open(NO_PAGES, 0)
    rows.launched(state, from_start=True)
    rows.rolled_back(state)
    assert not state.lost, "nothing was there"
    rows.launched(state, from_start=False)
    rows.rolled_back(state)
    assert state.lost
    again = rows.open(NO_PAGES, 0)
    rows.reserve(again, take_kept=False)
    rows.launched(again, from_start=False)
    rows.launched(again, from_start=False)
    rows.rolled_back(again)
    assert again.lost
    rows.rolled_back(again)
    assert not again.lost, "that was the row which the first of the two wrote"
    for each in (state, again):
        rows.close(each)
    assert rows.usage() == (7, 0, 0, 7)


def test_a_spare_row_may_cost_a_kept_state():
    rows = kept(StateRows(10, 4), 3)
    state = rows.open(NO_PAGES, 0)
    rows.reserve(state, take_kept=False)
    assert state.spare == NO_ROW, "one is free, and another request may want it"
    rows.reserve(state, take_kept=True)
    assert state.spare != NO_ROW
    other = rows.open(NO_PAGES, 0)
    rows.reserve(other, take_kept=True)
    assert (other.spare, rows.behind[3]) == (NO_ROW, NO_ROW)
    rows.unreserve(state)
    assert (state.spare, rows.usage()) == (NO_ROW, (1, 0, 2, 3))
    rows.check([state, other], NO_PAGES)


def test_a_request_from_a_kept_state_has_no_spare_row():
    rows = kept(StateRows(10, 8), 3)
    state = rows.open(pages(3), 1)
    rows.reserve(state, take_kept=True)
    rows.launched(state, from_start=False)
    rows.rolled_back(state)
    assert state.lost


def test_a_promise_counts_when_its_step_has_been_completed():
    rows = StateRows(10, 6)
    state = rows.open(NO_PAGES, 0)
    assert rows.promise(state, 1) == rows.promise(state, 1)
    rows.keep(state, pages(7, 8), 1, 0)
    assert not rows.behind.any()
    rows.close(state)  # as after a step whose results are lost
    rows.keep(state, pages(7, 8), 2, 0)
    assert not rows.behind.any()
    state = rows.open(NO_PAGES, 0)
    rows.promise(state, 0)
    rows.keep(state, pages(7, 8), 1, 0)
    rows.promise(state, 1)
    rows.keep(state, pages(7, 8), 2, 0)
    assert rows.behind[[7, 8]].astype(bool).tolist() == [False, True], "of its own a request keeps the last"
    rows.replace(pages(7, 8), pages(7, 2))
    rows.forget(pages(8))
    assert rows.behind[2] != NO_ROW
    rows.check([state], pages(2, 7))
    rows.close(state)
    rows.forget(pages(2, 7))
    assert rows.usage() == (5, 0, 0, 5)


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda rows, state: rows._allocator.allocate(1), "not exactly one thing"),
        (lambda rows, state: rows.behind.__setitem__(5, rows.behind[3]), "not exactly one thing"),
        (lambda rows, state: setattr(rows, "_held", 7), "counted 7"),
        (lambda rows, state: setattr(state, "source", 3), "pinned"),
        (lambda rows, state: None, "states of free pages"),
    ],
)
def test_the_check_finds_what_is_wrong(spoil, found):
    rows = kept(StateRows(10, 4), 3)
    state = rows.open(NO_PAGES, 0)
    rows.check([state], pages(3))
    spoil(rows, state)
    with pytest.raises(LedgerError, match=found):
        rows.check([state], NO_PAGES)
