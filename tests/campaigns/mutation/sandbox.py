"""Tests in a copy of the tree, each run in a process forked from this one.

Invariants:
- Nothing is written to the tree that was copied.
- This process never imports ``caesura``: every run imports what the copy holds at that moment. What is slow
  to import and never changes (torch, pytest, Hypothesis) is imported here, once.
- Every version of a mutated file has an mtime of its own, so that no run takes the bytecode of another.
- A run ends at its time limit, with every process of its group.
"""

import gc
import importlib
import json
import os
import re
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import hypothesis
import pytest

from .reach import Reach, Reached

PACKAGE = "caesura"
LEFT_OUT = (".git", ".venv", ".check", "__pycache__", ".*_cache", ".hypothesis", "build", "demo_out")
PRELOADED = (
    "torch", "numpy", "zmq", "msgspec", "safetensors.torch", "tokenizers",
    "hypothesis.stateful", "pytest_timeout", "scipy.stats",
    *(f"transformers.models.{name}.modeling_{name}"
      for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")),
)  # fmt: skip
"""Modules that tests and pytest import, and that take long."""
NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED


@dataclass(frozen=True, slots=True)
class Run:
    verdict: str
    """``passed``, ``failed`` or ``timeout``."""
    seconds: float
    output: str

    @property
    def failures(self) -> list[str]:
        """The lines of pytest's summary that name what failed."""
        return re.findall(
            r"^(?:FAILED|ERROR) \S.*", self.output, re.MULTILINE
        )  # ERROR and more spaces: a log record


class Sandbox:
    """A copy of ``tree`` in ``folder``."""

    def __init__(self, tree: Path, folder: Path, preloaded: Sequence[str] = PRELOADED) -> None:
        self.root = folder.resolve() / PACKAGE
        self._output = folder / "output"
        self._found = folder / "reach.json"
        self._versions = 0
        shutil.copytree(tree, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        assert PACKAGE not in sys.modules, f"{PACKAGE} is imported already: its mutants would not be"
        self._path = [entry for entry in sys.path if not Path(entry or ".").resolve().is_relative_to(tree)]
        _preload(preloaded, self._path)
        gc.freeze()  # what is here now is no garbage that a run would have to look through
        # A failure is all that counts here: no shrinking, and nothing kept from one mutant for the next.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutation", phases=phases, database=None, deadline=None)

    def write(self, module: str, source: str) -> None:
        path = self.root / module
        path.write_text(source, encoding="utf-8")
        self._versions += 1
        os.utime(path, (self._versions, self._versions))

    def test(self, tests: Sequence[str], limit_s: float) -> Run:
        """Run ``tests`` (node ids or paths), in this order, up to the first failure."""
        return self._fork(lambda: _pytest(["-x", *tests]), limit_s)

    def reach(self, paths: Sequence[str], modules: Sequence[str], limit_s: float) -> Reached:
        """Run all of ``paths``, and see which test executes which line of ``modules``.

        Raises:
            RuntimeError: they did not run to their end.
        """
        plugin = Reach({str(self.root / module): module for module in modules})

        def traced() -> int:
            plugin.start()
            code = _pytest([*paths], plugin)
            sys.settrace(None)
            self._found.write_text(json.dumps(plugin.found()), encoding="utf-8")
            return code

        run = self._fork(traced, limit_s)
        if not self._found.exists():
            raise RuntimeError(f"the tests did not run to their end ({run.verdict}):\n{run.output[-4000:]}")
        return Reached(json.loads(self._found.read_text(encoding="utf-8")))

    def _fork(self, work: Callable[[], int], limit_s: float) -> Run:
        started = perf_counter()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._be_child(work)
        watched = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([watched], [], [], limit_s)
        finally:
            os.close(watched)
            _kill_group(pid)  # at the limit, or what the tests have left behind
            _, status = os.waitpid(pid, 0)
        output = self._output.read_text(encoding="utf-8", errors="replace")
        code = os.waitstatus_to_exitcode(status)
        if ended and code == NO_TESTS:
            raise RuntimeError(f"no tests were collected:\n{output[-4000:]}")
        verdict = "timeout" if not ended else "failed" if code else "passed"
        return Run(verdict, perf_counter() - started, output)

    def _be_child(self, work: Callable[[], int]) -> NoReturn:
        code: Any = 70
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(self.root)
            with open(self._output, "wb") as output, open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            parent = str(self.root.parent)
            sys.path[:] = [parent, *self._path]
            os.environ["PYTHONPATH"] = parent
            hypothesis.settings.load_profile("mutation")
            code = work()
        except BaseException:  # noqa: BLE001  whatever it is, this process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(code))


def _preload(names: Sequence[str], path: list[str]) -> None:
    before = sys.path[:]
    sys.path[:] = path
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        sys.path[:] = before


def _pytest(arguments: list[str], *plugins: object) -> int:
    fixed = ["-q", "-p", "no:cacheprovider", "--tb=line", "--hypothesis-seed=0", "--no-header"]
    fixed += ["-p", "no:faker", "-p", "no:anyio"]  # plugins of others' packages, unused here, slow to import
    preloaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # its own asserts need no rewriting
    return int(pytest.main([*fixed, *preloaded, *arguments], plugins=list(plugins)))


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to its setsid, or all of them have ended
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
