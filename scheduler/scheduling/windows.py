"""Where a step finds the KV of layers with a window, and what of it is given back behind the step.

Invariant: a row has storage for what it sees before its step is built, and loses only what no step to come sees, after one has
been completed.
"""

import numpy as np
import torch
from torch import Tensor

from ..cache.manager import CacheManager
from ..execution.forward import ForwardBatch
from ..runtime.config import PAGE_SIZE
from .request import RequestTable


class WindowedSteps:
    """Of one ledger, whose layers with a window give pages back if it has any."""

    def __init__(self, table: RequestTable, cache: CacheManager) -> None:
        self._table, self._cache = table, cache

    def places(
        self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, page_table: np.ndarray
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """For rows ``slots`` that compute positions [starts, ends): where their tokens go, and their page table.

        Returns:
            int64 [T] and int32, as ``ForwardBatch.window_slots`` and ``window_table``; None, where there are none.
        """
        windows = self._cache.windows
        if windows is None:
            return None, None
        for row in np.nonzero(-(-ends // PAGE_SIZE) != -(-starts // PAGE_SIZE))[0].tolist():
            request = self._table.by_slot[slots[row]]
            assert request is not None, "a row of a step is a request's"
            assert request.kv is not None, "a running request has KV"
            self._cache.reach(request.kv, int(ends[row]))
        counts = ends - starts
        row_of_token = np.repeat(np.arange(len(slots)), counts)
        first = np.cumsum(counts) - counts
        positions = np.arange(len(row_of_token)) - first[row_of_token] + starts[row_of_token]
        table = windows.storage[page_table]
        pages = table[row_of_token, positions // PAGE_SIZE].astype(np.int64)
        return torch.from_numpy(pages * PAGE_SIZE + positions % PAGE_SIZE), torch.from_numpy(table)

    def completed(self, slots: np.ndarray, batch: ForwardBatch) -> None:
        """Give back what no later token of the rows ``slots`` sees; one that has not left its page has moved over none."""
        if self._cache.windows is None:
            return
        ends, counts = (np.asarray(lens, np.int64) for lens in (batch.kv_lens_host, batch.q_lens_host))
        for row in np.nonzero(ends // PAGE_SIZE != (ends - counts) // PAGE_SIZE)[0].tolist():
            request = self._table.by_slot[slots[row]]
            if request is not None and request.kv is not None:
                self._cache.passed(request.kv, int(ends[row]))
