"""Data-parallel attention: each rank computes whole attention for the rows of a step whose KV it has.

Invariants:
- All ranks divide a step alike, from its page table. A ledger of several ranks (``cache/manager.py``) numbers
  pages on from rank to rank; in a rank's pool its own begin at 1. Rows on the scratch page, those of a
  warm-up, are taken in turns.
- Hidden states are whole on all ranks before attention and after it. Rows are gathered, not summed, so they
  have the bits that their rank computed.
- Every rank gathers blocks as long as the longest part, also if it has no rows: it waits for nobody who does
  not wait for it.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..execution.forward import ForwardBatch
from ..parallel.group import TensorParallel
from ..runtime.engine_config import PAGE_SIZE


class AttentionRows:
    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self._longest = 0
        self._own = self._order = torch.empty(0, dtype=torch.int64)

    def divide(self, batch: ForwardBatch, pages: int) -> ForwardBatch | None:
        """Begin a step; return this rank's rows for an attention backend to plan, or None if it has none.

        ``pages``: of each rank, without scratch.
        """
        device, rank, ranks = batch.positions.device, self._parallel.rank, self._parallel.size
        table = batch.page_table.numpy() if batch.page_table_host is None else batch.page_table_host
        first, q_lens = table[:, 0], np.asarray(batch.q_lens_host, np.int64)
        owners = np.where(first > 0, (first - 1) // pages, np.arange(len(first)) % ranks)
        of_token = np.repeat(owners, q_lens)
        counts = np.bincount(of_token, minlength=ranks)
        self._longest = int(counts.max())
        by_rank = np.argsort(of_token, kind="stable")
        order = np.empty(len(of_token), np.int64)
        behind = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        order[by_rank] = of_token[by_rank] * self._longest + behind
        self._order = torch.from_numpy(order).to(device)
        self._own = own = torch.from_numpy(np.flatnonzero(of_token == rank)).to(device)
        numbers = np.flatnonzero(owners == rank)
        if not len(numbers):
            return None
        rows = torch.from_numpy(numbers).to(device)
        return replace(
            batch,
            num_decode=int((numbers < batch.num_decode).sum()),
            input_ids=batch.input_ids.index_select(0, own),
            positions=self.own(batch.positions),
            kv_slots=(self.own(batch.kv_slots) - rank * pages * PAGE_SIZE).clamp_(min=0),
            page_table=(batch.page_table.index_select(0, rows) - rank * pages).clamp_(min=0),
            page_table_host=None
            if batch.page_table_host is None
            else np.maximum(batch.page_table_host[numbers] - rank * pages, 0),
            kv_lens=batch.kv_lens.index_select(0, rows),
            q_lens_host=q_lens[numbers].tolist(),
            kv_lens_host=[batch.kv_lens_host[row] for row in numbers.tolist()],
            slots=batch.slots.index_select(0, rows),
        )

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's rows of ``x`` [T, ...]."""
        return x.index_select(0, self._own)

    def gather(self, x: Tensor) -> Tensor:
        """Return [T, width] of all ranks' rows; ``x`` are this rank's."""
        block = x.new_zeros((self._longest, x.shape[1]))
        block[: len(x)] = x
        parts = self._parallel.all_gather(block.view(1, -1)).view(-1, x.shape[1])
        return parts.index_select(0, self._order)
