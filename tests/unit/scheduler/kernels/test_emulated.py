"""Tests of this folder on kernels for 64-bit ARM, in an emulator: both instruction sets compute what torch does."""

import subprocess
from pathlib import Path

import pytest
from support import emulated

from caesura.scheduler.kernels import native

pytestmark = pytest.mark.long
HERE = Path(__file__).parent
RUN = """
import pytest
arguments = ["-q", "-p", "no:cacheprovider", "-m", "not long", "-k", {chosen!r}, {file!r}]
assert pytest.main(arguments) == 0
"""


@pytest.mark.parametrize("file,left_out", [
    ("attention", ""),
    ("decoder", ""),
    ("delta", ""),
    ("elementwise", ""),
    ("linear", ""),
    ("experts", ""),
    ("sampler", "large_vocabulary"),
])  # fmt: skip
def test_kernels_for_arm_compute_what_torch_does(file, left_out):
    emulated.require()
    chosen = left_out and f"not ({left_out})"
    assert " passed" in emulated.run_emulated(RUN.format(chosen=chosen, file=str(HERE / f"test_kernel_{file}.py")))


@pytest.mark.parametrize("isa", native.isas_of("aarch64")[1:])
def test_ranks_on_arm_add_in_their_order_and_round_once(isa):
    emulated.require()
    number = native.isas_of("aarch64").index(isa)
    command = emulated.command("emulated_ranks", emulated.library(), str(number))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("float32 1, bfloat16 1, float16 1\n", "")


@pytest.mark.parametrize("cpu,best", [("cortex-a72", "neon"), ("max", "neonbf16")])
def test_arm_without_bf16_instructions_is_served_without(cpu, best):
    emulated.require()
    library = emulated.EmulatedLibrary(emulated.library(), cpu)
    sets = native.isas_of("aarch64")
    assert sets[library.caesura_use_isa(len(sets) - 1)] == best
    library.close()
