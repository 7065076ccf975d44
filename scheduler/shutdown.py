"""Whether, how and why the engine ends.

Invariants:
- The first order to end is carried out as it says, or as the configuration says: ``abort`` ends every request in the
  next tick, ``drain`` lets those that are there go on until a deadline, and refuses new ones.
- A later order can only bring the end nearer. A signal to an engine that is ending already means now; one more is the
  system's own and ends the process without a word.
- The death of the launcher means now: what it started does not outlive it.
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
    """The orders that came, and what follows from them."""

    def __init__(
        self,
        *,
        drain: bool = False,
        drain_timeout_s: float = 0.0,
        signal_fd: int | None = None,
        lifeline_fd: int | None = None,
    ) -> None:
        """``signal_fd`` yields the numbers of signals; ``lifeline_fd`` becomes readable with the launcher's death.

        ``drain`` and ``drain_timeout_s`` hold for orders that do not say.
        """
        self.requested = False
        """The loop ends once nothing is to be drained."""
        self.reason = ""
        """Of the order that decided, for the log."""
        self.fds = tuple(fd for fd in (signal_fd, lifeline_fd) if fd is not None)
        self._drain = drain
        self._drain_timeout_s = drain_timeout_s
        self._signal_fd = signal_fd
        self._deadline = 0.0

    @property
    def left_s(self) -> float:
        """How much longer requests may go on; 0: no longer."""
        return max(0.0, self._deadline - monotonic())

    @property
    def is_draining(self) -> bool:
        """Ending, but requests that are there go on."""
        return self.requested and self.left_s > 0

    def request(self, reason: str, *, drain: bool | None = None, timeout_s: float | None = None) -> None:
        """End. None: as configured."""
        drain = self._drain if drain is None else drain
        limit = self._drain_timeout_s if timeout_s is None else timeout_s
        deadline = monotonic() + limit if drain else 0.0
        if not self.requested or deadline < self._deadline:
            self.requested, self.reason, self._deadline = True, reason, deadline

    def heard(self, fd: int) -> None:
        """One of :attr:`fds` is readable."""
        if fd != self._signal_fd:
            self.request("its launcher has ended", drain=False)
            return
        with contextlib.suppress(BlockingIOError):
            for number in os.read(fd, 64):
                self.request(f"signal {signal.Signals(number).name}", drain=False if self.requested else None)

    def refuse_work(self) -> None:
        """Raise if nothing new is begun any more."""
        if self.requested:
            raise CaesuraError(
                ErrorCode.SHUTTING_DOWN, "the engine is shutting down: it finishes what it has"
            )


class StartInterruptedError(BaseException):
    """A signal has come before the engine served."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """Turns signals into bytes on a descriptor; until the engine serves, into an exception.

    A signal that was ignored when the process began stays ignored if it is SIGHUP: that is what ``nohup`` is for.
    """

    def __init__(self) -> None:
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._count = 0
        self._serving = False
        self._signals = [
            number
            for number in STOP_SIGNALS
            if not (number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN)
        ]
        signal.set_wakeup_fd(writer.fileno())
        for number in self._signals:
            signal.signal(number, self._on_signal)
        writer.detach()
        self.fd = reader.detach()
        """Yields one byte per signal."""

    def serving(self) -> None:
        """From now on the loop hears signals."""
        self._serving = True

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._serving:
            self._serving = True  # once: what is unwound now must not be interrupted again
            raise StartInterruptedError(number)
        self._count += 1  # the wake-up descriptor does the work
        if self._count > 1:
            for each in self._signals:
                signal.signal(each, signal.SIG_DFL)
