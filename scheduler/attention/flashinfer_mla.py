"""Attention over latents (MLA with absorbed projections) by FlashInfer's kernels, for CUDA.

Invariants:
- The pool is FlashInfer's packed layout: [page, 16, latent + rotated], one key a token for all heads, whose
  front is also the value. Queries are packed the same way.
- Decode rows and prefill rows are planned and run apart, decode without a mask. Captured decode steps are
  planned outside of their graphs, into buffers that never move.
- Prefill is FlashInfer's only if every tile of it ends between two queries (:func:`serves_prefill`): its
  planner refuses some others. Otherwise torch computes steps with prefill rows (``sdpa_mla.py``).
- Host memory that a plan is copied from is written as in ``flashinfer.py``.

Written against FlashInfer 0.7.2; not run on a GPU. Plans and layouts are tested on the CPU by a stand-in.
"""

from copy import copy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..cache.pool import MLAPool
from ..execution.forward import (
    AttentionBackend,
    CapturableBackend,
    ForwardBatch,
    LatentAttentionBackend,
    StepLimits,
)
from ..memory.device_module import nvidia_generation
from ..runtime.engine_config import PAGE_SIZE
from .flashinfer import HostMemory, multiprocessors, why_not_for
from .page_lists import PageLists
from .sdpa_mla import LatentBackend
from .shape import Shape

KERNELS = ("fa3", "fa2")
"""FlashInfer's names of the kernels that take lists of pages, the faster first: Hopper's, Ampere's."""
_LATENT_MULTIPLE, _ROPE_MULTIPLE = 128, 64
_TILE = 128
"""Queries times heads of two blocks that work together; one alone takes half of them."""
_MAX_WORK = 16384
"""Most tiles of a step (FlashInfer's planner)."""
_SLACK = 1 << 20


def why_not(device: torch.device, dtype: torch.dtype, latent: int, rope: int) -> str | None:
    """Return why FlashInfer cannot serve here, as far as that shows without a step, or None."""
    sizes = None
    if latent % _LATENT_MULTIPLE or rope % _ROPE_MULTIPLE:
        sizes = f"it has no kernels for latents of {latent} and rotated keys of {rope}"
    return why_not_for(device, dtype, sizes)


def kernels_of(device: torch.device) -> tuple[str, ...]:
    return KERNELS if nvidia_generation(device) == 9 else KERNELS[1:]


def serves_prefill(num_heads: int, max_rows: int, max_tokens: int, device: torch.device) -> bool:
    """Return True if FlashInfer can plan any such step with prompts: tiles suffice, and cut no query."""
    tiles = -(-max_tokens * num_heads // _TILE) + 2 * max_rows + multiprocessors(device)
    return _TILE % num_heads == 0 and tiles <= _MAX_WORK


def workspace_bytes(latent: int, device: torch.device) -> int:
    """Return the bytes of partial results: FlashInfer's planner has two for each query of a block."""
    return 2 * multiprocessors(device) * (_TILE // 2) * (2 * latent + 4) + _SLACK


class FlashInferLatentBackend(LatentAttentionBackend, CapturableBackend):
    """Attention over an MLA pool of bfloat16 or float16."""

    def __init__(
        self, pool: MLAPool, shape: Shape, limits: StepLimits, kernels: str, library: Any = None
    ) -> None:
        """``kernels``: one of :data:`KERNELS`. ``library`` None: the installed ``flashinfer`` module."""
        assert shape.latent is not None
        self._library = import_module("flashinfer") if library is None else library
        self.pool, self._latent, self._kernels = pool, shape.latent, kernels
        self._device = device = shape.device
        self._options = {
            "num_heads": shape.num_heads,
            "head_dim_ckv": shape.latent,
            "head_dim_kpe": shape.head_dim - shape.latent,
            "page_size": PAGE_SIZE,
            "sm_scale": shape.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        self.lists = PageLists(limits, device)
        self._row_starts = torch.empty(limits.rows + 1, dtype=torch.int32, pin_memory=device.type != "cpu")
        torch.arange(limits.rows + 1, out=self._row_starts)
        self._workspace = self._zeros(workspace_bytes(shape.latent, device), torch.uint8)
        self._graph_pages = self._zeros(limits.rows * limits.pages, torch.int32)
        self.decode, self._prefill = self._wrapper(), self._wrapper()
        serves = serves_prefill(shape.num_heads, limits.rows, limits.tokens, device)
        self._torch = None if serves else LatentBackend(pool, shape)
        self.reads_page_table = not serves
        self.host_memory = HostMemory(device)
        self._num_decode = 0
        self._captured_rows: int | None = None
        self._by_torch = False
        self._kv_slots = torch.empty(0, dtype=torch.int64, device=device)

    def plan(self, batch: ForwardBatch) -> None:
        """Divide the step's work among the device's multiprocessors."""
        captured, rows = self._captured_rows, batch.num_rows
        assert captured is None or batch.num_decode == rows == captured, "captured for another number of rows"
        self._kv_slots = batch.kv_slots
        self._by_torch = self._torch is not None and rows > batch.num_decode
        if self._torch is not None and self._by_torch:
            self._torch.plan(batch)
            return
        self._num_decode = decode = batch.num_decode
        with self.host_memory.written():
            host, device = self.lists.fill(batch)
            first = int(host.indptr[decode])
            if decode:
                # With the host's page numbers, a graph's wrapper would wait.
                starts, ends = self._row_starts[: decode + 1], host.indptr[: decode + 1]
                lists = starts, ends, device.indices[:first], host.kv_lens[:decode]
                self._plan_rows(self.decode, lists, causal=False)
            if rows > decode:
                lists = host.qo_indptr, host.prefill_indptr, device.indices[first:], host.kv_lens[decode:]
                self._plan_rows(self._prefill, lists, causal=True)

    def _plan_rows(self, wrapper: Any, lists: tuple[Tensor, Tensor, Tensor, Tensor], *, causal: bool) -> None:
        metadata = self._library.mla.MLAPlanMetadata.csr(*lists)
        wrapper.plan(metadata=metadata, causal=causal, **self._options)

    def attend_latents(self, q: Tensor, layer: int) -> Tensor:
        if self._torch is not None and self._by_torch:
            return self._torch.attend_latents(q, layer)
        cache = self.pool.layer(layer)
        out = torch.empty((*q.shape[:2], self._latent), dtype=q.dtype, device=q.device)
        decode = self._num_decode
        if decode:
            self.decode.run(query=q[:decode], kv_cache=cache, out=out[:decode])
        if q.shape[0] > decode:
            self._prefill.run(query=q[decode:], kv_cache=cache, out=out[decode:])
        return out.flatten(1)

    def for_decode(self, rows: int) -> AttentionBackend:
        captured = copy(self)
        captured.decode = self._wrapper(
            use_cuda_graph=True,
            qo_indptr=self._zeros(rows + 1, torch.int32),
            kv_indptr=self._zeros(rows + 1, torch.int32),
            kv_indices=self._graph_pages,
            kv_len_arr=self._zeros(rows, torch.int32),
        )
        captured._captured_rows, captured.reads_page_table = rows, False
        return captured

    def _wrapper(self, **graph: Any) -> Any:
        return self._library.BatchMLAPagedAttentionWrapper(self._workspace, backend=self._kernels, **graph)

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)
