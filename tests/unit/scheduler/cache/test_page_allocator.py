"""Page allocator against a set of page ids."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.properties import examples

from caesura.scheduler.cache.allocator import LedgerError, PageAllocator

NUM_PAGES = 24


class AllocatorAgainstSet(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.free = set(range(1, NUM_PAGES))
        self.taken = []

    @rule(n=st.integers(0, 12))
    def allocate(self, n):
        pages = self.allocator.allocate(n)
        if n > len(self.free):
            assert pages is None
            return
        assert pages is not None
        assert pages.dtype == np.int32
        assert len(set(pages.tolist())) == n
        assert set(pages.tolist()) <= self.free
        self.free -= set(pages.tolist())
        self.taken += pages.tolist()

    @rule(data=st.data())
    def free_some(self, data):
        back = data.draw(st.lists(st.sampled_from(self.taken), unique=True) if self.taken else st.just([]))
        self.allocator.free(np.array(back, dtype=np.int32))
        self.free |= set(back)
        self.taken = [page for page in self.taken if page not in back]

    @rule(data=st.data(), kind=st.sampled_from(["free", "twice", "outside"]))
    def refuse_bad_free(self, data, kind):
        good = self.taken[:3]
        if kind == "free" and self.free:
            bad = [data.draw(st.sampled_from(sorted(self.free)))]
        elif kind == "twice" and good:
            bad = [good[0]]
        else:
            bad = [data.draw(st.sampled_from([0, -1, NUM_PAGES]))]
        with pytest.raises(LedgerError):
            self.allocator.free(np.array(good + bad, dtype=np.int32))

    @invariant()
    def same_free_pages(self):
        assert self.allocator.num_free == len(self.free)
        assert sorted(self.allocator.free_pages().tolist()) == sorted(self.free)


AllocatorAgainstSet.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=20)
TestAllocatorAgainstSet = AllocatorAgainstSet.TestCase


def test_page_zero_is_scratch():
    allocator = PageAllocator(5)
    assert allocator.total == 4
    pages = allocator.allocate(4)
    assert pages is not None
    assert sorted(pages.tolist()) == [1, 2, 3, 4]
    assert allocator.allocate(1) is None


def test_pages_handed_out_are_a_copy():
    allocator = PageAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert first is not None
    assert second is not None
    before = second.tolist()
    allocator.free(first)  # reuses the part of the stack that `second` came from
    assert second.tolist() == before


def test_messages_name_the_pages():
    allocator = PageAllocator(40)
    with pytest.raises(LedgerError, match="freed while free: 7, 9"):
        allocator.free(np.array([7, 9], dtype=np.int32))
    pages = allocator.allocate(39)
    assert pages is not None
    with pytest.raises(LedgerError, match="twice in one call"):
        allocator.free(np.concatenate([pages, pages[:1]]))
    allocator.free(pages)
    with pytest.raises(LedgerError, match="39 in all"):
        allocator.free(pages)


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_of_scratch_only_is_refused(num_pages):
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(num_pages)


def test_negative_allocation_is_refused():
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(4).allocate(-1)
