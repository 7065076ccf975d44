"""Marks of tests of Triton's kernels, which run in its interpreter on the CPU, or compile for a device.

Triton decides when it is imported whether it interprets: ``test_triton_compiled.py`` starts the files whose
tests are :data:`interpreted` in processes of their own. Its bfloat16 products are not a device's.
"""

import os
from importlib.util import find_spec

import pytest

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETS, reason="run by test_the_kernels_in_the_interpreter")
compiled = pytest.mark.skipif(
    INTERPRETS or find_spec("triton") is None, reason="compiles nothing: the interpreter, or no Triton"
)
