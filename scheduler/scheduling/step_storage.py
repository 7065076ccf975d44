"""Where a step's rows find their states, in layers that keep one per sequence, and which states it keeps for later prefixes.

Invariants:
- A step is the only writer of its rows' states. The row that it ends in is its request's own.
- Steps of decoding rows alone overwrite these: twice the memory would pass through the processor otherwise. Where such a step is
  lost, its requests are queued again (:meth:`~.batcher.Batcher.restart_states`).
- Steps that are likelier to run out of memory leave the states before them as they were, as far as there are rows: those with
  prompt tokens if rows are free, and all while memory is known to be short, by giving up kept states.
- A state is kept at the last page border that a row passes in a step, but of a prompt no later than the last border that
  another request with the same prompt could share; and at the end of what was cached of the prompt without a state, so that
  the next request that shares only that much finds one.
"""

import numpy as np
import torch

from ..cache.manager import CacheManager, RequestKV
from ..execution.forward import ForwardBatch, StateSegment, StateStep
from ..runtime.config import PAGE_SIZE
from .request import RequestTable


class StatefulSteps:
    """Of one ledger, whose layers may have a state per sequence."""

    def __init__(self, table: RequestTable, cache: CacheManager) -> None:
        self._table, self._cache = table, cache

    def places(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        num_decode: int,
        *,
        memory_is_short: bool,
    ) -> StateStep | None:
        """For rows ``slots`` that compute positions [starts, ends), the first ``num_decode`` of them one each."""
        if self._cache.states is None:
            return None
        kvs = [self._kv(slot) for slot in slots.tolist()]
        if memory_is_short or num_decode < len(slots):
            self._reserve(kvs, starts, take_kept=memory_is_short)
        else:
            self._unreserve(kvs)
        states = [kv.state for kv in kvs if kv.state is not None]
        sources = [state.row for state in states[:num_decode]]
        rows = [state.spare or state.row for state in states]
        kept, segments, first = [], [], num_decode
        for row in np.flatnonzero(ends[:num_decode] % PAGE_SIZE == 0).tolist():
            target = self._promise(kvs[row], int(ends[row]) // PAGE_SIZE)
            if target is not None:
                kept.append((row, target))
        for row in range(num_decode, len(slots)):
            start, end = int(starts[row]), int(ends[row])
            segments += self._segments(kvs[row], start, end, first, int(self._table.length[slots[row]]))
            first += end - start
        index, targets = torch.tensor(kept, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return StateStep(
            rows=torch.tensor(rows, dtype=torch.int64),
            sources=None if sources == rows[:num_decode] else torch.tensor(sources, dtype=torch.int64),
            segments=segments,
            kept=(index, targets) if kept else None,
        )

    def _reserve(self, kvs: list[RequestKV], starts: np.ndarray, *, take_kept: bool) -> None:
        """Rows to write for all that have a state before the step."""
        states = self._cache.states
        assert states is not None
        for kv, start in zip(kvs, starts.tolist(), strict=True):
            if start and kv.state is not None:
                states.reserve(kv.state, take_kept=take_kept)

    def _unreserve(self, kvs: list[RequestKV]) -> None:
        states = self._cache.states
        assert states is not None
        for kv in kvs:
            if kv.state is not None:
                states.unreserve(kv.state)

    def _segments(self, kv: RequestKV, start: int, end: int, first: int, known: int) -> list[StateSegment]:
        """Of a row that computes its positions [start, end), which are the step's tokens from ``first`` on."""
        states, state = self._cache.states, kv.state
        assert states is not None
        assert state is not None
        source: int | None = None
        if start:
            source = state.row if not state.source else int(states.kept[state.source])
        segments: list[tuple[int, int, int | None]] = []
        at = start
        for pages in sorted({state.branch, min(end, known - 1) // PAGE_SIZE}):
            border = pages * PAGE_SIZE
            kept = self._promise(kv, pages) if at < border <= end else None
            if kept is not None:
                segments.append((at, border, kept))
                at = border
        if at < end:
            segments.append((at, end, None))
        offset, target = first - start, state.spare or state.row
        return [
            StateSegment(offset + at, offset + to, target if at > start else source, target, kept)
            for at, to, kept in segments
        ]

    def _promise(self, kv: RequestKV, pages: int) -> int | None:
        """The row for the state behind so many pages. None: nobody could find it, or there is no room."""
        states = self._cache.states
        assert states is not None
        assert kv.state is not None
        if not self._cache.prefix_cache or kv.stale or pages == 0:
            return None
        return states.promise(kv.state, pages - 1)

    def launched(self, slots: np.ndarray, starts: np.ndarray) -> None:
        """A step of these rows, which begin at these positions, has been built: what comes later is ordered behind it."""
        states = self._cache.states
        if states is None:
            return
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            state = self._kv(slot).state
            assert state is not None
            states.launched(state, from_start=start == 0)

    def completed(self, slots: np.ndarray, batch: ForwardBatch) -> None:
        """The step's results are there, and so are the states that it was to keep."""
        states = self._cache.states
        if states is None:
            return
        for slot, end in zip(slots.tolist(), batch.kv_lens_host, strict=True):
            kv = self._kv(slot)
            assert kv.state is not None
            states.completed(kv.state)
            if kv.state.promised:
                self._cache.computed(kv, end)

    def rolled_back(self, slots: np.ndarray) -> None:
        """The results of the newest step of these rows are lost."""
        states = self._cache.states
        if states is None:
            return
        for slot in slots.tolist():
            state = self._kv(slot).state
            assert state is not None
            states.rolled_back(state)

    def _kv(self, slot: int) -> RequestKV:
        request = self._table.by_slot[slot]
        assert request is not None, "a row of a step is a request's"
        assert request.kv is not None, "a running request has KV"
        return request.kv
