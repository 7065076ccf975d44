"""Triton's compiler for sm_90 without a device."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as :func:`compiling` found it."""

    name: str
    ptx: str
    cubin: bytes
    shared: int
    """Bytes of shared memory."""

    @property
    def usage(self) -> dict[str, int]:
        """Registers of a thread (``REG``), and bytes that did not fit into them (``STACK``, ``LOCAL``)."""
        import triton

        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [tool, "-res-usage", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)
        return {name: int(value) for name, value in found}


@contextmanager
def compiling(cache: Path) -> Iterator[list[Compiled]]:
    """Yield a list of what each launch of a Triton kernel compiles to; ``cache`` is an empty folder."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: list[Compiled] = []
    asked = SimpleNamespace(  # the part of a driver that compiling asks for
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
        found.append(Compiled(kernel.__name__, ptx, cubin, compiled.metadata.shared))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(driver, "_active", asked)
        yield found
