"""Ledgers of layers with windows and with states, behind the pages of the KV ledger (``manager.py``).

Layers with a sliding window have storage for some pages only. A page has storage

- if it is a request's alone, while it is in the request's range, from what the next token sees to what is
  computed;
- if it is the prefix tree's, in a range: always; in no range: until somebody else needs it, longest idle
  first.

A range ends where a step has been scheduled, and begins where one has been completed: a step whose results
are lost can be computed again. A page more is kept below, so that a prefix in whole pages can be shared.
Storage suffices for the ranges of all requests by its size (:func:`storage_pages`); it is never a reason to
wait.

Layers with a state per sequence know a prefix by the state at its end and nothing else, so a request can go
on only from where a state was kept: at the end of a page. A row of states is

- *live*, an open request's: its state after its last step; *before*, its state before a step under way, which
  writes to another row; *spare*, where its next step is to write;
- *promised*, a step's under way, which will fill it; kept once the step is completed;
- *kept*, a page's: the state at the end of it, until the page is freed or a row is needed: oldest use first;
- *free*; the scratch row is none of them, and every other exactly one.

A step writes to its request's spare row, which becomes the live one, and if it is lost the row before is live
again. Without a spare row it overwrites the live one, so a lost step leaves that undefined: its request
starts again, from the last prefix that has a kept state. A kept row is never written again. Any may be given
up, but for one that a request has opened with and not yet been computed from (it is *pinned*, and its page is
locked by that request).
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .allocator import LedgerError, PageAllocator, Usage

NONE = NO_ROW = NO_PAGE = 0
_OVERWRITTEN = -1
"""Stands for the row before a step under way that began from no row of its request's."""


class _Behind:
    def __init__(self, num_pages: int, num_behind: int) -> None:
        self.behind = np.full(num_pages, NONE, np.int32)
        self._allocator = PageAllocator(num_behind)
        self._idle: dict[int, None] = {}

    def _take(self) -> int | None:
        if not self._allocator.num_free and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._drop(oldest)
        taken = self._allocator.allocate(1)
        return None if taken is None else int(taken[0])

    def _drop(self, page: int) -> None:
        self._allocator.free(self.behind[page : page + 1].copy())
        self.behind[page] = NONE


def storage_pages(window: int, page_size: int, *, rows: int, step_tokens: int) -> int:
    """Return the most pages that the ranges of ``rows`` requests need, with two steps under way."""
    # Both ends in the midst of a page, the page kept below, one that is given back late, and the step under
    # way.
    row = -(-window // page_size) + 5
    return rows * row + 2 * -(-step_tokens // page_size)


class WindowPages(_Behind):
    """Storage of pages in layers with a window; idle is what the tree has in nobody's range."""

    def __init__(self, num_pages: int, num_storage: int, page_size: int, window: int) -> None:
        super().__init__(num_pages, num_storage)
        self.window = window
        self._page_size = page_size
        self._users = np.zeros(num_pages, np.int32)

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) // self._page_size

    def shareable(self, pages: np.ndarray) -> int:
        """Return how many of ``pages``, a prefix, can be shared: the next token finds what it sees."""
        count = len(pages)
        ends = np.arange(1, count + 1)
        missing = np.nonzero(self.behind[pages] == NONE)[0]
        # The last page without storage below each end; -1 where all have.
        last_missing = np.full(count, -1)
        last_missing[missing] = missing
        last_missing = np.maximum.accumulate(last_missing)
        first = np.maximum(0, ends * self._page_size - self.window + 1) // self._page_size
        fits = np.nonzero(last_missing < first)[0]
        return int(fits[-1]) + 1 if len(fits) else 0

    def enter(self, pages: np.ndarray) -> None:
        unused = self._users[pages] == 0
        stored = self.behind[pages] != NONE
        needed = len(pages) - int(stored.sum())
        left = self._allocator.num_free + len(self._idle) - int((unused & stored).sum())
        if needed > left:
            reason = f"a range needs {needed} more of {self._allocator.total} pages, {left} are left"
            raise LedgerError(reason)
        for page in pages.tolist():
            if not self._users[page]:
                self._idle.pop(page, None)
            self._users[page] += 1
        for page in pages[~stored].tolist():
            taken = self._take()
            assert taken is not None, "whoever takes has counted"
            self.behind[page] = taken

    def leave(self, pages: np.ndarray, num_shared: int) -> None:
        """Take pages out of a request's range; the tree keeps the storage of its ``num_shared`` for now."""
        for index, page in enumerate(pages.tolist()):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if index < num_shared:
                self._idle[page] = None
            else:
                self._drop(page)

    def replace(self, own: np.ndarray, tree: np.ndarray) -> None:
        for mine, its in zip(own.tolist(), tree.tolist(), strict=True):
            if mine == its:
                continue
            if self.behind[its] == NONE:
                self.behind[its], self.behind[mine] = self.behind[mine], NONE
            else:
                if not self._users[its]:
                    del self._idle[its]
                self._drop(mine)
            self._users[its] += 1
            self._users[mine] = 0

    def drop(self, pages: np.ndarray) -> None:
        for page in pages[self.behind[pages] != NONE].tolist():
            self._idle.pop(page, None)
            self._drop(page)

    def check(self, ranges: Iterable[np.ndarray], tree: np.ndarray) -> None:
        users = np.zeros_like(self._users)
        for pages in ranges:
            np.add.at(users, pages, 1)
        if not np.array_equal(users, self._users):
            raise LedgerError(f"pages in ranges miscounted: {np.nonzero(users != self._users)[0].tolist()}")
        behind = np.nonzero(self.behind != NONE)[0]
        taken = self.behind[behind]
        if len(np.unique(taken)) != len(taken):
            raise LedgerError(f"storage of several pages: {sorted(taken.tolist())}")
        if self._allocator.num_free + len(taken) != self._allocator.total:
            raise LedgerError(f"{len(taken)} pages of storage in use, {self._allocator.num_free} free")
        if (users[self.behind == NONE] > 0).any():
            raise LedgerError("a page of a range has no storage")
        idle = set(behind[users[behind] == 0].tolist())
        if idle != set(self._idle):
            raise LedgerError(f"idle storage {sorted(self._idle)}, walked {sorted(idle)}")
        if not idle <= set(tree.tolist()):
            raise LedgerError(f"storage that nobody needs: {sorted(idle - set(tree.tolist()))}")


@dataclass(slots=True)
class RequestState:
    row: int
    source: int = NO_PAGE
    """Page whose kept state it begins from, pinned until a step that reads it has been launched."""
    branch: int = 0
    """Cached pages of its prefix, if more than it could share; a state will be kept at their end."""
    promised: dict[int, int] = field(default_factory=dict)
    """Row in which a step under way keeps the state at a page's end, by the page's position."""
    last_kept: int | None = None
    spare: int = NO_ROW
    """Row that its next step writes, or the scratch row to overwrite the live one."""
    before: deque[int] = field(default_factory=deque)
    """Row with the state before each step under way, oldest first; scratch before its first token."""
    lost: bool = False


class StateRows(_Behind):
    """Rows of states: live ones, and those kept at the ends of pages; pinned ones are not idle."""

    def __init__(self, num_pages: int, num_rows: int) -> None:
        super().__init__(num_pages, num_rows)
        self._pins: Counter[int] = Counter()
        self._held = 0

    @property
    def total(self) -> int:
        return self._allocator.total

    def usage(self) -> Usage:
        kept = len(self._idle) + len(self._pins)
        return Usage(self._allocator.num_free, kept, self._held, self.total)

    @property
    def available(self) -> int:
        return self._allocator.num_free + len(self._idle)

    def shareable(self, pages: np.ndarray) -> int:
        """Return how many of ``pages``, a prefix, can be shared: up to the last one with a kept state."""
        kept = np.nonzero(self.behind[pages])[0]
        return int(kept[-1]) + 1 if len(kept) else 0

    def open(self, shared: np.ndarray, num_cached: int) -> RequestState:
        """Return a live row to go on from locked ``shared`` pages, maybe their own; raises LedgerError."""
        if not self.available:
            raise LedgerError(f"all {self.total} rows of states are held")
        source = int(shared[-1]) if len(shared) else NO_PAGE
        branch = num_cached if num_cached > len(shared) else 0
        if not self._allocator.num_free and list(self._idle) == [source]:  # it is the page's no longer
            last = int(self.behind[source])
            self.behind[source] = NO_ROW
            self._idle.clear()
            self._held += 1
            return RequestState(last, branch=branch)
        if source != NO_PAGE:
            self._idle.pop(source, None)
            self._pins[source] += 1
        row = self._take_row()
        assert row is not None, "there is a row that is not the source's"
        return RequestState(row, source, branch)

    def reserve(self, state: RequestState, *, take_kept: bool) -> None:
        """Have a spare row for the next step, if that leaves one for another request."""
        room = self.available if take_kept else self._allocator.num_free
        if state.source == NO_PAGE and state.spare == NO_ROW and room > 1:
            state.spare = self._take_row() or NO_ROW

    def unreserve(self, state: RequestState) -> None:
        if state.spare != NO_ROW:
            self._give_back(state.spare)
            state.spare = NO_ROW

    def launched(self, state: RequestState, *, from_start: bool) -> None:
        """Note a launched step; ``from_start``: it begins with the request's first token."""
        if state.spare != NO_ROW:
            state.before.append(state.row)
            state.row, state.spare = state.spare, NO_ROW
        else:
            state.before.append(NO_ROW if from_start else _OVERWRITTEN)
        self._leave_source(state)

    def completed(self, state: RequestState) -> None:
        row = state.before.popleft()
        if row not in (NO_ROW, _OVERWRITTEN):
            self._give_back(row)

    def rolled_back(self, state: RequestState) -> None:
        row = state.before.pop()
        state.lost = row == _OVERWRITTEN
        if row not in (NO_ROW, _OVERWRITTEN):
            self._give_back(state.row)
            state.row = row

    def promise(self, state: RequestState, page: int) -> int | None:
        """Return the row for the state at the end of ``page`` (by position); None without room."""
        if page not in state.promised:
            row = self._take_row()
            if row is None:
                return None
            state.promised[page] = row
        return state.promised[page]

    def keep(self, state: RequestState, pages: np.ndarray, num_full: int, num_shared: int) -> None:
        """Keep what was promised for ``num_full`` pages; a request keeps its last one and its branch."""
        for position in sorted(page for page in state.promised if page < num_full):
            row, page = state.promised.pop(position), int(pages[position])
            if self.behind[page] != NO_ROW:
                self._give_back(row)
                continue
            self._held -= 1
            self.behind[page] = row
            self._idle[page] = None
            if position + 1 == state.branch:
                continue
            if state.last_kept is not None and state.last_kept >= num_shared:
                self.forget(pages[state.last_kept : state.last_kept + 1])
            state.last_kept = position

    def forget(self, pages: np.ndarray) -> None:
        for page in pages[self.behind[pages] != NO_ROW].tolist():
            del self._idle[page]
            self._drop(page)

    def close(self, state: RequestState) -> None:
        self._leave_source(state)
        for row in _held_by(state):
            self._give_back(row)
        state.promised.clear()

    def replace(self, own: np.ndarray, tree: np.ndarray) -> None:
        """Let the tree's pages take the place of a request's own, which are freed next."""
        for mine, its in zip(own.tolist(), tree.tolist(), strict=True):
            if mine != its and self.behind[mine] != NO_ROW and self.behind[its] == NO_ROW:
                self.behind[its], self.behind[mine] = self.behind[mine], NO_ROW
                del self._idle[mine]
                self._idle[its] = None

    def _leave_source(self, state: RequestState) -> None:
        page, state.source = state.source, NO_PAGE
        if page == NO_PAGE:
            return
        self._pins[page] -= 1
        if not self._pins[page]:
            del self._pins[page]
            self._idle[page] = None

    def _take_row(self) -> int | None:
        row = self._take()
        self._held += row is not None
        return row

    def _give_back(self, row: int) -> None:
        self._held -= 1
        self._allocator.free(np.asarray([row], np.int32))

    def check(self, states: Iterable[RequestState], owned: np.ndarray) -> None:
        states = list(states)
        held = [row for state in states for row in _held_by(state)]
        pages = np.nonzero(self.behind)[0]
        rows = np.sort(np.concatenate([self._allocator.free_pages(), self.behind[pages], held])).astype(
            np.int64
        )
        if not np.array_equal(rows, np.arange(1, self.total + 1)):
            raise LedgerError(f"rows of states that are not exactly one thing: {rows.tolist()}")
        if len(held) != self._held:
            raise LedgerError(f"{len(held)} rows of states are held, counted {self._held}")
        pins = Counter(state.source for state in states if state.source != NO_PAGE)
        if pins != self._pins or set(pages.tolist()) != set(self._idle) | set(pins):
            reason = f"states kept for {pages.tolist()}, of them pinned {pins}, counted {self._pins}"
            raise LedgerError(reason)
        if not set(pages.tolist()) <= set(owned.tolist()):
            raise LedgerError(f"states of free pages: {sorted(set(pages.tolist()) - set(owned.tolist()))}")


def _held_by(state: RequestState) -> list[int]:
    rows = (state.row, state.spare, *state.before, *state.promised.values())
    return [row for row in rows if row not in (NO_ROW, _OVERWRITTEN)]
