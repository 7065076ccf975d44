"""Attention over latents (MLA with absorbed projections) by torch.

All query heads share one key per token, latent and rotated part side by side, whose front is also the value
(DeepSeek-AI, 2024, arXiv:2405.04434, 2.1.2: up-projections are absorbed into queries and output).

Invariants:
- Decode and prefill are the same arithmetic: rows with equally many new tokens are computed together, their
  pages gathered once per layer into a grow-only workspace.
- A masked position contributes nothing: scores are overwritten (not added to) by -inf, and latents beyond a
  row's end are zeroed, because 0 * NaN is NaN.
- Both products read gathered latents as one contiguous block, because torch copies others: the rotated part
  takes part in the second one, and is cut off its result.
- Scores are computed for as many queries at a time as a fixed number of bytes holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cache.pool import MLAPool
from ..execution.forward import ForwardBatch, LatentAttentionBackend
from ..memory.workspace import Workspace
from .rows import as_index, group_rows, workspace_bytes
from .shape import Shape


@dataclass(slots=True, kw_only=True)
class _Queries:
    """The same stretch of new tokens in each row of a group: c tokens of n rows."""

    tokens: Tensor | slice
    """Tokens of the step, row by row: n * c of them."""
    length: int
    """Latents to attend over: of one row those that its last token sees, of several all."""
    positions: Tensor
    """int64 [n, c, 1]: the last position that each token sees."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """Rows with equally many new tokens, padded to P pages: L = P * page_size."""

    num_rows: int
    pages: Tensor
    """int64 [n * P]: pages of the pool."""
    unused: Tensor
    """int64: positions beyond a row's end, in gathered latents seen as [n * L, width]."""
    queries: list[_Queries]


class LatentBackend(LatentAttentionBackend):
    def __init__(self, pool: MLAPool, shape: Shape) -> None:
        assert shape.latent is not None
        self.pool, self._heads, self._scale = pool, shape.num_heads, shape.scale
        self._latent = shape.latent
        self._device, self._dtype = shape.device, shape.dtype
        self._page_cells = pool.page_size * pool.width
        self._limit = workspace_bytes(self._device)
        self.workspace = Workspace()
        self._columns = torch.empty(0, dtype=torch.int64, device=self._device)
        self._kv_slots = torch.empty(0, dtype=torch.int64, device=self._device)
        self.groups: list[_Group] = []

    def plan(self, batch: ForwardBatch) -> None:
        self._kv_slots = batch.kv_slots
        q_lens = np.asarray(batch.q_lens_host, dtype=np.int64)
        kv_lens = np.asarray(batch.kv_lens_host, dtype=np.int64)
        pages = -(-kv_lens // self.pool.page_size)
        max_pages = self._limit // (self._page_cells * self._dtype.itemsize)
        longest = int(pages.max(initial=0)) * self.pool.page_size
        if longest > len(self._columns):
            self._columns = torch.arange(2 * longest, device=self._device)
        self.groups = []
        for q_len in np.unique(q_lens):
            (rows,) = np.nonzero(q_lens == q_len)
            for chosen in group_rows(pages[rows], max_pages):
                self.groups.append(self._plan_group(batch, rows[chosen], q_lens, kv_lens))

    def attend_latents(self, q: Tensor, layer: int) -> Tensor:
        pages = self.pool.layer(layer).view(-1, self._page_cells)
        out = torch.empty((*q.shape[:2], self._latent), dtype=q.dtype, device=q.device)
        for group in self.groups:
            latents = self._gather(group, pages)
            for queries in group.queries:
                attended = self._attend(queries, q[queries.tokens], latents)
                out[queries.tokens] = attended[..., : self._latent]
        return out.flatten(1)

    def _plan_group(
        self, batch: ForwardBatch, rows: np.ndarray, q_lens: np.ndarray, kv_lens: np.ndarray
    ) -> _Group:
        first_tokens, lengths, q_len = (q_lens.cumsum() - q_lens)[rows], kv_lens[rows], int(q_lens[rows[0]])
        num_pages = -(-int(lengths.max()) // self.pool.page_size)
        row, position = np.nonzero(np.arange(num_pages * self.pool.page_size) >= lengths[:, None])
        unused = row * (num_pages * self.pool.page_size) + position
        pages = batch.page_table[as_index(rows, self._device), :num_pages]
        return _Group(
            num_rows=len(rows),
            pages=pages.to(torch.int64).reshape(-1),
            unused=torch.from_numpy(unused).to(self._device),
            queries=list(self._plan_queries(batch, first_tokens, lengths, q_len)),
        )

    def _plan_queries(
        self, batch: ForwardBatch, first_tokens: np.ndarray, lengths: np.ndarray, q_len: int
    ) -> Iterator[_Queries]:
        num_rows, longest, start = len(lengths), int(lengths.max()), 0
        padded = -(-longest // self.pool.page_size) * self.pool.page_size
        while start < q_len:
            # Bounded by what the last token sees; the stretches before it could be a little longer.
            count = max(1, self._limit // (num_rows * self._heads * padded * 4))
            end = min(start + count, q_len)
            tokens = as_index((first_tokens[:, None] + np.arange(start, end)).reshape(-1), self._device)
            # One row's first latents are one block, those of several rows are not.
            yield _Queries(
                tokens=tokens,
                length=longest - q_len + end if num_rows == 1 else padded,
                positions=batch.positions[tokens].view(num_rows, end - start, 1),
            )
            start = end

    def _gather(self, group: _Group, pages: Tensor) -> Tensor:
        shape = group.pages.shape[0], self._page_cells
        gathered = self.workspace.take("gathered", shape, self._dtype, self._device)
        torch.index_select(pages, 0, group.pages, out=gathered)
        latents = gathered.view(-1, self.pool.width)
        latents.index_fill_(0, group.unused, 0.0)
        return latents.view(group.num_rows, -1, self.pool.width)

    def _attend(self, queries: _Queries, q: Tensor, latents: Tensor) -> Tensor:
        """Attend with ``q`` [n * c, heads, width]; return the same shape, the rotated part to be cut off."""
        seen = latents[:, : queries.length]
        num_rows, count, _ = queries.positions.shape
        scores = torch.bmm(q.reshape(num_rows, -1, self.pool.width), seen.transpose(1, 2))
        scores = scores.float().mul_(self._scale)
        masked = self._columns[: queries.length] > queries.positions
        scores.view(num_rows, count, self._heads, -1).masked_fill_(masked.unsqueeze(2), -torch.inf)
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        return torch.bmm(weights, seen).view(num_rows * count, self._heads, -1)
