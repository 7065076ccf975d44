"""Finds and overwrites single elements of tensors on the CPU, by their bits.

Invariants: compiled and torch code give equal results. Positions are those of the flattened tensor,
ascending: int32, or int64 for tensors of 2^31 elements and more.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

_ABI = 5
_CHUNK = 1 << 22
"""Elements that a thread compares at a time."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None if they were not built or are others'."""
    folder = Path(__file__).parent
    path = next(
        (file for suffix in EXTENSION_SUFFIXES if (file := folder / f"_words{suffix}").exists()), None
    )
    if path is None:
        return None
    try:
        found = ctypes.CDLL(str(path))
    except OSError:  # another platform's file
        return None
    if found.caesura_words_abi() != _ABI:
        return None
    two, one = [_POINTER, _POINTER], [_POINTER]
    found.caesura_words_changed.argtypes = [*two, _COUNT, _INT, _COUNT, *one, _INT, *two]
    found.caesura_words_changed.restype = _COUNT
    found.caesura_words_scatter.argtypes = [*two, _INT, *two, _COUNT, _INT]
    found.caesura_words_scatter.restype = None
    found.caesura_words_digest.argtypes = [*one, _COUNT, _COUNT, *one]
    found.caesura_words_digest.restype = None
    found.caesura_words_digest_copied.argtypes = [*one, *[_COUNT] * 3, *[_POINTER] * 3, _COUNT]
    found.caesura_words_digest_copied.restype = None
    found.caesura_words_write.argtypes = [*one, _COUNT, *one]
    found.caesura_words_write.restype = None
    found.caesura_words_digest_change.argtypes = [*one, _INT, *two, _COUNT, *one]
    found.caesura_words_digest_change.restype = None
    found.caesura_words_difference.argtypes = [*two, _COUNT, _INT, *one]
    found.caesura_words_difference.restype = _COUNT
    return found


def address(name: str) -> int:
    """Return the address of the compiled function ``name``, for other compiled code."""
    return ctypes.cast(library()[name], _POINTER).value or 0  # type: ignore[index]


def threads() -> ThreadPoolExecutor:
    """Return the pool of as many threads as torch uses; no task of it may wait for another one."""
    return _threads(os.getpid())


@cache
def _threads(_: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads()), thread_name_prefix="words")


def position_dtype(elements: int) -> torch.dtype:
    """Return the dtype of positions in a tensor of so many elements."""
    return torch.int32 if elements < 1 << 31 else torch.int64


def as_words(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(_WORDS[tensor.element_size()])


def changed(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions of the elements whose bits differ, and their values before and after."""
    old, new = as_words(before), as_words(after)
    dtype, compiled = position_dtype(old.numel()), library()
    if compiled is None:
        found = (old != new).nonzero().reshape(-1)
        return found.to(dtype), old[found].view(after.dtype), new[found].view(after.dtype)
    starts = range(0, old.numel(), _CHUNK)

    def look(start: int) -> tuple[Tensor, Tensor, Tensor]:
        n = min(_CHUNK, old.numel() - start)
        positions, were, values = (torch.empty(n, dtype=each) for each in (dtype, old.dtype, new.dtype))
        count = compiled.caesura_words_changed(
            old.data_ptr() + start * old.element_size(),
            new.data_ptr() + start * old.element_size(),
            n,
            old.element_size(),
            start,
            positions.data_ptr(),
            dtype == torch.int64,
            were.data_ptr(),
            values.data_ptr(),
        )
        # Copied, as a view of few elements would keep memory for all
        return positions[:count].clone(), were[:count].clone(), values[:count].clone()

    if len(starts) > 1:
        parts = list(threads().map(look, starts))
    else:
        parts = [look(start) for start in starts]
    if not parts:
        return torch.empty(0, dtype=dtype), after.new_empty(0), after.new_empty(0)
    positions, were, values = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))
    return positions, were.view(after.dtype), values.view(after.dtype)


def scatter(target: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Overwrite elements of a contiguous tensor, and return what was there."""
    words, new = as_words(target), as_words(values)
    before = torch.empty_like(new)
    compiled = library()
    if compiled is None:
        index = positions.long()
        torch.index_select(words, 0, index, out=before)
        words[index] = new
        return before.view(values.dtype)
    count, width = new.numel(), words.element_size()
    compiled.caesura_words_scatter(
        words.data_ptr(),
        positions.data_ptr(),
        positions.dtype == torch.int64,
        new.data_ptr(),
        before.data_ptr(),
        count,
        width,
    )
    return before.view(values.dtype)


def difference(before: Tensor, after: Tensor) -> tuple[int, float, float]:
    """Return how many elements differ, and the sums of the squares of their changes and of ``before``."""
    before, after = before.contiguous(), after.contiguous()
    compiled = library() if before.device.type == after.device.type == "cpu" else None
    if compiled is not None and before.dtype in (torch.bfloat16, torch.float32):
        sums = (ctypes.c_double * 2)()
        pointers = before.data_ptr(), after.data_ptr()
        count = compiled.caesura_words_difference(*pointers, before.numel(), before.itemsize, sums)
        return count, sums[0], sums[1]
    old, new = before.to(torch.float32), after.to(before.device, torch.float32)
    changed = (as_words(before) != as_words(after.to(before.device))).sum()
    sums_of = [each.square().sum(dtype=torch.float64) for each in (new - old, old)]
    return int(changed), float(sums_of[0]), float(sums_of[1])
