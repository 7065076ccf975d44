"""Attention over latents (MLA with absorbed projections) by FlashInfer's kernels, for CUDA.

Invariants:
- The pool is FlashInfer's packed layout as it is: [page, 16, latent + rotated], one key a token for all
  heads, whose front is also the value. Queries are packed the same way.
- Decode rows and prefill rows are planned and run apart, decode without a mask. Captured decode steps are
  planned outside of their graphs, into buffers that never move.
- Prefill is FlashInfer's only if every tile of it ends between two queries (:func:`serves_prefill`): its
  planner refuses some others. Otherwise torch computes steps with prefill rows (``mla.py``).
- Host memory that a plan is copied from is written as in ``flashinfer.py``.

Written against ``BatchMLAPagedAttentionWrapper`` of FlashInfer 0.7.2; built and traced, not run on a GPU.
Plans and layouts are tested on the CPU against a module of the same interface.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..cache.pool import MLAPool
from ..execution.forward import AttentionBackend, ForwardBatch, FusedAttention
from ..kernels.attention_form import PLAIN, AttentionForm
from ..memory.device_module import nvidia_generation
from .flashinfer import HostMemory, multiprocessors, why_not_for
from .mla import LatentBackend
from .page_lists import Lists, PageLists

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


class FlashInferLatentBackend:
    """An :class:`~..forward.AttentionBackend` over an MLA pool of bfloat16 or float16, capturable."""

    def __init__(
        self,
        pool: MLAPool,
        num_heads: int,
        latent: int,
        scale: float,
        *,
        max_rows: int,
        max_tokens: int,
        max_pages: int,
        kernels: str,
        library: Any = None,
    ) -> None:
        """Args:
        latent: width of the latents, which is that of the values; the rest of the pool's is the rotated key.
        max_rows, max_tokens: largest step.
        max_pages: pages of the longest row.
        kernels: one of :data:`KERNELS`.
        library: the ``flashinfer`` module. None means the installed one.
        """
        self.fused: FusedAttention | None = None
        self.paged = None
        self._library = import_module("flashinfer") if library is None else library
        self._pool = pool
        self.latent = latent
        self._kernels = kernels
        storage = pool.layer(0)
        self._device = storage.device
        self._options = {
            "num_heads": num_heads,
            "head_dim_ckv": latent,
            "head_dim_kpe": pool.width - latent,
            "page_size": pool.page_size,
            "sm_scale": scale,
            "q_data_type": storage.dtype,
            "kv_data_type": storage.dtype,
        }
        self._lists = PageLists(
            rows=max_rows,
            tokens=max_tokens,
            pages=max_pages,
            page_size=pool.page_size,
            device=self._device,
        )
        self._row_starts = torch.empty(max_rows + 1, dtype=torch.int32, pin_memory=self._device.type != "cpu")
        torch.arange(max_rows + 1, out=self._row_starts)
        self._workspace = self._zeros(workspace_bytes(latent, self._device), torch.uint8)
        self._graph_pages = self._zeros(max_rows * max_pages, torch.int32)
        self._decode = self._wrapper()
        self._prefill = self._wrapper()
        serves = serves_prefill(num_heads, max_rows, max_tokens, self._device)
        self._torch = None if serves else LatentBackend(pool, num_heads, scale)
        self.reads_page_table = not serves
        self.host_memory = HostMemory(self._device)
        self._num_decode = 0
        self._by_torch = False
        self._kv_slots = torch.empty(0, dtype=torch.int64, device=self._device)

    def plan(self, batch: ForwardBatch) -> None:
        self._by_torch = self._torch is not None and batch.num_rows > batch.num_decode
        if self._torch is not None and self._by_torch:
            self._torch.plan(batch)
            return
        self._num_decode = batch.num_decode
        self._kv_slots = batch.kv_slots
        with self.host_memory.written():
            self._plan(batch)

    def _plan(self, batch: ForwardBatch) -> None:
        host, device = self._lists.fill(batch)
        decode = batch.num_decode
        first = int(host.indptr[decode])
        if decode:
            self.plan_decode(self._decode, host, device, decode)
        if batch.num_rows > decode:
            lists = host.qo_indptr, host.prefill_indptr, device.indices[first:], host.kv_lens[decode:]
            self._plan_rows(self._prefill, lists, causal=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        if self._torch is not None and self._by_torch:
            return self._torch.forward(q, k, v, layer, form)
        assert form.kind == PLAIN.kind, "chosen for plain forms only"
        cache = self.store(k, self._kv_slots, layer)
        out = torch.empty((*q.shape[:2], self.latent), dtype=q.dtype, device=q.device)
        decode = self._num_decode
        if decode:
            self._decode.run(query=q[:decode], kv_cache=cache, out=out[:decode])
        if q.shape[0] > decode:
            self._prefill.run(query=q[decode:], kv_cache=cache, out=out[decode:])
        return out.flatten(1)

    def for_decode(self, rows: int) -> AttentionBackend:
        wrapper = self._wrapper(
            use_cuda_graph=True,
            qo_indptr=self._zeros(rows + 1, torch.int32),
            kv_indptr=self._zeros(rows + 1, torch.int32),
            kv_indices=self._graph_pages,
            kv_len_arr=self._zeros(rows, torch.int32),
        )
        return _CapturedDecode(self, wrapper, self._lists, rows)

    def plan_decode(self, wrapper: Any, host: Lists, device: Lists, rows: int) -> None:
        """Plan the first ``rows`` rows; with the host's page numbers, a graph's wrapper would wait."""
        pages = device.indices[: int(host.indptr[rows])]
        lists = self._row_starts[: rows + 1], host.indptr[: rows + 1], pages, host.kv_lens[:rows]
        self._plan_rows(wrapper, lists, causal=False)

    def _plan_rows(self, wrapper: Any, lists: tuple[Tensor, Tensor, Tensor, Tensor], *, causal: bool) -> None:
        metadata = self._library.mla.MLAPlanMetadata.csr(*lists)
        wrapper.plan(metadata=metadata, causal=causal, **self._options)

    def store(self, k: Tensor, kv_slots: Tensor, layer: int) -> Tensor:
        self._pool.store(layer, k.squeeze(1), kv_slots)
        return self._pool.layer(layer)

    def _wrapper(self, **graph: Any) -> Any:
        return self._library.BatchMLAPagedAttentionWrapper(self._workspace, backend=self._kernels, **graph)

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)


class _CapturedDecode:
    def __init__(self, parent: FlashInferLatentBackend, wrapper: Any, lists: PageLists, rows: int) -> None:
        self.fused: FusedAttention | None = None
        self.paged = None
        self.reads_page_table = False
        self._parent = parent
        self._wrapper = wrapper
        self._lists = lists
        self._rows = rows
        self._kv_slots: Tensor | None = None

    def plan(self, batch: ForwardBatch) -> None:
        assert batch.num_decode == batch.num_rows == self._rows, "captured for another number of rows"
        self._kv_slots = batch.kv_slots
        with self._parent.host_memory.written():
            host, device = self._lists.fill(batch)
            self._parent.plan_decode(self._wrapper, host, device, self._rows)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        assert self._kv_slots is not None, "plan comes first"
        assert form.kind == PLAIN.kind, "chosen for plain forms only"
        cache = self._parent.store(k, self._kv_slots, layer)
        out = torch.empty((*q.shape[:2], self._parent.latent), dtype=q.dtype, device=q.device)
        self._wrapper.run(query=q, kv_cache=cache, out=out)
        return out.flatten(1)
