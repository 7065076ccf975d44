"""Free list of KV pages.

Page 0 is scratch: never handed out and not part of :attr:`PageAllocator.total`. Every page of the range that
is handed out is either free, exactly once, or with one caller of :meth:`PageAllocator.allocate`. A refused
call changes nothing.
"""

from typing import NamedTuple

import numpy as np


class LedgerError(RuntimeError):
    """A page is freed twice, owned twice or owned by nobody, or a call would make it so."""


class Usage(NamedTuple):
    """Pages, or rows of states, by owner; ``free + cached + held == total``. Scratch is none of them."""

    free: int
    cached: int
    held: int
    total: int


class PageAllocator:
    """A stack of free page ids. Each call is O(pages in the call), in array operations."""

    def __init__(self, num_pages: int, first: int = 1) -> None:
        """``num_pages`` counts the scratch page; the others begin at page ``first``."""
        if num_pages < 2:
            raise ValueError(f"num_pages = {num_pages}: need the scratch page and at least one other")
        self.total = num_pages - 1
        self.first, self.last = first, first + self.total - 1
        # Descending: low pages leave first.
        self._stack = np.arange(self.last, first - 1, -1, dtype=np.int32)
        self._num_free = self.total
        self._is_free = np.zeros(self.last + 1, dtype=np.bool_)
        self._is_free[first:] = True

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, n: int) -> np.ndarray | None:
        """Return ``n`` pages as a new int32 [n] array; take nothing and return None when fewer are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self._num_free:
            return None
        top = self._num_free
        pages = self._stack[top - n : top][::-1].copy()
        self._num_free = top - n
        self._is_free[pages] = False
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Take back int32 [n]; raise LedgerError, and free none, for pages unknown, free or named twice."""
        n = len(pages)
        if n == 0:
            return
        ordered = np.sort(pages)
        if ordered[0] < self.first or ordered[-1] > self.last:
            raise LedgerError(f"freed pages outside [{self.first}, {self.last}]: {_named(pages)}")
        already = self._is_free[pages]
        if already.any():
            raise LedgerError(f"pages freed while free: {_named(pages[already])}")
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise LedgerError(f"pages freed twice in one call: {_named(ordered[1:][twice])}")
        self._is_free[pages] = True
        self._stack[self._num_free : self._num_free + n] = pages[::-1]
        self._num_free += n

    def free_pages(self) -> np.ndarray:
        return self._stack[: self._num_free].copy()


def _named(pages: np.ndarray) -> str:
    shown = ", ".join(str(page) for page in pages[:16].tolist())
    return shown + (f" … ({len(pages)} in all)" if len(pages) > 16 else "")
