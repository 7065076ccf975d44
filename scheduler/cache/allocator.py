"""Free list of KV pages.

Page 0 is scratch: never handed out and not part of :attr:`PageAllocator.total`. Every other page is either
free, exactly once, or with one caller of :meth:`PageAllocator.allocate`. A refused call changes nothing.
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

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages = {num_pages}: need the scratch page and at least one other")
        self.total = num_pages - 1
        self._stack = np.arange(self.total, 0, -1, dtype=np.int32)  # descending: low pages leave first
        self._num_free = self.total
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._is_free[0] = False

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
        if ordered[0] < 1 or ordered[-1] > self.total:
            raise LedgerError(f"freed pages outside [1, {self.total}]: {_named(pages)}")
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
