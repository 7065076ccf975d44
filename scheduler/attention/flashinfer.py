"""Paged attention by FlashInfer's kernels (Ye et al., 2025, arXiv:2501.01005), for CUDA.

Invariants:
- The pool is FlashInfer's "HND" layout as it is: [page, kv head, 16, head size], K and V apart; page lists
  name the pages (``page_lists.py``).
- Decode rows and prefill rows are planned and run apart; K and V of both are appended first.
- Host memory that a plan is copied from, FlashInfer's own included, is written only after the copies of the
  plan before it have been made (:class:`HostMemory`).
- ``for_decode`` gives attention that a graph can hold: planned outside of it, into buffers that never move.
  All sizes share these buffers and the workspaces, as one step is planned and run after the other.
- The workspace holds the needs of the largest step: a plan that does not fit would end its step.
- Layers of one form share wrappers (``flashinfer_forms.py``), and those of one window share page lists.

Written against FlashInfer 0.7.2; built and traced, not run on a GPU. Its plans and page lists are tested on
the CPU against a module of the same interface.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..execution.forward import AttentionBackend, ForwardBatch, FusedAttention, KVPool
from ..kernels.attention_form import PLAIN, AttentionForm, FormKind
from ..runtime.dtypes import torch_name
from .flashinfer_forms import FormWrappers, Sizes, why_no_kernels
from .fused_store import fused_store
from .page_lists import Lists, PageLists

_INT_WORKSPACE_BYTES = 8 << 20
"""Bytes for plans, as FlashInfer's wrappers allocate them."""
_TENSOR_CORE_GROUP = 4
"""Query heads per KV head, at least."""
_HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_BLOCKS, _SMALL_BLOCKS = 2, 16
"""Most blocks per multiprocessor of a step with divided rows: with tensor cores, and without."""
_TILES = (16, 64, 128)
"""Rows of a block, which are queries times the heads of a group: the first that holds a decode row."""
_SLACK = 1 << 20


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, kinds: Sequence[FormKind] = (PLAIN.kind,)
) -> str | None:
    """Return why FlashInfer cannot serve ``kinds`` of layers, as far as that shows without a step."""
    sizes = None if head_size in _HEAD_SIZES else f"it has no kernels for heads of {head_size}"
    return why_not_for(device, dtype, sizes) or why_no_kernels(kinds)


def why_not_for(device: torch.device, dtype: torch.dtype, sizes: str | None) -> str | None:
    """Return the same, where ``sizes`` is the objection of the model's sizes."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {torch_name(dtype)}"
    if sizes is not None:
        return sizes
    return None if find_spec("flashinfer") else "it is not installed"


def workspace_bytes(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    rows: int,
    device: torch.device,
    *,
    tensor_cores: bool | None = None,
) -> int:
    """Return the bytes of partial results of any step, by the rules of FlashInfer's planner.

    They are float32, one vector and one log-sum for each query head of each row of a block. Rows are divided
    among blocks only if a step has fewer than the device holds. In a graph of tensor cores' decoding they
    always are, and every row has a block.
    """
    group = num_heads // num_kv_heads
    divided = -(-_BLOCKS * multiprocessors(device) // num_kv_heads)
    queries = divided * _TILES[-1] // group
    if on_tensor_cores(num_heads, num_kv_heads) if tensor_cores is None else tensor_cores:
        tile = next((tile for tile in _TILES if group <= tile), _TILES[-1])
        blocks = max(divided, rows + -(-rows * group // tile))
        queries = max(queries, blocks * tile // group)
    else:
        queries = max(queries, -(-_SMALL_BLOCKS * multiprocessors(device) // num_kv_heads))
    return (queries + 1) * num_heads * (head_size + 1) * 4 + _SLACK


def on_tensor_cores(num_heads: int, num_kv_heads: int) -> bool:
    """Return True if decoding fills the rows of a matrix instruction well enough."""
    return num_heads // num_kv_heads >= _TENSOR_CORE_GROUP


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class HostMemory:
    """Source of plans' copies to the device: written only after those of the plan before have been made."""

    def __init__(self, device: torch.device) -> None:
        self._copied: Any = None
        if device.type != "cpu":
            self._copied = torch.get_device_module(device).Event()

    @contextmanager
    def written(self) -> Iterator[None]:
        if self._copied is not None:
            self._copied.synchronize()
        yield
        if self._copied is not None:
            self._copied.record()


class FlashInferBackend:
    """An :class:`~..forward.AttentionBackend` over an MHA pool of bfloat16 or float16, capturable."""

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
        kinds: Sequence[FormKind] = (PLAIN.kind,),
        library: Any = None,
    ) -> None:
        """Args:
        scale: factor of the scores of layers without a scale of their own. None means ``head_size ** -0.5``.
        kinds: kinds of the layers' forms.
        max_rows, max_tokens: largest step.
        max_pages: pages of the longest row.
        library: the ``flashinfer`` module. None means the installed one.
        """
        self._store = fused_store(pool, num_heads, self._attend)
        self.fused: FusedAttention | None = self._store
        self.paged = None
        self.reads_page_table = False
        self._library = import_module("flashinfer") if library is None else library
        self.pool = pool
        keys, _ = pool.layer(0)
        self._device = keys.device
        self._sizes = Sizes(
            heads=(num_heads, num_kv_heads, head_size),
            page_size=pool.page_size,
            dtype=keys.dtype,
            scale=head_size**-0.5 if scale is None else scale,
            tensor_cores=on_tensor_cores(num_heads, num_kv_heads),
        )
        self._lists = {
            window: PageLists(
                rows=max_rows,
                tokens=max_tokens,
                pages=max_pages,
                page_size=pool.page_size,
                device=self._device,
                window=window,
            )
            for window in dict.fromkeys(kind.window for kind in kinds)
        }
        needed = workspace_bytes(
            num_heads,
            num_kv_heads,
            head_size,
            max_rows,
            self._device,
            tensor_cores=self._sizes.tensor_cores or any(kind.sinks for kind in kinds),
        )
        needed = max(needed, self._asked(max_rows, max_tokens - max_rows, max_pages))
        workspace = self._zeros(needed, torch.uint8)
        pages = {window: self._zeros(max_rows * max_pages, torch.int32) for window in self._lists}
        self._forms = {
            kind: FormWrappers(
                self._library,
                kind,
                self._sizes,
                self._lists[kind.window],
                workspace,
                graph_plans=self._zeros(_INT_WORKSPACE_BYTES, torch.uint8),
                graph_pages=pages[kind.window],
            )
            for kind in dict.fromkeys(kinds)
        }
        self.host_memory = HostMemory(self._device)
        self._num_decode = 0
        self._step: dict[int | None, Lists] = {}

    def _asked(self, rows: int, tokens: int, pages: int) -> int:
        """Return the bytes that the library reports for its largest captured step and a row's last chunk.

        Plain layers decide: a window takes no more, and kernels with sinks report nothing.
        """
        small, numbers = self._zeros(_SLACK, torch.uint8), self._zeros(rows * pages, torch.int32)
        lists = next(iter(self._lists.values()))
        plain = FormWrappers(
            self._library, PLAIN.kind, self._sizes, lists, small, graph_plans=small, graph_pages=numbers
        )
        ones = torch.ones(rows, dtype=torch.int32)
        ends = torch.arange(rows + 1, dtype=torch.int32)
        chunk = torch.tensor([0, max(1, min(tokens, pages * self.pool.page_size))], dtype=torch.int32)
        row = torch.tensor([0, pages], dtype=torch.int32)
        asked = [0]
        for wrapper, given, options in (
            (plain.captured(rows), (ends, numbers[:rows], ones), {}),
            (plain.prefill, (chunk, row, numbers[:pages], ones[:1]), {"causal": True}),
        ):
            if hasattr(wrapper, "workspace_size"):  # since 0.7
                try:
                    asked.append(plain.workspace_size(wrapper, given, **options))
                except NotImplementedError:  # kernels that take none
                    continue
        return max(asked)

    def plan(self, batch: ForwardBatch) -> None:
        """Divide the step's work among the device's multiprocessors."""
        with self.host_memory.written():
            hosts = self._fill(batch)
            for kind, each in self._forms.items():
                each.plan(batch, hosts[kind.window], self._step[kind.window])
        self._num_decode = batch.num_decode
        if self._store is not None:
            self._store.batch = batch

    def _fill(self, batch: ForwardBatch) -> dict[int | None, Lists]:
        """Return the step's lists on the host, by window; those on the device are kept."""
        both = {window: lists.fill(batch) for window, lists in self._lists.items()}
        self._step = {window: device for window, (_, device) in both.items()}
        return {window: host for window, (host, _) in both.items()}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        assert self._step, "plan comes first"
        self.append(self._step[form.window], k, v, layer)
        return self._attend(q, layer, form)

    def _attend(self, q: Tensor, layer: int, form: AttentionForm) -> Tensor:
        cache, wrappers = self.pool.layer(layer), self._forms[form.kind]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode = self._num_decode
        if decode:
            wrappers.run(wrappers.decode, q[:decode], cache, form, out[:decode])
        if q.shape[0] > decode:
            wrappers.run(wrappers.prefill, q[decode:], cache, form, out[decode:])
        return out.flatten(1)

    def for_decode(self, rows: int) -> AttentionBackend:
        return _CapturedDecode(self, self._forms, self._lists, rows, num_heads=self._sizes.heads[0])

    def append(self, step: Lists, k: Tensor, v: Tensor, layer: int) -> None:
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
    def __init__(
        self,
        parent: FlashInferBackend,
        forms: dict[FormKind, FormWrappers],
        lists: dict[int | None, PageLists],
        rows: int,
        *,
        num_heads: int,
    ) -> None:
        self._store = fused_store(parent.pool, num_heads, self._attend)
        self.fused: FusedAttention | None = self._store
        self.paged = None
        self.reads_page_table = False
        self._parent, self._forms, self._lists, self._rows = parent, forms, lists, rows
        self._wrappers = {kind: each.captured(rows) for kind, each in forms.items()}
        self._step = {window: each.decode_views(rows) for window, each in lists.items()}

    def plan(self, batch: ForwardBatch) -> None:
        assert batch.num_decode == batch.num_rows == self._rows, "captured for another number of rows"
        with self._parent.host_memory.written():
            filled = {window: each.fill(batch) for window, each in self._lists.items()}
            for kind, each in self._forms.items():
                each.plan_decode(self._wrappers[kind], *filled[kind.window], self._rows)
        if self._store is not None:
            self._store.batch = batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        self._parent.append(self._step[form.window], k, v, layer)
        return self._attend(q, layer, form)

    def _attend(self, q: Tensor, layer: int, form: AttentionForm) -> Tensor:
        cache = self._parent.pool.layer(layer)
        return self._forms[form.kind].run(self._wrappers[form.kind], q, cache, form, None).flatten(1)
