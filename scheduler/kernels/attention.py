"""Paged causal attention on the CPU, compiled (``cpu/attention.cpp``); what it would misread is a ValueError.

Invariant: a query's result depends on its own request alone, to the last bit, however steps are cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..memory.workspace import Workspace
from ..runtime.engine_config import PAGE_SIZE
from . import native
from .attention_form import PLAIN, AttentionForm
from .native import FLOAT, INT, POINTER, SIZE

if TYPE_CHECKING:
    from .delta import PlannedStates

_TASK_ROWS = 192
"""Queries that share a packed block of KV. Fewer pack more often (96: 4 % slower), more leave cores idle."""
_PACKING = 16
"""Estimated cost of a task beside its rows, in rows; it only orders tasks."""
_TASK_FIELDS = 6
_SHARED = 64
"""Positions that requests attend to together are a multiple of this: a block of the kernel's."""
_TILE = 16
"""Most query heads of a KV head for which they do."""

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
    """Divide a step's work into tasks, longest first: int64 [N, 6], row, first token, tokens, its position.

    The other fields are those of :func:`share_prefixes`: 1 and 0. ``q_lens``: at least 1, the last of
    ``kv_lens`` positions. ``group``: query heads per kv head.
    """
    q, kv = np.asarray(q_lens, dtype=np.int64), np.asarray(kv_lens, dtype=np.int64)
    if q.max(initial=1) == 1:
        return decode_tasks(kv)
    most = max(1, _TASK_ROWS // group)
    parts = -(-q // most)
    row = np.repeat(np.arange(len(q)), parts)
    part = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin, end = (q[row] * part) // parts[row], (q[row] * (part + 1)) // parts[row]
    first, position, tokens = (np.cumsum(q) - q)[row] + begin, (kv - q)[row] + begin, end - begin
    tasks = np.stack((row, first, tokens, position, np.ones_like(row), np.zeros_like(row)), axis=1)
    return np.ascontiguousarray(tasks[np.argsort(-_costs(tasks, group), kind="stable")])


def advance_tasks(tasks: np.ndarray, kv_lens: np.ndarray) -> None:
    """Let :func:`decode_tasks` of the same rows have other lengths; their order stays."""
    np.subtract(kv_lens[tasks[:, 0]], 1, out=tasks[:, 3])


def decode_tasks(kv_lens: np.ndarray) -> np.ndarray:
    """Return the tasks of rows of one token each: there is nothing to divide, and the longest costs most."""
    order = np.argsort(-kv_lens, kind="stable")
    tasks = np.ones((len(kv_lens), _TASK_FIELDS), dtype=np.int64)
    tasks[:, 0] = tasks[:, 1] = order
    tasks[:, 3], tasks[:, 5] = kv_lens[order] - 1, 0
    return tasks


def share_prefixes(tasks: np.ndarray, page_table: np.ndarray, group: int, most: int) -> np.ndarray:
    """Let requests that begin with the same pages attend to these together: the pages are read once for all.

    Of such tasks, which have one token each and follow one another, the first tells how many they are (field
    4, 0 in the others) and the positions that they share (field 5), at least half of those of one of them.
    ``page_table``: int32 [R, P]. ``most`` follow one another, of at most 16 heads.
    """
    most = min(most, _TASK_ROWS // group) if group <= _TILE else 1
    alone = np.flatnonzero(tasks[:, 2] == 1)
    first = np.sort(page_table[tasks[alone, 0], 0])
    if most < 2 or not (first[1:] == first[:-1]).any():
        return tasks
    rows = page_table[tasks[alone, 0]]
    order = sorted(range(len(alone)), key=[row.tobytes() for row in rows].__getitem__)
    alone, rows = alone[order], rows[order]
    ends = tasks[alone, 3] + 1
    equal = np.logical_and.accumulate(rows[1:] == rows[:-1], axis=1).sum(axis=1) * PAGE_SIZE
    shorter = np.minimum(ends[1:], ends[:-1])
    common = np.minimum(equal, shorter) // _SHARED * _SHARED
    # The rest a unit reads head by head of every request, which is slower than all heads of a page in turn.
    common[2 * common < shorter] = 0
    runs, positions = _runs(common.tolist(), most)
    # A task of several tokens is a run of its own, behind those of one token.
    tasks = tasks[np.concatenate([alone, np.flatnonzero(tasks[:, 2] > 1)])]
    several = range(len(alone), len(tasks))
    begins, shared = np.array([*runs, *several]), np.array([*positions, *(0 for _ in several)])
    counts = np.diff(begins, append=len(tasks))
    cost = np.add.reduceat(_costs(tasks, group), begins) - shared * (counts - 1) * _PACKING
    longest = np.argsort(-cost, kind="stable")
    begins, counts, shared = begins[longest], counts[longest], shared[longest]
    heads = np.cumsum(counts) - counts
    together: np.ndarray = tasks[np.arange(len(tasks)) + np.repeat(begins - heads, counts)]
    together[:, 4:] = 0
    together[heads, 4], together[heads, 5] = counts, shared
    return together


def _costs(tasks: np.ndarray, group: int) -> np.ndarray:
    costs: np.ndarray = (tasks[:, 3] + tasks[:, 2]) * (tasks[:, 2] * group + _PACKING)
    return costs


def _runs(common: list[int], most: int) -> tuple[list[int], list[int]]:
    """Divide rows into runs; return where each begins, and how many positions its rows have in common.

    ``common`` [R - 1]: positions that a row has in common with the one before. A row that has no more than
    half of what a run has in common, or of what the row behind it has with it, begins another run.
    """
    begins, shared = [0], [0]
    for row, here in enumerate(common, 1):
        behind = common[row] if row < len(common) else 0
        if here and row - begins[-1] < most and 2 * here > max(shared[-1], behind):
            shared[-1] = min(shared[-1] or here, here)
        else:
            begins.append(row)
            shared.append(0)
    return begins, shared


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
    states: "PlannedStates | None" = None
    """States of layers without K and V; ``kv`` then counts the others."""
