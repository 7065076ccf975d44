"""Paged causal attention on the CPU, compiled (``cpu/attention.cpp``); what it would misread is a ValueError.

Invariant: a query's result depends on its own request alone, to the last bit, however steps are cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..memory.workspace import Workspace
from ..runtime.engine_config import PAGE_SIZE
from . import native
from .attention_form import PLAIN, AttentionForm
from .native import FLOAT, INT, POINTER, SIZE

_TASK_ROWS = 192
"""Queries that share a packed block of KV. Fewer pack more often (96: 4 % slower), more leave cores idle."""
_PACKING = 16
"""Estimated cost of a task beside its rows, in rows; it only orders tasks."""
_TASK_FIELDS = 4

_ARGUMENTS = (
    *(POINTER, SIZE, SIZE),  # queries, strides of a token and a head
    *(POINTER, POINTER, SIZE, SIZE, SIZE, SIZE),  # keys, values, kv heads, group, sizes of a key and a value
    *(SIZE, SIZE),  # parts of a stored head, elements from a value to the next
    *(POINTER, SIZE),  # page table, stride of a row
    *(POINTER, SIZE),  # tasks
    *(SIZE, FLOAT, FLOAT, POINTER),  # window, scale, soft cap, sinks
    *(POINTER, SIZE),  # output, stride of a token
    *(POINTER, SIZE, INT),  # scratch, floats of it for each thread, threads
)
_ATTEND = native.by_dtype("caesura_attention", *_ARGUMENTS)
_SCRATCH = native.by_dtype("caesura_attention_scratch", SIZE, SIZE, SIZE, result=SIZE)


def plan_tasks(q_lens: Sequence[int], kv_lens: Sequence[int], group: int) -> np.ndarray:
    """Divide a step's work into tasks, longest first: int64 [N, 4], row, first token, tokens, its position.

    ``q_lens``: at least 1, the last of ``kv_lens`` positions. ``group``: query heads per kv head.
    """
    q, kv = np.asarray(q_lens, dtype=np.int64), np.asarray(kv_lens, dtype=np.int64)
    if q.max(initial=1) == 1:  # they decode: nothing to divide, and the longest costs most
        tasks = np.empty((len(kv), _TASK_FIELDS), dtype=np.int64)
        order = np.argsort(-kv, kind="stable")
        tasks[:, 0] = tasks[:, 1] = order
        tasks[:, 2] = 1
        tasks[:, 3] = kv[order] - 1
        return tasks
    most = max(1, _TASK_ROWS // group)
    parts = -(-q // most)
    row = np.repeat(np.arange(len(q)), parts)
    part = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin, end = (q[row] * part) // parts[row], (q[row] * (part + 1)) // parts[row]
    first, position, tokens = (np.cumsum(q) - q)[row] + begin, (kv - q)[row] + begin, end - begin
    tasks = np.stack((row, first, tokens, position), axis=1)
    cost = (position + tokens) * (tokens * group + _PACKING)
    return np.ascontiguousarray(tasks[np.argsort(-cost, kind="stable")])


class PagedAttention:
    def __init__(
        self,
        dtype: torch.dtype,
        kv_heads: int,
        group: int,
        head_size: int,
        scale: float,
        value_size: int | None = None,
        *,
        parts: int | None = None,
    ) -> None:
        """``scale`` is for forms without one; ``value_size`` None means ``head_size``.

        ``parts``: kv heads (all) that share one stored head, its front the values; None: all lie apart.
        """
        self.parts = 1 if parts is None else parts
        self._latents = parts is not None
        self.dtype, self.kv_heads, self.group, self.head_size = dtype, kv_heads, group, head_size
        self.value_size = head_size if value_size is None else value_size
        self.scale = scale
        self._attend = _ATTEND[dtype]
        rows = group * max(1, _TASK_ROWS // group)
        self._thread_floats = _SCRATCH[dtype](head_size, self.value_size, rows)
        self._workspace = Workspace()

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        page_table: Tensor,
        tasks: np.ndarray,
        out: Tensor,
        form: AttentionForm = PLAIN,
    ) -> Tensor:
        """Attend by :func:`plan_tasks` of these rows into ``out`` [T, heads * value size].

        Args:
            q: [T, query heads, head size], elements of a head contiguous.
            keys, values: contiguous [pages, kv heads, 16, size]; with ``parts`` the same tensor, of one head.
            page_table: int32 [R, P], rows contiguous. Entries of pages before a row's window are not used.
        """
        self._check(q, keys, values, page_table, out, form.sinks)
        if tasks.dtype != np.int64 or tasks.shape[1] != _TASK_FIELDS or not tasks.flags.c_contiguous:
            raise ValueError("tasks are as plan_tasks() makes them")
        threads = torch.get_num_threads()
        scratch, thread_floats = self.scratch(threads)
        self._attend(
            q.data_ptr(), q.stride(0), q.stride(1),
            keys.data_ptr(), values.data_ptr(), self.kv_heads, self.group, self.head_size, self.value_size,
            self.parts, self.head_size if self._latents else self.value_size,
            page_table.data_ptr(), page_table.stride(0), tasks.ctypes.data, len(tasks),
            form.window or 0, self.scale if form.scale is None else form.scale, form.softcap or 0.0,
            None if form.sinks is None else form.sinks.data_ptr(),
            out.data_ptr(), out.stride(0), scratch, thread_floats, threads,
        )  # fmt: skip
        return out

    def scratch(self, threads: int) -> tuple[int, int]:
        """Return the address of memory, valid until a call with more threads, and floats per thread."""
        scratch = self._workspace.take("scratch", (threads, self._thread_floats), torch.float32)
        return scratch.data_ptr(), self._thread_floats

    def _check(
        self, q: Tensor, keys: Tensor, values: Tensor, page_table: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        heads, dtype = self.kv_heads * self.group, self.dtype
        sizes = self.head_size, self.head_size if self._latents else self.value_size
        if not (
            q.dtype == keys.dtype == values.dtype == out.dtype == dtype
            and q.shape[1:] == (heads, sizes[0])
            and out.shape == (q.shape[0], heads * self.value_size)
            and keys.shape[1:] == (self.kv_heads // self.parts, PAGE_SIZE, sizes[0])
            and values.shape == (*keys.shape[:3], sizes[1])
            and keys.is_contiguous()
            and values.is_contiguous()
            and (keys.data_ptr() == values.data_ptr() or not self._latents)
            and q.stride(2) == out.stride(1) == page_table.stride(1) == 1
            and page_table.dtype == torch.int32
        ):
            told = f"no attention of {heads} heads of {sizes} in {dtype}"
            raise native.misfit(told, q, keys, values, page_table, out)
        if sinks is None or (sinks.dtype == dtype and sinks.shape == (heads,) and sinks.is_contiguous()):
            return
        raise native.misfit(f"sinks of {heads} heads in {dtype}", sinks)


@dataclass(slots=True)
class PagedStep:
    """Attention of a planned step, for a kernel that computes it together with the operations around it."""

    attention: PagedAttention
    kv: Callable[[int], tuple[Tensor, Tensor]]
    """Return keys and values of a layer, each [pages, kv heads, 16, head size], contiguous."""
    kv_slots: Tensor
    """int64 [T], contiguous: slots for the tokens' K and V."""
    page_table: Tensor
    """int32 [R, P], rows contiguous."""
    tasks: np.ndarray
    window_slots: Tensor | None = None
    window_table: Tensor | None = None
    """``page_table`` of layers with a window, or None if they store where all layers do."""
