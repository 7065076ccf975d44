"""The KV ledger, model-checked: the reference remembers what was computed into every page."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.properties import examples

from caesura.scheduler.cache.layer_ledgers import WindowPages, storage_pages
from caesura.scheduler.cache.manager import CacheManager, LedgerError, Usage

PAGE = 2
ROW = 16
pages = st.sampled_from([(0, 0), (0, 1)])  # two kinds: equal prefixes all the time
prompts = st.builds(
    lambda pages, tail: [token for page in pages for token in page] + tail,
    st.lists(pages, min_size=1, max_size=6),
    st.sampled_from([[], [0]]),
)


def array(values):
    return np.array(values, dtype=np.int32)


class Request:
    def __init__(self, kv, tokens, epoch):
        self.kv = kv
        self.tokens = tokens
        self.epoch = epoch  # of its first KV; None: it has none
        self.computed = kv.num_shared * PAGE
        self.stale = False


class ManagerAgainstContents(RuleBasedStateMachine):
    """``content[page]`` stands for the KV itself: the epoch, salt and prefix that the page was computed from.

    A request of one epoch must find its own prefix in every full page it holds, whatever others do; that
    covers use after free, pages shared by mistake, matches across salts or epochs, and donated pages that
    were never computed.
    """

    num_pages = 1000
    prefix_cache = True
    ranks = 1

    def __init__(self):
        super().__init__()
        self.manager = CacheManager(
            self.num_pages,
            PAGE,
            self.prefix_cache,
            windows=self.make_windows(self.num_pages),
            ranks=self.ranks,
        )
        self.requests = []
        self.content = {}
        self.donated = set()  # (salt, prefix), ignoring evictions
        self.epoch = 0
        self.quiet = 0  # steps since the cache was last emptied

    def make_windows(self, num_pages):
        return None

    def computed(self, request):
        """Do nothing: without windows, computed tokens need no further storage."""

    def prefixes(self, tokens):
        return [tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]

    def remember_donation(self, request):
        if self.prefix_cache and not request.stale:
            computed = request.tokens[: request.computed]
            self.donated |= {(request.kv.salt, prefix) for prefix in self.prefixes(computed)}

    @precondition(lambda self: len(self.requests) < 6)
    @rule(tokens=prompts, salt=st.sampled_from(["", "a"]), share=st.integers(1, 3))
    def open(self, tokens, salt, share):
        homes = self.manager.homes(array(tokens), salt, share)
        assert len({id(home) for home in homes}) == self.ranks
        kv = self.manager.open(array(tokens), salt, np.zeros(ROW, dtype=np.int32), homes[0])
        longest = 0
        for prefix in self.prefixes(tokens[:-1]):  # at least one token is left to compute
            if (salt, prefix) not in self.donated:
                break
            longest += 1
        if self.num_pages >= 1000 and self.manager.windows is None:
            assert kv.num_shared == longest
        assert kv.num_pages == kv.num_shared <= longest
        assert (kv.node is None) == (kv.num_shared == 0)
        self.requests.append(Request(kv, list(tokens), self.epoch))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def compute(self, data, more):
        request = data.draw(st.sampled_from(self.requests))
        kv, target = request.kv, [*request.tokens, *more][: ROW * PAGE]
        need = -(-len(target) // PAGE) - kv.num_pages
        before, row = self.manager.usage(), kv.pages.copy()
        if not self.manager.extend(kv, len(target)):
            assert need > kv.home.available()
            assert self.manager.usage() == before
            assert np.array_equal(kv.pages, row)
            return
        assert kv.num_pages == -(-len(target) // PAGE)
        request.tokens = target
        for i in range(request.computed // PAGE, len(target) // PAGE):
            key = (self.epoch, kv.salt) if not request.stale else (None, kv.salt)
            assert i >= kv.num_shared  # never written: others read it
            self.content[int(kv.pages[i])] = (*key, tuple(target[: (i + 1) * PAGE]))
        self.computed(request)
        request.computed = len(target)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def donate(self, data):
        request = data.draw(st.sampled_from(self.requests))
        shared = request.kv.num_shared
        self.manager.donate(request.kv, array(request.tokens[: request.computed]))
        self.remember_donation(request)
        if request.stale or not self.prefix_cache:
            assert request.kv.num_shared == shared
        else:
            assert request.kv.num_shared == request.computed // PAGE

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep=st.booleans(), lease=st.sampled_from([None, ("a", 1.0), ("b", 1e9)]))
    def close(self, data, keep, lease):
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        cached = self.manager.usage().cached
        self.manager.close(request.kv, array(request.tokens[: request.computed]) if keep else None, lease)
        if keep:
            self.remember_donation(request)
        if request.stale:
            assert self.manager.usage().cached == cached
        with pytest.raises(LedgerError, match="closed"):
            self.manager.extend(request.kv, 1)

    @rule(name=st.sampled_from("ab"))
    def end_lease(self, name):
        self.manager.end_lease(name)

    @precondition(lambda self: self.quiet > 8)  # rarely, so that a cache can grow
    @rule(step=st.integers(1, 2))
    def commit(self, step):
        self.quiet = 0
        before = self.manager.usage()
        self.epoch += step
        freed = self.manager.commit_epoch(self.epoch)
        assert self.manager.usage() == before._replace(free=before.free + before.cached, cached=0)
        assert freed == before.cached
        for request in self.requests:
            request.stale = request.stale or request.kv.num_pages > 0
            assert request.kv.stale == request.stale
            assert request.kv.epoch == (request.kv.epoch if request.stale else self.epoch)
        self.donated.clear()

    @precondition(lambda self: self.quiet > 8)
    @rule()
    def flush(self):
        self.quiet = 0
        before = self.manager.usage()
        if self.requests:
            with pytest.raises(LedgerError, match="hold KV"):
                self.manager.flush()
            assert self.manager.usage() == before
        else:
            assert self.manager.flush() == before.cached
            assert self.manager.usage() == Usage(before.total, 0, 0, before.total)
            self.donated.clear()

    @invariant()
    def ledger(self):
        self.quiet += 1
        self.manager.check()
        first = 1
        for home in self.manager.ranks:
            usage = home.usage()
            assert usage.free + usage.cached + usage.held == usage.total == self.num_pages - 1
            assert home.available() == usage.free + usage.cached
            rows = [r.kv.pages[: r.kv.num_pages] for r in self.requests if r.kv.home is home]
            pages = {int(page) for row in rows for page in row}
            assert usage.held == len(pages)
            assert pages <= set(range(first, first + usage.total))
            first += usage.total
        assert self.manager.usage().total == first - 1

    @invariant()
    def every_page_holds_what_its_request_computed(self):
        for request in self.requests:
            for i, prefix in enumerate(self.prefixes(request.tokens[: request.computed])):
                epoch, salt, stored = self.content[int(request.kv.pages[i])]
                assert (salt, stored) == (request.kv.salt, prefix)
                if not request.stale:
                    assert epoch == self.epoch


class ManagerUnderPressure(ManagerAgainstContents):
    num_pages = 15


class ManagerOfThreeRanks(ManagerAgainstContents):
    num_pages = 15
    ranks = 3


class ManagerWithWindows(ManagerAgainstContents):
    """Layers with a window beside the others: ``behind[storage page]`` is what they have there.

    Tokens are computed four at a time. Pages move out of a range one step late, as at a depth of 1.
    """

    window = 5

    def make_windows(self, num_pages):
        self.behind, self.late = {}, []
        storage = storage_pages(self.window, PAGE, rows=6, step_tokens=4) + 1
        return WindowPages(num_pages, storage, PAGE, self.window)

    def settle(self):
        for request, end in self.late:
            if request in self.requests:
                self.manager.passed(request.kv, end)
        self.late.clear()

    def computed(self, request):
        kv, storage = request.kv, self.manager.windows.behind
        for start in range(request.computed, len(request.tokens), 4):
            end = min(start + 4, len(request.tokens))
            self.manager.reach(kv, end)
            for i in range(self.first_seen(start), end // PAGE):
                stored = int(storage[kv.pages[i]])
                assert stored != 0, "the step sees a page without storage"
                if i >= start // PAGE:
                    self.behind[stored] = self.content[int(kv.pages[i])]
                else:
                    assert self.behind[stored] == self.content[int(kv.pages[i])], "somebody else's tokens"
            self.settle()
            self.late.append((request, end))

    def first_seen(self, position):
        return max(0, position - self.window + 1) // PAGE

    @invariant()
    def the_next_token_of_every_request_finds_what_it_sees(self):
        for request in self.requests:
            pages = request.kv.pages[self.first_seen(request.computed) : request.computed // PAGE]
            stored = self.manager.windows.behind[pages].tolist()
            assert 0 not in stored
            assert [self.behind[each] for each in stored] == [self.content[page] for page in pages.tolist()]


class ManagerWithWindowsUnderPressure(ManagerWithWindows):
    num_pages = 40
    window = 3


class ManagerWithoutPrefixCache(ManagerAgainstContents):
    num_pages = 15
    prefix_cache = False


for machine, number in (
    (ManagerAgainstContents, 50),
    (ManagerUnderPressure, 50),
    (ManagerOfThreeRanks, 25),
    (ManagerWithWindows, 25),
    (ManagerWithWindowsUnderPressure, 25),
    (ManagerWithoutPrefixCache, 15),
):
    machine.TestCase.settings = settings(max_examples=examples(number), stateful_step_count=40)
TestManagerAgainstContents = ManagerAgainstContents.TestCase
TestManagerUnderPressure = ManagerUnderPressure.TestCase
TestManagerOfThreeRanks = ManagerOfThreeRanks.TestCase
TestManagerWithWindows = ManagerWithWindows.TestCase
TestManagerWithWindowsUnderPressure = ManagerWithWindowsUnderPressure.TestCase
TestManagerWithoutPrefixCache = ManagerWithoutPrefixCache.TestCase


# -- named cases -----------------------------------------------------------------------------------


def make(num_pages=50, prefix_cache=True):
    return CacheManager(num_pages, PAGE, prefix_cache)


def begin(manager, tokens, salt="", compute=True):
    kv = manager.open(array(tokens), salt, np.zeros(ROW, dtype=np.int32))
    assert not compute or manager.extend(kv, len(tokens))
    return kv


def held_pages(kv):
    return kv.pages[: kv.num_pages].tolist()


def windowed(num_storage, window=4, num_pages=50):
    return CacheManager(num_pages, PAGE, True, windows=WindowPages(num_pages, num_storage + 1, PAGE, window))


def run(manager, tokens, keep=True):
    kv = begin(manager, tokens)
    shared = kv.num_shared
    for end in [*range(shared * PAGE + 4, len(tokens), 4), len(tokens)]:
        manager.reach(kv, end)
        manager.passed(kv, end)
    manager.close(kv, array(tokens) if keep else None)
    manager.check()
    return shared


def test_a_prefix_is_shared_while_its_window_has_storage():
    manager = windowed(20)
    tokens = list(range(28))
    run(manager, tokens)
    assert run(manager, [*tokens, 1, 2, 3], keep=False) == 14
    assert run(manager, [*tokens[:20], 1, 2, 3], keep=False) == 0, "its last pages have no storage any more"
    assert run(manager, tokens[:3], keep=False) == 0


def test_storage_of_the_tree_goes_when_others_need_it():
    manager = windowed(8, num_pages=100)
    first, second = list(range(20)), list(range(100, 120))
    run(manager, first)
    run(manager, second)
    assert run(manager, [*first, 1, 2, 3], keep=False) == 10, "both windows fit"
    for start in (200, 300, 400):
        run(manager, list(range(start, start + 20)))
    assert run(manager, [*first, 1, 2, 3], keep=False) == 0
    assert manager.usage().cached >= 40, "its pages are still there, in the layers that see everything"


def test_a_page_computed_twice_keeps_the_remaining_storage():
    manager = windowed(40)
    tokens = list(range(20))
    first, second = begin(manager, tokens), begin(manager, tokens)
    for kv in (first, second):
        manager.reach(kv, 20)
    manager.passed(first, 20)
    manager.donate(first, array(tokens))  # its early pages have lost their storage
    manager.donate(second, array(tokens))
    manager.check()
    assert np.count_nonzero(manager.windows.behind) == 10
    manager.close(first, None)
    manager.close(second, None)
    manager.check()
    assert run(manager, [*tokens[:10], 7, 7, 7], keep=False) == 5


def test_insufficient_window_storage_is_a_ledger_error():
    manager = windowed(3)
    kv = begin(manager, list(range(20)))
    with pytest.raises(LedgerError, match="of 3 pages"):
        manager.reach(kv, 20)
    manager.check()


def test_misuse_is_refused_and_changes_nothing():
    manager = make()
    kv = begin(manager, [1, 2, 3])
    with pytest.raises(LedgerError, match="pages for 4"):
        manager.donate(kv, array([1] * 6))
    with pytest.raises(LedgerError, match="pages for 4"):
        manager.close(kv, array([1] * 6))
    with pytest.raises(LedgerError, match="the row has 16"):
        manager.extend(kv, ROW * PAGE + 1)
    longer = begin(manager, [1, 2, 3, 4, 5])
    with pytest.raises(LedgerError, match=r"8 computed tokens, but pages for 6$"):
        manager.donate(longer, array([1] * 8))
    manager.check()
    manager.close(longer, None)
    manager.close(kv, None)
    for call in (lambda: manager.close(kv, None), lambda: manager.donate(kv, array([1, 2]))):
        with pytest.raises(LedgerError, match="closed"):
            call()
    manager.commit_epoch(1)
    for epoch in (1, 0):
        with pytest.raises(ValueError, match="does not follow"):
            manager.commit_epoch(epoch)
    manager.close(begin(manager, [1] * 8), array([1] * 8))
    with pytest.raises(LedgerError, match="does not fit a row of 2"):
        manager.open(array([1] * 9), "", np.zeros(2, dtype=np.int32))
    manager.check()


# -- the check itself: every kind of damage is seen and named --------------------------------------


@pytest.mark.parametrize("count,more", [(16, ""), (17, r" … \(17 in all\)")])
def test_check_names_at_most_sixteen_leaked_pages(count, more):
    manager = make()
    leaked = manager.ranks[0].allocator.allocate(count)
    assert leaked is not None
    named = ", ".join(map(str, sorted(leaked)[:16]))
    with pytest.raises(LedgerError, match=rf"no owner: \[{named}\]{more}$"):
        manager.check()


def swap_shared(manager, kv):
    kv.pages[[0, 1]] = kv.pages[[1, 0]]


def drift(manager, kv):
    manager.ranks[0].num_owned += 1


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda manager, kv: manager.ranks[0].allocator.allocate(1), r"no owner: \[4\]"),
        (lambda manager, kv: kv.pages.put(2, kv.pages[0]), r"several owners: \[1\]"),
        (lambda manager, kv: kv.pages.put(2, 0), r"unknown pages with an owner: \[0\]"),
        (lambda manager, kv: kv.pages.put(2, 9), r"unknown pages with an owner: \[9\]"),
        (drift, r"held=4.*held=3"),
        (swap_shared, "row shares"),
        (lambda manager, kv: manager.ranks[0].tree.lock(kv.node), "locked 2 times, used 1 times"),
    ],
)
def test_check_names_every_kind_of_damage(damage, named):
    manager = make(num_pages=9)
    manager.close(begin(manager, [1, 2, 3, 4]), array([1, 2, 3, 4]))
    kv = begin(manager, [1, 2, 3, 4, 5, 6])
    manager.check()
    damage(manager, kv)
    with pytest.raises(LedgerError, match=named):
        manager.check()


def test_a_request_goes_where_its_prefix_is_cached():
    manager = CacheManager(20, PAGE, True, ranks=3)
    tokens = list(range(9))
    for home in manager.ranks[:2]:  # the last rank has the longer prefix
        kv = manager.open(array(tokens), "", np.zeros(ROW, np.int32), home)
        assert manager.extend(kv, len(tokens))
        manager.close(kv, array(tokens if home is manager.ranks[1] else tokens[:4]))
    first, second, third = manager.homes(array(tokens), "", 1)
    assert [first, second, third] == [manager.ranks[1], manager.ranks[0], manager.ranks[2]]
    kv = manager.open(array(tokens), "", np.zeros(ROW, np.int32), first)
    assert kv.num_shared == 4
    assert manager.homes(array(tokens), "", 2)[0] is first, "it has less than its share"
    assert manager.homes(array(tokens), "", 1)[0] is second, "it has its share"
    assert manager.homes(array(tokens), "other", 2)[0] is not first, "nothing is cached: fewest requests"
    manager.close(kv, None)
    manager.check()


def test_pages_of_another_rank_are_refused():
    manager = CacheManager(20, PAGE, True, ranks=2)
    kv = begin(manager, range(4))
    kv.home = manager.ranks[1]
    with pytest.raises(LedgerError, match="outside"):
        manager.close(kv, None)
