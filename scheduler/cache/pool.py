"""Storage by page, row or slot: KV, latents, states of linear attention, and expert ids. Owners are the
ledgers' business.

Invariants:
- A page is [kv heads, page_size, head size], so that one head's keys within a page are contiguous; a page of
  latents, which all heads share, is [page_size, width].
- Addresses never change while a pool is resident: attention plans, kernels and captured graphs may keep them.
  On the CPU it is zero pages of the kernel until first written, so what is never used costs no memory.
- A state row is one sequence's state at one position, over all layers that have one; row 0 is scratch. The
  recurrent state is float32 whatever the model's dtype: rounding it would add up over all tokens.
- A slot's expert ids are written by the step that writes the slot's KV, on the forward stream, so they follow
  it into the prefix tree. Only slots whose step has landed are read, on a stream of its own, through a
  staging buffer.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory import residency
from ..memory.device_module import DeviceModule, streams_of
from ..runtime.dtypes import torch_name
from ..runtime.engine_config import PAGE_SIZE

STAGED_PAGES = 256


class _PagedPool:
    """Base of pools of pages; ``num_pages`` counts the scratch page 0."""

    num_pages: int
    page_size: int
    window_pages: int | None
    """Pages of layers with a window that give pages back, or None if all layers are alike."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if not shapes or min(map(min, shapes)) < 1:
            raise ValueError(f"every size of a KV pool is at least 1, got layers of {shapes}")
        self._tensors = [residency.allocate(shape, dtype, device) for shape in shapes]
        self.by_page = list(self._tensors)
        """Tensors that are indexed by page, if the layers are alike."""
        self.states: StatePool | None = None
        """States of layers that keep one per sequence and no KV; whoever allocates it sets it."""

    @property
    def nbytes(self) -> int:
        return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in self._tensors)

    def touch(self, nbytes: int) -> None:
        """Write zeros to about ``nbytes`` of the pages that are handed out first, which then have memory."""
        pages = self.num_pages * nbytes // self.nbytes  # of a layer with a window, at most all of them
        for tensor in self._tensors:
            tensor[:pages].zero_()


class MHAPool(_PagedPool):
    """K and V of multi-head (grouped-query) attention."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_size: int = PAGE_SIZE,
        value_size: int | None = None,
        window_layers: frozenset[int] = frozenset(),
        window_pages: int | None = None,
    ) -> None:
        """``num_pages`` counts scratch page 0; ``window_layers`` have ``window_pages`` with an own table."""
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.window_pages = window_pages if window_layers else None
        pages = [(window_pages if each in window_layers else None) or num_pages for each in range(num_layers)]
        sizes = head_size, head_size if value_size is None else value_size
        shapes = [(each, kv_heads, page_size, size) for each in pages for size in sizes]
        super().__init__(shapes, dtype, device)
        self._layers = list(zip(self._tensors[::2], self._tensors[1::2], strict=True))
        # Views [pages, page_size, kv heads, head size]: one index_put of (page, offset) then writes [heads,
        # size] rows straight from a strided slice of a fused qkv, without a contiguous copy or an index per
        # head. Timed against index_copy on a flat view, copy included, in microseconds for 1, 64 and 1024
        # tokens: 8 x 128 in bf16 2.1, 25, 458 against 1.9, 26, 657; 4 x 32 in fp32 1.8, 7, 98 against 1.7, 6,
        # 70.
        self._by_slot = [(k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)) for k, v in self._layers]

    @staticmethod
    def bytes_per_token(num_layers: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
        return num_layers * kv_heads * 2 * head_size * dtype.itemsize

    def split_slots(self, kv_slots: Tensor) -> tuple[Tensor, Tensor]:
        pages = torch.div(kv_slots, self.page_size, rounding_mode="floor")
        return pages, kv_slots - pages * self.page_size

    def store(self, layer: int, k: Tensor, v: Tensor, kv_slots: Tensor) -> None:
        """Write [T, kv heads, size], of any strides, to distinct ``kv_slots`` (int64 [T])."""
        pages, offsets = self.split_slots(kv_slots)
        self.store_at(layer, k, v, pages, offsets)

    def store_at(self, layer: int, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
        k_slots, v_slots = self._by_slot[layer]
        k_slots.index_put_((pages, offsets), k)
        v_slots.index_put_((pages, offsets), v)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]


class MLAPool(_PagedPool):
    """Latents that keys and values follow from, and the shared rotated key (arXiv:2405.04434, 2.1)."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_size: int = PAGE_SIZE,
    ) -> None:
        self.num_layers, self.num_pages, self.page_size, self.width = num_layers, num_pages, page_size, width
        self.window_pages = None
        super().__init__([(num_pages, page_size, width)] * num_layers, dtype, device)

    @staticmethod
    def bytes_per_token(num_layers: int, width: int, dtype: torch.dtype) -> int:
        return num_layers * width * dtype.itemsize

    def store(self, layer: int, latents: Tensor, kv_slots: Tensor) -> None:
        """Write ``latents`` ([T, width], pool dtype, any strides) to ``kv_slots`` (int64 [T])."""
        self._tensors[layer].view(-1, self.width).index_copy_(0, kv_slots, latents)

    def layer(self, layer: int) -> Tensor:
        return self._tensors[layer]


@dataclass(frozen=True, kw_only=True)
class StateShape:
    key_heads: int
    """Heads of keys and of queries; each serves ``value_heads / key_heads`` neighbouring value heads."""
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    """Positions that the convolution sees, its own included."""

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def recurrent(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_size, self.value_size

    @property
    def past(self) -> tuple[int, int]:
        return self.kernel - 1, self.channels

    def divided(self, ranks: int) -> "StateShape":
        """Return the shape on each of several ranks: a share of the key heads, with their value heads."""
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def row_bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.past) * dtype.itemsize + math.prod(self.recurrent) * torch.float32.itemsize


class StatePool:
    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        shape: StateShape,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(num_layers, num_rows) < 1:
            reason = f"every size of a state pool is at least 1, got {num_layers} layers of {num_rows} rows"
            raise ValueError(reason)
        self.num_rows, self.shape = num_rows, shape
        self._layers = [
            (
                residency.allocate((num_rows, *shape.past), dtype, device),
                residency.allocate((num_rows, *shape.recurrent), torch.float32, device),
            )
            for _ in range(num_layers)
        ]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self._layers for tensor in pair)


class RoutingPool:
    def __init__(
        self,
        *,
        num_layers: int,
        top_k: int,
        dtype: torch.dtype,
        num_pages: int,
        device: torch.device | str = "cpu",
        device_module: DeviceModule | None = None,
    ) -> None:
        """``dtype`` is uint8 or int16; ``num_pages`` are the KV pool's, scratch included."""
        self.num_layers, self.top_k, self.dtype = num_layers, top_k, dtype
        self.numpy_dtype = np.dtype(torch_name(dtype))
        on_host = torch.device(device).type == "cpu"
        self._streams = None if device_module is None or on_host else streams_of(device_module)
        self._stream = None if self._streams is None else self._streams.Stream()
        page = (PAGE_SIZE, num_layers, top_k)
        self.pages = residency.allocate((num_pages, *page), dtype, device)
        staged = min(STAGED_PAGES, num_pages)
        self._staging = residency.allocate((staged, *page), dtype, device)
        self._index = residency.allocate((staged,), torch.int64, device)
        self._by_slot = self.pages.view(-1, num_layers, top_k)

    @staticmethod
    def bytes_per_token(num_layers: int, top_k: int, dtype: torch.dtype) -> int:
        return num_layers * top_k * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes + self._staging.nbytes + self._index.nbytes

    def store(self, kv_slots: Tensor, rows: Tensor) -> None:
        self._by_slot.index_copy_(0, kv_slots, rows)

    def read(self, pages: np.ndarray, start: int, end: int) -> np.ndarray:
        """Return rows [end - start, layers, top_k] of a request whose KV lies in ``pages``, on the host."""
        size = PAGE_SIZE
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
            torch.index_select(self.pages, 0, index, out=staged)
            host = staged.to("cpu", copy=True)  # waits for this stream
        return host.view(-1, self.num_layers, self.top_k).numpy()

    def _reading(self) -> AbstractContextManager[Any]:
        if self._streams is None or self._stream is None:
            return nullcontext()
        return self._streams.stream(self._stream)
