"""Attempts at kernels: what they raise or differ by is told in a line."""

import pytest

from caesura.scheduler.kernels.self_test import failure

NINJA = """Ninja build failed. Ninja output:
ninja: Entering directory `/root/.cache/flashinfer'
[1/3] nvcc -c kernel.cu
/bin/sh: 1: nvcc: not found
"""


class CompileError(Exception):
    """No RuntimeError."""


@pytest.mark.parametrize(
    "error,told",
    [
        (
            RuntimeError(NINJA),
            "RuntimeError: Ninja build failed. Ninja output: … /bin/sh: 1: nvcc: not found",
        ),
        (RuntimeError("Could not find nvcc: error\nfatal"), "RuntimeError: Could not find nvcc: error"),
        (CompileError("at 12:3"), "CompileError: at 12:3"),
        (KeyError(), "KeyError"),
        (OSError("\n \n"), "OSError"),
        (ValueError("x" * 5000), f"ValueError: {'x' * 288}"),
    ],
)
def test_errors_of_a_self_test_are_reported(error, told):
    def attempt():
        yield 0.0
        raise error

    assert failure(attempt, 0.1, "a step") == f"a step fails: {told}"


@pytest.mark.parametrize(
    "differences,told",
    [
        ([], None),
        ([0.0, 0.1, 0.05], None),
        ([0.2, 0.0], "a step is off by 0.200"),
        ([float("nan"), 0.0], "a step is off by nan"),
        ([0.3, float("nan"), 0.0], "a step is off by nan"),
        ([float("inf")], "a step is off by inf"),
    ],
)
def test_the_largest_difference_counts(differences, told):
    assert failure(lambda: differences, 0.1, "a step") == told
