"""Installs a wheel where there is no compiler, and generates with it.

Invariants:
- The environment is new, outside the source tree, and its ``PATH`` holds its own commands alone: what serves
  came in the wheel.
- Nothing is skipped: a wheel without kernels, or with kernels that do not serve here, ends with an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILERS = ("cc", "gcc", "g++", "c++", "clang")
GENERATE = """
import sys
from caesura.client import SamplingParams, launch_scheduler
from caesura.transfer import words
assert words.library() is not None, "words.cpp was not compiled"
with launch_scheduler(sys.argv[1]) as client:
    output = client.generate([1, 2, 3], SamplingParams(max_new_tokens=8, ignore_eos=True))
    status = client.status()
assert len(output.output_ids) == 8, output
assert "torch" not in status.kernels.values(), (status.kernels, status.kernels_reason)
print("generated", output.output_ids, "with", status.kernels)
"""


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} WHEEL", file=sys.stderr)
        return 2
    wheel = Path(sys.argv[1]).resolve()
    assert "manylinux" in wheel.name, f"{wheel.name} is for this machine only"
    with tempfile.TemporaryDirectory(prefix="caesura-wheel-") as folder:
        try_wheel(wheel, Path(folder))
    print(f"{wheel.name}: ok")
    return 0


def try_wheel(wheel: Path, folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    commands, python = folder / "venv/bin", folder / "venv/bin/python"
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CC", "CXX", "PYTHONPATH", "CAESURA_KERNELS")
    } | {"PATH": str(commands)}
    found = [name for name in COMPILERS if shutil.which(name, path=environment["PATH"])]
    assert not found, f"compilers in {commands}: {found}"

    def run(*command: object) -> None:
        subprocess.run([str(word) for word in command], check=True, cwd=folder, env=environment)

    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    run(python, "-m", "caesura.scheduler.kernels")
    run(python, ROOT / "benchmarks/checkpoints.py", "tiny", folder / "tiny")
    run(python, "-c", GENERATE, folder / "tiny")
    run(commands / "caesura", "--version")
    run(commands / "caesura", "serve", "--help")


if __name__ == "__main__":
    sys.exit(main())
