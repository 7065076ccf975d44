"""Paged attention by the compiled CPU kernel: decode and prefill with the same arithmetic, over the pages.

Invariants:
- A token's result has the same bits whether it is decoded or prefilled, and whatever the chunking, other
  requests, pages and number of threads.
- A masked position contributes nothing, whatever it holds.
- Results lie in one grow-only workspace; a call overwrites those of the call before it.
"""

from dataclasses import replace

from torch import Tensor

from ..execution.forward import ForwardBatch, FusedAttention, KVPool
from ..kernels.attention import PagedAttention, PagedStep, plan_tasks
from ..kernels.attention_form import PLAIN, AttentionForm, HeadNorms
from ..kernels.elementwise import rope_store
from ..memory.workspace import Workspace
from ..runtime.config import PAGE_SIZE


class PagedCpuBackend:
    """An :class:`~..forward.AttentionBackend` over an MHA pool on the CPU."""

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float | None = None,
    ) -> None:
        if pool.page_size != PAGE_SIZE:
            raise ValueError(f"the kernel takes pages of {PAGE_SIZE} tokens, not {pool.page_size}")
        self.fused: FusedAttention | None = self.store_and_attend
        self.paged: PagedStep | None = None
        self._windowed: PagedStep | None = None
        self.reads_page_table = True
        self._pool = pool
        self._num_heads = num_heads
        self._group = num_heads // num_kv_heads
        scale = head_size**-0.5 if scale is None else scale
        keys, values = pool.layer(0)
        value_size = values.shape[-1]
        self._width = num_heads * value_size
        self._attention = PagedAttention(keys.dtype, num_kv_heads, self._group, head_size, scale, value_size)
        if value_size != head_size:
            self.fused = None
        self._workspace = Workspace()

    def plan(self, batch: ForwardBatch) -> None:
        tasks = plan_tasks(batch.q_lens_host, batch.kv_lens_host, self._group)
        self.paged = PagedStep(self._attention, self._pool.layer, batch.kv_slots, batch.page_table, tasks)
        self._windowed = self.paged
        if batch.window_slots is not None and batch.window_table is not None:
            self.paged.window_slots, self.paged.window_table = batch.window_slots, batch.window_table
            self._windowed = replace(self.paged, kv_slots=batch.window_slots, page_table=batch.window_table)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        step = self._planned(form)
        self._pool.store_at(layer, k, v, *self._pool.split_slots(step.kv_slots))
        return self._attend(q, layer, step, form)

    def store_and_attend(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        layer: int,
        norm: HeadNorms | None = None,
        form: AttentionForm = PLAIN,
    ) -> Tensor:
        """Do head norms, rotation and store in one pass, then attend: a ``FusedAttention``."""
        step, q = self._planned(form), qkv[:, : self._num_heads]
        keys, values = self._pool.layer(layer)
        rope_store(qkv, self._num_heads, cos, sin, step.kv_slots, keys, values, out=q, norm=norm)
        return self._attend(q, layer, step, form)

    def _planned(self, form: AttentionForm) -> PagedStep:
        step = self.paged if form.window is None else self._windowed
        assert step is not None, "a step is planned before its layers are computed"
        return step

    def _attend(self, q: Tensor, layer: int, step: PagedStep, form: AttentionForm) -> Tensor:
        out = self._workspace.take("attended", (q.shape[0], self._width), self._attention.dtype)
        return self._attention(q, *self._pool.layer(layer), step.page_table, step.tasks, out, form)
