"""Tensors in memory that another process of this host shares.

- One mapping per memory, opened at its first use. At most :data:`KEPT` of the host's are kept between
  sessions, because mapping costs more than copying, and none longer than its owner lives.
- Device memory is closed when the session ends.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .... import io_struct as wire
from ....io_struct import CaesuraError, ErrorCode
from ....transfer.cuda_ipc import CudaMemories
from ....transfer.shared_memory import is_owned, map_memory
from ..source import BufferSource, Fitting, SharedMemory

if TYPE_CHECKING:
    import mmap

KEPT = 4
"""Page faults on a fresh mapping take 90 ms per GB here, a copy 63 ms."""


class SharedMemoryMaps:
    """The shared memories that are open now, on the host and on the engine's device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._maps: dict[wire.SharedMemoryHandle, mmap.mmap] = {}
        self._cuda = CudaMemories(self._device)

    def __len__(self) -> int:
        return len(self._maps) + len(self._cuda)

    def collect(self) -> None:
        """Let go of memories whose owner has closed them, or is gone."""
        for handle in [handle for handle in self._maps if not is_owned(handle)]:
            del self._maps[handle]

    def open(
        self, request: wire.UpdateWeightsFromIPCReqInput, fitting: Fitting | None = None
    ) -> BufferSource:
        """Return the tensors of ``request``; raises as :meth:`view`, or if a spec does not fit."""
        handle = request.handle
        memory = SharedMemory(handle, 0, handle.nbytes)
        return BufferSource("ipc", request.specs, [self.view(handle)], memory, request.delta, fitting)

    def view(self, handle: wire.SharedMemoryHandle | wire.CudaIPCHandle) -> memoryview | Tensor:
        """Return the bytes of ``handle``, valid until :meth:`close`; raises ``invalid_request`` if unfit."""
        if isinstance(handle, wire.CudaIPCHandle):
            if self._device.type != "cuda":
                reason = f"the engine runs on {self._device.type}, it cannot open device memory"
                raise CaesuraError(
                    ErrorCode.INVALID_REQUEST, reason, field="handle", value=handle.device_uuid
                )
            return self._cuda.view(handle)
        known = self._maps.pop(handle, None)
        if known is None or not is_owned(handle):
            known = map_memory(handle)
        self._maps[handle] = known  # the last one used is the last one given up
        return memoryview(known)

    def end_session(self) -> None:
        """Let go of all but the memories used last; each is unmapped with the last piece that uses it."""
        self._cuda.close()
        self.collect()
        for handle in list(self._maps)[:-KEPT]:
            del self._maps[handle]

    def close(self) -> None:
        self._maps.clear()
        self._cuda.close()
