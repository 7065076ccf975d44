"""Device memory that processes of one host share through CUDA's IPC handles.

Invariants:
- Before the driver or torch sees a handle, it is checked: it is of our device, of a kind that torch opens
  with one driver call, its sizes fit the device, and torch's counter and event are within their bounds.
- One export is opened once, and closed when the session ends, references that are left behind included. The
  exporter's reference of torch is released at once: it would keep the memory of a closed export.
- The exporting process has synchronised before it sends, and the reader before it answers.
"""

import ctypes
import gc
import re
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..io_struct import CaesuraError, CudaIPCHandle, ErrorCode

_DRIVER_HANDLE_BYTES = 64
_COUNTER_NAME = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
_COUNTERS_PER_FILE = 10_000
"""torch's CUDA_IPC_REF_COUNTER_FILE_SIZE; it writes to a counter at ``ref_counter_offset`` unchecked."""


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a device without the prefix ``GPU-`` of nvidia-smi."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export(memory: Tensor) -> CudaIPCHandle:
    """Return the handle of ``memory``, which is all of its storage; refuse expandable segments."""
    storage: Any = memory.untyped_storage()
    _, handle, nbytes, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
    if len(handle) != _DRIVER_HANDLE_BYTES and handle[1:2] == b"e":
        raise CaesuraError(
            ErrorCode.UNSUPPORTED,
            "memory in expandable segments cannot be shared: allocate with expandable_segments:False,"
            " or send from the CPU",
        )
    return CudaIPCHandle(
        device_uuid=uuid_of(memory.device),
        handle=handle,
        nbytes=nbytes,
        offset=offset,
        ref_counter_handle=counter,
        ref_counter_offset=counter_offset,
        event_handle=event,
        event_sync_required=event_sync,
    )


def check_handle(handle: CudaIPCHandle, device_uuid: str, device_bytes: int) -> None:
    """Raise ``invalid_request`` unless the handle may be opened on this process's device of that size."""
    if handle.device_uuid != device_uuid:
        problem = f"is not the engine's device, {device_uuid}: export from that one"
        raise _bad("device_uuid", handle.device_uuid, problem)
    # torch puts two bytes before the driver's 64 since 2.5: a version, and ``c`` for memory of cudaMalloc.
    length, kind = len(handle.handle), handle.handle[1:2]
    if length != _DRIVER_HANDLE_BYTES and not (length == _DRIVER_HANDLE_BYTES + 2 and kind == b"c"):
        if kind == b"e":
            problem = "is of an expandable segment: allocate the bucket with expandable_segments:False"
            raise _bad("handle", "e", problem)
        raise _bad("handle", length, "bytes are not a handle of cudaMalloc memory")
    if handle.offset + handle.nbytes > device_bytes:
        raise _bad("nbytes", handle.nbytes, f"from byte {handle.offset} on is more than the device has")
    if not _COUNTER_NAME.fullmatch(handle.ref_counter_handle):
        raise _bad("ref_counter_handle", handle.ref_counter_handle, "is not the name of a counter of torch")
    if handle.ref_counter_offset >= _COUNTERS_PER_FILE:
        raise _bad("ref_counter_offset", handle.ref_counter_offset, f"must be below {_COUNTERS_PER_FILE}")
    if handle.event_sync_required and len(handle.event_handle) != _DRIVER_HANDLE_BYTES:
        raise _bad("event_handle", len(handle.event_handle), f"must have {_DRIVER_HANDLE_BYTES} bytes")


class CudaMemories:
    """The exports of other processes that are open now."""

    def __init__(self, device: torch.device) -> None:
        """Open exports on ``device``, a CUDA device; without an index, the current one."""
        self._device = device
        self._open: dict[CudaIPCHandle, Tensor] = {}

    def __len__(self) -> int:
        return len(self._open)

    def view(self, handle: CudaIPCHandle) -> Tensor:
        """Return the exported storage, uint8 [handle.nbytes], valid until :meth:`close`."""
        if handle not in self._open:
            properties = torch.cuda.get_device_properties(self._device)
            check_handle(handle, uuid_of(self._device), properties.total_memory)
            self._open[handle] = self._map(handle)
        return self._open[handle]

    def close(self) -> None:
        """Close all of them, even if a reference was left behind in a cycle. Idempotent."""
        if not self._open:
            return
        storages = [StorageWeakRef(memory.untyped_storage()) for memory in self._open.values()]
        self._open.clear()
        if not all(storage.expired() for storage in storages):
            gc.collect()
        torch.cuda.ipc_collect()

    def _map(self, handle: CudaIPCHandle) -> Tensor:
        index = self._device.index
        try:
            storage: Any = torch.UntypedStorage._new_shared_cuda(
                torch.cuda.current_device() if index is None else index,
                handle.handle,
                handle.nbytes,
                handle.offset,
                handle.ref_counter_handle,
                handle.ref_counter_offset,
                handle.event_handle,
                handle.event_sync_required,
            )
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise _bad("handle", len(handle.handle), f"bytes cannot be opened: {reason}") from error
        room = _bytes_from(storage.data_ptr(), handle.offset)
        if room is not None and handle.nbytes > room:
            raise _bad("nbytes", handle.nbytes, f"are more than the {room} that were exported from there on")
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_from(pointer: int, offset: int) -> int | None:
    """Return the bytes of an allocation from ``pointer``, ``offset`` bytes into it; None if unknown."""
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    try:
        query = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    except (OSError, AttributeError):
        return None
    start = pointer - offset
    if query(ctypes.byref(base), ctypes.byref(size), ctypes.c_void_p(start)) or base.value is None:
        return None
    return base.value + size.value - pointer


def _bad(field: str, value: object, problem: str) -> CaesuraError:
    shown = value.decode(errors="replace") if isinstance(value, bytes) else value
    reason = f"CUDA IPC handle: {field} {shown!r} {problem}"
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=field, value=shown)
