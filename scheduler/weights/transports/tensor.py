"""Tensors in the frames of a ZeroMQ message.

Invariants: frames are read where libzmq put them (8-byte aligned, enough for every dtype) and never unpickled; they are
let go when the call has been answered. Of the messages of one update the sender has two under way, half a bucket each at
most, so one bucket per sender is in memory.
"""

from collections.abc import Sequence

from ....io_struct import UpdateWeightsFromTensorReqInput
from ..source import BufferSource


def open_frames(request: UpdateWeightsFromTensorReqInput, frames: Sequence[memoryview]) -> BufferSource:
    """The tensors of ``request``; raises CaesuraError ``invalid_request`` where a spec does not fit its frame."""
    return BufferSource("tensor", request.specs, frames)
