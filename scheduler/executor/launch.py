"""A worker that rank 0 starts on its own host.

Invariants: it never outlives rank 0, which holds the only write end of a pipe that it watches; it is reaped; a thread says how it
ended, unless its end was asked for.
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
        """``command`` says where rank 0 is; ``on_end(reason)`` is called in a thread."""
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
        on_end(f"rank {self._rank} (pid {self.process.pid}) {how_it_ended(status)}")


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def worker_command(*arguments: str) -> list[str]:
    """What runs ``caesura worker ARGUMENTS`` with this interpreter; ``-P`` as of a scheduler's command."""
    return [sys.executable, "-P", "-m", "caesura.scheduler.executor", *arguments]
