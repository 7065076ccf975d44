"""Kernels rebuilt with sanitizers, and a program run on them: accesses out of bounds and undefined behaviour end it."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from caesura.scheduler.kernels import native

_SOURCES = Path(native.__file__).parent / "cpu"
_FLAGS = ("-O1", "-g", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fPIC", "-w")
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


@cache
def _object_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="sanitized-")  # goes with the interpreter


@cache
def _compiled(operation: str, flags: tuple[str, ...]) -> Path:
    """The operation's object file, made once in this process."""
    folder = Path(_object_folder().name)
    target = folder / f"{operation}-{len(list(folder.iterdir()))}.o"
    source = _SOURCES / f"{operation}.cpp"
    subprocess.run(
        ["g++", *_FLAGS, *_SANITIZERS, *flags, "-c", source, "-o", target], check=True, timeout=170
    )
    return target


def run_sanitized(program: str, folder: Path, *operations: str, flags: tuple[str, ...] = ()) -> str:
    """What ``program`` prints when ``native.cpp`` and these operations' files serve it, linked in ``folder``; ``flags`` go to
    the compiler.
    """
    try:
        runtime = subprocess.run(
            ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()
    except FileNotFoundError:
        pytest.skip("no g++ to build with sanitizers")
    objects = [_compiled(operation, flags) for operation in ("native", *operations)]
    library = folder / "_cpu.so"
    subprocess.run(["g++", "-shared", *_SANITIZERS, *objects, "-o", library], check=True, timeout=60)
    lines = (
        "from caesura.scheduler.kernels import native",
        f"native._find = lambda: native.Path({str(library)!r})",
        "assert native.why_not() is None, native.why_not()",
        program,
    )
    # The runtime has to be there before everything else; leaks at exit are the interpreter's.
    environment = {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0",
        native.VARIABLE: "",
    }
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout
