"""Shutdown of the engine: whether it is requested, by whom, and how long requests may go on.

Invariants:
- The first shutdown request decides the mode, or else the configuration does: ``abort`` ends every request in the next tick;
  ``drain`` lets live requests go on until a deadline and refuses new ones.
- A later request can only shorten the time. A signal during the shutdown ends it at once; after that, a further signal has its
  default action and kills the process.
- The launcher's death ends the engine at once, so that the engine does not outlive its launcher.
"""

import contextlib
import os
import signal
import socket
from time import monotonic
from types import FrameType

from ..io_struct import CaesuraError, ErrorCode

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Shutdown:
    """The requested shutdown, if any, and its deadline."""

    def __init__(
        self,
        *,
        drain: bool = False,
        drain_timeout_s: float = 0.0,
        signal_fd: int | None = None,
        lifeline_fd: int | None = None,
    ) -> None:
        """``signal_fd`` yields one byte per signal, its number; ``lifeline_fd`` becomes readable when the launcher dies.

        ``drain`` and ``drain_timeout_s`` are the defaults of requests that do not set them.
        """
        self.requested = False
        """Whether the loop must end, after draining if that was requested."""
        self.reason = ""
        """Reason of the request that decided the deadline, for the log."""
        self.fds = tuple(fd for fd in (signal_fd, lifeline_fd) if fd is not None)
        self._drain = drain
        self._drain_timeout_s = drain_timeout_s
        self._signal_fd = signal_fd
        self._deadline = 0.0

    @property
    def left_s(self) -> float:
        """Seconds that live requests may still go on; 0 if they must end now."""
        return max(0.0, self._deadline - monotonic())

    @property
    def is_draining(self) -> bool:
        """Whether the engine is shutting down while live requests go on."""
        return self.requested and self.left_s > 0

    def request(self, reason: str, *, drain: bool | None = None, timeout_s: float | None = None) -> None:
        """Request the shutdown; ``drain`` and ``timeout_s`` are the configured ones if they are None."""
        drain = self._drain if drain is None else drain
        limit = self._drain_timeout_s if timeout_s is None else timeout_s
        deadline = monotonic() + limit if drain else 0.0
        if not self.requested or deadline < self._deadline:
            self.requested, self.reason, self._deadline = True, reason, deadline

    def on_readable(self, fd: int) -> None:
        """Handle one of :attr:`fds`, which is readable."""
        if fd != self._signal_fd:
            self.request("its launcher has ended", drain=False)
            return
        with contextlib.suppress(BlockingIOError):
            for number in os.read(fd, 64):
                self.request(f"signal {signal.Signals(number).name}", drain=False if self.requested else None)

    def refuse_work(self) -> None:
        """Raise ``shutting_down`` if the shutdown is requested."""
        if self.requested:
            raise CaesuraError(
                ErrorCode.SHUTTING_DOWN, "the engine is shutting down and accepts no new requests"
            )


def exit_on_stop_signals() -> None:
    """Let stop signals end the process at once, until :class:`StopSignals` takes over: nothing has been made yet."""
    for number in _stop_signals():
        signal.signal(number, _exit_at_start)


def _exit_at_start(number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"the engine ends: {signal.Signals(number).name} at start\n".encode())
    os._exit(128 + number)


def _stop_signals() -> list[signal.Signals]:
    """SIGHUP stays ignored if it was ignored when the process started, so that ``nohup`` works."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in STOP_SIGNALS if not (number == signal.SIGHUP and ignored)]


class StartInterruptedError(BaseException):
    """A stop signal arrived before the engine served."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Turns stop signals into bytes on a descriptor, or into an exception until the engine serves."""

    def __init__(self) -> None:
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._count = 0
        self._serving = False
        self._signals = _stop_signals()
        signal.set_wakeup_fd(writer.fileno())
        for number in self._signals:
            signal.signal(number, self._on_signal)
        writer.detach()
        self.fd = reader.detach()
        """Yields one byte per signal."""

    def serving(self) -> None:
        """Signals no longer raise: the loop handles them, by :attr:`fd`."""
        self._serving = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._serving:
            self._serving = True  # only once, so that the cleanup of this exception is not interrupted again
            raise StartInterruptedError(number)
        self._count += 1  # Python has written the signal's number to the wake-up descriptor
        if self._count > 1:
            for each in self._signals:
                signal.signal(each, signal.SIG_DFL)
