"""A device module on the host whose streams do nothing until somebody waits for them, or do all at once: the
extremes of a device.

Copies given to a stream are done in its order when the host synchronises with it or with an event behind
them, or when another stream that does its own work has been told to wait for such an event. Memory that is
used again too early is therefore always read with the wrong bytes in it, whatever the timing.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LATER = (torch.ops.aten.copy_.default,)
NOW = (torch.ops.aten.empty.memory_format, torch.ops.aten.view.default, torch.ops.aten.slice.Tensor,
       torch.ops.aten.view.dtype, torch.ops.aten.narrow.default, torch.ops.aten.detach.default)  # fmt: skip

_lock = threading.RLock()
"""One for all streams: to do the work of one may mean to do another's first."""


class Event:
    """The moment of a stream at which the event was recorded."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        with _lock:
            self.place = stream.done + len(stream.pending)

    def synchronize(self) -> None:
        self.stream.run_to(self.place)


class Stream(TorchDispatchMode):
    """Copies that are given to it while it is current wait; an eager one's are done at once."""

    def __init__(self, *, eager: bool = False) -> None:
        super().__init__()
        self._eager = eager
        self.pending: list[Callable[[], object]] = []
        self.done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in LATER:
            assert func in NOW, f"{func} would have to wait for the device"
            return func(*args, **(kwargs or {}))
        self._give(lambda: func(*args, **(kwargs or {})))
        return args[0]

    def _give(self, work: Callable[[], object]) -> None:
        with _lock:
            self.pending.append(work)
            if self._eager:
                self.synchronize()

    def run_to(self, place: int) -> None:
        with _lock:
            while self.done < place:
                self.pending.pop(0)()
                self.done += 1

    def record_event(self) -> Event:
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self._give(event.synchronize)

    def synchronize(self) -> None:
        self.run_to(self.done + len(self.pending))


class LaggingDevice:
    """The part of ``torch.cuda`` that a load uses.

    Attributes:
        writing: the stream on which weights are written.
    """

    def __init__(self, *, eager_side: bool = False) -> None:
        self._eager_side = eager_side
        self.writing = Stream()
        self._current = threading.local()

    def Stream(self) -> Stream:  # noqa: N802 (torch's name)
        return Stream(eager=self._eager_side)

    def current_stream(self) -> Stream:
        return getattr(self._current, "stream", self.writing)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            with stream:
                yield
        finally:
            self._current.stream = before

    def on_stream(self) -> Any:
        return self.stream(self.writing)
