"""Paged attention by FlashInfer's kernels (Ye et al., 2025, arXiv:2501.01005), for CUDA.

Invariants:
- The pool is FlashInfer's "HND" layout as it is: [page, kv head, 16, head size], K and V apart. A row's pages are a slice of
  one list of page numbers (``indptr``, ``indices``, ``last_page_len``), made on the host once per step.
- Decode rows and prefill rows are planned and run apart, by the kernels meant for them; K and V of both are appended first.
- Host memory that a plan is copied from is written anew for every step, FlashInfer's own included: a plan waits until the
  copies of the plan before it have been made. Those stand before their own step, so at depth 1 they have been.
- ``for_decode`` gives attention that a graph can hold: planned outside of it, into buffers that never move. All sizes
  share these buffers and the workspaces, as one step is planned and run after the other.

Not measured on a device yet. Its plans and page lists are tested on the CPU against a module of the same interface.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..dtypes import torch_name
from ..forward import AttentionBackend, ForwardBatch, FusedAttention, KVPool
from .fused_store import fused_store

_FLOAT_WORKSPACE_BYTES = 128 << 20
"""Partial results of rows whose KV is divided among several blocks; FlashInfer's recommendation."""
_INT_WORKSPACE_BYTES = 8 << 20
"""Plans; what FlashInfer's wrappers allocate by themselves."""
_TENSOR_CORE_GROUP = 4
"""From this many query heads per KV head on, decoding fills the rows of a matrix instruction well enough."""
_HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_INTS_PER_LINE = 16


def why_not(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why FlashInfer cannot serve here; None where it can."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {torch_name(dtype)}"
    if head_size not in _HEAD_SIZES:
        return f"it has no kernels for heads of {head_size}"
    return None if find_spec("flashinfer") else "it is not installed"


@dataclass(frozen=True, slots=True)
class _Lists:
    """A step's pages and tokens, int32, all in one block: on the host, or on the device."""

    indptr: Tensor
    """[R + 1]: where each row's pages begin in ``indices``."""
    last_page_len: Tensor
    """[R]: tokens in each row's last page, 1 to 16."""
    qo_indptr: Tensor
    """[prefill rows + 1]: where each row's queries begin among those of the prefill rows."""
    prefill_indptr: Tensor
    """[prefill rows + 1]: ``indptr`` of the prefill rows, from 0."""
    batch_indices: Tensor
    """[T]: row of each token."""
    positions: Tensor
    """[T]"""
    indices: Tensor
    """Page numbers, row after row."""

    @classmethod
    def lay_out(cls, block: Tensor, sizes: list[int]) -> "_Lists":
        """Views of ``block``; the page numbers come last, so they alone lie elsewhere when there are more of them."""
        views, start = [], 0
        for size in sizes:
            views.append(block[start : start + size])
            start += _lines(size)
        return cls(*views)


class PageLists:
    """Builds the lists of one step after the other in the same memory."""

    def __init__(self, *, rows: int, tokens: int, pages: int, page_size: int, device: torch.device) -> None:
        """``pages`` of one row; like the others, at most."""
        self._page_size = page_size
        sizes = [rows + 1, rows, rows + 1, rows + 1, tokens, tokens, rows * pages]
        capacity = sum(_lines(size) for size in sizes)
        self._host = torch.empty(capacity, dtype=torch.int32, pin_memory=device.type != "cpu")
        self._ints: np.ndarray = self._host.numpy()
        self.device = torch.zeros(capacity, dtype=torch.int32, device=device)

    def fill(self, batch: ForwardBatch) -> tuple[_Lists, _Lists]:
        """The lists of ``batch`` on the host, and on the device (the copy is enqueued)."""
        arrays = page_lists(batch, self._page_size)
        start = 0
        for array in arrays:
            self._ints[start : start + len(array)] = array
            start += _lines(len(array))
        self.device[:start].copy_(self._host[:start], non_blocking=True)
        sizes = [len(array) for array in arrays]
        return _Lists.lay_out(self._host, sizes), _Lists.lay_out(self.device, sizes)

    def decode_views(self, rows: int) -> _Lists:
        """Where :meth:`fill` puts the lists of a step of ``rows`` decode rows; of the page numbers, as many as fit."""
        sizes = [rows + 1, rows, 1, 1, rows, rows]
        room = len(self.device) - sum(_lines(size) for size in sizes)
        return _Lists.lay_out(self.device, [*sizes, room])


def page_lists(batch: ForwardBatch, page_size: int) -> tuple[np.ndarray, ...]:
    """The arrays of :class:`_Lists` for a step, in their order."""
    q_lens, kv_lens = (np.asarray(lens, np.int64) for lens in (batch.q_lens_host, batch.kv_lens_host))
    table = batch.page_table.cpu().numpy() if batch.page_table_host is None else batch.page_table_host
    pages = -(-kv_lens // page_size)
    indptr = _starts(pages)
    row_of_token = np.repeat(np.arange(len(q_lens)), q_lens)
    new_from = kv_lens - q_lens
    first_token = _starts(q_lens)[:-1]
    positions = np.arange(len(row_of_token)) - first_token[row_of_token] + new_from[row_of_token]
    return (
        indptr,
        kv_lens - (pages - 1) * page_size,
        _starts(q_lens[batch.num_decode :]),
        indptr[batch.num_decode :] - indptr[batch.num_decode],
        row_of_token,
        positions,
        table[np.arange(table.shape[1]) < pages[:, None]],
    )


class FlashInferBackend:
    """An :class:`~..forward.AttentionBackend` over an MHA pool of bfloat16 or float16; its decode steps can be captured."""

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float | None = None,
        *,
        max_rows: int,
        max_tokens: int,
        max_pages: int,
        library: Any = None,
    ) -> None:
        """
        Args:
            scale: multiplies the scores. None: ``head_size ** -0.5``.
            max_rows, max_tokens: of one step.
            max_pages: of one row.
            library: the ``flashinfer`` module. None: the installed one.
        """
        self._store = fused_store(pool, num_heads, self._attend)
        self.fused: FusedAttention | None = self._store
        self.paged = None
        self._library = import_module("flashinfer") if library is None else library
        self.pool = pool
        self._heads = (num_heads, num_kv_heads, head_size)
        keys, _ = pool.layer(0)
        self._device = keys.device
        self._options = {
            "sm_scale": head_size**-0.5 if scale is None else scale,
            "q_data_type": keys.dtype,
            "kv_data_type": keys.dtype,
        }
        self._lists = PageLists(
            rows=max_rows,
            tokens=max_tokens,
            pages=max_pages,
            page_size=pool.page_size,
            device=self._device,
        )
        self._tensor_cores = num_heads // num_kv_heads >= _TENSOR_CORE_GROUP
        self._workspace = self._zeros(_FLOAT_WORKSPACE_BYTES, torch.uint8)
        self._graph_plans = self._zeros(_INT_WORKSPACE_BYTES, torch.uint8)
        self._graph_pages = self._zeros(max_rows * max_pages, torch.int32)
        self._decode = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._tensor_cores
        )
        self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        self._copied: Any = None
        if self._device.type != "cpu":
            self._copied = torch.get_device_module(self._device).Event()
        self._num_decode = 0
        self._step: _Lists | None = None

    def plan(self, batch: ForwardBatch) -> None:
        """Divide the step's work among the device's multiprocessors."""
        with self.host_memory():
            self._plan(batch)

    def _plan(self, batch: ForwardBatch) -> None:
        host, device = self._lists.fill(batch)
        decode = batch.num_decode
        first = int(host.indptr[decode])
        if decode:
            self.plan_decode(self._decode, host, device, decode)
        if batch.num_rows > decode:
            self._prefill.plan(
                host.qo_indptr,
                host.prefill_indptr,
                device.indices[first:],
                host.last_page_len[decode:],
                *self._heads,
                self.pool.page_size,
                causal=True,
                **self._options,
            )
        self._num_decode, self._step = decode, device
        if self._store is not None:
            self._store.kv_slots = batch.kv_slots

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Store this step's K and V, then attend; shapes as in :class:`~..forward.AttentionBackend`."""
        assert self._step is not None, "plan comes first"
        self.append(self._step, k, v, layer)
        return self._attend(q, layer)

    def _attend(self, q: Tensor, layer: int) -> Tensor:
        cache = self.pool.layer(layer)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode = self._num_decode
        if decode:
            self._decode.run(q[:decode], cache, out=out[:decode])
        if q.shape[0] > decode:
            self._prefill.run(q[decode:], cache, out=out[decode:])
        return out.flatten(1)

    def for_decode(self, rows: int) -> AttentionBackend:
        """Attention for steps of exactly ``rows`` decode rows, to be captured."""
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=self._zeros(rows + 1, torch.int32),
            paged_kv_indices_buffer=self._graph_pages,
            paged_kv_last_page_len_buffer=self._zeros(rows, torch.int32),
        )
        wrapper.reset_workspace_buffer(self._workspace, self._graph_plans)  # instead of one of its own
        return _CapturedDecode(self, wrapper, self._lists, rows, num_heads=self._heads[0])

    @contextmanager
    def host_memory(self) -> Iterator[None]:
        """Around what writes it and enqueues copies from it."""
        if self._copied is not None:
            self._copied.synchronize()
        yield
        if self._copied is not None:
            self._copied.record()

    def plan_decode(self, wrapper: Any, host: _Lists, device: _Lists, rows: int) -> None:
        """The first ``rows`` rows by ``wrapper``. Page numbers from the device: from the host, a graph's wrapper waits."""
        wrapper.plan(
            host.indptr[: rows + 1],
            device.indices[: int(host.indptr[rows])],
            host.last_page_len[:rows],
            *self._heads,
            self.pool.page_size,
            **self._options,
        )

    def append(self, step: _Lists, k: Tensor, v: Tensor, layer: int) -> None:
        """Store [T, kv heads, head size] each at the step's positions."""
        self._library.append_paged_kv_cache(
            k,
            v,
            step.batch_indices,
            step.positions,
            self.pool.layer(layer),
            step.indices,
            step.indptr,
            step.last_page_len,
            kv_layout="HND",
        )

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self._device)


class _CapturedDecode:
    """Decode rows of one number, over buffers that never move."""

    def __init__(
        self, parent: FlashInferBackend, wrapper: Any, lists: PageLists, rows: int, *, num_heads: int
    ) -> None:
        self._store = fused_store(parent.pool, num_heads, self._attend)
        self.fused: FusedAttention | None = self._store
        self.paged = None
        self._parent = parent
        self._wrapper = wrapper
        self._lists = lists
        self._rows = rows
        self._step = lists.decode_views(rows)

    def plan(self, batch: ForwardBatch) -> None:
        """See :meth:`FlashInferBackend.plan`."""
        assert batch.num_decode == batch.num_rows == self._rows, "captured for another number of rows"
        with self._parent.host_memory():
            host, device = self._lists.fill(batch)
            self._parent.plan_decode(self._wrapper, host, device, self._rows)
        if self._store is not None:
            self._store.kv_slots = batch.kv_slots

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """See :meth:`FlashInferBackend.forward`."""
        self._parent.append(self._step, k, v, layer)
        return self._attend(q, layer)

    def _attend(self, q: Tensor, layer: int) -> Tensor:
        out: Tensor = self._wrapper.run(q, self._parent.pool.layer(layer))
        return out.flatten(1)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """[n + 1]: running sums, from 0."""
    return np.concatenate([[0], np.cumsum(lengths)])


def _lines(count: int) -> int:
    """``count`` integers, rounded up to whole cache lines."""
    return -(-count // _INTS_PER_LINE) * _INTS_PER_LINE
