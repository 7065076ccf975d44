"""Kernels rebuilt with sanitizers, and a program run on them."""

import os
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from caesura.scheduler.kernels import native

_SOURCES = Path(native.__file__).parent / "cpu"
_TESTS = Path(__file__).parents[1]
_OBJECTS = _TESTS.parent / "build" / "sanitized"
_FLAGS = ("-O0", "-g1", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fPIC", "-w")
_SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


@cache
def _digest() -> str:
    digest = sha256(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _compiled(operation: str, flags: tuple[str, ...]) -> Path:
    made_of = [_digest(), operation, *_FLAGS, *_SANITIZERS, *flags]
    made_of += [Path(flag).read_text(encoding="utf-8") for flag in flags if Path(flag).is_file()]
    target = _OBJECTS / f"{operation}-{sha256(repr(made_of).encode()).hexdigest()[:16]}.o"
    if not target.exists():
        _OBJECTS.mkdir(parents=True, exist_ok=True)
        written = target.with_suffix(f".{os.getpid()}")
        source = _SOURCES / f"{operation}.cpp"
        subprocess.run(["g++", *_FLAGS, *_SANITIZERS, *flags, "-c", source, "-o", written], check=True)
        written.replace(target)  # at once: another process may be about to link it
    return target


def run_sanitized(program: str, folder: Path, *operations: str, flags: tuple[str, ...] = ()) -> str:
    """Return what ``program`` prints when ``native.cpp`` and these operations' files serve it."""
    try:
        runtime = subprocess.run(
            ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except FileNotFoundError:
        pytest.skip("no g++ to build with sanitizers")
    objects = [_compiled(operation, flags) for operation in ("native", *operations)]
    library = folder / "_cpu.so"
    subprocess.run(["g++", "-shared", *_SANITIZERS, *objects, "-o", library], check=True)
    lines = (
        f"import sys; sys.path.insert(0, {str(_TESTS)!r})",
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
        [sys.executable, "-c", "\n".join(lines)], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout
