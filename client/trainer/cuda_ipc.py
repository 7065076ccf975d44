"""CUDA memory that a trainer shares with an engine on the same device.

Invariants:
- A bucket is exported once and used for many updates; every message names the same export, so the engine opens it once per
  session, however many buckets go through it.
- The exporter's reference of torch is released at once: torch would otherwise keep the memory of a closed bucket until every
  engine has opened and closed it. The engine's replies say when the memory may be written again.
- The data is complete when it is announced: filling waits for earlier work of the device and for its own copies.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ...io_struct import CaesuraError, CudaIPCHandle, ErrorCode, TensorSpec
from .buckets import Bucket, padded, spec_of

_DRIVER_HANDLE_BYTES = 64


def common_cuda_device(tensors: Iterable[Tensor]) -> torch.device | None:
    """The one CUDA device that all of ``tensors`` are on; None: there is no such device."""
    devices = {tensor.device for tensor in tensors}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and device.type == "cuda" else None


class CudaBucket:
    """Device memory that an engine on the same device can open; used like ``SharedBucket``."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """
        Raises:
            CaesuraError: ``out_of_memory``; ``unsupported``, torch allocates in segments that cannot be exported.
        """
        self.nbytes = padded(max(nbytes, 1))
        self.device = device
        try:
            self._bytes: Tensor | None = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise CaesuraError(
                ErrorCode.OUT_OF_MEMORY, f"no {self.nbytes} bytes on {device}", needed_bytes=self.nbytes
            ) from error
        self.handle = _export(self._bytes)

    def view(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [nbytes], in place."""
        assert self._bytes is not None, "the bucket is closed"
        return self._bytes[offset : offset + nbytes]

    def fill(self, bucket: Bucket, offset: int = 0) -> list[TensorSpec]:
        """Copy the pieces of the bucket to byte ``offset`` and after. The copies are complete when this returns."""
        torch.cuda.synchronize(self.device)  # the pieces may be in the making on any stream
        specs = []
        for piece in bucket.pieces:
            self.view(offset, piece.rows.nbytes).copy_(piece.rows.reshape(-1).view(torch.uint8))
            specs.append(spec_of(piece, offset=offset))
            offset = padded(offset + piece.rows.nbytes)
        torch.cuda.current_stream(self.device).synchronize()
        return specs

    def close(self) -> None:
        """Release the memory; no update that uses it may be running. Idempotent."""
        if self._bytes is not None:
            self._bytes = None
            torch.cuda.ipc_collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _export(memory: Tensor) -> CudaIPCHandle:
    """The handle of ``memory``, which is all of its storage."""
    storage: Any = memory.untyped_storage()
    _, handle, nbytes, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    torch.UntypedStorage._release_ipc_counter_cuda(counter, counter_offset)
    if len(handle) != _DRIVER_HANDLE_BYTES and handle[1:2] == b"e":
        raise CaesuraError(
            ErrorCode.UNSUPPORTED,
            "memory in expandable segments cannot be shared: allocate with expandable_segments:False, or send from the CPU",
        )
    return CudaIPCHandle(
        device_uuid=str(torch.cuda.get_device_properties(memory.device).uuid),
        handle=handle,
        nbytes=nbytes,
        offset=offset,
        ref_counter_handle=counter,
        ref_counter_offset=counter_offset,
        event_handle=event,
        event_sync_required=event_sync,
    )
