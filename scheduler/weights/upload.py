"""Bytes of the host into a device's memory: through pinned buckets, beside the writing of what came before.

    threads or loop      fill bucket n+2        (read ahead by threads, or packed from what a transport has in memory)
    the side stream      copy bucket n+1        after what was written from that bucket's memory on the device
    the writing stream   write bucket n         after its copy

Invariants:
- A bucket is filled again after its copy, and copied into again after what was written from it: events say so, and the loop
  waits for neither. It waits for the bytes themselves, and for a fill to finish.
- One bucket is always on its way while another one is written: the writing may wait for the device (a comparison does).
- Memory belongs to one load and goes with it, when nothing on the device uses it any more.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..memory.device_module import DeviceEvent
from .loader import WeightLoader
from .pieces import WeightPiece
from .source import WeightSource
from .write_stream import WriteStream

READERS = 4
"""Threads that read ahead: one reads the page cache at a fifth of what a link to the device takes."""
BUCKETS = READERS + 2
"""One of them is being copied, one written."""
_ALIGN = 64
Skip = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Place:
    """Where some rows of a tensor lie in a bucket."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    start_row: int
    rows: tuple[int, ...]
    """Their shape."""
    offset: int

    def piece(self, bucket: Tensor) -> WeightPiece:
        """A view of ``bucket``, uint8."""
        nbytes = prod(self.rows) * self.dtype.itemsize
        rows = bucket[self.offset : self.offset + nbytes].view(self.dtype).view(self.rows)
        return WeightPiece(self.name, self.shape, self.dtype, self.start_row, rows)


@dataclass(frozen=True, slots=True)
class Fill:
    """The contents of one bucket, and how they come there."""

    nbytes: int
    read: Callable[[Tensor], None]
    """Into uint8 [nbytes] on the host; may run in any thread, at any time until the load ends."""
    places: list[Place]


@runtime_checkable
class ReadAhead(Protocol):
    """A source whose buckets can be read in any order, by threads."""

    def fills(self, bucket_bytes: int, skip: Skip) -> Iterator[Fill]:
        """All of it; one that is larger than ``bucket_bytes`` holds a single row."""
        ...


@dataclass(slots=True, eq=False)
class _Bucket:
    """One bucket on both sides."""

    host: Tensor
    device: Tensor
    written: DeviceEvent
    """What was written from ``device``."""
    copied: DeviceEvent | None = None
    """When ``host`` can be filled again."""
    places: list[Place] = field(default_factory=list)
    filled: int = 0

    def await_host(self) -> None:
        """Until the last copy has left ``host``; in the thread that fills it."""
        if self.copied is not None:
            self.copied.synchronize()


class Uploader:
    """Loads of host memory into one device."""

    def __init__(self, stream: WriteStream, device: torch.device) -> None:
        """``stream``: on which the weights are written."""
        self._stream = stream
        self._device = device

    def pieces(
        self, source: WeightSource, bucket_bytes: int, skip: Skip
    ) -> Generator[WeightPiece | None, None, None]:
        """The pieces of ``source`` on the device, valid for the writing stream; those that lie there already as they are."""
        load = _Load(self._stream, self._device, bucket_bytes)
        try:
            if isinstance(source, ReadAhead):
                yield from load.read_ahead(source.fills(bucket_bytes, skip))
            else:
                yield from load.packed(source.pieces(bucket_bytes, skip))
        finally:
            load.close()


def uploader_of(stream: WriteStream | None, device: torch.device) -> Uploader | None:
    """Of ``device``; None without a stream: its memory is written from the host's as it is."""
    return None if stream is None else Uploader(stream, device)


class _Load:
    """The buckets of one load."""

    def __init__(self, stream: WriteStream, device: torch.device, bucket_bytes: int) -> None:
        self._stream = stream
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._made = 0
        self._free: deque[_Bucket] = deque()
        self._sent: deque[_Bucket] = deque()
        self._readers: ThreadPoolExecutor | None = None

    def read_ahead(self, fills: Iterator[Fill]) -> Generator[WeightPiece, None, None]:
        """Buckets that threads fill."""
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="caesura-read")
        reading: deque[tuple[_Bucket, Future[None]]] = deque()
        while True:
            while self._can_fill() and (fill := next(fills, None)) is not None:
                bucket = self._take(fill.nbytes)
                bucket.places, bucket.filled = fill.places, fill.nbytes
                reading.append((bucket, self._readers.submit(_read, bucket, fill)))
            if not reading:
                break
            bucket, future = reading.popleft()
            future.result()
            self._send(bucket)
            if len(self._sent) > 1:
                yield from self._written()
        yield from self._drain()

    def packed(
        self, pieces: Generator[WeightPiece | None, None, None]
    ) -> Generator[WeightPiece | None, None, None]:
        """Pieces of host memory, copied into buckets before the next one is asked for."""
        bucket: _Bucket | None = None
        try:
            for piece in pieces:
                if piece is not None and piece.rows.device.type != "cpu":
                    yield from self._finish(bucket)
                    bucket = None
                    yield piece
                    continue
                if piece is None:  # write what is there meanwhile
                    yield from self._finish(bucket)
                    bucket = None
                    yield None
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
                _pack(bucket, piece)
            yield from self._finish(bucket)
        finally:
            pieces.close()

    def close(self) -> None:
        """When nothing reads or copies any more. What is being written goes on: its memory is that stream's own."""
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
        self._stream.synchronize()

    def _can_fill(self) -> bool:
        return bool(self._free) or self._made < BUCKETS

    def _take(self, nbytes: int) -> _Bucket:
        """A bucket of at least ``nbytes``."""
        bucket = self._free.popleft() if self._free else None
        size = max(self._bucket_bytes, nbytes)
        if bucket is not None and len(bucket.host) >= size:
            return bucket
        self._made += bucket is None
        with self._stream.on_stream():
            # Memory of the writing stream: what that one has been given may still use it.
            device = torch.empty(size, dtype=torch.uint8, device=self._device)
            host = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
            return _Bucket(host, device, self._stream.here())

    def _send(self, bucket: _Bucket) -> None:
        """Start its copy; the writing stream is told when its turn comes."""
        with self._stream.beside():
            self._stream.wait(bucket.written)
            bucket.device[: bucket.filled].copy_(bucket.host[: bucket.filled], non_blocking=True)
            bucket.copied = self._stream.here()
        self._sent.append(bucket)

    def _written(self) -> Generator[WeightPiece, None, None]:
        """The pieces of the bucket that was sent first; it is free when all have been written."""
        bucket = self._sent.popleft()
        assert bucket.copied is not None
        self._stream.write_after(bucket.copied)
        for place in bucket.places:
            yield place.piece(bucket.device)
        bucket.written = self._stream.mark()
        self._free.append(bucket)

    def _finish(self, bucket: _Bucket | None) -> Generator[WeightPiece, None, None]:
        if bucket is not None:
            self._send(bucket)
        yield from self._drain()

    def _drain(self) -> Generator[WeightPiece, None, None]:
        while self._sent:
            yield from self._written()


def _read(bucket: _Bucket, fill: Fill) -> None:
    bucket.await_host()
    fill.read(bucket.host[: fill.nbytes])


def _pack(bucket: _Bucket, piece: WeightPiece) -> None:
    """Behind what the bucket holds."""
    rows = piece.rows
    place = Place(piece.name, piece.shape, piece.dtype, piece.start_row, tuple(rows.shape), bucket.filled)
    place.piece(bucket.host).rows.copy_(rows)
    bucket.places.append(place)
    bucket.filled += -(-rows.nbytes // _ALIGN) * _ALIGN


def pieces_of(
    source: WeightSource, loader: WeightLoader, uploader: Uploader | None, bucket_bytes: int
) -> Generator[WeightPiece | None, None, None]:
    """Of ``source``, where the weights are: on the device, if it has streams."""
    if uploader is None:
        return source.pieces(bucket_bytes, loader.skip)
    return uploader.pieces(source, bucket_bytes, loader.skip)
