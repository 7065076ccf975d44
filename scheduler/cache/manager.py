"""The ledger of KV pages: what a request holds, what the prefix cache holds, what is free.

Owners of a request's pages, by half-open ranges of its row:

- [0, num_shared): the tree, locked through ``node``; freed when evicted or dropped, after the last lock on it
  has gone, and at once with that lock if its epoch is over by then.
- [num_shared, num_pages): the request; freed at ``close``, or at ``donate`` where the tree has an equal page.

Invariants:
- free + cached + held = total, where *free* is in the allocator, *cached* in the tree and locked by nobody,
  and *held* in the tree and locked, or a request's own. The three are counted apart, so that the equation can
  fail.
- This is the only module that returns pages to the allocator.
- With data-parallel attention every rank has pages, a tree and leases of its own (:class:`RankPages`); all
  pages of a request are one rank's, chosen when it opens.
- Pages and owners are the same for all layers; windows and states add what ``layer_ledgers.py`` knows, and a
  prefix is shared only as far as they allow.
- No KV crosses epochs: requests match and donate only under the current epoch, and one that held pages at a
  commit is stale, so that nothing of it is ever stored.
- What the tier (``tier.py``) has of a prefix goes into a request's own pages, and is then shared as if the
  request had computed it.
- Calls with a closed :class:`RequestKV` raise :class:`LedgerError`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .allocator import LedgerError as LedgerError
from .allocator import PageAllocator, Usage
from .layer_ledgers import RequestState, StateRows, WindowPages
from .prefix_leases import PrefixLeases
from .prompt_logprobs import PromptLogprobs
from .radix import NO_PAGES, Node, RadixTree, Salt
from .tier import KVTier, first_key, next_key

LEASED_SHARE = 0.5
"""Largest share of the pool that leases protect."""
_SAVED_PAGES = 32
"""Pages that one step of :meth:`CacheManager.save` copies."""


class RankPages:
    """Pages of one rank, or the same pages of all ranks if attention is divided by heads."""

    def __init__(self, num_pages: int, page_size: int, first: int) -> None:
        """``num_pages`` counts the scratch page; the others begin at page ``first`` of the ledger."""
        self.allocator = PageAllocator(num_pages, first)
        self.tree = RadixTree(page_size)
        self.leases = PrefixLeases(self.tree, int(LEASED_SHARE * num_pages))
        self.num_owned = 0
        """Sum of ``num_pages - num_shared`` over the open requests."""
        self.num_open = 0
        """Number of open requests."""

    def available(self) -> int:
        return self.allocator.num_free + self.tree.num_evictable_pages

    def usage(self) -> Usage:
        return Usage(
            free=self.allocator.num_free,
            cached=self.tree.num_evictable_pages,
            held=self.num_owned + self.tree.num_locked_pages,
            total=self.allocator.total,
        )


@dataclass(slots=True, eq=False)
class RequestKV:
    """KV of one live request; written by :class:`CacheManager` alone. Compared and hashed by identity."""

    home: RankPages
    pages: np.ndarray
    """int32 row of the caller's page table, written in place; [0, num_pages) is valid."""
    num_pages: int
    num_shared: int
    node: Node | None
    epoch: int
    stale: bool
    salt: Salt
    first_in_range: int = 0
    end_of_range: int = 0
    """Pages of the row that have storage in layers with a window, if there are any."""
    state: RequestState | None = None


class CacheManager:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        epoch: int = 0,
        windows: WindowPages | None = None,
        states: StateRows | None = None,
        tier: KVTier | None = None,
        ranks: int = 1,
    ) -> None:
        """``num_pages`` counts the scratch page; without ``prefix_cache`` nothing is matched or stored.

        Of several ``ranks`` with pages of their own, each has ``num_pages``, numbered on through all ranks.
        They go with none of ``windows``, ``states`` and ``tier``.
        """
        assert ranks == 1 or not (windows or states or tier)
        self.windows = windows
        self.states = states
        self.epoch = epoch
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.prompt_logprobs = PromptLogprobs()
        self.tier = tier
        self._came_with = {epoch: epoch}
        """Epoch that first had the same weights, by epoch: another one after a rollback."""
        # Key of each page of the tree, and its place in its prefix.
        self._keys = [b""] * num_pages if tier is not None else []
        self._depths = np.zeros(len(self._keys), np.int32)
        self.ranks = [RankPages(num_pages, page_size, 1 + rank * (num_pages - 1)) for rank in range(ranks)]
        self._open: dict[RequestKV, None] = {}  # a set that remembers the order

    def homes(self, tokens: np.ndarray, salt: Salt, share: int) -> Sequence[RankPages]:
        """Return the ranks in the order in which a request of ``tokens`` should be opened there.

        First come those with less than ``share`` open requests, as the busiest rank sets the time of a step;
        of these the one with the longest cached prefix, then the one with the fewest requests.
        """
        if len(self.ranks) == 1:
            return self.ranks
        prefix = self._sharable(tokens)

        def place(home: RankPages) -> tuple[bool, int, int, int]:
            cached = len(home.tree.match(self.epoch, salt, prefix)[0]) if len(prefix) else 0
            return home.num_open >= share, -cached, home.num_open, -home.available()

        return sorted(self.ranks, key=place)

    def open(
        self, tokens: np.ndarray, salt: Salt, pages_row: np.ndarray, home: RankPages | None = None
    ) -> RequestKV:
        """Start a request, sharing a cached prefix of at most ``(n - 1) // page_size`` pages.

        :attr:`can_open` must be true. ``pages_row`` is kept and written in place until :meth:`close`;
        ``home`` is one of :meth:`homes`, the first rank if None.
        """
        if not self.can_open:
            raise LedgerError("no row of states is left")
        home = home or self.ranks[0]
        kv = RequestKV(home, pages_row, 0, 0, None, self.epoch, False, salt)
        prefix, cached = self._sharable(tokens), 0
        if len(prefix):
            pages, node, cached = self._match(home.tree, salt, prefix)
            if len(pages) > len(pages_row):
                raise LedgerError(f"a prefix of {len(pages)} pages does not fit a row of {len(pages_row)}")
            if node is not None:
                home.tree.lock(node)
                kv.node = node
                kv.num_pages = kv.num_shared = len(pages)
                pages_row[: len(pages)] = pages
        self._open[kv] = None
        home.num_open += 1
        if self.states is not None:
            kv.state = self.states.open(pages_row[: kv.num_shared], cached)
        if self.windows is not None:
            kv.first_in_range = kv.end_of_range = self.windows.first_seen(kv.num_pages * self.page_size)
            self._enter(kv, kv.num_pages)
        return kv

    @property
    def can_open(self) -> bool:
        return self.states is None or self.states.available > 0

    def _sharable(self, tokens: np.ndarray) -> np.ndarray:
        """Return the longest part of a request's tokens that can be a cached prefix."""
        usable = max(len(tokens) - 1, 0) // self.page_size if self.prefix_cache else 0
        return tokens[: usable * self.page_size]

    def _match(self, tree: RadixTree, salt: Salt, tokens: np.ndarray) -> tuple[np.ndarray, Node | None, int]:
        pages, node = tree.match(self.epoch, salt, tokens)
        cached = shareable = len(pages)
        for rooms in (self.windows, self.states):
            if rooms is not None and shareable:
                shareable = rooms.shareable(pages[:shareable])
        if shareable < cached:
            pages, node = tree.match(self.epoch, salt, tokens[: shareable * self.page_size])
        return pages, node, cached

    def reach(self, kv: RequestKV, num_tokens: int) -> None:
        self._require_open(kv)
        self._enter(kv, -(-num_tokens // self.page_size))

    def passed(self, kv: RequestKV, num_tokens: int) -> None:
        self._require_open(kv)
        if self.windows is not None:
            self._leave(kv, self.windows.first_seen(num_tokens - self.page_size))

    def computed(self, kv: RequestKV, num_tokens: int) -> None:
        self._require_open(kv)
        if self.states is not None and kv.state is not None:
            self.states.keep(kv.state, kv.pages, num_tokens // self.page_size, kv.num_shared)

    def _enter(self, kv: RequestKV, end: int) -> None:
        if self.windows is not None and end > kv.end_of_range:
            self.windows.enter(kv.pages[kv.end_of_range : end])
            kv.end_of_range = end

    def _leave(self, kv: RequestKV, first: int) -> None:
        first = min(first, kv.end_of_range)
        if self.windows is not None and first > kv.first_in_range:
            self.windows.leave(kv.pages[kv.first_in_range : first], max(0, kv.num_shared - kv.first_in_range))
            kv.first_in_range = first

    def extend(self, kv: RequestKV, num_tokens: int) -> bool:
        """Give ``kv`` pages for ``num_tokens`` in total, evicting cached ones; False changes nothing."""
        self._require_open(kv)
        wanted = -(-num_tokens // self.page_size)
        need = wanted - kv.num_pages
        if need <= 0:
            return True
        if wanted > len(kv.pages):
            raise LedgerError(f"{num_tokens} tokens need {wanted} pages, the row has {len(kv.pages)}")
        home = kv.home
        if need > home.available():
            return False
        if need > home.allocator.num_free:
            home.leases.expire()
            evicted = home.tree.evict(need - home.allocator.num_free)
            if self.tier is not None:
                self._save(evicted[np.argsort(-self._depths[evicted], kind="stable")])
            self._free(home, evicted)
        pages = home.allocator.allocate(need)
        if pages is None:
            raise LedgerError(f"the tree counted {need} pages as evictable that it could not evict")
        kv.pages[kv.num_pages : wanted] = pages
        kv.num_pages = wanted
        home.num_owned += need
        return True

    def donate(self, kv: RequestKV, tokens: np.ndarray) -> None:
        """Share the full pages of ``tokens`` while it lives; equal pages of the tree replace its own."""
        self._require_open(kv)
        full = len(tokens) // self.page_size
        if full > kv.num_pages:
            raise LedgerError(f"{len(tokens)} computed tokens, but pages for {kv.num_pages * self.page_size}")
        if kv.stale or kv.epoch != self.epoch or not self.prefix_cache or full <= kv.num_shared:
            return
        first = kv.num_shared
        run = tokens[first * self.page_size : full * self.page_size]
        if self.tier is not None:  # before the tree has them: whatever fails then, no page has another's key
            for at, key in enumerate(self._chain(kv, tokens, first, full), first):
                self._keys[kv.pages[at]], self._depths[kv.pages[at]] = key, at
        home = kv.home
        inserted = home.tree.insert(kv.epoch, kv.salt, run, kv.pages[first:full], after=kv.node)
        home.tree.lock(inserted.node)
        if kv.node is not None:
            self._free(home, home.tree.unlock(kv.node))
        duplicates = kv.pages[first : first + inserted.num_existing].copy()
        if self.windows is not None:
            low, high = max(first, kv.first_in_range), min(first + inserted.num_existing, kv.end_of_range)
            if low < high:
                self.windows.replace(
                    duplicates[low - first : high - first], inserted.existing[low - first : high - first]
                )
        if self.states is not None:
            self.states.replace(duplicates, inserted.existing)
        kv.pages[first : first + inserted.num_existing] = inserted.existing
        kv.node = inserted.node
        kv.num_shared = full
        home.num_owned -= full - first
        self._free(home, duplicates)

    def restore(self, kv: RequestKV, tokens: np.ndarray) -> int:
        """Copy what the tier has of a prefix, as :meth:`open` would share it, into the request's own pages.

        The prefix goes on behind what it shares; returns the tokens that need not be computed.
        """
        self._require_open(kv)
        first, end = kv.num_shared, max(len(tokens) - 1, 0) // self.page_size
        if self.tier is None or not self.prefix_cache or kv.stale or kv.epoch != self.epoch or first >= end:
            return 0
        pages = self.tier.load(self._chain(kv, tokens, first, end), kv.pages[first:end].tolist())
        self.donate(kv, tokens[: (first + pages) * self.page_size])
        return pages * self.page_size

    def _chain(self, kv: RequestKV, tokens: np.ndarray, first: int, end: int) -> Iterator[bytes]:
        """Yield the keys of a request's pages from ``first`` on, of which it shares those before."""
        key = self._keys[kv.pages[first - 1]] if first else first_key(self._came_with[kv.epoch], kv.salt)
        run = np.ascontiguousarray(tokens[first * self.page_size : end * self.page_size], np.int32)
        for page in run.reshape(-1, self.page_size):
            key = next_key(key, page)
            yield key

    def save(self) -> Iterator[None]:
        """Copy what the prefix tree has to the tier, as far as it has room, the most recently used last."""
        if self.tier is None:
            return
        (home,) = self.ranks
        nodes = list(home.tree.nodes())[::-1]  # children first
        used: dict[Node, int] = {}
        for node in nodes:
            used[node] = max(node.last_access, used.get(node, -1))
            if node.parent is not None:
                used[node.parent] = max(used[node], used.get(node.parent, -1))
        nodes.sort(key=lambda node: used[node])
        pages = _joined([node.pages[::-1] for node in nodes])[-self.tier.capacity :]
        for at in range(0, len(pages), _SAVED_PAGES):
            self._save(pages[at : at + _SAVED_PAGES])
            yield

    def _save(self, pages: np.ndarray) -> None:
        assert self.tier is not None, "whoever saves has looked"
        page_list = pages.tolist()
        self.tier.save([self._keys[page] for page in page_list], page_list)

    def close(self, kv: RequestKV, tokens: np.ndarray | None, lease: tuple[str, float] | None = None) -> None:
        """End a request, donating ``tokens`` unless None; if that raises, ``kv`` is still open.

        ``lease`` is the name and the seconds of a lease on what it shares.
        """
        self._require_open(kv)
        if tokens is not None:
            self.donate(kv, tokens)
        if lease is not None and kv.node is not None and not kv.stale and kv.epoch == self.epoch:
            kv.home.leases.hold(lease[0], kv.node, lease[1])
        self._leave(kv, kv.end_of_range)
        if self.states is not None and kv.state is not None:
            self.states.close(kv.state)
        home, own = kv.home, kv.pages[kv.num_shared : kv.num_pages].copy()
        unlocked = home.tree.unlock(kv.node) if kv.node is not None else NO_PAGES
        del self._open[kv]
        home.num_open -= 1
        home.num_owned -= len(own)
        kv.num_pages = kv.num_shared = 0
        kv.node = None
        self._free(home, own)
        self._free(home, unlocked)

    def end_lease(self, name: str) -> bool:
        """End a lease whose prefixes will not be used again; False if there is none."""
        return sum(home.leases.end(name) for home in self.ranks) > 0

    def mark_stale(self, kv: RequestKV) -> None:
        """Keep the KV of one request from others: other weights go on with it."""
        self._require_open(kv)
        kv.stale = True

    def commit_epoch(self, epoch: int, same_as: int | None = None) -> int:
        """Free older cached pages that nobody locks; return how many. Requests with pages become stale.

        ``same_as`` is an earlier epoch, kept so far, that had the same weights bit for bit.
        """
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} does not follow {self.epoch}")
        self.epoch = epoch
        self._came_with[epoch] = epoch if same_as is None else self._came_with[same_as]
        self.prompt_logprobs.clear()
        for home in self.ranks:
            home.leases.clear()
        for kv in self._open:
            if kv.num_pages:
                kv.stale = True
            else:
                kv.epoch = epoch
        return sum(self._free(home, home.tree.drop_epochs_before(epoch)) for home in self.ranks)

    def keep_epochs(self, epochs: set[int]) -> None:
        """Forget in the tier what only weights of other epochs have computed."""
        self._came_with = {epoch: self._came_with[epoch] for epoch in epochs}
        if self.tier is not None:
            self.tier.keep(set(self._came_with.values()))

    def flush(self, *, keep_tier: bool = False) -> int:
        if self._open:
            raise LedgerError(f"flush while {len(self._open)} requests hold KV")
        if self.tier is not None and not keep_tier:
            self.tier.keep(set())
        self.prompt_logprobs.clear()
        for home in self.ranks:
            home.leases.clear()
        return sum(self._free(home, home.tree.clear()) for home in self.ranks)

    def usage(self) -> Usage:
        """Return the sums over all ranks."""
        return Usage(*(sum(column) for column in zip(*(home.usage() for home in self.ranks), strict=True)))

    def check(self) -> None:
        """Walk everything and compare with the counters; O(pages), for tests and after errors."""
        for home in self.ranks:
            self._check_rank(home, [kv for kv in self._open if kv.home is home])
        for kv in self._open:
            path = _path_pages(kv.node)
            if not np.array_equal(path, kv.pages[: kv.num_shared]):
                reason = f"row shares {kv.pages[: kv.num_shared].tolist()}, its node has {path.tolist()}"
                raise LedgerError(reason)

    def _check_rank(self, home: RankPages, requests: list[RequestKV]) -> None:
        free, first = home.allocator.free_pages(), home.allocator.first
        nodes = list(home.tree.nodes())
        cached = _joined([node.pages for node in nodes if not node.lock_ref])
        locked = _joined([node.pages for node in nodes if node.lock_ref])
        owned = _joined([kv.pages[kv.num_shared : kv.num_pages] for kv in requests])
        known = home.allocator.last + 1
        times = np.bincount(_joined([free, cached, locked, owned]), minlength=known)
        _refuse("scratch or unknown pages with an owner", np.nonzero(times[:first])[0].tolist())
        _refuse("unknown pages with an owner", (np.nonzero(times[known:])[0] + known).tolist())
        _refuse("pages with several owners", np.nonzero(times > 1)[0].tolist())
        _refuse("pages with no owner", (np.nonzero(times[first:] == 0)[0] + first).tolist())
        leased = sum(len(node.pages) for node in nodes if node.lease_ref)
        if leased != home.tree.num_leased_pages:
            raise LedgerError(f"counted {home.tree.num_leased_pages} leased pages, walked {leased}")
        walked = Usage(len(free), len(cached), len(locked) + len(owned), home.allocator.total)
        if walked != home.usage():
            raise LedgerError(f"counted {home.usage()}, walked {walked}")
        if len(requests) != home.num_open:
            raise LedgerError(f"counted {home.num_open} open requests, walked {len(requests)}")
        self._check_tree(nodes, requests)
        if self.windows is not None:
            ranges = (kv.pages[kv.first_in_range : kv.end_of_range] for kv in requests)
            self.windows.check(ranges, _joined([cached, locked]))
        if self.states is not None:
            states = (kv.state for kv in requests if kv.state is not None)
            self.states.check(states, _joined([cached, locked, owned]))

    def _check_tree(self, nodes: list[Node], requests: list[RequestKV]) -> None:
        locks: dict[Node, int] = dict.fromkeys(nodes, 0)
        for kv in requests:
            if kv.node is not None:
                locks[kv.node] = locks.get(kv.node, 0) + 1
        for node in nodes:
            if node.lock_ref and node.parent is not None and node.parent in locks:
                locks[node.parent] += 1
        for node, count in locks.items():
            if node.lock_ref != count:
                reason = f"pages {node.pages.tolist()} locked {node.lock_ref} times, used {count} times"
                raise LedgerError(reason)
            if node.epoch < self.epoch and not count:
                raise LedgerError(f"pages {node.pages.tolist()} of epoch {node.epoch} outlived it unlocked")

    def _require_open(self, kv: RequestKV) -> None:
        if kv not in self._open:
            raise LedgerError("this RequestKV is closed")

    def _free(self, home: RankPages, pages: np.ndarray) -> int:
        home.allocator.free(pages)
        if self.windows is not None:
            self.windows.drop(pages)
        if self.states is not None:
            self.states.forget(pages)
        return len(pages)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([NO_PAGES, *parts])


def _path_pages(node: Node | None) -> np.ndarray:
    runs: list[np.ndarray] = []
    while node is not None:
        runs.append(node.pages)
        node = node.parent
    return _joined(runs[::-1])


def _refuse(what: str, pages: list[int]) -> None:
    if pages:
        raise LedgerError(f"{what}: {pages[:16]}" + (f" … ({len(pages)} in all)" if len(pages) > 16 else ""))
