"""Where a step's rows find their KV in layers with a window, and their state in layers with linear attention.

Invariants:
- A row has storage for what its window sees before its step is built, and loses it after one has been
  completed.
- A step is the only writer of its rows' states. Steps of decoding rows alone overwrite these, as twice the
  memory would pass through the processor otherwise; where such a step is lost, its requests are queued again.
- Steps that are likelier to run out of memory leave the states before them, as far as there are rows: those
  with prompt tokens if rows are free, and all while memory is known to be short, by giving up kept states.
- A state is kept for later prefixes at the last page border that a row passes in a step, but of a prompt no
  later than the last border that another request with it could share; and at the end of what was cached of
  the prompt without a state, so that the next request that shares only that much finds one.
"""

import numpy as np
import torch
from torch import Tensor

from ..cache.layer_ledgers import RequestState, StateRows
from ..cache.manager import CacheManager, RequestKV
from ..execution.forward import ForwardBatch, StateSegment, StateStep
from ..runtime.engine_config import PAGE_SIZE
from .request import RequestTable


class WindowedSteps:
    def __init__(self, table: RequestTable, cache: CacheManager) -> None:
        self._table, self._cache = table, cache

    def places(
        self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, page_table: np.ndarray,
        row_of_token: np.ndarray, positions: np.ndarray,
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:  # fmt: skip
        """Return ``ForwardBatch``'s ``window_slots`` (int64 [T]) and ``window_table`` (int32), or None."""
        windows = self._cache.windows
        if windows is None:
            return None, None
        for row in np.nonzero(-(-ends // PAGE_SIZE) != -(-starts // PAGE_SIZE))[0].tolist():
            self._cache.reach(_kv(self._table, slots[row]), int(ends[row]))
        table = windows.behind[page_table]
        pages = table[row_of_token, positions // PAGE_SIZE].astype(np.int64)
        return torch.from_numpy(pages * PAGE_SIZE + positions % PAGE_SIZE), torch.from_numpy(table)

    def completed(self, slots: np.ndarray, batch: ForwardBatch) -> None:
        if self._cache.windows is None:
            return
        ends, counts = (np.asarray(lens, np.int64) for lens in (batch.kv_lens_host, batch.q_lens_host))
        for row in np.nonzero(ends // PAGE_SIZE != (ends - counts) // PAGE_SIZE)[0].tolist():
            request = self._table.by_slot[slots[row]]
            if request is not None and request.kv is not None:
                self._cache.passed(request.kv, int(ends[row]))


class LinearStateSteps:
    def __init__(self, table: RequestTable, cache: CacheManager) -> None:
        self._table, self._cache, self._states = table, cache, cache.states

    def places(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        num_decode: int,
        *,
        memory_is_short: bool,
    ) -> StateStep | None:
        """Return the states of a step whose rows ``slots`` compute [starts, ends), decoding ones first."""
        if self._states is None:
            return None
        kvs = [_kv(self._table, slot) for slot in slots.tolist()]
        states = [_state(kv) for kv in kvs]
        has_prompts = num_decode < len(slots)
        for state, start in zip(states, starts.tolist(), strict=True):
            if not (memory_is_short or has_prompts):
                self._states.unreserve(state)
            elif start:
                self._states.reserve(state, take_kept=memory_is_short)
        sources = [state.row for state in states[:num_decode]]
        rows = [state.spare or state.row for state in states]
        kept, segments, first = [], [], num_decode
        for row in np.flatnonzero(ends[:num_decode] % PAGE_SIZE == 0).tolist():
            target = self._promise(self._states, kvs[row], int(ends[row]) // PAGE_SIZE)
            if target is not None:
                kept.append((row, target))
        for row in range(num_decode, len(slots)):
            start, end = int(starts[row]), int(ends[row])
            known = int(self._table.length[slots[row]])
            segments += self._segments(self._states, kvs[row], start, end, first, known)
            first += end - start
        index, targets = torch.tensor(kept, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return StateStep(
            rows=torch.tensor(rows, dtype=torch.int64),
            sources=None if sources == rows[:num_decode] else torch.tensor(sources, dtype=torch.int64),
            segments=segments,
            kept=(index, targets) if kept else None,
        )

    def may_repeat(self, slots: np.ndarray, *, memory_is_short: bool) -> bool:
        """Return True if a decode step of ``slots`` only overwrites the states of its rows."""
        if self._states is None:
            return True
        ends = self._table.scheduled[slots] + 1
        return not (memory_is_short or (self._cache.prefix_cache and (ends % PAGE_SIZE == 0).any()))

    def _segments(
        self, states: StateRows, kv: RequestKV, start: int, end: int, first: int, known: int
    ) -> list[StateSegment]:
        state = _state(kv)
        source: int | None = None
        if start:
            source = state.row if not state.source else int(states.behind[state.source])
        segments: list[tuple[int, int, int | None]] = []
        at = start
        for pages in sorted({state.branch, min(end, known - 1) // PAGE_SIZE}):
            border = pages * PAGE_SIZE
            kept = self._promise(states, kv, pages) if at < border <= end else None
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

    def _promise(self, states: StateRows, kv: RequestKV, pages: int) -> int | None:
        if not self._cache.prefix_cache or kv.stale or pages == 0:
            return None
        return states.promise(_state(kv), pages - 1)

    def launched(self, slots: np.ndarray, batch: ForwardBatch) -> None:
        if self._states is not None:
            for slot, end, count in zip(slots.tolist(), batch.kv_lens_host, batch.q_lens_host, strict=True):
                self._states.launched(_state(_kv(self._table, slot)), from_start=end == count)

    def completed(self, slots: np.ndarray, batch: ForwardBatch) -> None:
        if self._states is not None:
            for slot, end in zip(slots.tolist(), batch.kv_lens_host, strict=True):
                kv = _kv(self._table, slot)
                state = _state(kv)
                self._states.completed(state)
                if state.promised:
                    self._cache.computed(kv, end)

    def rolled_back(self, slots: np.ndarray) -> None:
        if self._states is not None:
            for slot in slots.tolist():
                self._states.rolled_back(_state(_kv(self._table, slot)))


def _kv(table: RequestTable, slot: int) -> RequestKV:
    request = table.by_slot[slot]
    assert request is not None, "a row of a step is a request's"
    assert request.kv is not None, "a running request has KV"
    return request.kv


def _state(kv: RequestKV) -> RequestState:
    assert kv.state is not None, "every request has a row where layers have states"
    return kv.state
