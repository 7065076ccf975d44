"""Wheels for a GPU machine that reaches no registry: fetched here, carried there, installed by
install_wheels.sh.

    python benchmarks/gpu/fetch_wheels.py --python 3.12                  # of the machine with the card
    python benchmarks/gpu/fetch_wheels.py --python 3.12 --with transformers flashinfer

Each package by itself, without its requirements: the lists name all of them, and torch is not among them.
Whatever was in the folder before goes: two versions of one package would not install.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXTRA = ("transformers", "flashinfer")
NEWEST_GLIBC = 39
"""Tags for glibc up to 2.39: pip takes each number literally."""


def platforms(machine: str) -> list[str]:
    """Return the tags of the wheels that a machine with glibc takes, the newest first."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, 16, -1)]
    return [*tags, f"manylinux2014_{machine}", f"manylinux1_{machine}"]


def command(files: Sequence[Path], folder: Path, python: str, machine: str) -> list[str]:
    """Return pip's command for one folder of wheels."""
    wanted = [word for file in files for word in ("--requirement", str(file))]
    tags = [word for tag in platforms(machine) for word in ("--platform", tag)]
    target = ["--python-version", python, "--implementation", "cp", *tags]
    return [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *target,
        "--dest", str(folder), *wanted,
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fetch_wheels.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="version of the card's machine (default: 3.12)")
    parser.add_argument("--machine", default="x86_64", help="its processor (default: x86_64)")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/gpu-wheels"), help="(default: build/gpu-wheels)"
    )
    parser.add_argument(
        "--with", dest="extra", nargs="+", choices=EXTRA, default=[], help="what the machine lacks as well"
    )
    options = parser.parse_args(argv)
    files = [HERE / "requirements.txt"] + [HERE / f"requirements-{name}.txt" for name in options.extra]
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    subprocess.run(command(files, options.folder, options.python, options.machine), check=True)
    wheels = sorted(options.folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:8.1f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 2**20:8.1f} MB in {options.folder}")


if __name__ == "__main__":
    main()
