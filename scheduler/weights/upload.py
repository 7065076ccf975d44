"""Copies bytes of the host to a device through pinned buckets, while earlier ones are written.

    threads or loop      fill bucket n+2        (read ahead by threads, or packed from a transport's memory)
    the side stream      copy bucket n+1        after what was written from that bucket's memory on the device
    the writing stream   write bucket n         after its copy

- Events order the reuse of a bucket, on the host and on the device. The loop waits for the bytes themselves,
  and for a fill to finish.
- One bucket is always on its way while another one is written: the writing may wait for the device (a
  comparison does).
- Memory belongs to one load, and is freed when nothing on the device uses it any more.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..memory.device_module import StreamModule, device_module_for, streams_of
from .loader import WeightLoader
from .source import Pieces, Place, WeightPiece, WeightSource

READERS = 4
"""Threads that read ahead: one reads the page cache at a fifth of the speed of a link to the device."""
BUCKETS = READERS + 2
"""Beside those that are read, one is copied and one is written."""
_ALIGN = 64
Skip = Callable[[str], bool]
OnStream = Callable[[], AbstractContextManager[Any]]
"""Makes the stream current on which weights are written."""


class WriteStream:
    """The stream of a device on which weights are written, and a side stream on which bytes arrive."""

    def __init__(
        self, streams: StreamModule, on_stream: OnStream = nullcontext, device: torch.device | str = "cpu"
    ) -> None:
        """Without ``on_stream``, weights are written on whichever stream is current."""
        self.on_stream = on_stream
        self.device = torch.device(device)
        self._streams = streams
        self.side = streams.Stream()

    def beside(self) -> AbstractContextManager[Any]:
        """Make the side stream current; in any thread."""
        return self._streams.stream(self.side)

    def mark(self) -> torch.Event:
        with self.on_stream():
            return self.here()

    def here(self) -> torch.Event:
        """Return an event after everything that the current stream has been given so far."""
        return self._streams.current_stream().record_event()

    def wait(self, event: torch.Event) -> None:
        self._streams.current_stream().wait_event(event)

    def write_after(self, event: torch.Event) -> None:
        with self.on_stream():
            self.wait(event)

    def synchronize(self) -> None:
        """Wait until all bytes have arrived that were sent."""
        self.side.synchronize()

    def upload(self, source: WeightSource, bucket_bytes: int, skip: Skip) -> Pieces:
        """Yield the pieces of ``source`` on the device, valid for the writing stream."""
        load = _Load(self, bucket_bytes)
        try:
            fills: Callable[[int, Skip], Iterator[Fill]] | None = getattr(source, "fills", None)
            if fills is not None:  # threads can read them in any order
                yield from load.read_ahead(fills(bucket_bytes, skip))
            else:
                yield from load.packed(source.pieces(bucket_bytes, skip))
        finally:
            load.close()


def write_stream_of(device: torch.device, on_stream: OnStream = nullcontext) -> WriteStream | None:
    streams = streams_of(device_module_for(device))
    return None if streams is None else WriteStream(streams, on_stream, device)


@dataclass(frozen=True, slots=True)
class Fill:
    nbytes: int
    read: Callable[[Tensor], None]
    """Fills uint8 [nbytes] on the host; may run in any thread, at any time until the load ends."""
    places: list[Place]


@dataclass(slots=True, eq=False)
class _Bucket:
    host: Tensor
    device: Tensor
    written: torch.Event
    """Event after what was written from ``device``."""
    copied: torch.Event | None = None
    """Event after which ``host`` can be filled again."""
    places: list[Place] = field(default_factory=list)
    filled: int = 0

    def await_host(self) -> None:
        """Wait until the last copy has left ``host``; in the thread that fills it."""
        if self.copied is not None:
            self.copied.synchronize()

    def read(self, fill: Fill) -> None:
        self.await_host()
        fill.read(self.host[: fill.nbytes])

    def pack(self, piece: WeightPiece) -> None:
        rows = piece.rows
        place = Place(piece.name, piece.shape, piece.dtype, piece.start_row, tuple(rows.shape), self.filled)
        place.piece(self.host).rows.copy_(rows)
        self.places.append(place)
        self.filled += -(-rows.nbytes // _ALIGN) * _ALIGN


class _Load:
    def __init__(self, stream: WriteStream, bucket_bytes: int) -> None:
        self._stream = stream
        self._bucket_bytes = bucket_bytes
        self._made = 0
        self._free: deque[_Bucket] = deque()
        self._sent: deque[_Bucket] = deque()
        self._readers: ThreadPoolExecutor | None = None

    def read_ahead(self, fills: Iterator[Fill]) -> Generator[WeightPiece, None, None]:
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="caesura-read")
        reading: deque[tuple[_Bucket, Future[None]]] = deque()
        while True:
            while (self._free or self._made < BUCKETS) and (fill := next(fills, None)) is not None:
                bucket = self._take(fill.nbytes)
                bucket.places, bucket.filled = fill.places, fill.nbytes
                reading.append((bucket, self._readers.submit(bucket.read, fill)))
            if not reading:
                break
            bucket, future = reading.popleft()
            future.result()
            self._send(bucket)
            if len(self._sent) > 1:
                yield from self._written()
        yield from self._drain(None)

    def packed(self, pieces: Pieces) -> Pieces:
        """Yield pieces of host memory, which are copied into buckets before the next one is asked for."""
        bucket: _Bucket | None = None
        try:
            for piece in pieces:
                if piece is None or piece.rows.device.type != "cpu":
                    yield from self._drain(bucket)  # written while nothing comes
                    bucket = None
                    yield piece
                    continue
                nbytes = piece.rows.nbytes
                if bucket is not None and bucket.filled + nbytes > len(bucket.host):
                    self._send(bucket)
                    bucket = None
                    while len(self._sent) > 1:
                        yield from self._written()
                if bucket is None:
                    bucket = self._take(nbytes)
                    bucket.await_host()
                    bucket.places, bucket.filled = [], 0
                bucket.pack(piece)
            yield from self._drain(bucket)
        finally:
            pieces.close()

    def close(self) -> None:
        """Wait until nothing reads or copies any more; the writing stream goes on in memory of its own."""
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
        self._stream.synchronize()

    def _take(self, nbytes: int) -> _Bucket:
        bucket = self._free.popleft() if self._free else None
        size = max(self._bucket_bytes, nbytes)
        if bucket is not None and len(bucket.host) >= size:
            return bucket
        self._made += bucket is None
        with self._stream.on_stream():
            # Memory of the writing stream: what that one has been given may still use it.
            device = torch.empty(size, dtype=torch.uint8, device=self._stream.device)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=device.device.type != "cpu")
            return _Bucket(host, device, self._stream.here())

    def _send(self, bucket: _Bucket) -> None:
        with self._stream.beside():
            self._stream.wait(bucket.written)
            bucket.device[: bucket.filled].copy_(bucket.host[: bucket.filled], non_blocking=True)
            bucket.copied = self._stream.here()
        self._sent.append(bucket)

    def _written(self) -> Generator[WeightPiece, None, None]:
        """Yield the pieces of the bucket that was sent first; it is free when all have been written."""
        bucket = self._sent.popleft()
        assert bucket.copied is not None
        self._stream.write_after(bucket.copied)
        for place in bucket.places:
            yield place.piece(bucket.device)
        bucket.written = self._stream.mark()
        self._free.append(bucket)

    def _drain(self, bucket: _Bucket | None) -> Generator[WeightPiece, None, None]:
        """Send ``bucket``, and yield the pieces of all buckets that were sent."""
        if bucket is not None:
            self._send(bucket)
        while self._sent:
            yield from self._written()


def pieces_of(
    source: WeightSource, loader: WeightLoader, stream: WriteStream | None, bucket_bytes: int
) -> Pieces:
    """Return the pieces of ``source``, on the weights' device if it has streams: else the loader copies."""
    read = source.pieces if stream is None else partial(stream.upload, source)
    return read(bucket_bytes, loader.skip)
