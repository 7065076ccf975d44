"""The broadcasts that this engine sends as rank 0: its own weights, or what it relays while it is received.

- A buffer is filled again after its broadcast has ended on every rank that it reaches directly. The loop
  waits for none of them.
- Each broadcast has a timeout. A relay that fails is over, and says so; it never fails the reception that it
  serves.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from ....io_struct import CaesuraError
from ...runtime.background import Task
from ..upload import WriteStream
from .reception import GRACE_S, broadcast_options

Submit = Callable[[Callable[[], None]], None]


class Transmission:
    """One send: the loop fills a buffer while a thread broadcasts the other."""

    def __init__(
        self,
        backend: Any,
        buffers: Sequence[Tensor],
        stream: WriteStream | None,
        *,
        timeout_s: float,
        submit: Submit,
        wake: Callable[[], None],
        broken: Callable[[str], CaesuraError],
    ) -> None:
        """Args:
        buffers: two, uint8, of the largest broadcast.
        timeout_s: of a broadcast.
        submit: runs a callable in the group's thread, after those before it.
        broken: ends the group, for a reason.
        """
        self._backend = backend
        self._buffers = buffers
        self._stream = stream
        self._options = broadcast_options(timedelta(seconds=timeout_s))
        self._timeout_s = timeout_s
        self._submit = submit
        self._wake = wake
        self._broken = broken
        self._tasks: list[Task[None] | None] = [None, None]
        self._slot = 0
        self._deadline = monotonic() + timeout_s + GRACE_S
        self.is_open = True
        """True while broadcasts of this send may still come, or be on their way."""

    def room(self) -> Tensor | None:
        """Return the buffer to fill next, or None while what was sent from it is on its way.

        Raises ``group_error`` if a broadcast failed or did not end in time; the group is dead then.
        """
        return self._buffers[self._slot] if self._is_free(self._slot) else None

    def send(self, nbytes: int) -> None:
        """Broadcast the first ``nbytes`` of the buffer that :meth:`room` gave."""
        view = self._buffers[self._slot][:nbytes]
        filled = None if self._stream is None else self._stream.mark()
        self._tasks[self._slot] = Task(lambda: self._broadcast(view, filled), self._wake, submit=self._submit)
        self._slot = 1 - self._slot

    def is_over(self) -> bool:
        """Return True once every broadcast has ended; raises as :meth:`room`."""
        return all([self._is_free(self._slot), self._is_free(1 - self._slot)])

    def close(self) -> None:
        self.is_open = False

    def _is_free(self, slot: int) -> bool:
        task = self._tasks[slot]
        if task is None:
            return True
        if not task.done:
            if monotonic() > self._deadline:
                raise self._broken(f"a broadcast did not end within {self._timeout_s:g} s")
            return False
        self._tasks[slot] = None
        self._deadline = monotonic() + self._timeout_s + GRACE_S
        try:
            task.result()
        except RuntimeError as error:
            raise self._broken(f"a broadcast failed: {_first_line(error)}") from error
        return True

    def _broadcast(self, view: Tensor, filled: torch.Event | None) -> None:
        if self._stream is None or filled is None:
            self._backend.broadcast([view], self._options).wait()
            return
        with self._stream.beside():
            self._stream.wait(filled)
            self._backend.broadcast([view], self._options).wait()


class Relay:
    """Broadcasts on what another group's thread receives, from the buffers that it is received into."""

    def __init__(self, backend: Any, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.failure: str | None = None
        """Why the ranks behind this one did not get everything, or None."""
        self._backend = backend
        self._options = broadcast_options(timedelta(seconds=timeout_s))
        self._works: dict[int, list[Any]] = {}

    def forward(self, slot: int, views: Sequence[Tensor]) -> None:
        """Broadcast ``views``, which lie in buffer ``slot``, without waiting; never raises."""
        if self.failure is not None:
            return
        try:
            self._works[slot] = [self._backend.broadcast([view], self._options) for view in views]
        except RuntimeError as error:
            self._fail(error)

    def settle(self, slot: int) -> None:
        """Wait until what is relayed from buffer ``slot`` has arrived, or cannot; never raises."""
        for work in self._works.pop(slot, ()):
            try:
                work.wait()
            except RuntimeError as error:
                self._fail(error)

    def _fail(self, error: RuntimeError) -> None:
        self.failure = self.failure or f"a broadcast failed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
