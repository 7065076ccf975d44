"""The engine's only hang detector: ends the process when the loop hangs, after printing all stacks.

Invariants:
- The loop pays three attribute writes per tick. Time in ``poll``, in operations declared as long and in
  which compilers run below the process does not count; that of a stopped process (SIGSTOP) does, that of a
  suspended machine does not.
- After half of the timeout the stacks are printed to stderr; after all of it the process exits with
  :data:`EXIT_HUNG`, a status that no other exit has. Both happen even if a C call holds the GIL forever: the
  thread keeps postponing faulthandler's thread and a kernel timer, at whose expiry glibc calls ``_exit``.
- faulthandler's thread reads frames without the GIL, and crashes if they run meanwhile. It prints only where
  the watchdog's own thread, which prints with the GIL held, did not come to it in time.
"""

import contextlib
import ctypes
import faulthandler
import logging
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

from ...process import log
from ...process.compilers import compiler_below
from ...process.contract import EXIT_HUNG

logger = logging.getLogger(__name__)

LOOK_S = 10.0
_DUMP_S = 0.5
LONGEST_S = 1e9
"""A longer timeout, inf included, means none."""
LOOKS = 8

_SIGEV_THREAD = 2
_CLOCK_MONOTONIC = 1


class Heartbeat:
    def __init__(self) -> None:
        self.ticked = False
        self.asleep = False
        self.long: str | None = None
        self.on_change: Callable[[], None] = lambda: None

    @property
    def is_due(self) -> bool:
        return not (self.asleep or self.long)

    @contextlib.contextmanager
    def long_operation(self, what: str) -> Iterator[None]:
        """Expect no tick within the block; for the thread of the loop only."""
        before, self.long = self.long, what
        self.on_change()
        try:
            yield
        finally:
            self.long = before
            self.ticked = True
            self.on_change()


class Watchdog:
    def __init__(
        self, heartbeat: Heartbeat, timeout_s: float, checks: tuple[Callable[[], None], ...] = ()
    ) -> None:
        """``timeout_s`` 0 disables the watchdog; ``checks`` are called at every check in any case."""
        timeout_s = timeout_s if timeout_s <= LONGEST_S else 0.0
        self._heartbeat = heartbeat
        self._timeout_s = timeout_s
        self._interval_s = min(LOOK_S, timeout_s / LOOKS) if timeout_s else LOOK_S
        self._checks = checks
        self._backstop = Backstop() if timeout_s else None
        self._alive_at = monotonic()
        self._told = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caesura-watchdog", daemon=True)

    def start(self) -> None:
        self._alive_at = monotonic()
        self._heartbeat.on_change = self._put_off
        self._put_off()
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._backstop is not None:
                self._backstop.disarm()

    def _put_off(self) -> None:
        with self._lock:
            self._alive_at, self._told = monotonic(), False
            if self._backstop is None or self._closed.is_set():
                return
            if self._heartbeat.long:
                self._backstop.disarm()
            else:  # later than the thread
                late = self._interval_s * 2
                self._backstop.arm(self._timeout_s / 2 + late, self._timeout_s + late)

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            try:
                self._look()
                for check in self._checks:
                    check()
            except Exception:
                with contextlib.suppress(Exception):
                    logger.warning("the watchdog's check failed", exc_info=True)

    def _look(self) -> None:
        heartbeat = self._heartbeat
        ticked, heartbeat.ticked = heartbeat.ticked, False
        if ticked or not heartbeat.is_due or not self._timeout_s:
            self._put_off()
            return
        if (compiler := compiler_below(os.getpid())) is not None:
            logger.info("the loop waits for kernels that %s compiles", compiler)
            self._put_off()
            return
        silent = monotonic() - self._alive_at
        if silent >= self._timeout_s:
            logger.critical(
                "the engine ends: its loop has not ticked for %.1f s (exit status %d)", silent, EXIT_HUNG
            )
            log.flush()
            os._exit(EXIT_HUNG)
        if silent >= self._timeout_s / 2 and not self._told:
            self._told = True
            logger.error(
                "the loop has not ticked for %.1f s; the process ends after %.1f s. "
                "Stacks of all threads follow, or precede.",
                silent, self._timeout_s,
            )  # fmt: skip
            with self._lock:
                if self._backstop is not None and not self._closed.is_set():
                    self._backstop.dump()


class Backstop:
    def __init__(self) -> None:
        self._timer = _ExitTimer()
        self._stderr = _nonblocking_stderr()

    def arm(self, dump_s: float, exit_s: float) -> None:
        """Print all stacks in ``dump_s`` seconds and exit in ``exit_s``; replaces earlier times."""
        self._timer.set(exit_s)
        if self._stderr is not None:
            faulthandler.dump_traceback_later(dump_s, exit=False, file=self._stderr)

    def dump(self) -> None:
        """Print all stacks now, and not again before the next :meth:`arm`."""
        if self._stderr is not None:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.dump_traceback(self._stderr)

    def disarm(self) -> None:
        self._timer.set(0.0)
        if self._stderr is not None:
            faulthandler.cancel_dump_traceback_later()


class _ExitTimer:
    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self._libc, "timer_create"):  # glibc before 2.34
            self._libc = ctypes.CDLL("librt.so.1", use_errno=True)
        self._id = ctypes.c_void_p()
        exit_now = ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p).value
        event = struct.pack("@PiiPP32x", EXIT_HUNG, 0, _SIGEV_THREAD, exit_now, 0)  # struct sigevent
        if self._libc.timer_create(_CLOCK_MONOTONIC, event, ctypes.byref(self._id)):
            raise OSError(ctypes.get_errno(), "timer_create failed")

    def set(self, seconds: float) -> None:
        spec = struct.pack("@4l", 0, 0, int(seconds), int(seconds % 1 * 1e9))  # struct itimerspec
        if self._libc.timer_settime(self._id, 0, spec, None):
            raise OSError(ctypes.get_errno(), "timer_settime failed")


def exit_within(seconds: float) -> None:
    def end() -> None:
        sleep(seconds)
        backstop.dump()
        logger.critical(
            "the engine ends: its shutdown has taken more than %g s (exit status %d); "
            "the stacks of all threads precede",
            seconds, EXIT_HUNG,
        )  # fmt: skip
        log.flush()
        os._exit(EXIT_HUNG)

    backstop = Backstop()
    backstop.arm(seconds + 2 * _DUMP_S, seconds + 4 * _DUMP_S)
    threading.Thread(target=end, name="caesura-end", daemon=True).start()


def _nonblocking_stderr() -> int | None:
    """Return a non-blocking stderr: a dump into an unread pipe must not block the watchdog."""
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):
            return 2  # it never blocks, and another opening would write at another place
    except OSError:
        return None  # closed
    try:
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:  # a socket, or no /proc
        return 2
