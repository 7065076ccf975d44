"""Engines that tests start are forked from a process that has imported torch, instead of importing it for
seconds each.

Invariants:
- Who starts a process sees no difference, but for its command line in ``/proc``, its age and the memory that
  it shares: it is a ``subprocess.Popen``, the process is a child of this one, and its program runs from the
  beginning.
- Only engines, their workers and programs of ``python -c`` are forked, and only if nothing of what the
  template has read at its own start differs: the environment but for :data:`READ_LATER`, processors, signals.
  Anything else is executed as always.
- The template is started when it is first needed, by one process for itself, and ends with that, or gives way
  to another where a library or a test has changed this process's own environment for good.
"""

import inspect
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from caesura.client.launch import launcher as engines
from caesura.scheduler.executor import workers
from caesura.scheduler.runtime.libraries import settings

VARIABLE = "CAESURA_TEST_FORK"
"""Variable that enables forks; unset or empty, every process is executed."""
READ_LATER = frozenset({
    VARIABLE, "CAESURA_ADMIN_KEY", "CAESURA_API_KEY", "CAESURA_KERNELS", "CAESURA_NODES_SECRET",
    "NOTIFY_SOCKET",
    "PYTEST_CURRENT_TEST", "TMPDIR", "TRL_EXPERIMENTAL_SILENCE", "WATCHDOG_USEC",
})  # fmt: skip
"""Variables that nothing reads while it is imported."""
MODULE, CODE = "-m", "-c"
LARGEST = 160_000
"""Bytes of a request: a packet of a Unix socket."""
MOST_DESCRIPTORS = 64
READY = b"ready"
CLI = "from caesura.client.cli import main; main()"
_ENGINE, _WORKER = "caesura.scheduler", "caesura.scheduler.executor"
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
PATIENCE = 3
"""Starts in a row before which this process may differ from the one that started the template: a test's
change is soon undone.
"""
_ALWAYS = (
    "click",
    "caesura.scheduler.runtime.process",
    "caesura.scheduler.models.qwen3",
    "caesura.scheduler.executor.worker_process",
)
_COMMAND_LINE = (
    "caesura.client.cli",
    "caesura.client.serve.app",
    "caesura.client.serve.server",
    "caesura.client.text.tokenizer_manager",
    "uvloop",
    "litestar.plugins.attrs",
    "litestar.plugins.pydantic",
)
_TRANSFORMERS = ("caesura.scheduler.models.transformers_backend.model",)
_IMAGES = ("caesura.scheduler.images.runner", "caesura.scheduler.images.sd3", "diffusers.AutoencoderKL")
_START = (
    "import sys; sys.path.append(sys.argv[1]); from support import template_process; sys.path.pop(); "
    "template_process.serve(int(sys.argv[2]), *sys.argv[3:])"
)


class Template:
    """The process to fork from, and the socket to ask it by."""

    def __init__(
        self, channel: socket.socket, pid: int, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.pid = pid
        self.is_gone = False
        """True once the process has ended unasked."""
        self._channel = channel
        self._process = process
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._inherited = _inherited()
        self._environment = _read_at_start(os.environ)
        self._differences = 0

    @classmethod
    def start(cls) -> "Template | None":
        """Start a template for this process, or return None where there can be none."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root, number = str(Path(__file__).parents[1]), its.fileno()
        command = [sys.executable, "-P", CODE, _START, root, str(number), *_ALWAYS]
        with its:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[number], process_group=0)
        template = cls(mine, process.pid, process)
        if mine.recv(len(READY)) == READY:
            return template
        process.kill()
        template.close()
        return None

    def fork(self, arguments: dict[str, Any]) -> int | None:
        """Return the process id of a fork that continues as ``Popen`` would with these arguments, or None."""
        request = _request(arguments)
        if os.getpid() != self._owner or _inherited() != self._inherited:
            return None
        if _read_at_start(request["environment"]) != self._environment:
            return None
        message = json.dumps(request).encode(errors="surrogateescape")
        if len(message) > LARGEST:
            return None
        standard = [arguments[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        standard = [number if given == -1 else given for number, given in enumerate(standard)]
        answer, its = socket.socketpair()
        with answer:
            with its, self._lock:
                descriptors = [its.fileno(), *standard, *sorted(arguments["pass_fds"])]
                try:
                    socket.send_fds(self._channel, [message], descriptors)
                except OSError:
                    self.is_gone = True
                    return None
            said = answer.recv(64)
        return int(said) if said else None

    def is_outdated(self) -> bool:
        """Return True if this process has changed for good since the template started. Call once a start."""
        if self._process is None or os.getpid() != self._owner:
            return False
        here = _inherited(), _read_at_start(os.environ)
        self._differences = 0 if here == (self._inherited, self._environment) else self._differences + 1
        return self._differences > PATIENCE

    def close(self) -> None:
        if os.getpid() == self._owner:
            self._channel.close()
            if self._process is not None:
                self._process.wait()


class Process(subprocess.Popen[Any]):
    """A process that is forked from the template where it can be."""

    def _execute_child(self, *arguments: Any) -> None:  # type: ignore[override]
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        template = _template() if _is_ours(given) else None
        pid = None if template is None else template.fork(given)
        if pid is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        self.pid = pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))


def run(code: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, CODE, code, *arguments]
    pipe = subprocess.PIPE
    with Process(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        try:
            output, error = process.communicate()
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, error)


_current: Template | None = None
_none_here = False
_beginning = threading.Lock()
_executing = False


def install(template: Template | None = None) -> None:
    global _current
    _current = template
    engines.Popen = workers.Popen = Process


def is_wanted() -> bool:
    return bool(os.environ.get(VARIABLE))


def close() -> None:
    if _current is not None:
        _current.close()


@contextmanager
def executing(*, executing: bool = True) -> Iterator[None]:
    """Execute every process that is started in the block: for tests of what a fork does not show."""
    global _executing
    before, _executing = _executing, executing
    try:
        yield
    finally:
        _executing = before


def _template() -> Template | None:
    global _current, _none_here
    with _beginning:
        if _current is not None and (_current.is_gone or _current.is_outdated()):
            _current.close()
            _current = None
        if _current is None and not _none_here:
            _current = Template.start()
            _none_here = _current is None
        return _current


def _is_ours(arguments: dict[str, Any]) -> bool:
    command = arguments["args"]
    usual = {
        "executable": command[0],
        "preexec_fn": None,
        "close_fds": True,
        "shell": False,
        "restore_signals": True,
        "gid": None,
        "gids": None,
        "uid": None,
        "umask": -1,
        "start_new_session": False,
    }
    if _executing or not is_wanted() or command[0] != sys.executable:
        return False
    if any(arguments[name] not in (None, value) for name, value in usual.items()):
        return False
    return command[1:4] in (["-P", MODULE, _ENGINE], ["-P", MODULE, _WORKER]) or command[1] == CODE


def _request(arguments: dict[str, Any]) -> dict[str, Any]:
    command = [os.fspath(argument) for argument in arguments["args"]]
    program = command[2 if command[1] == "-P" else 1 :]
    environment = os.environ if arguments["env"] is None else arguments["env"]
    starts_others = {"serve", "supervise"} if program[0] == CODE else {"--tp"}
    return {
        "command": command,
        "program": program,
        "starts_others": not starts_others.isdisjoint(program),
        "imports": _imported_by(program),
        "environment": dict(environment),
        "folder": os.path.abspath(arguments["cwd"] or "."),
        "limits": [[limit, *resource.getrlimit(limit)] for limit in LIMITS],
        "group": os.getpgrp() if arguments["process_group"] == -1 else arguments["process_group"],
        "descriptors": [0, 1, 2, *sorted(arguments["pass_fds"])],
    }


def _imported_by(program: Sequence[str]) -> list[str]:
    names = [*_COMMAND_LINE] if program[0] == CODE else []
    options = dict(pairwise(program))
    if options.get("--model-backend") == "transformers":
        names += _TRANSFORMERS
    if (Path(options.get("--model", "")) / "model_index.json").exists():
        names += _IMAGES
    return names


def _inherited() -> tuple[object, ...]:
    status = Path("/proc/thread-self/status").read_text()
    kept = tuple(line for line in status.splitlines() if line.startswith(("Umask:", "SigBlk:", "SigIgn:")))
    return kept, os.sched_getaffinity(0), os.nice(0)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    read = {**settings(), **environment}  # a template loads libraries with these, as an engine does
    return {name: value for name, value in read.items() if name not in READ_LATER}
