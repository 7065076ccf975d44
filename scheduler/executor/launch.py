"""A worker that rank 0 starts on its own host.

Invariants: it never outlives rank 0, which holds the only write end of a pipe that it watches; it is reaped;
a thread says how it ended, unless its end was asked for.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from subprocess import DEVNULL, Popen
from time import monotonic


class LaunchedWorker:
    """One worker's process."""

    def __init__(self, rank: int, command: Sequence[str], on_end: Callable[[str], None]) -> None:
        """
        Args:
            command: starts a worker, but for its rank.
            on_end: called in a thread with the reason.
        """
        self._rank = rank
        reader, self._writer = os.pipe()
        try:
            self.process = Popen(  # noqa: S603 (our own interpreter and module)
                [*command, "--rank", str(rank), "--lifeline-fd", str(reader)],
                stdin=DEVNULL,
                pass_fds=(reader,),
            )
        except BaseException:
            os.close(self._writer)
            raise
        finally:
            os.close(reader)
        self._thread = threading.Thread(
            target=self._watch, args=(on_end,), name=f"caesura-rank-{rank}", daemon=True
        )
        self._thread.start()

    def close(self, deadline: float) -> None:
        """End it, at the latest at ``deadline`` on the monotonic clock, and reap it."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
        self._thread.join(max(0.0, deadline - monotonic()))
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join()

    def _watch(self, on_end: Callable[[str], None]) -> None:
        status = self.process.wait()
        how = f"ended with exit status {status}"
        if status < 0:
            try:
                how = f"was killed by {signal.Signals(-status).name}"
            except ValueError:
                how = f"was killed by signal {-status}"
        on_end(f"rank {self._rank} (pid {self.process.pid}) {how}")


def worker_command(*arguments: str) -> list[str]:
    """Return the command line of ``caesura worker ARGUMENTS``, by this interpreter."""
    return [sys.executable, "-P", "-m", "caesura.scheduler.executor", *arguments]
