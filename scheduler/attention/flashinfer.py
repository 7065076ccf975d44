"""Paged attention by FlashInfer's kernels (Ye et al., 2025, arXiv:2501.01005), for CUDA.

Invariants:
- The pool is FlashInfer's "HND" layout: [page, kv head, 16, head size], K and V apart (``page_lists.py``).
- Decode rows and prefill rows are planned and run apart; K and V of both are appended first.
- Host memory that a plan is copied from, FlashInfer's own included, is written only after the copies of the
  plan before it have been made (:class:`HostMemory`).
- ``for_decode`` gives attention that a graph can hold: planned outside of it, into buffers that never move
  and that all sizes share with the workspaces, as one step is planned and run after the other.
- The workspace holds the needs of the largest step: a plan that does not fit would end its step.
- A form of layers is planned by wrappers of its own: a plan's options hold until the next. Layers of one
  window share page lists. A window of n positions is ``window_left`` of n - 1.
- With sinks, decode rows and prompts go through ``BatchAttentionWithAttentionSinkWrapper``, which knows no
  soft caps and takes sinks in float32 at each run, so an update of them is seen at the next step.

Written against FlashInfer 0.7.2; not run on a GPU. Plans and page lists are tested on the CPU by a stand-in.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..cache.pool import MHAPool
from ..execution.forward import AttentionBackend, CapturableBackend, ForwardBatch, StepLimits
from ..kernels.attention_form import PLAIN, AttentionForm, FormKind
from ..runtime.dtypes import torch_name
from ..runtime.engine_config import PAGE_SIZE
from .fused_store import fused_store
from .page_lists import Lists, PageLists
from .shape import Shape

INT_WORKSPACE_BYTES = 8 << 20
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
_SINKS = "BatchAttentionWithAttentionSinkWrapper"


def why_not(
    device: torch.device, dtype: torch.dtype, head_size: int, kinds: Sequence[FormKind] = (PLAIN.kind,)
) -> str | None:
    """Return why FlashInfer cannot serve ``kinds`` of layers, as far as that shows without a step."""
    sizes = None if head_size in _HEAD_SIZES else f"it has no kernels for heads of {head_size}"
    return why_not_for(device, dtype, sizes) or _why_no_kernels(kinds)


def why_not_for(device: torch.device, dtype: torch.dtype, sizes: str | None) -> str | None:
    """Return the same, where ``sizes`` is the objection of the model's sizes."""
    if device.type != "cuda":
        return f"it runs on CUDA, not on {device.type}"
    if dtype not in _DTYPES:
        return f"it computes in bfloat16 or float16, not {torch_name(dtype)}"
    if sizes is not None:
        return sizes
    return None if find_spec("flashinfer") else "it is not installed"


def _why_no_kernels(kinds: Sequence[FormKind]) -> str | None:
    if any(kind.sinks and kind.softcap is not None for kind in kinds):
        return "it has no kernels for soft caps together with attention sinks"
    if any(kind.sinks for kind in kinds) and not hasattr(import_module("flashinfer"), _SINKS):
        return f"this release does not serve attention sinks ({_SINKS})"
    return None


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
    only if a step has fewer than the device holds, but always in a graph of tensor cores' decoding.
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
        self.copied: Any = None
        if device.type != "cpu":
            self.copied = torch.get_device_module(device).Event()

    @contextmanager
    def written(self) -> Iterator[None]:
        """Enclose writes to the memory and the enqueuing of copies from it."""
        if self.copied is not None:
            self.copied.synchronize()
        yield
        if self.copied is not None:
            self.copied.record()


class FormWrappers:
    """Plans and runs the layers of one form, by FlashInfer's wrappers for it."""

    def __init__(
        self,
        library: Any,
        kind: FormKind,
        shape: Shape,
        workspace: Tensor,
        graph_plans: Tensor,
        graph_pages: Tensor,
    ) -> None:
        """``workspace`` and ``graph_…`` are shared: by all forms, and by captured steps of all sizes."""
        self._library, self._kind = library, kind
        self._sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE
        self.workspace, self._graph_plans, self._graph_pages = workspace, graph_plans, graph_pages
        self._tensor_cores = on_tensor_cores(shape.num_heads, shape.num_kv_heads)
        self._options: dict[str, Any] = {
            "sm_scale": shape.scale if kind.scale is None else kind.scale,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
        }
        if kind.window is not None:
            self._options["window_left"] = kind.window - 1
        if kind.softcap is not None:
            self._options["logits_soft_cap"] = kind.softcap
        self.decode = self._with_sinks() if kind.sinks else self._decoding()
        prefilling = self._library.BatchPrefillWithPagedKVCacheWrapper
        self.prefill = self._with_sinks() if kind.sinks else prefilling(self.workspace, "HND")

    def _decoding(self, **options: Any) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "HND", use_tensor_cores=self._tensor_cores, **options
        )

    def _with_sinks(self, **options: Any) -> Any:
        return getattr(self._library, _SINKS)(
            self.workspace,
            "HND",
            q_data_type=self._options["q_data_type"],
            kv_data_type=self._options["kv_data_type"],
            head_dim_qk=self._sizes[2],
            head_dim_vo=self._sizes[2],
            window_left=self._options.get("window_left", -1),
            **options,
        )

    def captured(self, rows: int) -> Any:
        """Return a wrapper for decode steps of ``rows`` rows, whose plans go where graphs find them."""
        device = self.workspace.device
        ends, last = (torch.zeros(size, dtype=torch.int32, device=device) for size in (rows + 1, rows))
        if self._kind.sinks:
            wrapper = self._with_sinks(
                use_cuda_graph=True,
                qo_indptr_buf=torch.zeros_like(ends),
                paged_kv_indptr_buf=ends,
                paged_kv_indices_buf=self._graph_pages,
                paged_kv_last_page_len_buf=last,
            )
        else:
            wrapper = self._decoding(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=ends,
                paged_kv_indices_buffer=self._graph_pages,
                paged_kv_last_page_len_buffer=last,
            )
        wrapper.reset_workspace_buffer(self.workspace, self._graph_plans)  # instead of one of its own
        return wrapper

    def plan(self, decode: Any, batch: ForwardBatch, host: Lists, device: Lists) -> None:
        """Plan the decode rows of a step by ``decode``, and its prompts."""
        rows = batch.num_decode
        first = int(host.indptr[rows])
        if rows:
            # With the host's page numbers, a graph's wrapper would wait.
            pages = host.indptr[: rows + 1], device.indices[:first], host.last_page_len[:rows], *self._sizes
            if self._kind.sinks:
                starts = torch.arange(rows + 1, dtype=torch.int32)
                decode.plan(starts, *pages, causal=True, **self._options)
            else:
                decode.plan(*pages, **self._options)
        if batch.num_rows > rows:
            self.prefill.plan(
                host.qo_indptr,
                host.prefill_indptr,
                device.indices[first:],
                host.last_page_len[rows:],
                *self._sizes,
                causal=True,
                **self._options,
            )

    def workspace_size(self, wrapper: Any, lists: tuple[Tensor, ...], **options: Any) -> int:
        """Return the bytes of partial results that ``wrapper`` needs with these page lists."""
        return int(wrapper.workspace_size(*lists, *self._sizes, **options, **self._options)[0])


class FlashInferBackend(CapturableBackend):
    """Attention over an MHA pool of bfloat16 or float16."""

    reads_page_table = False

    def __init__(self, pool: MHAPool, shape: Shape, limits: StepLimits, library: Any = None) -> None:
        """``library``: the ``flashinfer`` module. None means the installed one."""
        self._fused_over(pool, shape.num_heads)
        self._library = import_module("flashinfer") if library is None else library
        self.pool, self._shape = pool, shape
        self.lists = {window: PageLists(limits, shape.device, window) for window in shape.windows}
        needed = workspace_bytes(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            limits.rows,
            shape.device,
            tensor_cores=on_tensor_cores(shape.num_heads, shape.num_kv_heads)
            or any(kind.sinks for kind in shape.kinds),
        )
        needed = max(needed, self._asked(limits.rows, limits.tokens - limits.rows, limits.pages))
        workspace = self._zeros(needed, torch.uint8)
        pages = {window: self._zeros(limits.rows * limits.pages, torch.int32) for window in self.lists}
        self.forms: dict[FormKind, tuple[FormWrappers, Any]] = {}
        """Wrappers of each form, and that of decode rows, which a graph has of its own."""
        for kind in shape.kinds:
            plans = self._zeros(INT_WORKSPACE_BYTES, torch.uint8)
            form = FormWrappers(self._library, kind, shape, workspace, plans, pages[kind.window])
            self.forms[kind] = form, form.decode
        self.host_memory = HostMemory(shape.device)
        self._num_decode = 0
        self._captured_rows: int | None = None
        self._step: dict[int | None, Lists] = {}

    def _fused_over(self, pool: MHAPool, num_heads: int) -> None:
        self._store = self.fused = fused_store(pool, num_heads, self._attend)

    def _asked(self, rows: int, tokens: int, pages: int) -> int:
        """Return the bytes that plain layers ask for: windows take no more, and sinks report nothing."""
        small, numbers = self._zeros(_SLACK, torch.uint8), self._zeros(rows * pages, torch.int32)
        plain = FormWrappers(self._library, PLAIN.kind, self._shape, small, small, numbers)
        ones = torch.ones(rows, dtype=torch.int32)
        ends = torch.arange(rows + 1, dtype=torch.int32)
        chunk = torch.tensor([0, max(1, min(tokens, pages * PAGE_SIZE))], dtype=torch.int32)
        row = torch.tensor([0, pages], dtype=torch.int32)
        asked = [0]
        for wrapper, given, options in (
            (plain.captured(rows), (ends, numbers[:rows], ones), {}),
            (plain.prefill, (chunk, row, numbers[:pages], ones[:1]), {"causal": True}),
        ):
            if hasattr(wrapper, "workspace_size"):  # since 0.7
                with suppress(NotImplementedError):  # this kernel uses no workspace
                    asked.append(plain.workspace_size(wrapper, given, **options))
        return max(asked)

    def plan(self, batch: ForwardBatch) -> None:
        """Divide the step's work among the device's multiprocessors."""
        captured, rows = self._captured_rows, batch.num_rows
        assert captured is None or batch.num_decode == rows == captured, "captured for another number of rows"
        with self.host_memory.written():
            filled = {window: lists.fill(batch) for window, lists in self.lists.items()}
            for kind, (form, decode) in self.forms.items():
                form.plan(decode, batch, *filled[kind.window])
        if captured is None:
            self._num_decode = batch.num_decode
            self._step = {window: device for window, (_, device) in filled.items()}
        if self._store is not None:
            self._store.batch = batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, form: AttentionForm = PLAIN) -> Tensor:
        step = self._step[form.window]
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
        return self._attend(q, layer, form)

    def _attend(self, q: Tensor, layer: int, form: AttentionForm) -> Tensor:
        cache, (wrappers, decoding) = self.pool.layer(layer), self.forms[form.kind]
        sinks = () if form.sinks is None else (form.sinks.float(),)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode = self._num_decode
        if decode:
            decoding.run(q[:decode], cache, *sinks, out=out[:decode])
        if q.shape[0] > decode:
            wrappers.prefill.run(q[decode:], cache, *sinks, out=out[decode:])
        return out.flatten(1)

    def for_decode(self, rows: int) -> AttentionBackend:
        captured = copy(self)
        captured._fused_over(self.pool, self._shape.num_heads)
        captured.forms = {kind: (form, form.captured(rows)) for kind, (form, _) in self.forms.items()}
        captured._step = {window: each.decode_views(rows) for window, each in self.lists.items()}
        captured._num_decode = captured._captured_rows = rows
        return captured

    def _zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=self._shape.device)
