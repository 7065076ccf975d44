"""Parameters and tensors of the kernels' tests: instruction sets in turn, numbers of threads, precisions."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from caesura.scheduler.kernels import linear, native


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


def normal(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(weights: Tensor) -> Tensor:
    """Return the storage of one [N, K], or of [B, N, K] one behind the other."""
    rows, columns = linear.storage_shape(*weights.shape[-2:], weights.dtype)
    parts = weights.view(-1, *weights.shape[-2:])
    storage = torch.zeros(len(parts) * rows, columns).to(weights.dtype)
    for number, part in enumerate(parts):
        linear.pack_rows(storage, part, number * rows)
    return storage


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype, steps: int = 2) -> None:
    close = steps * max(unit(dtype), 2.0**-20)
    torch.testing.assert_close(got.double(), want.double(), rtol=close, atol=close)
