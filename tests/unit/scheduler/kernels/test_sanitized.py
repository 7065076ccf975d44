"""Tests of this folder on kernels that sanitizers watch: no access out of bounds, nothing undefined.

What computes much without reaching other addresses is left out.
"""

from pathlib import Path

import pytest
from support.sanitized import run_sanitized

from caesura.scheduler.kernels import native

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]  # each runs a whole file, many times slower
HERE = Path(__file__).parent
FAKE_AMX = HERE.parents[2] / "support" / "fake_amx.h"
LAYERS = ("linear", "attention", "elementwise", "experts", "delta")
RUN = """
import pytest
arguments = ["-q", "-p", "no:cacheprovider", "-m", "not long", "-k", {chosen!r}, {file!r}]
assert pytest.main(arguments) == 0
"""


@pytest.mark.parametrize("file,operations,left_out", [
    ("attention", ("attention",), "decoded_and_in_any_chunk"),
    ("decoder", (*LAYERS, "quantize", "sampler", "collectives", "decoder"), "many_more_threads"),
    ("delta", ("delta", "elementwise", "linear"), ""),
    ("elementwise", ("elementwise",), ""),
    ("linear", ("linear", "elementwise"), "every_company"),
    ("experts", ("linear", "elementwise", "experts"), "every_company"),
    ("modulation", ("linear", "elementwise", "modulation", "joint_attention"), ""),
    ("sampler", ("sampler",), "follow_the_kept or large_vocabulary"),
])  # fmt: skip
def test_memory_is_accessed_within_bounds(file, operations, left_out, tmp_path):
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    flags = ()
    # AMX in software, where there is what surrounds its instructions.
    if file in ("attention", "linear", "experts"):
        with native.limited_to("avx512bf16") as possible:
            flags = ("-include", str(FAKE_AMX)) if possible else ()
    program = RUN.format(chosen=left_out and f"not ({left_out})", file=str(HERE / f"test_kernel_{file}.py"))
    assert " passed" in run_sanitized(program, tmp_path, *operations, flags=flags)
