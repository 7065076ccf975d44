"""The process that tests fork engines from: it has imported what they import, and then waits.

Invariants:
- It has one thread and has used nothing that does not survive a fork: no zmq context, no parallel region of
  OpenMP.
- What it forks is a child of the process that asked (``CLONE_PARENT``): who asked waits for it, as for any
  child, and it sees that parent.
- A forked process goes on as its command line would from the beginning, with the arguments, environment,
  folder, descriptors and process group that were asked for, and with no descriptor of this process.
- A forked process ends with the status, the output and the exit handlers that it would have had, but
  finalizes no module.
- It ends with the last process that holds the other end of its socket.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from io import TextIOWrapper
from types import ModuleType
from typing import Any, NoReturn

from caesura.scheduler.runtime.libraries import settings

from . import engine_template
from .engine_template import CODE, LARGEST, MODULE, MOST_DESCRIPTORS, READY

_CLONE_NUMBER = {"x86_64": 56}
"""The number and the order of the arguments of the system call differ between machines."""
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40
_libc = ctypes.PyDLL(None, use_errno=True)


def serve(descriptor: int, *imports: str) -> None:
    """Answer the requests on a socket. Return only in a forked process that has run its program."""
    channel = socket.socket(fileno=descriptor)
    _import(imports)
    if platform.machine() not in _CLONE_NUMBER:
        os._exit(1)
    forking = _Forking()
    gc.collect()
    gc.freeze()  # or the collection at the end of each fork would copy all of it
    channel.send(READY)
    _end(lambda: _run(_next(channel, forking), forking))


def _end(program: Callable[[], None]) -> NoReturn:
    """End this process with ``program`` as the interpreter would, but do not take its modules down."""
    status: object = 0
    interrupted = False
    try:
        program()
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:  # noqa: BLE001  (this is the edge of a process)
        sys.excepthook(type(error), error, error.__traceback__)
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    # What Py_FinalizeEx does first, in its order.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _import(names: Iterable[str]) -> None:
    """Import modules as an engine would, with what libraries read from the environment as they load."""
    mine = dict(os.environ)
    os.environ.update(settings())
    for name in names:
        if name not in sys.modules:
            # of an extra that is not installed, which the fork will say
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    os.environ.clear()
    os.environ.update(mine)


class _Forking:
    """``fork`` whose child has this process's parent."""

    def __init__(self) -> None:
        address = ctypes.c_void_p()
        if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) or not address.value:
            os._exit(1)
        if ctypes.c_int.from_address(address.value).value != os.getpid():
            os._exit(1)
        # glibc keeps the number of a thread there, and addresses signals by it.
        self._thread_number = address

    def fork(self) -> int:
        flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
        ctypes.pythonapi.PyOS_BeforeFork()
        number = _CLONE_NUMBER[platform.machine()]
        pid: int = _libc.syscall(
            ctypes.c_long(number), ctypes.c_long(flags), None, None, self._thread_number, None
        )
        if pid:
            ctypes.pythonapi.PyOS_AfterFork_Parent()
        else:
            ctypes.pythonapi.PyOS_AfterFork_Child()
        return pid


def _next(channel: socket.socket, forking: _Forking) -> dict[str, Any]:
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, LARGEST, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = json.loads(message)
        _import(request["imports"])
        if len(os.listdir("/proc/self/task")) == 1 and not forking.fork():
            channel.close()
            answer = _place(request, descriptors)
            os.write(answer, b"%d" % os.getpid())
            os.close(answer)
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def _place(request: dict[str, Any], descriptors: list[int]) -> int:
    answer, *given = descriptors
    if request["group"] != os.getpgrp():
        os.setpgid(0, request["group"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # may have been looked up in the template's environment
    for limit, *values in request["limits"]:
        if resource.getrlimit(limit) != tuple(values):
            resource.setrlimit(limit, values)
    wanted = request["descriptors"]
    above = max([*wanted, *descriptors]) + 1
    answer = _move(answer, above)
    given = [_move(descriptor, above) for descriptor in given]
    for descriptor, number in zip(given, wanted, strict=True):
        os.dup2(descriptor, number, inheritable=True)
    for name in map(int, os.listdir("/proc/self/fd")):
        if name not in (*wanted, answer):
            _close(name)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        _open(number, name, mode)
    sys.orig_argv = request["command"]
    return answer


def _open(number: int, name: str, mode: str) -> None:
    old = getattr(sys, name)
    unbuffered = old.write_through
    raw: Any = open(number, f"{mode}b", 0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    at_lines = not unbuffered and (number == 2 or os.isatty(number))
    stream = TextIOWrapper(raw, old.encoding, old.errors, line_buffering=at_lines, write_through=unbuffered)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _move(descriptor: int, above: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(descriptor)
    return moved


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # that of the listing itself
        os.close(descriptor)


def _run(request: dict[str, Any], forking: _Forking) -> None:
    kind, program, *arguments = request["program"]
    if request["starts_others"]:
        _have_template(forking)
    sys.argv = [kind, *arguments]
    if kind == MODULE:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    assert kind == CODE
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(program, vars(main))


def _have_template(forking: _Forking) -> None:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        its.close()
        engine_template.install(engine_template.Template(mine, pid))
        return
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in map(int, os.listdir("/proc/self/fd")):
        if name in (0, 1, 2):
            os.dup2(nothing, name)
        elif name not in (nothing, its.fileno()):
            _close(name)
    os.close(nothing)
    mine.detach()
    _end(lambda: _run(_next(its, forking), forking))
