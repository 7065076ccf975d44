"""What engines log while no test runs: pytest captures nothing then, and the lines would stand among its
dots.

An engine answers first and logs then, and its lines come through a thread of this process. So the last ones
of a test may come when its phase has ended.

Invariants:
- Lines are written within a phase of a test only, where pytest captures them: late ones in the next phase, in
  their order.
- A phase ends only when no line is being written.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from caesura.client.launch import launcher as launch


class LateLines:
    """Stands between engines and the standard error of this process."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._open = False
        self._held: list[str] = []

    def show(self, text: str) -> None:
        """Write ``text`` now, or in the next phase; from any thread."""
        with self._lock:
            if self._open:
                self._write(text)
            else:
                self._held.append(text)

    @contextmanager
    def phase(self) -> Iterator[None]:
        with self._lock:
            for text in self._held:
                self._write(text)
            self._held.clear()
            self._open = True
        try:
            yield
        finally:
            with self._lock:
                self._open = False


lines = LateLines(launch.show_log)


def install() -> None:
    """From now on the lines of engines that this process launches are written within :meth:`LateLines.phase`
    only.
    """
    launch.show_log = lines.show
