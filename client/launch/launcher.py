"""Start a scheduler process, wait until it serves, and always clean up.

Invariants:
- The child never outlives its parent: it polls a pipe whose write end only the parent holds, not its forks.
- A start yields a client of a ready engine, or raises the engine's own typed error and leaves nothing behind.
- ``close`` ends the process in bounded time: shutdown message, as long as the engine says that it drains,
  then SIGTERM, then SIGKILL. An engine that ends unasked is logged.

Ready handshake: the child writes one JSON line to the ``--ready-fd`` pipe, ``{"ready": true, "endpoint": …}``
or ``{"ready": false, "code": …, "message": …, "detail": {…}}``; the end of the pipe means that it died.
"""

import contextlib
import functools
import inspect
import json
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass
from itertools import zip_longest
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack

from ... import __version__
from ...io_struct import CaesuraError
from ...io_struct.field_errors import unknown_name
from ...process import private_directory
from ...process.compilers import result_of
from ...process.contract import EXIT_HUNG
from ...process.engine_options import EngineOptions
from ..connection.blocking import ControlClient, SchedulerClient
from ..connection.client_options import ConnectionOptions, seconds
from ..connection.endpoints import ClientKeys, KeyOrFile
from ..connection.fork import Process, close_sign_of_life, keep_from_children, not_forking
from ..exceptions import EngineDied, InvalidRequest, TimedOut, error_for

logger = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")
ResultT = TypeVar("ResultT")

STDERR_TAIL_BYTES = 4096
USAGE_STATUS = 2
"""Exit status of a scheduler whose command line is wrong: it would be wrong again."""
SHUTDOWN_S = 5.0
"""Seconds that each stage of closing (message, SIGTERM) may take before the next."""


class LaunchedScheduler:
    """A scheduler process and a client, which it yields as a context manager; close removes ``directory``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        directory: Path | None = None,
        startup_timeout: float | None = 300.0,
        log_path: str | os.PathLike[str] | None = None,
        **keys: Unpack[ConnectionOptions],
    ) -> None:
        check_keys(keys)
        self._child = Child(command, directory, log_path)
        try:
            self.endpoint = self._child.wait_ready(startup_timeout)
            self.client = SchedulerClient(self.endpoint, **keys)
        except BaseException:
            self._child.end()
            raise
        # Bound to the client, which users may keep without this object; it runs at interpreter exit too.
        self._finalizer = weakref.finalize(self.client, self._child.end)
        self._child.report_exit_to(self.client)
        self._child.log_end()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.process.pid

    @property
    def returncode(self) -> int | None:
        """The child's exit status; None while it runs."""
        return self._child.process.poll()

    def close(self, *, drain: bool | None = None, drain_s: float | None = None) -> None:
        """Shut down as ``AsyncControlClient.shutdown``, close the client. Idempotent; no effect in forks."""
        if not self._child.launcher.is_here:
            return
        if self._finalizer.alive and self.returncode is None:
            self._child.expected = True
            patience = SHUTDOWN_S
            with contextlib.suppress(CaesuraError):  # gone, stuck or already stopping: the signals follow
                patience += self.client.shutdown(drain=drain, drain_s=drain_s, timeout=SHUTDOWN_S).drain_s
            self._child.wait(patience)
        self._finalizer()
        self.client.close()

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the child's end; return True if it has ended."""
        return self._child.wait(timeout)

    def hurry(self) -> None:
        """End a drain that :meth:`close` waits for in another thread; RuntimeError in a forked child."""
        self._child.launcher.require()
        self._child.process.terminate()

    def __enter__(self) -> SchedulerClient:
        return self.client

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Child:
    """A scheduler's process, its pipes and the threads that watch it; ``environment`` extends ours."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path | None = None,
        log_path: str | os.PathLike[str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.launcher = Process("engine")
        self._directory = directory
        self._log_path = log_path
        self.expected = False
        """True once this process has asked the child to end, so that the end is not logged."""
        self._tail = b""
        self._ready: Future[bytes] = Future()
        self._exited: Future[int] = Future()
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as given:
            failed.callback(self._remove_directory)
            log = None
            if log_path is not None:
                log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                given.callback(os.close, log)  # the process has its own, of these, too
                command = _with_first_line(command, log_path)
            ready_read, ready_write = os.pipe()
            failed.callback(os.close, ready_read)
            given.callback(os.close, ready_write)
            with not_forking():
                lifeline_read, self._lifeline_write = os.pipe()
                keep_from_children(self._lifeline_write)
            failed.callback(close_sign_of_life, self._lifeline_write)
            given.callback(os.close, lifeline_read)
            self.process = Popen(  # noqa: S603 (our own interpreter and module)
                [*command, "--ready-fd", str(ready_write), "--lifeline-fd", str(lifeline_read)],
                stdin=DEVNULL,
                stderr=PIPE if log is None else log,
                stdout=log,
                pass_fds=(ready_write, lifeline_read),
                # Its own group: Ctrl-C at a terminal reaches the parent only, which then stops the engine in
                # order.
                process_group=0,
                env=None if environment is None else {**os.environ, **environment},
            )
            failed.pop_all()
        ready = threading.Thread(target=self._read, args=(ready_read,), name="caesura-ready", daemon=True)
        self._threads = [ready, threading.Thread(target=self._watch, name="caesura-exit", daemon=True)]
        if log is None:
            self._threads.append(threading.Thread(target=self._tee, name="caesura-stderr", daemon=True))
        for thread in self._threads:
            thread.start()

    def wait_ready(self, timeout: float | None) -> str:
        """Return the endpoint once the engine serves, or raise its reason; EngineDied without one.

        Time in which the engine's kernels are compiled does not count.
        """
        patience = seconds("startup_timeout", timeout)
        try:
            line = result_of(self._ready, math.inf if patience is None else patience, self.process.pid)
        except TimeoutError:
            raise TimedOut(f"the scheduler was not ready within {timeout} s", timeout=timeout) from None
        if not line.endswith(b"\n"):
            self.wait(SHUTDOWN_S)
            if self.process.returncode == USAGE_STATUS:
                reason = f"the scheduler refused its options: {self.last_line().removeprefix('Error: ')}"
            else:
                reason = self._exit_reason("before it was ready")
            raise EngineDied(reason, returncode=self.process.returncode, stderr=self._stderr_tail())
        message: dict[str, Any] = json.loads(line)
        if message["ready"]:
            return str(message["endpoint"])
        raise error_for(message["code"], message["message"], message.get("detail"))

    def report_exit_to(self, client: ControlClient) -> None:
        """Have ``client``, while it lives, explain a lost connection by the end of the process."""
        client.expect_exit()
        listener = weakref.WeakMethod(client.engine_exited)

        def report(_: object) -> None:
            if (told := listener()) is not None:
                told(self._exit_reason("while it was in use"))

        self._exited.add_done_callback(report)

    def log_end(self) -> None:
        """Log the end of the process, with a warning where it failed; nothing if it was asked for here."""

        def log(ended: Future[int]) -> None:
            if not self.expected:
                level = logging.WARNING if ended.result() else logging.INFO
                logger.log(level, "the scheduler process (pid %d) %s", self.process.pid, self.ending())

        self._exited.add_done_callback(log)

    def wait(self, timeout: float) -> bool:
        return not wait([self._exited], min(timeout, threading.TIMEOUT_MAX)).not_done

    def end(self) -> None:
        """Terminate, kill if need be, close the pipes and remove the directory."""
        if not self.launcher.is_here:
            return  # a forked copy of the parent is exiting: the engine is not its own
        close_sign_of_life(self._lifeline_write)  # what a dead parent would do; the child ends on it
        if not self.wait(0.0):
            self.expected = True
            self.process.terminate()
            if not self.wait(SHUTDOWN_S):
                self.process.kill()
                logger.warning(
                    "the scheduler process (pid %d) had not ended %g s after SIGTERM, and is killed",
                    self.process.pid, SHUTDOWN_S,
                )  # fmt: skip
        for thread in self._threads:
            if thread is not threading.current_thread():  # any thread may be the one that collects the client
                thread.join(SHUTDOWN_S)
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            private_directory.remove(self._directory)

    def _read(self, ready: int) -> None:
        with open(ready, "rb") as pipe:
            self._ready.set_result(pipe.readline())  # without a newline if the process has ended

    def _watch(self) -> None:
        self._exited.set_result(self.process.wait())

    def last_line(self) -> str:
        """Return the last line that an ended process has written to stderr, or an empty string."""
        tail = self._stderr_tail().strip()
        return tail.splitlines()[-1] if tail else ""

    def ending(self, longest: int | None = None) -> str:
        """Return how an ended process ended, with the first ``longest`` characters of its last line."""
        last = self.last_line()[:longest]
        return how_it_ended(self.process.returncode) + (last and f", last line: {last}")

    def _exit_reason(self, when: str) -> str:
        last = self.last_line()
        how = how_it_ended(self.process.returncode)
        return f"the scheduler process {how} {when}" + (last and f": {last}")

    def _stderr_tail(self) -> str:
        if self._log_path is not None:
            return _tail_of(self._log_path)
        self._threads[-1].join(SHUTDOWN_S)  # it ends with the pipe
        return self._tail.decode(errors="replace")

    def _tee(self) -> None:
        pipe = self.process.stderr
        assert pipe is not None
        with pipe:
            while chunk := os.read(pipe.fileno(), 65536):
                self._tail = (self._tail + chunk)[-STDERR_TAIL_BYTES:]
                with contextlib.suppress(OSError, ValueError):  # ours may be closed: the child goes on
                    sys.stderr.write(chunk.decode(errors="replace"))
                    sys.stderr.flush()


def _with_first_line(command: Sequence[str], path: str | os.PathLike[str]) -> list[str]:
    """Return a command that writes the first line of a run, with its process id, and becomes ``command``."""
    endpoint = option_value(command, "--endpoint") or "?"
    before = f"===== {time.strftime('%Y-%m-%d %H:%M:%S')} caesura {__version__} scheduler"
    if _tail_of(path)[-1:] not in ("", "\n"):  # half a line of a killed run
        before = "\n" + before
    shell = 'printf "%s, pid %s on %s =====\\n" "$0" $$ "$1"; shift; exec "$@"'
    return ["/bin/sh", "-c", shell, before, endpoint, *command]


def check_keys(options: ConnectionOptions) -> None:
    """Refuse keys that cannot be used, before anything is made or started."""
    ClientKeys.read(options.get("curve_server_key"), options.get("curve_client_key_file"))


def how_it_ended(returncode: int | None) -> str:
    """Return the end of a process in words, with its status or signal: ``ended with status 3``."""
    if returncode is None:
        return "has not ended"
    if returncode >= 0:
        hung = " (its loop or its shutdown hung)" if returncode == EXIT_HUNG else ""
        return f"ended with status {returncode}{hung}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "a real-time signal"
    perhaps = ": by somebody, or by the kernel for lack of memory" if name == "SIGKILL" else ""
    return f"was killed by signal {-returncode} ({name}{perhaps})"


@dataclass(frozen=True)
class LaunchOptions(EngineOptions):
    """Arguments of :func:`launch_scheduler`."""

    model: str | os.PathLike[str]
    _: KW_ONLY
    curve_server_key: KeyOrFile | None = None
    curve_client_key_file: KeyOrFile | None = None
    startup_timeout: float | None = 300.0
    log_path: str | os.PathLike[str] | None = None


def _called_as(
    options: Callable[Arguments, object],
) -> Callable[[Callable[[dict[str, Any]], ResultT]], Callable[Arguments, ResultT]]:
    """Give a function the parameters of ``options`` that are given; refuse others with the nearest."""
    signature = inspect.signature(options)
    names = list(signature.parameters)

    def decorate(function: Callable[[dict[str, Any]], ResultT]) -> Callable[Arguments, ResultT]:
        @functools.wraps(function)
        def call(*values: Arguments.args, **options: Arguments.kwargs) -> ResultT:
            if (unknown := next((name for name in options if name not in names), None)) is not None:
                raise TypeError(f"{function.__name__}: {unknown} {unknown_name(unknown, names)}")
            given = signature.bind(*values, **options).arguments
            return function(given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


@_called_as(LaunchOptions)
def launch_scheduler(given: dict[str, Any]) -> LaunchedScheduler:
    """Start an engine on ``model`` (a Hugging Face folder) and return when it is ready.

    Call it as ``with launch_scheduler(model, dtype="float32") as client:``, or keep the result and call
    ``.client`` and ``.close()``. Keywords are the engine's own options (``caesura scheduler --help``; None
    leaves each at its default) and those of :class:`LaunchOptions`. The engine's stderr goes to this
    process's, or with its stdout to the end of the file ``log_path``. ``startup_timeout``: seconds.
    ``curve_server_key`` and ``curve_client_key_file`` are the returned client's, for an engine with keys.

    Raises:
        EngineError: the engine's reason for not starting; EngineDied or TimedOut if it gave none.
    """
    launched = {name: given.pop(name) for name in LaunchOptions.__annotations__ if name in given}
    seconds("startup_timeout", launched.get("startup_timeout", 0.0))  # refused before anything is made
    model, directory = os.fspath(launched.pop("model")), None
    if node_rank := given.get("node_rank"):
        reason = "has no client: a launched engine is node 0, and caesura scheduler runs the others"
        raise InvalidRequest(f"node_rank = {node_rank} {reason}", field="node_rank")
    endpoint = given.pop("endpoint", None)
    if endpoint is None:
        directory = private_directory.make()
        endpoint = f"ipc://{directory}/{private_directory.SOCKET}"
    command = engine_command(*command_line(model, {"endpoint": endpoint, **given}))
    return LaunchedScheduler(command, directory=directory, **launched)


def engine_command(*arguments: str) -> list[str]:
    """Return the command of ``caesura scheduler``; ``-P``: a clone in the current folder has no kernels."""
    return [sys.executable, "-P", "-m", "caesura.scheduler", *arguments]


def option_value(arguments: Sequence[str], option: str) -> str | None:
    """Return the last value of ``option``, as click reads it, or None without the option."""
    value = None
    for each, following in zip_longest(arguments, arguments[1:]):
        name, equals, given = each.partition("=")
        if name == option:
            value = given if equals else following
    return value


def worker_command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "caesura.scheduler.executor", *arguments]


def command_line(model: str, options: Mapping[str, Any]) -> list[str]:
    """Return the arguments of ``caesura scheduler`` for these keywords of :func:`launch_scheduler`."""
    command = ["--model", model]
    for name, value in options.items():
        if value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    return command


def _tail_of(path: str | os.PathLike[str]) -> str:
    if not os.path.isfile(path):
        return ""
    with contextlib.suppress(OSError), open(path, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - STDERR_TAIL_BYTES))
        return log.read().decode(errors="replace")
    return ""
