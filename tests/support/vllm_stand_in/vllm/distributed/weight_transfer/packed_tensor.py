"""vLLM's packed broadcasts: bytes of whole tensors, in chunks that end when they exceed the buffer."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

BUFFER_BYTES = 1 << 30


def packed_nccl_broadcast_producer(
    iterator: Iterator[Any], group: Any, src: int, post_iter_func: Callable[[Any], torch.Tensor]
) -> None:
    chunk: list[torch.Tensor] = []
    for item in iterator:
        chunk.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        if sum(part.numel() for part in chunk) > BUFFER_BYTES:
            group.broadcast(torch.cat(chunk), src=src)
            chunk = []
    if chunk:
        group.broadcast(torch.cat(chunk), src=src)
