"""Paged attention by the compiled CPU kernel: decode and prefill with the same arithmetic, over the pages.

Invariants:
- A token's bits depend on neither decode or prefill nor chunking, other requests, pages and threads.
- A masked position contributes nothing, whatever it holds.
- Results lie in one grow-only workspace; a call overwrites those of the call before it.
- Latents are one stored head, whose front is the values. Their query heads are divided into equal parts,
  which threads can take apart; the division follows from their number alone.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache.pool import MHAPool, MLAPool
from ..execution.forward import AttentionBackend, ForwardBatch
from ..kernels.attention import (
    PagedAttention,
    PagedStep,
    advance_tasks,
    decode_tasks,
    plan_tasks,
    share_prefixes,
)
from ..kernels.attention_form import PLAIN, AttentionForm, HeadNorms
from ..kernels.elementwise import rope_store
from ..memory.workspace import Workspace
from ..runtime.engine_config import PAGE_SIZE
from .shape import Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

_PART_HEADS = 12
"""Most query heads that attend to latents together: what a decode step keeps in registers, in two turns."""

_TURNS = 4
"""Tasks of a decode step that each thread has, at least, where requests are computed together."""


class PagedCpuBackend(AttentionBackend):
    def __init__(self, pool: MHAPool | MLAPool, shape: Shape) -> None:
        """Raise ValueError if the pool's pages are not of 16 tokens."""
        if pool.page_size != PAGE_SIZE:
            raise ValueError(f"the kernel takes pages of {PAGE_SIZE} tokens, not {pool.page_size}")
        self._pool, self._num_heads = pool, shape.num_heads
        self._windowed: PagedStep | None = None
        self._decoding: tuple[ForwardBatch, np.ndarray] | None = None
        """The batch planned last, if all of its rows decode, and its lengths."""
        self._stored: Callable[[int], tuple[Tensor, Tensor]]
        if isinstance(pool, MLAPool):
            assert shape.latent is not None
            self._stored, values = self._latents, shape.latent
            self._group = max(size for size in range(1, _PART_HEADS + 1) if shape.num_heads % size == 0)
            parts = kv_heads = shape.num_heads // self._group
        else:
            self._stored, values, parts = pool.layer, pool.layer(0)[1].shape[-1], None
            kv_heads, self._group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
            if values == shape.head_dim:
                self.fused = self.store_and_attend
        self._width = shape.num_heads * values
        self._attention = PagedAttention(
            shape.dtype, kv_heads, self._group, shape.head_dim, shape.scale, values, parts=parts
        )
        self.workspace = Workspace()

    def plan(self, batch: ForwardBatch) -> None:
        last, self._decoding = self._decoding, None
        if last is not None and last[0] is batch and self.paged is not None:
            advance_tasks(self.paged.tasks, last[1])
            self._decoding = last
            return
        if batch.num_decode == batch.num_rows:
            lengths = batch.kv_lens.numpy()
            self._decoding = batch, lengths
            tasks = decode_tasks(lengths)
        else:
            tasks = plan_tasks(batch.q_lens_host, batch.kv_lens_host, self._group)
        most = batch.num_rows * self._attention.kv_heads // (_TURNS * torch.get_num_threads())
        tasks = share_prefixes(tasks, batch.page_table.numpy(), self._group, most)
        step = PagedStep(self._attention, self._stored, batch.kv_slots, batch.page_table, tasks)
        self.paged = self._windowed = step
        if batch.window_slots is not None and batch.window_table is not None:
            step.window_slots, step.window_table = batch.window_slots, batch.window_table
            self._windowed = replace(step, kv_slots=batch.window_slots, page_table=batch.window_table)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        step, pool = self._planned(form), self._pool
        if isinstance(pool, MLAPool):
            pool.store(layer, k.squeeze(1), step.kv_slots)
        else:
            pool.store(layer, k, v, step.kv_slots)
        return self._attend(q, layer, step, form)

    def store_and_attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int, norm: HeadNorms | None, form: AttentionForm
    ) -> Tensor:
        """Do head norms, rotation and store in one pass, then attend: a ``FusedAttention``."""
        step, q = self._planned(form), qkv[:, : self._num_heads]
        keys, values = self._stored(layer)
        rope_store(qkv, self._num_heads, cos, sin, step.kv_slots, keys, values, out=q, norm=norm)
        return self._attend(q, layer, step, form)

    def _planned(self, form: AttentionForm) -> PagedStep:
        step = self.paged if form.window is None else self._windowed
        assert step is not None, "a step is planned before its layers are computed"
        return step

    def _attend(self, q: Tensor, layer: int, step: PagedStep, form: AttentionForm) -> Tensor:
        out = self.workspace.take("attended", (q.shape[0], self._width), self._attention.dtype)
        return self._attention(q, *self._stored(layer), step.page_table, step.tasks, out, form)

    def _latents(self, layer: int) -> tuple[Tensor, Tensor]:
        assert isinstance(self._pool, MLAPool)
        cells = self._pool.layer(layer).unsqueeze(1)
        return cells, cells
