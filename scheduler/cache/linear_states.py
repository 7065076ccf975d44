"""The ledger of state rows: the row of each sequence, and those that are kept for prefixes.

Layers with a state per sequence (``state_pool.py``) know a prefix by the state at its end and nothing else,
so a request can go on only from where a state was kept: at the end of a page of the KV ledger
(``manager.py``), with which it goes. A row is

- *live*, an open request's: its state after its last step; given back when the request's KV is closed;
- *before*, an open request's: its state before a step under way, which writes to another row;
- *spare*, an open request's: where its next step is to write;
- *promised*, a step's under way, which will fill it; kept once the step is completed;
- *kept*, a page's: the state at the end of it, until the page is freed or a row is needed: oldest use first;
- *free*.

Invariants:
- live + before + spare + promised + kept + free = total; the scratch row is none of them.
- A step writes to its request's spare row, which becomes the live one, and if it is lost the row before is
  live again. Without a spare row it overwrites the live one, so a lost step leaves that undefined: its
  request starts again, from the last prefix that has a kept state. A kept row is never written again.
- Any kept state may be given up, but for one that a request has opened with and not yet been computed from
  (it is *pinned*, and its page is locked by that request).
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .allocator import LedgerError, PageAllocator, Usage

NO_ROW = 0
NO_PAGE = 0
_OVERWRITTEN = -1
"""Stands for the row before a step under way that began from no row of its request's."""


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
    """True if a step has been rolled back that had overwritten the live row."""


class StateRows:
    def __init__(self, num_pages: int, num_rows: int) -> None:
        self.kept = np.full(num_pages, NO_ROW, np.int32)
        """[pages]: the row with the state at each page's end, or the scratch row."""
        self._allocator = PageAllocator(num_rows)
        self._oldest: dict[int, None] = {}  # pages with a kept state that is not pinned; longest unused first
        self._pins: Counter[int] = Counter()
        self._held = 0

    @property
    def total(self) -> int:
        return self._allocator.total

    def usage(self) -> Usage:
        """Return the rows by state, from counters; O(1)."""
        kept = len(self._oldest) + len(self._pins)
        return Usage(self._allocator.num_free, kept, self._held, self.total)

    @property
    def available(self) -> int:
        return self._allocator.num_free + len(self._oldest)

    def shareable(self, pages: np.ndarray) -> int:
        """Return how many of ``pages``, a prefix, can be shared: up to the last one with a kept state."""
        kept = np.nonzero(self.kept[pages])[0]
        return int(kept[-1]) + 1 if len(kept) else 0

    def open(self, shared: np.ndarray, num_cached: int) -> RequestState:
        """Return a live row for a request that goes on from the ``shared`` pages, which are locked.

        If the only row to be had is that of the shared prefix, the request takes it over. ``num_cached`` are
        the cached pages of its prefix. Raises LedgerError, with nothing changed, if no row is free or kept.
        """
        if not self.available:
            raise LedgerError(f"all {self.total} rows of states are held")
        source = int(shared[-1]) if len(shared) else NO_PAGE
        branch = num_cached if num_cached > len(shared) else 0
        if not self._allocator.num_free and list(self._oldest) == [source]:  # it is the page's no longer
            last = int(self.kept[source])
            self.kept[source] = NO_ROW
            self._oldest.clear()
            self._held += 1
            return RequestState(last, branch=branch)
        if source != NO_PAGE:
            self._pin(source)
        row = self._take()
        assert row is not None, "there is a row that is not the source's"
        return RequestState(row, source, branch)

    def reserve(self, state: RequestState, *, take_kept: bool) -> None:
        """Have a spare row for the next step, if there is one to be had beside one for another request.

        There is none while the request begins from another's kept state: that outlives the step anyway. With
        ``take_kept`` a kept state is given up for it.
        """
        room = self.available if take_kept else self._allocator.num_free
        if state.source == NO_PAGE and state.spare == NO_ROW and room > 1:
            state.spare = self._take() or NO_ROW

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
        """Note that the oldest step under way has been computed: nobody goes back behind it."""
        row = state.before.popleft()
        if row not in (NO_ROW, _OVERWRITTEN):
            self._give_back(row)

    def rolled_back(self, state: RequestState) -> None:
        """Go back to the state before the newest step under way, or set :attr:`~RequestState.lost`."""
        row = state.before.pop()
        state.lost = row == _OVERWRITTEN
        if row not in (NO_ROW, _OVERWRITTEN):
            self._give_back(state.row)
            state.row = row

    def promise(self, state: RequestState, page: int) -> int | None:
        """Return the row for the state at the end of ``page`` (by position); None without room."""
        if page not in state.promised:
            row = self._take()
            if row is None:
                return None
            state.promised[page] = row
        return state.promised[page]

    def keep(self, state: RequestState, pages: np.ndarray, num_full: int, num_shared: int) -> None:
        """Keep what was promised for the first ``num_full`` of the request's ``pages``, which are filled.

        Beside the states of the ``num_shared`` pages that are the tree's, a request keeps the last one, and
        that of its branch.
        """
        for position in sorted(page for page in state.promised if page < num_full):
            row, page = state.promised.pop(position), int(pages[position])
            if self.kept[page] != NO_ROW:
                self._give_back(row)
                continue
            self._held -= 1
            self.kept[page] = row
            self._oldest[page] = None
            if position + 1 == state.branch:
                continue
            if state.last_kept is not None and state.last_kept >= num_shared:
                self.forget(pages[state.last_kept : state.last_kept + 1])
            state.last_kept = position

    def forget(self, pages: np.ndarray) -> None:
        for page in pages[self.kept[pages] != NO_ROW].tolist():
            del self._oldest[page]
            self._drop(page)

    def close(self, state: RequestState) -> None:
        self._leave_source(state)
        for row in _held_by(state):
            self._give_back(row)
        state.promised.clear()

    def replace(self, own: np.ndarray, tree: np.ndarray) -> None:
        """Let the tree's pages take the place of a request's own, which are freed next."""
        for mine, its in zip(own.tolist(), tree.tolist(), strict=True):
            if mine != its and self.kept[mine] != NO_ROW and self.kept[its] == NO_ROW:
                self.kept[its], self.kept[mine] = self.kept[mine], NO_ROW
                del self._oldest[mine]
                self._oldest[its] = None

    def _leave_source(self, state: RequestState) -> None:
        if state.source != NO_PAGE:
            self._unpin(state.source)
            state.source = NO_PAGE

    def _pin(self, page: int) -> None:
        self._oldest.pop(page, None)
        self._pins[page] += 1

    def _unpin(self, page: int) -> None:
        if page == NO_PAGE:
            return
        self._pins[page] -= 1
        if not self._pins[page]:
            del self._pins[page]
            self._oldest[page] = None

    def _take(self) -> int | None:
        if not self._allocator.num_free and self._oldest:
            oldest = next(iter(self._oldest))
            del self._oldest[oldest]
            self._drop(oldest)
        taken = self._allocator.allocate(1)
        if taken is None:
            return None
        self._held += 1
        return int(taken[0])

    def _drop(self, page: int) -> None:
        self._allocator.free(self.kept[page : page + 1].copy())
        self.kept[page] = NO_ROW

    def _give_back(self, row: int) -> None:
        self._held -= 1
        self._allocator.free(np.asarray([row], np.int32))

    def check(self, states: Iterable[RequestState], owned: np.ndarray) -> None:
        states = list(states)
        held = [row for state in states for row in _held_by(state)]
        pages = np.nonzero(self.kept)[0]
        rows = np.sort(np.concatenate([self._allocator.free_pages(), self.kept[pages], held])).astype(
            np.int64
        )
        if not np.array_equal(rows, np.arange(1, self.total + 1)):
            raise LedgerError(f"rows of states that are not exactly one thing: {rows.tolist()}")
        if len(held) != self._held:
            raise LedgerError(f"{len(held)} rows of states are held, counted {self._held}")
        pins = Counter(state.source for state in states if state.source != NO_PAGE)
        if pins != self._pins or set(pages.tolist()) != set(self._oldest) | set(pins):
            raise LedgerError(
                f"states kept for {pages.tolist()}, of them pinned {pins}, counted {self._pins}"
            )
        if not set(pages.tolist()) <= set(owned.tolist()):
            raise LedgerError(f"states of free pages: {sorted(set(pages.tolist()) - set(owned.tolist()))}")


def _held_by(state: RequestState) -> list[int]:
    rows = (state.row, state.spare, *state.before, *state.promised.values())
    return [row for row in rows if row not in (NO_ROW, _OVERWRITTEN)]
