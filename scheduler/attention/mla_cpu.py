"""Attention over latents by the compiled CPU kernel: one stored head, whose front is the values.

Invariants: a token's result has the same bits whether it is decoded or prefilled, whatever the chunking,
other requests, pages and threads. Query heads are divided into parts of equal size, which threads can take
apart; the division follows from their number alone.
"""

from torch import Tensor

from ..cache.pool import MLAPool
from ..execution.forward import ForwardBatch, FusedAttention
from ..kernels.attention import PagedAttention, PagedStep, plan_tasks
from ..kernels.attention_form import PLAIN, AttentionForm
from ..memory.workspace import Workspace
from ..runtime.config import PAGE_SIZE

_PART_HEADS = 12
"""Most query heads that attend together: as many as a decode step keeps in registers, in two turns."""


class LatentCpuBackend:
    """An :class:`~..forward.AttentionBackend` over an MLA pool on the CPU."""

    def __init__(self, pool: MLAPool, num_heads: int, latent: int, scale: float) -> None:
        if pool.page_size != PAGE_SIZE:
            raise ValueError(f"the kernel takes pages of {PAGE_SIZE} tokens, not {pool.page_size}")
        self.fused: FusedAttention | None = None
        self.paged: PagedStep | None = None
        self.reads_page_table = True
        self._pool = pool
        self._group = max(size for size in range(1, _PART_HEADS + 1) if num_heads % size == 0)
        self._width = num_heads * latent
        parts = num_heads // self._group
        dtype = pool.layer(0).dtype
        self._attention = PagedAttention(dtype, parts, self._group, pool.width, scale, latent, parts=parts)
        self._workspace = Workspace()

    def plan(self, batch: ForwardBatch) -> None:
        tasks = plan_tasks(batch.q_lens_host, batch.kv_lens_host, self._group)
        self.paged = PagedStep(self._attention, self._stored, batch.kv_slots, batch.page_table, tasks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        assert form.kind == PLAIN.kind, "latent attention has no other forms"
        step = self.paged
        assert step is not None, "a step is planned before its layers are computed"
        self._pool.store(layer, k.squeeze(1), step.kv_slots)
        out = self._workspace.take("attended", (q.shape[0], self._width), self._attention.dtype)
        return self._attention(q, *self._stored(layer), step.page_table, step.tasks, out)

    def _stored(self, layer: int) -> tuple[Tensor, Tensor]:
        cells = self._pool.layer(layer).unsqueeze(1)
        return cells, cells
