"""Tests of this folder on kernels for 64-bit ARM, in an emulator: both instruction sets do what torch does.

What computes long for a few more bits of the same kind is left out.
"""

import subprocess
from pathlib import Path

import pytest
from support import emulated

from caesura.scheduler.kernels import native

pytestmark = pytest.mark.long
HERE = Path(__file__).parent
SETS = native.isas_of("aarch64")
RUN = """
import pytest
arguments = ["-q", "-p", "no:cacheprovider", "--timeout=0", "-m", "not long", "-k", {chosen!r}, {file!r}]
assert pytest.main(arguments) == 0
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file,chosen", [
    ("attention", "not decoded_and_in_any_chunk"),
    ("attention", "decoded_and_in_any_chunk"),
    ("decoder", "not many_more_threads and not layers_one_by_one"),
    ("delta", ""),
    ("elementwise", ""),
    ("experts", ""),
    ("linear", "not every_company"),
    ("linear", "every_company"),
    ("modulation", ""),
    ("quantize", ""),
    ("sampler", "not large_vocabulary"),
])  # fmt: skip
def test_kernels_for_arm_compute_what_torch_does(file, chosen):
    emulated.require()
    program = RUN.format(chosen=chosen, file=str(HERE / f"test_kernel_{file}.py"))
    assert " passed" in emulated.run_emulated(program)


@pytest.mark.parametrize("isa", SETS[1:])
def test_ranks_on_arm_add_in_their_order_and_round_once(isa):
    emulated.require()
    command = emulated.command("emulated_ranks", emulated.library(), str(SETS.index(isa)))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("float32 1, bfloat16 1, float16 1\n", "")


@pytest.mark.parametrize("cpu,best", [("cortex-a72", "neon"), ("max", "neonbf16")])
def test_arm_without_bf16_instructions_is_served_without(cpu, best):
    emulated.require()
    library = emulated.EmulatedLibrary(emulated.library(), cpu)
    assert SETS[library.caesura_use_isa(len(SETS) - 1)] == best
    library.close()
