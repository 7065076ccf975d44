"""The file that a launched scheduler's output is appended to, and how its end is put into words.

Invariants:
- Each run begins with a line of its own, which has time, version, process id and endpoint, before anything that the process
  writes. The id is known when the process runs, so its place is filled in then.
- Nothing that is in the file is overwritten but that place.
"""

import contextlib
import os
import signal
import stat
from collections.abc import Sequence
from time import localtime, strftime

from ... import __version__
from ...process.contract import EXIT_HUNG

_PID_WIDTH = 10


class ChildLog:
    """One run's place in a log."""

    def __init__(self, path: str | os.PathLike[str], command: Sequence[str]) -> None:
        """Append the first line of the run of ``command``; raises OSError if the file cannot be written."""
        self.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        """For the process to write to."""
        self._pid_at: int | None = None
        self._command = command
        self._path = path
        try:
            if stat.S_ISREG(os.fstat(self.fd).st_mode):
                before, after = self._line()
                os.write(self.fd, before + b" " * _PID_WIDTH + after)
                self._pid_at = os.lseek(self.fd, 0, os.SEEK_CUR) - len(after) - _PID_WIDTH
        except OSError:
            self.close()
            raise

    def started(self, pid: int) -> None:
        """The process runs."""
        text = str(pid).ljust(_PID_WIDTH).encode()
        with contextlib.suppress(OSError):
            if self._pid_at is None:  # a pipe or a terminal
                before, after = self._line()
                os.write(self.fd, before + text + after)
                return
            # What is opened for appending writes nowhere else.
            with open(f"/proc/self/fd/{self.fd}", "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), text, self._pid_at)

    def close(self) -> None:
        """The process has its own descriptor."""
        os.close(self.fd)

    def _line(self) -> tuple[bytes, bytes]:
        """What is before and after the process id."""
        now = strftime("%Y-%m-%d %H:%M:%S", localtime())
        endpoint = next(
            (value for name, value in zip(self._command, self._command[1:]) if name == "--endpoint"), "?"
        )
        before = f"===== {now} caesura {__version__} scheduler, pid "
        return self._end_of_line() + before.encode(), f" on {endpoint} =====\n".encode()

    def _end_of_line(self) -> bytes:
        """A newline where the last run was cut off in the middle of a line."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            if file.seekable() and file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                return b"" if file.read() == b"\n" else b"\n"
        return b""


def how_it_ended(returncode: int | None) -> str:
    """What became of a process, with its status or the signal that killed it: ``ended with status 3``."""
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
