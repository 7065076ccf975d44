"""Shutdown of the engine: whether it is requested, by whom, and how long requests may go on.

Invariants:
- The first request decides between ``abort`` (all end in the next tick) and ``drain`` (live ones go on until
  a deadline); a later one can only shorten the time. A signal during the shutdown ends it at once, and a
  further one kills the process. The launcher's death ends the engine at once.
- A signal that ends the process is named in a last line first, but for SIGKILL and those of a crash.
"""

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from types import FrameType

from ...io_struct import CaesuraError, ErrorCode

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FATAL_SIGNALS = tuple(
    signal.Signals[f"SIG{name}"]
    for name in ("QUIT", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "XCPU", "IO", "PWR")
)
"""Signals that the engine does not use and that end a process by default."""
_WATCH_S = 0.1


class Shutdown:
    def __init__(
        self, drain: bool = False, drain_timeout_s: float = 0.0,
        signal_fd: int | None = None, lifeline_fd: int | None = None,
    ) -> None:  # fmt: skip
        """``signal_fd`` yields one byte per signal, its number; ``lifeline_fd`` the launcher's death."""
        self.requested = False
        self.reason = ""
        self.fds = tuple(fd for fd in (signal_fd, lifeline_fd) if fd is not None)
        self._drain = drain
        self._drain_timeout_s = drain_timeout_s
        self._signal_fd = signal_fd
        self._launcher = os.getppid()
        self._deadline = 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - monotonic())

    @property
    def is_draining(self) -> bool:
        return self.requested and self.left_s > 0

    def request(self, reason: str, *, drain: bool | None = None, timeout_s: float | None = None) -> None:
        drain = self._drain if drain is None else drain
        limit = self._drain_timeout_s if timeout_s is None else timeout_s
        deadline = monotonic() + limit if drain else 0.0
        if not self.requested or deadline < self._deadline:
            self.requested, self.reason, self._deadline = True, reason, deadline

    def on_readable(self, fd: int) -> None:
        if fd != self._signal_fd:
            self.request(f"its launcher (pid {self._launcher}) has ended", drain=False)
            return
        with contextlib.suppress(BlockingIOError):
            for number in os.read(fd, 64):
                self.request(f"signal {signal.Signals(number).name}", drain=False if self.requested else None)

    def refuse_work(self) -> None:
        if self.requested:
            reason = "the engine is shutting down and accepts no new requests"
            raise CaesuraError(ErrorCode.SHUTTING_DOWN, reason)


class StartInterruptedError(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def end_on_stop_signals() -> None:
    """Let a stop signal end the process at once, with a line on stderr, while it imports."""

    def end(number: int, _frame: FrameType | None) -> None:
        status = 128 + number
        line = f"the engine ends: signal {signal.Signals(number).name} at start (exit status {status})\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        os._exit(status)

    for number in _handled(STOP_SIGNALS):
        signal.signal(number, end)


def name_fatal_signals(say: Callable[[str], None]) -> None:
    """Call ``say`` before a fatal signal ends the process, unless it is ignored, handled, or pid is 1."""
    if os.getpid() == 1:
        return

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        say(f"signal {signal.Signals(number).name}")
        signal.raise_signal(number)

    for number in FATAL_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _handled(numbers: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Return ``numbers`` without a SIGHUP that was ignored when the process started (``nohup``)."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if not (number == signal.SIGHUP and ignored)]


class StopSignals:
    """Turns stop signals into bytes on a descriptor, or into an exception until the engine serves."""

    def __init__(self, limit_end: Callable[[], None]) -> None:
        """Install the handlers; ``limit_end`` ends the process later, even if the exception is lost."""
        self._limit_end = limit_end
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._count = 0
        self._serving = False
        self._signals = _handled(STOP_SIGNALS)
        signal.set_wakeup_fd(writer.fileno())
        for number in self._signals:
            signal.signal(number, self._on_signal)
        writer.detach()
        self.fd = reader.detach()
        peek = socket.socket(fileno=os.dup(self.fd))
        threading.Thread(target=self._watch, args=[peek], name="start-signals", daemon=True).start()

    def _watch(self, peek: socket.socket) -> None:
        """Repeat a signal without effect: it came as the interpreter began to wait for a lock."""
        main, limited = threading.main_thread().ident or 0, False
        with peek:
            while not self._serving:
                if not select.select([peek], [], [], _WATCH_S)[0]:
                    continue
                sleep(_WATCH_S)
                number = peek.recv(1, socket.MSG_PEEK)[0]
                if not self._serving and number in self._signals:
                    if not limited:
                        limited = True
                        self._limit_end()
                    signal.pthread_kill(main, number)

    def serving(self) -> None:
        self._serving = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._serving:
            self._serving = True  # only once, so that the cleanup of this exception is not interrupted again
            self._limit_end()
            raise StartInterruptedError(number)
        self._count += 1  # Python has written the signal's number to the wake-up descriptor
        if self._count > 1:
            for each in self._signals:
                signal.signal(each, signal.SIG_DFL)
