"""A source of weights, as another rank opens it for itself, or as it is sent to it.

Invariants: files are read, memory is mapped and broadcasts are received by each rank; only what came in frames of a message is sent
on. The result of a source is the same on every rank, whichever way it took.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..memory.storage import bytes_of
from ..weights.components import ComponentSource
from ..weights.source import BufferSource, WeightSource
from ..weights.transports.disk import DiskSource
from ..weights.transports.distributed import DistributedSource
from .messages import Broadcast, Buffers, Folder, Shared, Source


def described(source: WeightSource) -> tuple[Source, Sequence[bytes | memoryview]]:
    """What tells another rank of ``source``, and the frames that go with it.

    Raises:
        CaesuraError: ``unsupported``, no other rank can open it.
    """
    if isinstance(source, DiskSource):
        return Folder(path=source.path, digest=source.digest), ()
    if isinstance(source, DistributedSource):
        # Rank 0 alone relays: the engines behind it are in a group of its own.
        return Broadcast(request=msgspec.structs.replace(source.request, relay_to=None)), ()
    if isinstance(source, BufferSource):
        memory = source.memory
        if memory is not None:
            shared = Shared(
                name=source.name,
                specs=source.specs,
                handle=memory.handle,
                start=memory.start,
                nbytes=memory.nbytes,
            )
            return shared, ()
        return Buffers(name=source.name, specs=source.specs), [_on_host(each) for each in source.buffers]
    assert not isinstance(source, ComponentSource), "models of several components have one rank"
    raise CaesuraError(ErrorCode.UNSUPPORTED, f"updates by {source.name} are not built for several ranks")


def _on_host(buffer: memoryview | Tensor) -> memoryview:
    if isinstance(buffer, Tensor):
        return memoryview(bytes_of(buffer.to(torch.device("cpu"))))
    return buffer
