"""Deadlines pass over the time in which compilers run below a process."""

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S, eventually

from caesura.process import compilers
from caesura.process.compilers import compiler_below, result_of


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A shell with a child called ``nvcc``, below which something else runs, until its stdin is closed."""
    cat = shutil.which("cat")
    assert cat is not None
    (tmp_path / "nvcc").symlink_to(cat)
    script = "exec 3<&0; sh -c 'nvcc <&3; :' & wait; read never"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, env=environment)
    try:
        eventually(lambda: compiler_below(process.pid) == "nvcc")
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_compiler_is_found_below_others(parent):
    assert compiler_below(parent.pid) == "nvcc"
    assert compiler_below(os.getpid()) == "nvcc"
    parent.stdin.close()
    eventually(lambda: compiler_below(os.getpid()) is None)
    parent.wait(PATIENCE_S)
    assert compiler_below(parent.pid) is None


def test_the_time_of_compilers_does_not_count(parent, monkeypatch):
    looks: list[int] = []

    def counted(pid: int) -> str | None:
        looks.append(pid)
        return compiler_below(pid)

    monkeypatch.setattr(compilers, "compiler_below", counted)
    never: Future[None] = Future()
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(TimeoutError):
            result_of(never, 0.05, parent.pid)
        failed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: failed.is_set() or len(looks) >= 5)
    assert not failed.is_set()
    parent.stdin.close()
    assert failed.wait(PATIENCE_S)
    thread.join()


def test_a_result_that_comes_while_compiling_is_returned(parent):
    ready: Future[int] = Future()
    threading.Timer(0, ready.set_result, [3]).start()
    assert result_of(ready, PATIENCE_S, parent.pid) == 3
