"""Expert ids by KV slot: the experts that computed what the KV pool holds there.

Invariants:
- A slot's row is written by the step that writes the slot's KV, on the forward stream, so a row follows its
  KV: pages that the prefix tree shares bring their rows along, and a stale page keeps those of the weights
  that computed it.
- Only slots whose step has landed are read, so reading waits for nothing but itself: on accelerators it has a
  stream of its own.
- Reading allocates nothing on the device: rows pass through a staging buffer of fixed size.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory import residency
from ..memory.device_module import DeviceModule, streams_of
from ..runtime.config import PAGE_SIZE
from ..runtime.dtypes import torch_name

STAGED_PAGES = 256


class RoutingPool:
    """Rows [layers, top_k] of expert ids, one per KV slot, in the dtype of the model's record."""

    def __init__(
        self,
        *,
        num_layers: int,
        top_k: int,
        dtype: torch.dtype,
        num_pages: int,
        device: torch.device | str = "cpu",
        device_module: DeviceModule | None = None,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """``dtype`` is uint8 or int16; ``num_pages`` are the KV pool's; ``device_module`` makes the stream of
        reads.
        """
        self.num_layers, self.top_k, self.dtype = num_layers, top_k, dtype
        self.numpy_dtype = np.dtype(torch_name(dtype))
        self._page_size = page_size
        on_host = torch.device(device).type == "cpu"
        self._streams = None if device_module is None or on_host else streams_of(device_module)
        self._stream = None if self._streams is None else self._streams.Stream()
        page = (page_size, num_layers, top_k)
        self._pages = residency.allocate((num_pages, *page), dtype, device)
        staged = min(STAGED_PAGES, num_pages)
        self._staging = residency.allocate((staged, *page), dtype, device)
        self._index = residency.allocate((staged,), torch.int64, device)
        self._by_slot = self._pages.view(-1, num_layers, top_k)

    @staticmethod
    def bytes_per_token(num_layers: int, top_k: int, dtype: torch.dtype) -> int:
        return num_layers * top_k * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes + self._staging.nbytes + self._index.nbytes

    def store(self, kv_slots: Tensor, rows: Tensor) -> None:
        """Write ``rows`` [T, layers, top_k] to ``kv_slots`` (int64 [T]), which are distinct."""
        self._by_slot.index_copy_(0, kv_slots, rows)

    def read(self, pages: np.ndarray, start: int, end: int) -> np.ndarray:
        """Return the rows of positions [start, end) of a request whose KV lies in ``pages`` (from position
        0).

        [end - start, layers, top_k] of uint8 or int16, on the host.
        """
        size = self._page_size
        first, last = start // size, -(-end // size)
        rows = np.empty(((last - first) * size, self.num_layers, self.top_k), self.numpy_dtype)
        for at in range(first, last, STAGED_PAGES):
            run = pages[at : min(at + STAGED_PAGES, last)]
            rows[(at - first) * size :][: len(run) * size] = self._read_pages(run)
        return rows[start - first * size : end - first * size]

    def _read_pages(self, pages: np.ndarray) -> np.ndarray:
        with self._reading():
            index, staged = self._index[: len(pages)], self._staging[: len(pages)]
            index.copy_(torch.from_numpy(pages))
            torch.index_select(self._pages, 0, index, out=staged)
            host = staged.to("cpu", copy=True)  # waits for this stream
        return host.view(-1, self.num_layers, self.top_k).numpy()

    def _reading(self) -> AbstractContextManager[Any]:
        if self._streams is None or self._stream is None:
            return nullcontext()
        return self._streams.stream(self._stream)
