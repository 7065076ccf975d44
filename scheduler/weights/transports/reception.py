"""The broadcasts of one update: a thread receives them into two buffers, the loop writes from one while the
other fills.

- A buffer is received into again after what was written from it: on the host when the loop has released it,
  on a device after the event that the loop then gives. The loop never waits for either.
- Each broadcast has a timeout. Where the backend's does not hold (NCCL looking for its ranks), the loop gives
  the group up.
- Small tensors share a buffer on a device: their broadcasts are entered one behind the other and waited for
  together.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ....io_struct import CaesuraError
from ...runtime.background import Feed
from ..upload import WriteStream

SHARED_BYTES = 32 << 20
"""Bytes of broadcasts that are waited for together on a device: torch looks for the end once in a
millisecond.
"""
GRACE_S = 2.0
"""Seconds for the backend's own timeout to be reported."""
_ALIGN = 256
"""Bytes. Each broadcast is received at a multiple of it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Broadcasts that are received into one buffer."""

    places: list[tuple[int, int]]
    """First byte and size of each."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Received:
    """The contents of one buffer."""

    broadcasts: list[Tensor]
    """uint8, one for each."""
    arrived: torch.Event | None
    """None on the host, where they have arrived."""


class Relays(Protocol):
    """What passes on the broadcasts that arrive (transmission.py); in the thread that receives."""

    def forward(self, slot: int, views: Sequence[Tensor]) -> None:
        """Pass ``views`` on, which lie in buffer ``slot``, without waiting; never raises."""
        ...

    def settle(self, slot: int) -> None:
        """Wait until buffer ``slot`` is not read any more; never raises."""
        ...


def broadcast_options(timeout: timedelta) -> Any:
    """Return the options of a broadcast from rank 0."""
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = timeout
    return options


def plans_of(sizes: Sequence[int], shared_bytes: int) -> Iterator[Plan]:
    """Put as many broadcasts together as ``shared_bytes`` hold, at least one."""
    places: list[tuple[int, int]] = []
    end = 0
    for size in sizes:
        if places and end + size > shared_bytes:
            yield Plan(places, end)
            places, end = [], 0
        places.append((end, size))
        end += -(-size // _ALIGN) * _ALIGN
    if places:
        yield Plan(places, end)


def broadcasts(
    backend: Any,
    plans: Sequence[Plan],
    buffers: Sequence[Tensor],
    written: Sequence[torch.Event | None],
    stream: WriteStream | None,
    timeout: timedelta,
    relay: "Relays | None" = None,
) -> Iterator[Received]:
    """Fill ``buffers`` in turn, each after what was ``written`` from it, and ``relay`` what arrives; in a
    thread.
    """
    options = broadcast_options(timeout)
    works: deque[Any] = deque()
    try:
        for number, plan in enumerate(plans):
            with nullcontext() if stream is None else stream.beside():
                if relay is not None:
                    relay.settle(number % 2)
                event = written[number % 2]
                if stream is not None and event is not None:
                    stream.wait(event)
                views = [buffers[number % 2][at : at + size] for at, size in plan.places]
                works += [backend.broadcast([view], options) for view in views]
                while works:
                    works.popleft().wait()
                received = Received(views, None if stream is None else stream.here())
                if relay is not None:
                    relay.forward(number % 2, views)
            yield received
        if relay is not None:
            with nullcontext() if stream is None else stream.beside():
                relay.settle(0)
                relay.settle(1)
    finally:
        # The traceback of a broadcast that failed keeps this frame, and would keep the backend's threads and
        # sockets.
        works.clear()
        del backend


class Reception:
    """What the thread has received, as the loop takes it."""

    def __init__(
        self,
        feed: Feed[Received],
        written: list[torch.Event | None],
        stream: WriteStream | None,
        *,
        timeout_s: float,
        broken: Callable[[str], CaesuraError],
        wake: Callable[[], None],
    ) -> None:
        """Args:
        written: event of each buffer, for the thread; filled here.
        timeout_s: of a broadcast.
        broken: ends the group, for a reason.
        wake: makes the loop look again.
        """
        self._feed = feed
        self._written = written
        self._stream = stream
        self._timeout_s = timeout_s
        self._broken = broken
        self._wake = wake
        self._ready: deque[Tensor] = deque()
        self._taken = 0
        self._holds = False
        self._deadline = monotonic() + timeout_s + GRACE_S
        self._timer: threading.Timer | None = None

    def take(self) -> Tensor | None:
        """Return the bytes of the next broadcast, valid until the next call; None if it has not come yet.

        Raises ``group_error`` if it failed or did not come in time; the group is dead then.
        """
        if not self._ready:
            self._release()
            try:
                received = self._feed.take()
            except RuntimeError as error:
                raise self._broken(f"a broadcast failed: {str(error).partition(chr(10))[0]}") from error
            if received is None:
                self._look_again()
                return None
            if self._stream is not None and received.arrived is not None:
                self._stream.write_after(received.arrived)
            self._ready.extend(received.broadcasts)
            self._taken += 1
            self._holds = True
            self._deadline = monotonic() + self._timeout_s + GRACE_S
        return self._ready.popleft()

    def is_over(self) -> bool:
        """Return True once the thread has relayed everything, too; raises as :meth:`take`."""
        self._release()
        if self._feed.ended:
            return True
        self._look_again()
        return False

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._feed.cancel()

    def _release(self) -> None:
        """Allow the buffer taken last to be filled again, after what was enqueued from it."""
        if self._holds:
            self._holds = False
            if self._stream is not None:
                self._written[(self._taken - 1) % 2] = self._stream.mark()
            self._feed.release()

    def _look_again(self) -> None:
        """Look again at the deadline, also where the thread is stuck."""
        left = self._deadline - monotonic()
        if left <= 0:
            raise self._broken(f"a broadcast did not come within {self._timeout_s:g} s")
        if self._stream is not None and (self._timer is None or self._timer.finished.is_set()):
            self._timer = threading.Timer(left, self._wake)
            self._timer.daemon = True
            self._timer.start()
