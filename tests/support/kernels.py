"""Parameters of the kernels' tests: instruction sets in turn, a number of threads, a dtype's precision."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from caesura.scheduler.kernels import native


def instruction_sets() -> Iterator[str]:
    """Yield each set that can serve here, serving; skip the test where none can."""
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    for name in native.ISAS[1:]:
        with native.limited_to(name) as possible:
            if possible:
                yield name


def unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of a rounding to ``dtype``, where it is not :func:`least`."""
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype) -> float:
    """Return the smallest positive number: twice the largest error of a rounding close to zero."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
