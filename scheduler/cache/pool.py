"""KV storage: per layer, one K and one V tensor of pages, or one of latents.

Invariants:
- A page is [kv heads, page_size, head size], so that one head's keys within a page are contiguous; a page of
  latents, which all heads share, is [page_size, width].
- Addresses never change while the pool is resident: attention plans, kernels and captured graphs may keep
  them.
- On the CPU the storage is zero pages of the kernel until first written, so what is never used costs no
  memory.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..memory import residency
from ..runtime.config import PAGE_SIZE

if TYPE_CHECKING:
    from .state_pool import StatePool


class MHAPool:
    """K and V of multi-head (grouped-query) attention, a ``KVPool`` of ``forward.py``."""

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
        """``num_pages`` counts the scratch page 0, where padding rows may write; ``value_size`` is
        ``head_size`` by default.

        ``window_layers`` have ``window_pages`` instead, with a page table of their own.
        """
        value_size = head_size if value_size is None else value_size
        shape = (num_pages, kv_heads, page_size, head_size)
        if min(num_layers, value_size, *shape) < 1:
            raise ValueError(f"every size of a KV pool is at least 1, got {num_layers} layers of {shape}")
        self.page_size = page_size
        self.num_pages = num_pages
        self.window_pages = window_pages if window_layers else None
        self.states: StatePool | None = None
        """States of layers that keep one per sequence and no KV; whoever allocates it sets it."""

        def storage(layer: int, size: int) -> Tensor:
            pages = window_pages if layer in window_layers and window_pages is not None else num_pages
            return residency.allocate((pages, kv_heads, page_size, size), dtype, device)

        self._layers = [(storage(i, head_size), storage(i, value_size)) for i in range(num_layers)]
        # Views [pages, page_size, kv heads, head size]: one index_put of (page, offset) then writes [heads,
        # size] rows straight from a strided slice of a fused qkv, without a contiguous copy or an index per
        # head. Timed against index_copy on a flat view, copy included, in microseconds for 1, 64 and 1024
        # tokens: 8 x 128 in bf16 2.1, 25, 458 against 1.9, 26, 657; 4 x 32 in fp32 1.8, 7, 98 against 1.7, 6,
        # 70.
        self._by_slot = [(k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)) for k, v in self._layers]

    @classmethod
    def bytes_per_token(
        cls,
        num_layers: int,
        kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        value_size: int | None = None,
    ) -> int:
        sizes = head_size + (head_size if value_size is None else value_size)
        return num_layers * kv_heads * sizes * dtype.itemsize

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(t.shape) * t.element_size() for pair in self._layers for t in pair)

    def touch(self, nbytes: int) -> None:
        """Write zeros to about ``nbytes`` of the pages that are handed out first, which then have memory."""
        pages = self.num_pages * nbytes // self.nbytes  # of a layer with a window, at most all of them
        for pair in self._layers:
            for tensor in pair:
                tensor[:pages].zero_()

    def split_slots(self, kv_slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(pages, offsets)``, int64 [T] each: once per step, for :meth:`store_at`."""
        pages = torch.div(kv_slots, self.page_size, rounding_mode="floor")
        return pages, kv_slots - pages * self.page_size

    def store(self, layer: int, k: Tensor, v: Tensor, kv_slots: Tensor) -> None:
        """Write [T, kv heads, size], of any strides, to distinct ``kv_slots`` (int64 [T])."""
        pages, offsets = self.split_slots(kv_slots)
        self.store_at(layer, k, v, pages, offsets)

    def store_at(self, layer: int, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
        """Do as :meth:`store`, with the slots already split, which all layers of a step share."""
        k_slots, v_slots = self._by_slot[layer]
        k_slots.index_put_((pages, offsets), k)
        v_slots.index_put_((pages, offsets), v)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]


class MLAPool:
    """Latents of multi-head latent attention: what all heads' keys and values follow from, and the shared
    rotated key.

    DeepSeek-AI, 2024 (arXiv:2405.04434), section 2.1: (kv_lora_rank + qk_rope_head_dim) elements a token and
    layer.
    """

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
        """``width`` is kv_lora_rank + qk_rope_head_dim; ``num_pages`` counts the scratch page 0."""
        shape = (num_pages, page_size, width)
        if min(num_layers, *shape) < 1:
            raise ValueError(f"every size of a KV pool is at least 1, got {num_layers} layers of {shape}")
        self.page_size = page_size
        self.num_pages = num_pages
        self.window_pages: int | None = None
        self.states: StatePool | None = None
        self.width = width
        self._layers = [residency.allocate(shape, dtype, device) for _ in range(num_layers)]

    @classmethod
    def bytes_per_token(cls, num_layers: int, width: int, dtype: torch.dtype) -> int:
        return num_layers * width * dtype.itemsize

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        return sum(math.prod(t.shape) * t.element_size() for t in self._layers)

    def touch(self, nbytes: int) -> None:
        pages = self.num_pages * nbytes // self.nbytes
        for tensor in self._layers:
            tensor[:pages].zero_()

    def store(self, layer: int, latents: Tensor, kv_slots: Tensor) -> None:
        """Write ``latents`` ([T, width], pool dtype, any strides) to ``kv_slots`` (int64 [T])."""
        self._layers[layer].view(-1, self.width).index_copy_(0, kv_slots, latents)

    def layer(self, layer: int) -> Tensor:
        return self._layers[layer]
