"""How a source of weights reaches the workers.

Invariants: each rank reads files, maps memory and receives broadcasts for itself; only what came in frames of
a message is sent on. The result of a source is the same on every rank, whichever way it took.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode, TensorSpec
from ...io_struct.weights import UpdateWeightsFromDistributedReqInput
from ..memory.storage import bytes_of
from ..weights.source import BufferSource, ComponentSource, SharedMemory, WeightSource
from ..weights.transports.disk import Checkpoint
from ..weights.transports.distributed import DistributedSource


class Folder(msgspec.Struct, kw_only=True, tag=True):
    path: str
    digest: str
    """Digest of the files that rank 0 has found; other files are refused."""


class Buffers(msgspec.Struct, kw_only=True, tag=True):
    """Tensors in memory that another process shares, or in the frames of the call."""

    name: str
    specs: list[TensorSpec]
    memory: SharedMemory | None


class Broadcast(msgspec.Struct, kw_only=True, tag=True):
    request: UpdateWeightsFromDistributedReqInput


Source = Folder | Buffers | Broadcast


def described(source: WeightSource) -> tuple[Source, Sequence[bytes | memoryview]]:
    """Return what a worker opens ``source`` by, and the frames that go with it.

    Raises:
        CaesuraError: ``unsupported``, no worker can open it.
    """
    if isinstance(source, Checkpoint):
        return Folder(path=str(source.path), digest=source.digest), ()
    if isinstance(source, DistributedSource):
        # Rank 0 alone relays: the engines behind it are in a group of its own.
        return Broadcast(request=msgspec.structs.replace(source.request, relay_to=None)), ()
    if isinstance(source, BufferSource):
        frames = [_on_host(each) for each in source.buffers] if source.memory is None else []
        return Buffers(name=source.name, specs=source.specs, memory=source.memory), frames
    assert not isinstance(source, ComponentSource), "models of several components have one rank"
    raise CaesuraError(ErrorCode.UNSUPPORTED, f"updates by {source.name} are not built for several ranks")


def _on_host(buffer: memoryview | Tensor) -> memoryview:
    if isinstance(buffer, Tensor):
        return memoryview(bytes_of(buffer.to(torch.device("cpu"))))
    return buffer
