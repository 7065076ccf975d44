"""Radix tree against a dictionary of prefixes that works page by page."""

import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.properties import examples

from caesura.scheduler.cache.allocator import LedgerError
from caesura.scheduler.cache.radix import RadixTree

PAGE = 2
SALTS = ["", "", "", "a"]
# Two kinds of page: shared prefixes and splits all the time. The odd token at the end never counts.
token_lists = st.builds(
    lambda pages, tail: [token for page in pages for token in page] + tail,
    st.lists(st.sampled_from([(0, 0), (0, 1)]), min_size=1, max_size=6),
    st.sampled_from([[], [0]]),
)


def array(values):
    return np.array(values, dtype=np.int32)


def prefixes(tokens):
    return [tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]


class TreeAgainstPrefixes(RuleBasedStateMachine):
    """Reference: (epoch, salt, prefix) → [page, last use], one entry for every page."""

    def __init__(self):
        super().__init__()
        self.tree = RadixTree(PAGE)
        self.stored = {}
        self.locks = []  # (node, (epoch, salt), prefix)
        self.leases = []  # the same
        self.epoch = 0
        self.clock = 0
        self.next_page = 1

    # -- reference --

    def touch(self, key, tokens):
        self.clock += 1
        for prefix in prefixes(tokens):
            if (*key, prefix) in self.stored:
                self.stored[*key, prefix][1] = self.clock

    def matched(self, key, tokens):
        return [self.stored[*key, p][0] for p in prefixes(tokens) if (*key, p) in self.stored]

    def locked(self):
        return {(*key, prefix) for _, key, tokens in self.locks for prefix in prefixes(tokens)}

    def leased(self):
        return {(*key, prefix) for _, key, tokens in self.leases for prefix in prefixes(tokens)}

    def children(self, entry):
        return [e for e in self.stored if e[:2] == entry[:2] and e[2][:-PAGE] == entry[2]]

    def parents(self):
        return {(epoch, salt, prefix[:-PAGE]) for epoch, salt, prefix in self.stored}

    def evict_one(self):
        ends = set(self.stored) - self.parents() - self.locked()
        leased = self.leased()
        oldest = min(ends, key=lambda entry: (entry in leased, self.stored[entry][1]))
        page, stamp = self.stored.pop(oldest)
        self.leases = [  # one of pages that are gone is one of what is left above them
            (node, key, list(tokens[:-PAGE]) if (*key, tuple(tokens)) == oldest else tokens)
            for node, key, tokens in self.leases
        ]
        above = (*oldest[:2], oldest[2][:-PAGE])
        if above in self.stored:
            self.stored[above][1] = max(self.stored[above][1], stamp)
        return page

    # -- rules --

    @rule(salt=st.sampled_from(SALTS), tokens=token_lists, lock=st.booleans())
    def match(self, salt, tokens, lock):
        key = (self.epoch, salt)
        pages, node = self.tree.match(*key, array(tokens))
        expected = self.matched(key, tokens)
        assert pages.tolist() == expected
        assert (node is None) == (not expected)
        self.touch(key, tokens)
        if lock and node is not None:
            self.tree.lock(node)
            self.locks.append((node, key, tokens[: len(expected) * PAGE]))

    def insert_run(self, key, before, tokens, after, lock):
        whole = [*before, *tokens]
        existing = self.matched(key, whole)[len(before) // PAGE :]
        pages = list(range(self.next_page, self.next_page + len(tokens) // PAGE))
        self.next_page += len(pages)
        inserted = self.tree.insert(*key, array(tokens), array(pages), after=after)
        assert inserted.num_existing == len(existing)
        assert inserted.existing.tolist() == existing
        for prefix, page in zip(prefixes(whole)[len(before) // PAGE :], pages, strict=True):
            self.stored.setdefault((*key, prefix), [page, 0])
        self.touch(key, whole)
        if lock:
            self.tree.lock(inserted.node)
            self.locks.append((inserted.node, key, whole))

    @rule(salt=st.sampled_from(SALTS), tokens=token_lists, lock=st.booleans())
    def insert(self, salt, tokens, lock):
        self.insert_run((self.epoch, salt), [], tokens[: len(tokens) // PAGE * PAGE], None, lock)

    @rule(data=st.data(), tokens=token_lists, lock=st.booleans())
    def insert_after_a_lock(self, data, tokens, lock):
        living = [entry for entry in self.locks if entry[1][0] == self.epoch]
        if living:
            node, key, before = data.draw(st.sampled_from(living))
            self.insert_run(key, before, tokens[: len(tokens) // PAGE * PAGE], node, lock)

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        node, key, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        freed = self.tree.unlock(node)
        still = self.locked()
        gone = [entry for entry in self.stored if entry[0] < self.epoch and entry not in still]
        assert sorted(freed.tolist()) == sorted(self.stored.pop(entry)[0] for entry in gone)
        assert not gone or key[0] < self.epoch

    @rule(salt=st.sampled_from(SALTS), tokens=token_lists)
    def lease(self, salt, tokens):
        key = (self.epoch, salt)
        pages, node = self.tree.match(*key, array(tokens))
        self.touch(key, tokens)
        if node is not None:
            self.tree.lease(node)
            self.leases.append((node, key, tokens[: len(pages) * PAGE]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), dead=st.booleans())
    def unlease(self, data, dead):
        node, key, tokens = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.tree.unlease(node, dead=dead)
        kept, unused = self.leased() | self.locked(), dead
        for entry in [(*key, prefix) for prefix in prefixes(tokens)[::-1]]:
            if entry in self.stored:
                unused &= entry not in kept and all(self.stored[e][1] < 0 for e in self.children(entry))
                if unused:
                    self.stored[entry][1] = -1

    @rule(num_pages=st.integers(0, 5))
    def evict(self, num_pages):
        available = sum(entry not in self.locked() for entry in self.stored)
        expected = [self.evict_one() for _ in range(min(num_pages, available))]
        assert sorted(self.tree.evict(num_pages).tolist()) == sorted(expected)

    @precondition(lambda self: len(self.stored) > 8)  # rarely, so that a tree can grow
    @rule(step=st.integers(1, 2))
    def end_epoch(self, step):
        self.epoch += step
        self.end_leases()
        gone = set(self.stored) - self.locked()
        freed = self.tree.drop_epochs_before(self.epoch)
        assert sorted(freed.tolist()) == sorted(self.stored.pop(entry)[0] for entry in gone)

    @precondition(lambda self: self.epoch > 0)
    @rule(salt=st.sampled_from(SALTS))
    def ended_epochs_are_closed(self, salt):
        assert self.tree.match(self.epoch - 1, salt, array([0] * PAGE))[1] is None
        with pytest.raises(LedgerError):
            self.tree.insert(self.epoch - 1, salt, array([0] * PAGE), array([1]))

    @precondition(lambda self: len(self.stored) > 8 or self.locks)
    @rule()
    def clear(self):
        if self.locks:
            with pytest.raises(LedgerError, match="locked"):
                self.tree.clear()
        else:
            self.end_leases()
            assert sorted(self.tree.clear().tolist()) == sorted(page for page, _ in self.stored.values())
            self.stored.clear()

    def end_leases(self):
        for node, _, _ in self.leases:
            self.tree.unlease(node)
        self.leases.clear()

    # -- after every step --

    @invariant()
    def counters(self):
        locked = self.locked()
        assert self.tree.num_locked_pages == len(locked)
        assert self.tree.num_evictable_pages == len(self.stored) - len(locked)
        assert self.tree.num_leased_pages == len(self.leased() & set(self.stored))

    @invariant()
    def structure(self):
        pages = []
        nodes = list(self.tree.nodes())
        for node in nodes:
            pages += node.pages.tolist()
            assert len(node.tokens) == len(node.pages) * PAGE > 0
            assert node.parent.children[node.tokens[:PAGE].tobytes()] is node
            for part in (node.tokens, node.pages):
                assert part.base is None or part.base.size < 2 * part.size
        assert sorted(pages) == sorted(page for page, _ in self.stored.values())
        assert len(self.tree._heap) <= 2 * len(nodes)


TreeAgainstPrefixes.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
TestTreeAgainstPrefixes = TreeAgainstPrefixes.TestCase


@pytest.fixture
def tree():
    return RadixTree(PAGE)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_of_any_integers_are_copied(tree, dtype):
    tokens, pages = np.array([1, 2, 3, 4], dtype=dtype), np.array([7, 8], dtype=dtype)
    tree.insert(0, "", tokens, pages)
    tokens[:] = 0
    pages[:] = 0
    found, _ = tree.match(0, "", np.arange(1, 10, dtype=dtype))
    assert (found.tolist(), found.dtype) == ([7, 8], np.int32)


def test_unlock_without_lock_and_old_locks_are_refused(tree):
    node = tree.insert(0, "", array([1, 1]), array([1])).node
    with pytest.raises(LedgerError, match="not locked"):
        tree.unlock(node)
    tree.drop_epochs_before(1)
    with pytest.raises(LedgerError, match="epoch 0"):
        tree.lock(node)


def test_eviction_order_is_last_use(tree):
    tree.insert(0, "", array([1, 1, 2, 2]), array([1, 2]))
    tree.insert(0, "", array([5, 5]), array([5]))
    tree.insert(0, "", array([6, 6]), array([6]))
    tree.match(0, "", array([1, 1]))  # page 1 is young now, page 2 still the oldest
    tree.match(0, "", array([5, 5]))
    assert [tree.evict(1).tolist() for _ in range(5)] == [[2], [6], [1], [5], []]


def test_a_continuation_keeps_what_is_above_it_young(tree):
    node = tree.insert(0, "", array([1, 1]), array([1])).node
    tree.lock(node)
    below = tree.insert(0, "", array([2, 2]), array([2]), after=node).node
    tree.lock(below)
    tree.unlock(node)
    other = tree.insert(0, "", array([5, 5]), array([5])).node
    tree.insert(0, "", array([3, 3]), array([3]), after=below)
    tree.unlock(below)
    tree.lock(other)
    assert [tree.evict(1).tolist() for _ in range(2)] == [[3], [2]]
    tree.unlock(other)
    assert [tree.evict(1).tolist() for _ in range(2)] == [[5], [1]]


def test_a_split_under_locks_locks_the_upper_part_once(tree):
    node = tree.insert(0, "", array([1, 1, 2, 2]), array([1, 2])).node
    tree.lock(node)
    tree.lock(node)
    tree.match(0, "", array([1, 1, 3, 3]))
    tree.unlock(node)
    assert tree.num_locked_pages == 2
    tree.unlock(node)
    assert tree.num_locked_pages == 0
    assert tree.num_evictable_pages == 2


def test_empty_roots_and_used_heap_entries_do_not_pile_up(tree):
    for salt in range(100):
        node = tree.insert(0, str(salt), array([1, 1]), array([1])).node
        for _ in range(5):
            tree.match(0, str(salt), array([1, 1]))
            tree.lock(node)
            tree.unlock(node)
        assert len(tree._heap) == 1
        assert tree.evict(1).tolist() == [1]
    assert len(tree._roots) == 0
    assert len(tree._heap) == 0


def test_lengths_must_agree(tree):
    for tokens, pages in (([1, 2, 3], [1]), ([1, 2], [1, 2]), ([], [])):
        with pytest.raises(ValueError, match="do not fill"):
            tree.insert(0, "", array(tokens), array(pages))


class LinesExecuted:
    """Python lines run inside the block: work that does not grow with the tokens stays in numpy."""

    def __enter__(self):
        self.count = 0
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def trace(self, frame, event, arg):
        self.count += event == "line"
        return self.trace

    def __exit__(self, *exc):
        sys.settrace(self.before)


def test_work_does_not_grow_with_a_million_tokens():
    page, n = 16, 1 << 20
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, n, dtype=np.int32)
    pages = np.arange(1, n // page + 1, dtype=np.int32)
    fork = tokens.copy()
    fork[n // 2 :] += 1
    tree = RadixTree(page)
    with LinesExecuted() as lines:
        tree.insert(0, "", tokens, pages)
        assert tree.insert(0, "", fork, pages + len(pages)).num_existing == len(pages) // 2
        found, node = tree.match(0, "", tokens)
        tree.lock(node)
        tree.unlock(node)
        tree.evict(1000)
        tree.drop_epochs_before(1)
    assert len(found) == len(pages)
    assert lines.count < 600


def test_growing_a_long_sequence_costs_what_is_new():
    page, chunk, chunks = 16, 512, 400
    tree = RadixTree(page)
    tokens = np.random.default_rng(0).integers(0, 1000, chunk * chunks, dtype=np.int32)
    per_chunk = chunk // page
    node = None
    counts = []
    for i in range(chunks):
        run = tokens[i * chunk : (i + 1) * chunk]
        with LinesExecuted() as lines:
            grown = tree.insert(
                0, "", run, np.arange(i * per_chunk, (i + 1) * per_chunk, dtype=np.int32), after=node
            )
            tree.lock(grown.node)
            if node is not None:
                tree.unlock(node)
        node = grown.node
        counts.append(lines.count)
    assert max(counts[1:]) <= counts[1] + 5
    assert tree.match(0, "", tokens)[0].tolist() == list(range(chunks * per_chunk))
    assert tree.unlock(node).tolist() == []
    assert len(tree.evict(chunks * per_chunk)) == chunks * per_chunk


def test_cutting_a_long_run_page_by_page_copies_little():
    page, n = 16, 512
    tree = RadixTree(page)
    tokens = np.arange(n * page, dtype=np.int32)
    tree.insert(0, "", tokens, np.arange(n, dtype=np.int32))
    (lower,) = list(tree.nodes())
    owner = lower.tokens
    owners = 1
    for cut in range(1, n):
        tree.match(0, "", tokens[: cut * page])
        base = lower.tokens if lower.tokens.base is None else lower.tokens.base
        owners += base is not owner
        owner = base
    assert owners <= 11  # log2(512) + 2
    assert len(list(tree.nodes())) == n
