"""A communicator of NCCL as vLLM's trainers make it, outside torch.distributed.

Rank 0 puts the communicator's id into its TCPStore, or gives it to the engines itself, in base64; every rank
joins by it, and all reduce one element (``StatelessProcessGroup`` and ``PyNcclCommunicator`` of vLLM 0.33).

Invariants:
- The id, which vLLM pickles, is parsed and never unpickled.
- A broadcast that does not end in time raises in the thread that waits for it, after the communicator was
  aborted: its kernels would wait for ever. Nothing here ends the process.
- NCCL is the library that torch has loaded. Not run on a GPU yet.
"""

import ctypes
import time
from datetime import timedelta
from typing import Any

import torch

from .legacy_pickle import Call, parse

ID_KEY = "broadcast_from/0/0"
ID_BYTES = 128
_LIBRARY = "libnccl.so.2"
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_POLL_S = 0.0005
_Comm = ctypes.c_void_p


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


def read_id(pickled: bytes) -> bytes:
    """Return the id in vLLM's pickle of its ``ncclUniqueId``; malformed_message or RuntimeError otherwise."""
    found = parse(pickled)
    state = found.args[-1] if isinstance(found, Call) and found.function.name == "_unpickle" else ()
    data = state[-1] if isinstance(state, tuple) and state else None
    if not isinstance(data, bytes) or len(data) != ID_BYTES:
        raise RuntimeError("the store has no id of an NCCL communicator")
    return data


class RawNccl:
    """A backend with the methods of torch's that groups use; every broadcast is from rank 0."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        """Join, on ``device``; block until all ranks have. Raises RuntimeError."""
        try:
            self._nccl = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise RuntimeError(f"NCCL cannot be loaded: {error}") from error
        self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
        self._comm = _Comm()
        torch.cuda.set_device(device)
        identity = _UniqueId.from_buffer_copy(unique_id)
        self._call("ncclCommInitRank", ctypes.byref(self._comm), world_size, identity, rank)
        one = torch.zeros(1, device=device)
        place = ctypes.c_void_p(one.data_ptr())
        self._call(
            "ncclAllReduce", place, place, ctypes.c_size_t(1), _FLOAT32, _SUM, self._comm, self._stream()
        )
        torch.cuda.current_stream().synchronize()

    def name(self) -> str:
        return "nccl"

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> "Broadcast":
        """Receive into one uint8 tensor, on the current stream; ``options`` are torch's."""
        (tensor,) = tensors
        place, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
        self._call("ncclBroadcast", place, place, size, _UINT8, 0, self._comm, self._stream())
        return Broadcast(self, options.timeout)

    def abort(self) -> None:
        comm, self._comm = self._comm, _Comm()
        if comm:
            self._nccl.ncclCommAbort(comm)

    def require_no_error(self) -> None:
        """Raise RuntimeError, and abort, if another rank or the connection to it is gone."""
        state = ctypes.c_int(0)
        self._call("ncclCommGetAsyncError", self._comm, ctypes.byref(state))
        try:
            self._check("a broadcast", state.value)
        except RuntimeError:
            self.abort()
            raise

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._nccl, function)(*arguments))

    def _check(self, what: str, status: int) -> None:
        if status not in (0, 7):  # 7: in progress
            raise RuntimeError(f"{what}: {self._nccl.ncclGetErrorString(status).decode()}")


class Broadcast:
    """torch's ``Work`` of a broadcast on the stream that was current."""

    def __init__(self, nccl: RawNccl, timeout: timedelta) -> None:
        self._nccl = nccl
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._ended = torch.cuda.Event()
        self._ended.record()

    def is_completed(self) -> bool:
        return bool(self._ended.query())

    def wait(self) -> None:
        """Block until it has ended; RuntimeError if it has failed, or past its timeout."""
        while not self._ended.query():
            if time.monotonic() > self._deadline:
                self._nccl.abort()
                raise RuntimeError("a broadcast did not end in time")
            self._nccl.require_no_error()
            time.sleep(_POLL_S)
