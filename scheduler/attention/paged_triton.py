"""Paged attention whose decode steps can be captured with only torch and Triton, for CUDA.

Invariants: eager steps attend as the torch backend does; only captured decode steps use the kernel
(``kernels/triton_decode.py``), and those of all sizes read one page table and one list of lengths that never
move.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..cache.pool import MHAPool
from ..execution.forward import AttentionBackend, CapturableBackend, ForwardBatch, StepLimits
from ..kernels import TRITON, Elementwise, best, elementwise_for
from ..kernels.attention_form import PLAIN, AttentionForm, HeadNorms
from .fused_store import fused_store
from .sdpa import SdpaBackend
from .shape import Shape

_MULTIPROCESSORS = 132


def why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it is used on CUDA, not on {device.type}"
    return None if find_spec("triton") else "it is not installed"


class PagedTritonBackend(SdpaBackend, CapturableBackend):
    def __init__(self, pool: MHAPool, shape: Shape, limits: StepLimits) -> None:
        super().__init__(pool, shape)
        device = shape.device
        self._elementwise: Elementwise | None = None
        if best("elementwise", device, shape.dtype) == TRITON:
            self._elementwise = elementwise_for(device, shape.dtype)
            self.fused = self._store_and_attend
        self._step: ForwardBatch | None = None
        self._kernels = import_module("..kernels.triton_decode", __package__)
        self._heads = shape.num_heads
        self._sizes = {
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_size": shape.head_dim,
            "page_size": pool.page_size,
            "scale": shape.scale,
        }
        self.multiprocessors = _MULTIPROCESSORS
        if device.type == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        size = limits.rows, limits.pages
        self._table = self._window_table = torch.zeros(size, dtype=torch.int32, device=device)
        if pool.window_pages is not None:
            self._window_table = torch.zeros_like(self._table)
        self._kv_lens = torch.ones(limits.rows, dtype=torch.int32, device=device)

    def plan(self, batch: ForwardBatch) -> None:
        super().plan(batch)
        self._step = batch

    def _store_and_attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: int, norm: HeadNorms | None, form: AttentionForm
    ) -> Tensor:
        """Store and attend; rotated keys stay in ``qkv`` as well, where torch reads those of prompts."""
        assert self._elementwise is not None
        assert self._step is not None, "plan comes first"
        heads, kv_heads = self._heads, self._kv_heads
        keys, values = self.pool.layer(layer)
        self._elementwise.rope_store(
            qkv, heads, cos, sin, self._step.slots_in(form), keys, values, out=qkv[:, :-kv_heads], norm=norm
        )
        return self.attend(qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:], layer, form)

    def for_decode(self, rows: int) -> AttentionBackend:
        tables, kv_lens = (self._table[:rows], self._window_table[:rows]), self._kv_lens[:rows]
        splits = self._kernels.num_splits(rows, self._sizes["num_kv_heads"], self.multiprocessors)
        kernel = self._kernels.PagedDecode(*tables, kv_lens, splits=splits, **self._sizes)
        return _CapturedDecode(self.pool, kernel, tables, kv_lens, num_heads=self._heads)


class _CapturedDecode(AttentionBackend):
    def __init__(
        self, pool: MHAPool, kernel: Any, tables: tuple[Tensor, Tensor], kv_lens: Tensor, *, num_heads: int
    ) -> None:
        self._store = self.fused = fused_store(pool, num_heads, self._attend)
        self.pool, self._kernel = pool, kernel
        self._tables, self._kv_lens = tables, kv_lens

    def plan(self, batch: ForwardBatch) -> None:
        assert batch.num_decode == batch.num_rows == len(self._kv_lens), "captured for another number of rows"
        plain, windowed = self._tables
        plain[:, : batch.page_table.shape[1]] = batch.page_table
        if batch.window_table is not None:
            windowed[:, : batch.window_table.shape[1]] = batch.window_table
        self._kv_lens.copy_(batch.kv_lens)
        if self._store is not None:
            self._store.batch = batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        out: Tensor = self._kernel(q, k, v, *self.pool.layer(layer), form)
        return out

    def _attend(self, q: Tensor, layer: int, form: AttentionForm) -> Tensor:
        out: Tensor = self._kernel.attend(q, *self.pool.layer(layer), form)
        return out
