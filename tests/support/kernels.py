"""What the kernels' tests share: each instruction set in turn, and a number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from caesura.scheduler.kernels import native


def instruction_sets() -> Iterator[str]:
    """Each set that can serve here, serving; skips the test where none can."""
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    for name in native.ISAS[1:]:
        with native.limited_to(name) as possible:
            if possible:
                yield name


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch, and with it every kernel, uses ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
