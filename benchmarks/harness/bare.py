"""Reference costs of an update's bytes without an engine: one reference per transport, between two threads.

Invariant: a reference moves the same bytes from where the trainer has them to where the engine would want
them, in one copy at the end of the plainest road of that kind, and does nothing else.
"""

import os
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import zmq
from torch.distributed import BroadcastOptions, HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from caesura.client.trainer import as_frames, buckets

from .transports import Weights

GLOO_TIMEOUT = timedelta(seconds=60)


def flat_bytes(weights: Weights) -> torch.Tensor:
    """Return all tensors' bytes one after the other as uint8."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in weights.values()])


def copy_seconds(weights: Weights, destination: Weights) -> float:
    """Return the seconds of one copy of each tensor (ipc)."""
    start = time.perf_counter()
    for name, tensor in weights.items():
        destination[name].copy_(tensor)
    return time.perf_counter() - start


class BareZeroMQ:
    """A DEALER, and a ROUTER that copies each frame and answers each message (tensor)."""

    def __init__(self, folder: Path, weights: list[Weights], bucket_bytes: int) -> None:
        self._weights = weights
        self._bucket_bytes = bucket_bytes
        self.memory = torch.zeros_like(flat_bytes(weights[0]))
        """Destination of the bytes."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        endpoint = f"ipc://{folder}/bare.sock"
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(endpoint)
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.connect(endpoint)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def seconds(self, which: int) -> float:
        """Return the seconds of one pass over the weights number ``which``, bucket by bucket."""
        start, first = time.perf_counter(), 0
        for bucket in buckets(self._weights[which].items(), self._bucket_bytes):
            _, frames = as_frames(bucket)
            self._dealer.send_multipart([str(first).encode(), *frames], copy=False)
            self._dealer.recv()
            first += sum(frame.nbytes for frame in frames)
        return time.perf_counter() - start

    def close(self) -> None:
        self._dealer.send(b"")
        self._thread.join()
        self._dealer.close(linger=0)
        self._router.close(linger=0)

    def _serve(self) -> None:
        while True:
            client, header = self._router.recv(), self._router.recv()
            if not header:
                return
            place = int(header)
            while self._router.rcvmore:
                data = torch.frombuffer(self._router.recv(copy=False).buffer, dtype=torch.uint8)
                self.memory[place : place + len(data)].copy_(data)
                place += len(data)
            self._router.send_multipart([client, b""])


class BareGloo:
    """Rank 0 broadcasts buckets, rank 1 copies each to its place (distributed)."""

    def __init__(self, weights: list[Weights], bucket_bytes: int) -> None:
        self._bytes = [flat_bytes(one) for one in weights]
        self._bucket_bytes = bucket_bytes
        self.memory = torch.zeros_like(self._bytes[0])
        """Destination of the bytes."""
        self._start, self._copied = threading.Semaphore(0), threading.Semaphore(0)
        self._ending = False
        store = HashStore()
        self._thread = threading.Thread(target=self._serve, args=(store,))
        self._thread.start()
        self._group = ProcessGroupGloo(store, 0, 2, GLOO_TIMEOUT)

    def seconds(self, which: int) -> float:
        """Return the seconds of one pass over the weights number ``which``, up to the last byte."""
        start = time.perf_counter()
        self._start.release()
        for _, bucket in _cut(self._bytes[which], self._bucket_bytes):
            self._group.broadcast([bucket], BroadcastOptions()).wait()  # type: ignore[attr-defined]
        self._copied.acquire()
        return time.perf_counter() - start

    def close(self) -> None:
        self._ending = True
        self._start.release()
        self._thread.join()

    def _serve(self, store: HashStore) -> None:
        group = ProcessGroupGloo(store, 1, 2, GLOO_TIMEOUT)
        staging = torch.zeros(self._bucket_bytes, dtype=torch.uint8)
        while self._start.acquire() and not self._ending:
            for _, place in _cut(self.memory, self._bucket_bytes):
                bucket = staging[: len(place)]
                group.broadcast([bucket], BroadcastOptions()).wait()  # type: ignore[attr-defined]
                place.copy_(bucket)
            self._copied.release()


def _cut(data: torch.Tensor, bucket_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(0, len(data), bucket_bytes):
        yield first, data[first : first + bucket_bytes]


BUCKET_BYTES = 8 << 20


def plain_read_and_copy(checkpoint: Path, repeats: int = 5) -> dict[str, float]:
    """Read every weight file in buckets and copy each bucket into memory that is already resident.

    Returns:
        ``seconds``, the median of ``repeats`` passes, and ``bytes``. The files come from the page cache:
        whoever writes a checkpoint for an engine to load has just written it.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in files)
    destination = memoryview(bytearray(total))
    bucket = memoryview(bytearray(BUCKET_BYTES))
    seconds = [_one_pass(files, bucket, destination) for _ in range(repeats + 1)]
    return {"seconds": statistics.median(seconds[1:]), "bytes": float(total)}


def _one_pass(files: list[Path], bucket: memoryview, destination: memoryview) -> float:
    start = time.perf_counter()
    written = 0
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            offset = 0
            while count := os.preadv(descriptor, [bucket], offset):
                destination[written : written + count] = bucket[:count]
                offset += count
                written += count
        finally:
            os.close(descriptor)
    return time.perf_counter() - start
