"""Paged attention by torch: the backend that runs everywhere.

Invariants:
- Decode rows are computed together: pages gathered once per layer into a grow-only workspace [row, kv head,
  position], then two batched products with the query heads of a group as the rows of a matrix, so K and V are
  never repeated (2 to 20 times faster than ``scaled_dot_product_attention`` in bf16).
- A masked position contributes nothing: scores are overwritten (not added to) by -inf and gathered V is
  zeroed there, because 0 * NaN is NaN; copies for prefill rows are cut at the KV length.
- Gather indices and masks are made in :meth:`SdpaBackend.plan`, so that no layer waits for a copy.
- With a window, pages that no token of a row sees are not gathered: they may have been given back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..cache.pool import MHAPool
from ..execution.forward import AttentionBackend, ForwardBatch
from ..kernels.attention_form import PLAIN, AttentionForm
from ..memory.workspace import Workspace
from .rows import as_index, group_rows, workspace_bytes
from .shape import Shape

SCORE_ELEMENTS = 1 << 24
"""Scores of a prefill at a time, where torch has no call for the form: 64 MB in float32."""


@dataclass(slots=True, kw_only=True)
class _DecodeGroup:
    """Decode rows that see similar lengths, padded to P pages: L = P * page_size."""

    rows: Tensor | slice
    num_rows: int
    pages: Tensor
    """int64 [n * kv heads * P]: rows of the pool seen as [pages * kv heads, page_size * head_size]."""
    masked: Tensor
    """bool [n, 1, 1, L]: beyond the row's KV, or before its window."""
    masked_cells: Tensor
    """int64: the same positions in gathered V seen as [n * kv heads * L, value size]."""


@dataclass(slots=True, kw_only=True)
class _PrefillRun:
    """Neighbouring prefill rows of equal lengths: n rows of ``q_len`` tokens that see ``kv_len``."""

    first_token: int
    num_rows: int
    q_len: int
    kv_len: int
    pages: Tensor | None
    """Pages as in :class:`_DecodeGroup`; None if the rows have no earlier tokens: the step's own K and V."""
    bias: Tensor | None
    """[q_len, kv_len], 0 or -inf in the pool's dtype; None if plainly causal, or for one token."""


@dataclass(slots=True)
class _Plan:
    groups: list[_DecodeGroup] = field(default_factory=list)
    runs: list[_PrefillRun] = field(default_factory=list)


class SdpaBackend(AttentionBackend):
    def __init__(self, pool: MHAPool, shape: Shape) -> None:
        self.pool, self._windows, self._scale = pool, shape.windows, shape.scale
        self._kv_heads = num_kv_heads = shape.num_kv_heads
        self._group = shape.num_heads // num_kv_heads
        self._head_sizes = shape.head_dim, pool.layer(0)[1].shape[-1]
        self._device, self._dtype = shape.device, shape.dtype
        self._max_pages = workspace_bytes(self._device) // (
            num_kv_heads * pool.page_size * max(self._head_sizes) * self._dtype.itemsize
        )
        self._head_index = torch.arange(num_kv_heads, device=self._device).view(1, -1, 1)
        self.workspace = Workspace()
        self._slots = (torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        self._window_slots = self._slots
        self._num_decode = 0
        self._batch: ForwardBatch | None = None
        self._plans: dict[int | None, _Plan] = {}

    def plan(self, batch: ForwardBatch) -> None:
        self._slots = self._window_slots = self.pool.split_slots(batch.kv_slots)
        if batch.window_slots is not None:
            self._window_slots = self.pool.split_slots(batch.window_slots)
        self._num_decode = batch.num_decode
        self._batch = batch
        self._plans.clear()
        for window in self._windows:
            self.plan_for(window)

    def plan_for(self, window: int | None) -> _Plan:
        """Plan groups of rows, gather indices and masks of layers whose tokens see ``window`` positions."""
        plan = self._plans.get(window)
        if plan is not None:
            return plan
        batch = self._batch
        assert batch is not None, "a step is planned before its layers are computed"
        if window is not None and batch.window_table is not None:
            batch = replace(batch, page_table=batch.window_table)
        lengths = np.asarray(batch.kv_lens_host[: batch.num_decode], dtype=np.int64)
        first = np.zeros_like(lengths) if window is None else np.maximum(0, lengths - window)
        pages = -(-lengths // self.pool.page_size) - first // self.pool.page_size
        rows = group_rows(pages, self._max_pages)
        plan = _Plan(
            [self._plan_group(batch, group, lengths, first) for group in rows], self._plan_runs(batch, window)
        )
        self._plans[window] = plan
        return plan

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        slots = self._slots if form.window is None else self._window_slots
        self.pool.store_at(layer, k, v, *slots)
        return self.attend(q, k, v, layer, form)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        k_pool, v_pool = (x.view(-1, self.pool.page_size * x.shape[-1]) for x in self.pool.layer(layer))
        plan = self.plan_for(form.window)
        out = torch.empty((q.shape[0], q.shape[1] * self._head_sizes[1]), dtype=q.dtype, device=q.device)
        decode_q, decode_out = q[: self._num_decode], out[: self._num_decode]
        for group in plan.groups:
            self._decode(group, decode_q, decode_out, k_pool, v_pool, form)
        for run in plan.runs:
            tokens = slice(run.first_token, run.first_token + run.num_rows * run.q_len)
            if run.pages is None:
                keys, values = self._split_rows(k[tokens], run), self._split_rows(v[tokens], run)
            else:
                keys, values = self._gather_run(run, k_pool, v_pool)
            out[tokens] = self._prefill(run, q[tokens], keys, values, form)
        return out

    # Decode

    def _plan_group(
        self, batch: ForwardBatch, rows: np.ndarray, lengths: np.ndarray, first: np.ndarray
    ) -> _DecodeGroup:
        """Plan ``rows``, which see the positions [first, lengths)."""
        n, page_size = len(rows), self.pool.page_size
        lengths, first = lengths[rows], first[rows]
        left_out = first // page_size
        lengths, first = lengths - left_out * page_size, first - left_out * page_size
        num_pages = -(-int(lengths.max()) // page_size)
        length = num_pages * page_size
        index = as_index(rows, self._device)
        table = batch.page_table[: batch.num_decode][index]
        if left_out.any():
            columns = np.minimum(left_out[:, None] + np.arange(num_pages), table.shape[1] - 1)
            table = table.gather(1, torch.from_numpy(columns).to(self._device))
        cells = np.arange(length)
        masked = (cells >= lengths[:, None]) | (cells < first[:, None])
        row, position = np.nonzero(masked)
        cells = (row * self._kv_heads + np.arange(self._kv_heads)[:, None]) * length + position
        return _DecodeGroup(
            rows=index,
            num_rows=n,
            pages=self._page_rows(table[:, :num_pages]),
            masked=torch.from_numpy(masked).to(self._device).view(n, 1, 1, length),
            masked_cells=torch.from_numpy(cells.reshape(-1)).to(self._device),
        )

    def _decode(
        self, group: _DecodeGroup, q: Tensor, out: Tensor, k_pool: Tensor, v_pool: Tensor, form: AttentionForm
    ) -> None:
        heads, (size, value_size) = group.num_rows * self._kv_heads, self._head_sizes
        keys, values = self._gather(group.pages, k_pool, v_pool)
        values.view(-1, value_size).index_fill_(0, group.masked_cells, 0.0)
        grouped_q = q[group.rows].reshape(heads, self._group, size)
        scores = torch.bmm(grouped_q, keys.view(heads, -1, size).transpose(1, 2))
        split = scores.view(group.num_rows, self._kv_heads, self._group, -1)
        weights = self._weights(split, group.masked, form).view_as(scores)
        values = values.view(heads, -1, value_size)
        if isinstance(group.rows, slice):
            torch.bmm(weights, values, out=out[group.rows].view(heads, self._group, value_size))
        else:
            out[group.rows] = torch.bmm(weights, values).view(group.num_rows, -1)

    def _weights(self, products: Tensor, masked: Tensor, form: AttentionForm) -> Tensor:
        """Return float32 softmax of ``products`` [n, kv heads, group, ..., L], 0 where ``masked``."""
        scores = products.float().mul_(self._scale if form.scale is None else form.scale)
        if form.softcap is not None:
            scores = scores.div_(form.softcap).tanh_().mul_(form.softcap)
        scores.masked_fill_(masked, -torch.inf)
        if form.sinks is None:
            return torch.softmax(scores, dim=-1).to(products.dtype)
        shape = 1, self._kv_heads, self._group, *[1] * (scores.dim() - 3)
        sinks = form.sinks.float().view(shape).expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1].to(products.dtype)

    # Prefill

    def _plan_runs(self, batch: ForwardBatch, window: int | None) -> list[_PrefillRun]:
        first_row, token = batch.num_decode, batch.num_decode
        q_lens, kv_lens = batch.q_lens_host, batch.kv_lens_host
        runs = []
        while first_row < batch.num_rows:
            end = self._run_end(first_row, q_lens, kv_lens)
            q_len, kv_len = q_lens[first_row], kv_lens[first_row]
            cut = window is not None and kv_len > window
            run = _PrefillRun(
                first_token=token, num_rows=end - first_row, q_len=q_len, kv_len=kv_len, pages=None, bias=None
            )
            if kv_len > q_len:
                num_pages = -(-kv_len // self.pool.page_size)
                left_out = max(0, kv_len - q_len + 1 - (window or kv_len)) // self.pool.page_size
                run.pages = self._page_rows(batch.page_table[first_row:end, left_out:num_pages])
                run.kv_len = kv_len - left_out * self.pool.page_size
            if (kv_len > q_len and q_len > 1) or cut:
                run.bias = self._bias(q_len, run.kv_len, window)
            runs.append(run)
            token += run.num_rows * q_len
            first_row = end
        return runs

    def _run_end(self, first: int, q_lens: Sequence[int], kv_lens: Sequence[int]) -> int:
        """Return the end of the longest run of equal rows from ``first`` on whose KV fits the workspace."""
        num_pages = -(-kv_lens[first] // self.pool.page_size)
        limit = min(len(q_lens), first + max(1, self._max_pages // num_pages))
        end = first + 1
        while end < limit and q_lens[end] == q_lens[first] and kv_lens[end] == kv_lens[first]:
            end += 1
        return end

    def _bias(self, q_len: int, kv_len: int, window: int | None) -> Tensor:
        bias = torch.full((q_len, kv_len), -torch.inf, dtype=self._dtype, device=self._device)
        bias.triu_(kv_len - q_len + 1)
        if window is not None:
            own = torch.arange(kv_len - q_len, kv_len, device=self._device).unsqueeze(1)
            bias.masked_fill_(own - torch.arange(kv_len, device=self._device) >= window, -torch.inf)
        return bias

    def _prefill(
        self, run: _PrefillRun, q: Tensor, keys: Tensor, values: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attend to [n * kv heads, 1, kv_len, size]; return [n * q_len, heads * value size]."""
        n, group, size = run.num_rows, self._group, self._head_sizes[0]
        grouped_q = q.reshape(n, run.q_len, self._kv_heads, group, size).permute(0, 2, 3, 1, 4)
        grouped_q = grouped_q.reshape(n * self._kv_heads, group, run.q_len, size)
        if form.softcap is not None or form.sinks is not None:
            attended = self._prefill_by_parts(run, grouped_q, keys, values, form)
        else:
            attended = scaled_dot_product_attention(
                grouped_q,
                keys.expand(-1, group, -1, -1),
                values.expand(-1, group, -1, -1),
                attn_mask=run.bias,
                is_causal=run.pages is None and run.bias is None,
                scale=self._scale if form.scale is None else form.scale,
            )
        attended = attended.view(n, self._kv_heads, group, run.q_len, -1)
        return attended.permute(0, 3, 1, 2, 4).reshape(n * run.q_len, -1)

    def _prefill_by_parts(
        self, run: _PrefillRun, q: Tensor, keys: Tensor, values: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attend some queries at a time, for forms that torch has no call for."""
        bias = run.bias
        if bias is None:
            bias = self._bias(run.q_len, run.kv_len, None)
        most = max(1, SCORE_ELEMENTS // (q.shape[0] * self._group * run.kv_len))
        parts = []
        for some, masked in zip(q.split(most, dim=2), (bias != 0).split(most)):
            products = torch.matmul(some, keys.transpose(2, 3))
            split = products.view(run.num_rows, self._kv_heads, *products.shape[1:])
            parts.append(torch.matmul(self._weights(split, masked, form).view_as(products), values))
        return torch.cat(parts, dim=2)

    def _split_rows(self, x: Tensor, run: _PrefillRun) -> Tensor:
        """Turn [n * q_len, kv heads, size] into [n * kv heads, 1, q_len, size]."""
        split = x.reshape(run.num_rows, run.q_len, self._kv_heads, -1).transpose(1, 2)
        return split.reshape(run.num_rows * self._kv_heads, 1, run.q_len, x.shape[-1])

    def _gather_run(self, run: _PrefillRun, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        assert run.pages is not None
        keys, values = (
            x.view(run.num_rows * self._kv_heads, 1, -1, size)[:, :, : run.kv_len]
            for x, size in zip(self._gather(run.pages, k_pool, v_pool), self._head_sizes, strict=True)
        )
        return keys, values

    # Shared

    def _page_rows(self, pages: Tensor) -> Tensor:
        """Turn the page table [n, P] into the gather index [n * kv heads * P]."""
        return (pages.to(torch.int64).unsqueeze(1) * self._kv_heads + self._head_index).reshape(-1)

    def _gather(self, pages: Tensor, k_pool: Tensor, v_pool: Tensor) -> tuple[Tensor, Tensor]:
        """Copy these pages to the workspace, each [n * kv heads * P, page_size * size]."""
        cells = [pages.shape[0] * x.shape[1] for x in (k_pool, v_pool)]
        parts = self.workspace.take("gathered", (sum(cells),), self._dtype, self._device).split(cells)
        keys, values = (part.view(pages.shape[0], -1) for part in parts)
        torch.index_select(k_pool, 0, pages, out=keys)
        torch.index_select(v_pool, 0, pages, out=values)
        return keys, values
