"""Paged attention by FlashInfer's kernels (Ye et al., 2025, arXiv:2501.01005), for CUDA.

Invariants:
- The pool is FlashInfer's "HND" layout as it is: [page, kv head, 16, head size], K and V apart; pages are told by lists
  (``page_lists.py``).
- Decode rows and prefill rows are planned and run apart, by the kernels meant for them; K and V of both are appended first.
- Host memory that a plan is copied from is written anew for every step, FlashInfer's own included: a plan waits until the
  copies of the plan before it have been made (:class:`HostMemory`). Those stand before their own step, so at depth 1 they
  have been.
- ``for_decode`` gives attention that a graph can hold: planned outside of it, into buffers that never move. All sizes
  share these buffers and the workspaces, as one step is planned and run after the other.
- The workspace holds what the largest step needs: a plan that does not fit would end its step.

Written against FlashInfer 0.7.2; built and traced, not run on a GPU. Its plans and page lists are tested on the CPU against
a module of the same interface.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..dtypes import torch_name
from ..forward import AttentionBackend, ForwardBatch, FusedAttention, KVPool
from ..kernels.forms import PLAIN, AttentionForm
from .fused_store import fused_store
from .page_lists import Lists, PageLists

_INT_WORKSPACE_BYTES = 8 << 20
"""Plans; what FlashInfer's wrappers allocate by themselves."""
_TENSOR_CORE_GROUP = 4
"""Query heads per KV head, at least."""
_HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_BLOCKS, _SMALL_BLOCKS = 2, 16
"""Of a step with divided rows there are at most so many for a multiprocessor, for all KV heads together: with tensor cores,
and without, where a block has one query of a KV head (FlashInfer's planner)."""
_TILES = (16, 64, 128)
"""Rows of a block, which are queries times the heads of a group: the first that holds a decode row, at most the last."""
_SLACK = 1 << 20


def why_not(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why FlashInfer cannot serve here, as far as that shows without a step; None where nothing speaks against it."""
    sizes = None if head_size in _HEAD_SIZES else f"it has no kernels for heads of {head_size}"
    return why_not_for(device, dtype, sizes)


def why_not_for(device: torch.device, dtype: torch.dtype, sizes: str | None) -> str | None:
    """The same, where ``sizes`` is what the model's sizes say against it."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {torch_name(dtype)}"
    if sizes is not None:
        return sizes
    return None if find_spec("flashinfer") else "it is not installed"


def workspace_bytes(
    num_heads: int, num_kv_heads: int, head_size: int, rows: int, device: torch.device
) -> int:
    """What the partial results of any step take, by the rules of FlashInfer's planner.

    They are float32, one vector and one log-sum for each query head of each row of a block. Rows are divided among blocks
    only where a step has fewer than the device holds. In a graph of tensor cores' decoding they always are, and every row
    has a block.
    """
    group = num_heads // num_kv_heads
    divided = -(-_BLOCKS * multiprocessors(device) // num_kv_heads)
    queries = divided * _TILES[-1] // group
    if on_tensor_cores(num_heads, num_kv_heads):
        tile = next((tile for tile in _TILES if group <= tile), _TILES[-1])
        blocks = max(divided, rows + -(-rows * group // tile))
        queries = max(queries, blocks * tile // group)
    else:
        queries = max(queries, -(-_SMALL_BLOCKS * multiprocessors(device) // num_kv_heads))
    return (queries + 1) * num_heads * (head_size + 1) * 4 + _SLACK


def on_tensor_cores(num_heads: int, num_kv_heads: int) -> bool:
    """Whether decoding fills the rows of a matrix instruction well enough."""
    return num_heads // num_kv_heads >= _TENSOR_CORE_GROUP


def multiprocessors(device: torch.device) -> int:
    """Of ``device``; 1 where there are none."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class HostMemory:
    """What plans are copied to the device from: written only after the copies of the plan before have been made."""

    def __init__(self, device: torch.device) -> None:
        self._copied: Any = None
        if device.type != "cpu":
            self._copied = torch.get_device_module(device).Event()

    @contextmanager
    def written(self) -> Iterator[None]:
        """Around what writes it and enqueues copies from it."""
        if self._copied is not None:
            self._copied.synchronize()
        yield
        if self._copied is not None:
            self._copied.record()


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
        self.reads_page_table = False
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
        self._tensor_cores = on_tensor_cores(num_heads, num_kv_heads)
        self._graph_plans = self._zeros(_INT_WORKSPACE_BYTES, torch.uint8)
        self._graph_pages = self._zeros(max_rows * max_pages, torch.int32)
        needed = workspace_bytes(num_heads, num_kv_heads, head_size, max_rows, self._device)
        needed = max(needed, self._asked(max_rows, max_tokens - max_rows, max_pages))
        self._workspace = self._zeros(needed, torch.uint8)
        self._decode = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._tensor_cores
        )
        self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        self.host_memory = HostMemory(self._device)
        self._num_decode = 0
        self._step: Lists | None = None

    def _asked(self, rows: int, tokens: int, pages: int) -> int:
        """What the library says that its largest captured step and a chunk at the end of the longest row take; 0: nothing."""
        small = self._zeros(_SLACK, torch.uint8)
        decode = self._captured_wrapper(small, rows)
        prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(small, "HND")
        ones = torch.ones(rows, dtype=torch.int32)
        ends = torch.arange(rows + 1, dtype=torch.int32)
        chunk = torch.tensor([0, max(1, min(tokens, pages * self.pool.page_size))], dtype=torch.int32)
        row = torch.tensor([0, pages], dtype=torch.int32)
        shape = *self._heads, self.pool.page_size
        asked = [0]
        for wrapper, lists, options in (
            (decode, (ends, self._graph_pages[:rows], ones), {}),
            (prefill, (chunk, row, self._graph_pages[:pages], ones[:1]), {"causal": True}),
        ):
            if hasattr(wrapper, "workspace_size"):  # since 0.7
                try:
                    asked.append(wrapper.workspace_size(*lists, *shape, **options, **self._options)[0])
                except NotImplementedError:  # kernels that take none
                    continue
        return max(asked)

    def plan(self, batch: ForwardBatch) -> None:
        """Divide the step's work among the device's multiprocessors."""
        with self.host_memory.written():
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
            self._store.batch = batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        """Store this step's K and V, then attend; shapes as in :class:`~..forward.AttentionBackend`."""
        assert self._step is not None, "plan comes first"
        self.append(self._step, k, v, layer)
        return self._attend(q, layer, form)

    def _attend(self, q: Tensor, layer: int, form: AttentionForm) -> Tensor:
        assert form.kind == PLAIN.kind, "chosen for plain forms only"
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
        wrapper = self._captured_wrapper(self._workspace, rows)
        wrapper.reset_workspace_buffer(self._workspace, self._graph_plans)  # instead of one of its own
        return _CapturedDecode(self, wrapper, self._lists, rows, num_heads=self._heads[0])

    def _captured_wrapper(self, workspace: Tensor, rows: int) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=self._zeros(rows + 1, torch.int32),
            paged_kv_indices_buffer=self._graph_pages,
            paged_kv_last_page_len_buffer=self._zeros(rows, torch.int32),
        )

    def plan_decode(self, wrapper: Any, host: Lists, device: Lists, rows: int) -> None:
        """The first ``rows`` rows by ``wrapper``. Page numbers from the device: from the host, a graph's wrapper waits."""
        wrapper.plan(
            host.indptr[: rows + 1],
            device.indices[: int(host.indptr[rows])],
            host.last_page_len[:rows],
            *self._heads,
            self.pool.page_size,
            **self._options,
        )

    def append(self, step: Lists, k: Tensor, v: Tensor, layer: int) -> None:
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
        self.reads_page_table = False
        self._parent = parent
        self._wrapper = wrapper
        self._lists = lists
        self._rows = rows
        self._step = lists.decode_views(rows)

    def plan(self, batch: ForwardBatch) -> None:
        """See :meth:`FlashInferBackend.plan`."""
        assert batch.num_decode == batch.num_rows == self._rows, "captured for another number of rows"
        with self._parent.host_memory.written():
            host, device = self._lists.fill(batch)
            self._parent.plan_decode(self._wrapper, host, device, self._rows)
        if self._store is not None:
            self._store.batch = batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        """See :meth:`FlashInferBackend.forward`."""
        self._parent.append(self._step, k, v, layer)
        return self._attend(q, layer, form)

    def _attend(self, q: Tensor, layer: int, form: AttentionForm) -> Tensor:
        assert form.kind == PLAIN.kind, "chosen for plain forms only"
        out: Tensor = self._wrapper.run(q, self._parent.pool.layer(layer))
        return out.flatten(1)
