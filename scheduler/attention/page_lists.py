"""A step's pages for FlashInfer's wrappers: one list of page numbers, and where each row's begin.

Invariants:
- All lists of a step lie in one block and travel in one copy; the host's is written once that is over.
- Lists of steps of one size begin at the same addresses, where a captured step looks for them.
- With a window a row's pages begin with the first that any of its new tokens sees: those before may have been
  given back. Kernels count positions from a row's end.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..execution.forward import ForwardBatch, StepLimits
from ..runtime.engine_config import PAGE_SIZE

_INTS_PER_LINE = 16


@dataclass(frozen=True, slots=True)
class Lists:
    """A step's pages and tokens, int32, all in one block: on the host, or on the device."""

    indptr: Tensor
    """[R + 1]: where each row's pages begin in ``indices``."""
    last_page_len: Tensor
    """[R]: tokens in each row's last page, 1 to 16."""
    kv_lens: Tensor
    """[R]: tokens in each row's pages, from the first of these on."""
    qo_indptr: Tensor
    """[prefill rows + 1]: where each row's queries begin among those of the prefill rows."""
    prefill_indptr: Tensor
    """[prefill rows + 1]: ``indptr`` of the prefill rows, from 0."""
    batch_indices: Tensor
    """[T]: row of each token."""
    positions: Tensor
    """[T]: position of each token, from the first of its row's pages on."""
    indices: Tensor
    """Page numbers, row after row."""

    @classmethod
    def lay_out(cls, block: Tensor, sizes: list[int]) -> "Lists":
        """Return views of ``block``; page numbers come last, so more of them move nothing else."""
        views, start = [], 0
        for size in sizes:
            views.append(block[start : start + size])
            start += _lines(size)
        return cls(*views)


class PageLists:
    def __init__(self, limits: StepLimits, device: torch.device, window: int | None = None) -> None:
        """``window``: that of the layers which use these lists."""
        self._window = window
        rows, tokens = limits.rows, limits.tokens
        sizes = [rows + 1, rows, rows, rows + 1, rows + 1, tokens, tokens, rows * limits.pages]
        capacity = sum(_lines(size) for size in sizes)
        self.host = torch.empty(capacity, dtype=torch.int32, pin_memory=device.type != "cpu")
        self._ints: np.ndarray = self.host.numpy()
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)

    def fill(self, batch: ForwardBatch) -> tuple[Lists, Lists]:
        """Write the lists of ``batch`` and enqueue their copy; return those on the host and on the device."""
        arrays = page_lists(batch, self._window)
        start = 0
        for array in arrays:
            self._ints[start : start + len(array)] = array
            start += _lines(len(array))
        self.device[:start].copy_(self.host[:start], non_blocking=True)
        sizes = [len(array) for array in arrays]
        return Lists.lay_out(self.host, sizes), Lists.lay_out(self.device, sizes)

    def decode_views(self, rows: int) -> Lists:
        """Return the places of a step of ``rows`` decode rows; of the page numbers, as many as fit."""
        sizes = [rows + 1, rows, rows, 1, 1, rows, rows]
        room = len(self.device) - sum(_lines(size) for size in sizes)
        return Lists.lay_out(self.device, [*sizes, room])


def page_lists(batch: ForwardBatch, window: int | None = None) -> tuple[np.ndarray, ...]:
    """Return the arrays of :class:`Lists`, in order, for layers whose tokens see ``window`` positions."""
    q_lens, kv_lens = (np.asarray(lens, np.int64) for lens in (batch.q_lens_host, batch.kv_lens_host))
    new_from = kv_lens - q_lens
    first = np.zeros_like(kv_lens) if window is None else np.maximum(0, new_from + 1 - window) // PAGE_SIZE
    table, last = _table(batch, window), -(-kv_lens // PAGE_SIZE)
    indptr = _starts(last - first)
    row_of_token = np.repeat(np.arange(len(q_lens)), q_lens)
    first_token = _starts(q_lens)[:-1]
    kept_from = new_from - first * PAGE_SIZE
    positions = np.arange(len(row_of_token)) - first_token[row_of_token] + kept_from[row_of_token]
    columns = np.arange(table.shape[1])
    return (
        indptr,
        kv_lens - (last - 1) * PAGE_SIZE,
        kv_lens - first * PAGE_SIZE,
        _starts(q_lens[batch.num_decode :]),
        indptr[batch.num_decode :] - indptr[batch.num_decode],
        row_of_token,
        positions,
        table[(columns >= first[:, None]) & (columns < last[:, None])],
    )


def _table(batch: ForwardBatch, window: int | None) -> np.ndarray:
    if window is None or batch.window_table is None:
        table, host = batch.page_table, batch.page_table_host
    else:
        table, host = batch.window_table, batch.window_table_host
    return table.cpu().numpy() if host is None else host


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _lines(count: int) -> int:
    return -(-count // _INTS_PER_LINE) * _INTS_PER_LINE
