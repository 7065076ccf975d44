"""Kernels compiled for 64-bit ARM, and tests run on them: an emulator computes in this process's memory.

What runs is the library that an installation on such a machine builds: its sources and flags are those of
``pyproject.toml``. Tensors, torch and the tests are this machine's.
"""

import ctypes
import os
import struct
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from caesura.scheduler.kernels import native

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_ROOT = Path(__file__).parents[2]
_BUILT = _ROOT / "build" / "emulated"
_SYSTEM = "/usr/aarch64-linux-gnu"
_KERNELS = Path(native.__file__).parent / "cpu"
_PROGRAMS = [Path(__file__).parent / f"{name}.cpp" for name in ("kernel_server", "emulated_ranks")]
_WITH_OPENMP = ("-O2", "-std=c++17", "-fopenmp", "-rdynamic", "-Wl,--no-as-needed")
_LIBRARY = "_cpu.so"
_REQUEST = struct.Struct("64s32q8f")


def require() -> None:
    """Skip the test where something is missing that it needs."""
    for program in (COMPILER, EMULATOR, "setarch"):
        if which(program) is None:
            pytest.skip(f"no {program}")


@cache
def built() -> Path:
    """Return the folder of the library and the programs; compile what has changed."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extension = project["tool"]["setuptools"]["ext-modules"][0]
    digest = sha256(subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout)
    for path in (*map(_ROOT.joinpath, extension["sources"] + extension["depends"]), *_PROGRAMS):
        digest.update(path.read_bytes())
    digest.update(repr((extension, _WITH_OPENMP)).encode())
    folder = _BUILT / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    flags = extension["extra-compile-args"]

    def compiled(*arguments: object, to: Path) -> Path:
        if not to.exists():
            written = to.with_suffix(f".{os.getpid()}")
            subprocess.run([COMPILER, *map(str, arguments), "-o", written], check=True)
            written.replace(to)
        return to

    def compiled_source(source: str) -> Path:
        return compiled(*flags, "-fPIC", "-c", _ROOT / source, to=folder / f"{Path(source).stem}.o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled_source, extension["sources"]))
    compiled("-shared", *objects, to=folder / _LIBRARY)
    for program in _PROGRAMS:  # with the OpenMP runtime, which torch brings elsewhere
        compiled(*_WITH_OPENMP, f"-I{_KERNELS}", program, "-ldl", to=folder / program.stem)
    return folder


def library() -> str:
    return str(built() / _LIBRARY)


def command(program: str, *arguments: str, cpu: str = "max") -> list[str]:
    """Return the command line of a program for ARM; the emulator's own memory lies where Python has none."""
    emulator = ["setarch", "--addr-compat-layout", EMULATOR, "-cpu", cpu, "-L", _SYSTEM]
    return [*emulator, str(built() / program), *arguments]


class EmulatedLibrary:
    """Functions of a library for ARM, for whoever takes a :class:`ctypes.CDLL`; not for several threads."""

    def __init__(self, path: str, cpu: str = "max") -> None:
        self._process = self._start(path, cpu)
        while self["caesura_isa"]() < 0 or not _apart(self._process.pid):  # once in a thousand times
            self.close()
            self._process = self._start(path, cpu)

    def _start(self, path: str, cpu: str) -> "subprocess.Popen[bytes]":
        memory = os.open("/proc/self/mem", os.O_RDWR)
        try:
            return subprocess.Popen(
                command("kernel_server", path, str(memory), cpu=cpu),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory],
            )  # fmt: skip
        finally:
            os.close(memory)

    def __getitem__(self, name: str) -> "EmulatedFunction":
        return EmulatedFunction(self, name)

    __getattr__ = __getitem__

    def call(self, request: bytes) -> int:
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None and answers is not None
        to.write(request)
        to.flush()
        answer = answers.read(8)
        assert len(answer) == 8, f"the emulated library ended with {self._process.wait()}"
        return int(struct.unpack("q", answer)[0])

    def close(self) -> None:
        self._process.communicate()


class EmulatedFunction:
    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = ctypes.c_int

    def __call__(self, *values: Any) -> Any:
        kinds = self.argtypes or (native.INT,) * len(values)
        numbers = [value for value, kind in zip(values, kinds, strict=True) if kind is native.FLOAT]
        words = [_word(value) for value, kind in zip(values, kinds, strict=True) if kind is not native.FLOAT]
        words += [0] * (32 - len(words))
        numbers += [0.0] * (8 - len(numbers))
        result = self._library.call(_REQUEST.pack(self._name.encode(), *words, *numbers))
        return None if self.restype is None else self.restype(result).value


def _apart(process: int) -> bool:
    """Return True if nothing of the emulator lies where this process has something, or may soon."""
    theirs, ours = _mapped(process), _mapped(os.getpid())
    return all(end <= first or last + 2**30 <= begin for begin, end in theirs for first, last in ours)


def _mapped(process: int) -> list[tuple[int, int]]:
    lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
    spans = (line.split()[0].split("-") for line in lines if not line.endswith(("[stack]", "[vsyscall]")))
    return [(int(begin, 16), int(end, 16)) for begin, end in spans]


def _word(value: Any) -> int:
    if value is None or isinstance(value, int):
        return int(value or 0)
    return ctypes.addressof(getattr(value, "_obj", value))  # what ctypes.byref() refers to, or an array


def run_emulated(program: str) -> str:
    """Return what ``program`` prints when the library for ARM serves it."""
    lines = (
        f"import sys; sys.path.insert(0, {str(_ROOT / 'tests')!r})",
        "from support import emulated",
        "emulated.install()",
        program,
    )
    # A third of the examples; threads that wait leave the cores to those that emulate.
    environment = {native.VARIABLE: "", "HYPOTHESIS_PROFILE": "short", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def install() -> None:
    """Let the library for ARM serve this process."""
    native.ISAS = native.isas_of("aarch64")
    native._find = lambda: Path(library())
    loaded, ctypes.CDLL = ctypes.CDLL, EmulatedLibrary  # type: ignore[misc,assignment]
    try:
        native._library.cache_clear()
        assert native.isa() == native.ISAS[-1], native.why_not()
    finally:
        ctypes.CDLL = loaded  # type: ignore[misc]
