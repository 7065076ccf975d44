"""Storage of layers with a sliding window, given back page by page as windows move on.

Each of the ledger's pages (``manager.py``) has a page of the storage of windowed layers behind it, or none,
if the window of every request that has it has moved on. A page has storage

- if it is a request's alone, while it is in the request's range, from what the next token sees to what is
  computed;
- if it is the prefix tree's, in a range: always; in no range: until somebody else needs it, longest idle
  first.

Invariants:
- A prefix can be shared up to where the pages that its next token sees have storage.
- A request's range ends where a step has been scheduled, and begins where one has been completed: a step
  whose results are lost can be computed again. A page more is kept below, so that a prefix in whole pages can
  be shared.
- Storage suffices for the ranges of all requests by its size (:func:`storage_pages`); it is never a reason to
  wait.
"""

from collections.abc import Iterable

import numpy as np

from .allocator import LedgerError, PageAllocator

NO_STORAGE = 0


def storage_pages(window: int, page_size: int, *, rows: int, step_tokens: int) -> int:
    """Return the most pages that the ranges of ``rows`` requests need, without the scratch page.

    ``step_tokens`` are the prompt tokens that a step computes, of all rows; two steps may be under way.
    """
    # Both ends in the midst of a page, the page kept below, one that is given back late, and the step under
    # way.
    row = -(-window // page_size) + 5
    return rows * row + 2 * -(-step_tokens // page_size)


class WindowPages:
    def __init__(self, num_pages: int, num_storage: int, page_size: int, window: int) -> None:
        self.window = window
        self._page_size = page_size
        self.storage = np.full(num_pages, NO_STORAGE, np.int32)
        """[pages of the ledger]: the page of storage behind each; the scratch page where there is none."""
        self._users = np.zeros(num_pages, np.int32)
        self._idle: dict[int, None] = {}  # of the tree, in nobody's range; longest idle first
        self._allocator = PageAllocator(num_storage)

    def first_seen(self, position: int) -> int:
        """Return the first page of a row that the token at ``position`` sees."""
        return max(0, position - self.window + 1) // self._page_size

    def shareable(self, pages: np.ndarray) -> int:
        """Return how many of ``pages``, a prefix, can be shared: the next token finds what it sees."""
        count = len(pages)
        ends = np.arange(1, count + 1)
        missing = np.nonzero(self.storage[pages] == NO_STORAGE)[0]
        # The last page without storage below each end; -1 where all have.
        last_missing = np.full(count, -1)
        last_missing[missing] = missing
        last_missing = np.maximum.accumulate(last_missing)
        first = np.maximum(0, ends * self._page_size - self.window + 1) // self._page_size
        fits = np.nonzero(last_missing < first)[0]
        return int(fits[-1]) + 1 if len(fits) else 0

    def enter(self, pages: np.ndarray) -> None:
        unused = self._users[pages] == 0
        stored = self.storage[pages] != NO_STORAGE
        needed = len(pages) - int(stored.sum())
        left = self._allocator.num_free + len(self._idle) - int((unused & stored).sum())
        if needed > left:
            raise LedgerError(
                f"a range needs {needed} more of {self._allocator.total} pages, {left} are left"
            )
        for page in pages.tolist():
            if not self._users[page]:
                self._idle.pop(page, None)
            self._users[page] += 1
        for page in pages[~stored].tolist():
            self.storage[page] = self._take()

    def leave(self, pages: np.ndarray, num_shared: int) -> None:
        """Take pages out of a request's range; the tree keeps the storage of its ``num_shared`` for now."""
        for index, page in enumerate(pages.tolist()):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if index < num_shared:
                self._idle[page] = None
            else:
                self._give_back(page)

    def replace(self, own: np.ndarray, tree: np.ndarray) -> None:
        """Let the tree's pages take the place of a request's own, of the same contents, in its range."""
        for mine, its in zip(own.tolist(), tree.tolist(), strict=True):
            if mine == its:
                continue
            if self.storage[its] == NO_STORAGE:
                self.storage[its], self.storage[mine] = self.storage[mine], NO_STORAGE
            else:
                if not self._users[its]:
                    del self._idle[its]
                self._give_back(mine)
            self._users[its] += 1
            self._users[mine] = 0

    def drop(self, pages: np.ndarray) -> None:
        for page in pages[self.storage[pages] != NO_STORAGE].tolist():
            self._idle.pop(page, None)
            self._give_back(page)

    def _take(self) -> int:
        if not self._allocator.num_free and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._give_back(oldest)
        taken = self._allocator.allocate(1)
        assert taken is not None, "whoever takes has counted"
        return int(taken[0])

    def _give_back(self, page: int) -> None:
        self._allocator.free(self.storage[page : page + 1].copy())
        self.storage[page] = NO_STORAGE

    def check(self, ranges: Iterable[np.ndarray], tree: np.ndarray) -> None:
        users = np.zeros_like(self._users)
        for pages in ranges:
            np.add.at(users, pages, 1)
        if not np.array_equal(users, self._users):
            raise LedgerError(f"pages in ranges miscounted: {np.nonzero(users != self._users)[0].tolist()}")
        behind = np.nonzero(self.storage != NO_STORAGE)[0]
        taken = self.storage[behind]
        if len(np.unique(taken)) != len(taken):
            raise LedgerError(f"storage of several pages: {sorted(taken.tolist())}")
        if self._allocator.num_free + len(taken) != self._allocator.total:
            raise LedgerError(f"{len(taken)} pages of storage in use, {self._allocator.num_free} free")
        if (users[self.storage == NO_STORAGE] > 0).any():
            raise LedgerError("a page of a range has no storage")
        idle = set(behind[users[behind] == 0].tolist())
        if idle != set(self._idle):
            raise LedgerError(f"idle storage {sorted(self._idle)}, walked {sorted(idle)}")
        if not idle <= set(tree.tolist()):
            raise LedgerError(f"storage that nobody needs: {sorted(idle - set(tree.tolist()))}")
