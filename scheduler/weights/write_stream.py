"""The stream of a device on which weights are written, and the one beside it on which bytes arrive.

Invariants: the host enqueues and waits for nothing. What one stream does after the other is said with events.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..memory.device_module import DeviceEvent, StreamModule, device_module_for, streams_of

OnStream = Callable[[], AbstractContextManager[Any]]
"""Makes the stream current on which weights are written."""


class WriteStream:
    """Both streams of one device."""

    def __init__(self, streams: StreamModule, on_stream: OnStream = nullcontext) -> None:
        """``on_stream``: without it, weights are written on whichever stream is current."""
        self.on_stream = on_stream
        self._streams = streams
        self._side = streams.Stream()

    def beside(self) -> AbstractContextManager[Any]:
        """What is enqueued within goes to the stream on which bytes arrive; in any thread."""
        return self._streams.stream(self._side)

    def mark(self) -> DeviceEvent:
        """What has been written so far."""
        with self.on_stream():
            return self.here()

    def here(self) -> DeviceEvent:
        """What the current stream has been given so far."""
        return self._streams.current_stream().record_event()

    def wait(self, event: DeviceEvent) -> None:
        """What comes next on the current stream comes after ``event``."""
        self._streams.current_stream().wait_event(event)

    def write_after(self, event: DeviceEvent) -> None:
        """What is written from now on is written after ``event``."""
        with self.on_stream():
            self.wait(event)

    def synchronize(self) -> None:
        """Until all bytes have arrived that were sent."""
        self._side.synchronize()


def write_stream_of(device: torch.device, on_stream: OnStream = nullcontext) -> WriteStream | None:
    """For ``device``; None: it has no streams."""
    streams = streams_of(device_module_for(device))
    return None if streams is None else WriteStream(streams, on_stream)
