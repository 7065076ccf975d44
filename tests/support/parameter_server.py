"""A parameter server as checkpoint-engine's."""

import fcntl
import mmap
import os
import uuid
from collections.abc import Iterator
from typing import Any, Self

import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

from .pickles import pickled

ALIGNMENT = 256


class ParameterServer:
    """The REQ side. Buckets lie in turn in the two halves of its buffer."""

    def __init__(self, half_bytes: int) -> None:
        self.half_bytes = -(-half_bytes // ALIGNMENT) * ALIGNMENT
        nbytes = 2 * self.half_bytes
        self._fd = os.memfd_create("parameter-server", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, nbytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self._fd, nbytes)
        self.handle: Any = {
            "pid": os.getpid(), "fd": self._fd, "inode": os.fstat(self._fd).st_ino, "nbytes": nbytes,
        }  # fmt: skip
        self.address = f"ipc://@caesura-test-{uuid.uuid4().hex}.sock"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()
        self._map.close()
        os.close(self._fd)

    def tell(self, message: object, *frames: bytes) -> None:
        """Send without waiting for the answer; bytes go as they are, everything else as a pickle."""
        data = message if isinstance(message, bytes) else pickled(message)
        self._socket.send_multipart([data, *frames])

    def answer(self, seconds: float = 20.0) -> str:
        assert self._socket.poll(round(seconds * 1000)), f"no answer within {seconds} s"
        return self._socket.recv().decode()

    def ask(self, message: object) -> str:
        self.tell(message)
        return self.answer()

    def buckets(self, weights: dict[str, torch.Tensor]) -> Iterator[list[dict[str, Any]]]:
        """Fill one half after the other; a bucket must be answered before the next but one is asked for."""
        bucket: list[dict[str, Any]] = []
        number, used = 0, 0
        for name, tensor in weights.items():
            data = tensor.contiguous().view(-1).view(torch.uint8)
            if used + len(data) > self.half_bytes:
                yield bucket
                bucket, used, number = [], 0, number + 1
            offset = number % 2 * self.half_bytes + used
            self._put(offset, data)
            bucket.append({"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": offset})
            used += -(-len(data) // ALIGNMENT) * ALIGNMENT
        yield bucket

    def _put(self, offset: int, data: torch.Tensor) -> None:
        self._map[offset : offset + len(data)] = bytes(data.numpy().data)


class CudaParameterServer(ParameterServer):
    """The same with its buffer on a device, exported as checkpoint-engine exports it."""

    def __init__(self, half_bytes: int) -> None:
        super().__init__(half_bytes)
        self._buffer = torch.empty(2 * self.half_bytes, dtype=torch.uint8, device="cuda")
        self.handle = reduce_tensor(self._buffer)

    def __exit__(self, *exc: object) -> None:
        del self._buffer, self.handle
        torch.cuda.ipc_collect()
        super().__exit__(*exc)

    def _put(self, offset: int, data: torch.Tensor) -> None:
        self._buffer[offset : offset + len(data)] = data.to("cuda")
        torch.cuda.synchronize()
