"""Compiled libraries that are there and cannot serve: tests that need them would be skipped unnoticed.

Tests may be skipped where nothing was compiled, or the processor lacks the instructions, as they say.
"""

import os
from pathlib import Path

import pytest

from caesura.scheduler.kernels import native
from caesura.transfer import words


def refuse_stale_builds() -> None:
    """End the run (UsageError) if a compiled library is of other sources than these, or does not load."""
    why, is_off = native.why_not(), os.environ.get(native.VARIABLE) == native.ISAS[0]
    if native._find() is not None and not is_off and why not in (None, native.NO_AVX2):
        raise pytest.UsageError(f"{why}: make setup does, and {native.VARIABLE}=torch goes without")
    found = sorted(Path(words.__file__).parent.glob("_words*.so"))
    if found and words.library() is None:
        raise pytest.UsageError(f"{found[0].name} was built from other sources, or does not load: make setup")
