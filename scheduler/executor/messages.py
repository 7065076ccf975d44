"""What rank 0 and its workers say to each other: calls one way, answers the other, each a msgpack header and frames of bytes.

Invariants:
- Every call has a number, and calls are executed in the order of their numbers. Each gets one answer, except plans, whose
  answers come when their step has ended.
- Both ends are the same version of Caesura: a worker of another one is refused when it joins.
- Nothing is unpickled.
"""

from typing import Any

import msgspec

from ...io_struct import CaesuraError, CudaIPCHandle, ErrorCode, MemoryTag, SharedMemoryHandle, TensorSpec
from ...io_struct.weights import InitWeightsUpdateGroupReqInput, UpdateWeightsFromDistributedReqInput
from ..runtime.config import EngineConfig


class Join(msgspec.Struct, kw_only=True, tag=True):
    """A worker's first words."""

    rank: int
    pid: int
    host: str
    """Name of its machine, with the boot that it is in."""
    version: str


class Answer(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    """What became of a call."""

    number: int
    failure: "Failure | None" = None
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    memory: "Memory | None" = None
    """A reading, where one is worth its time."""


class Offer(msgspec.Struct, kw_only=True, tag=True):
    """A number of which the group wants the smallest; answered by :class:`Agreed`."""

    value: int


class Failure(msgspec.Struct, kw_only=True):
    """An exception, as another process can raise it."""

    message: str
    code: str = ErrorCode.INTERNAL
    detail: dict[str, Any] = {}
    out_of_memory: bool = False
    typed: bool = False
    """It was a :class:`CaesuraError`, whose words are for the client."""
    follows: bool = False
    """It says only that another rank has failed."""


class Memory(msgspec.Struct, kw_only=True, array_like=True):
    """One look at a rank's allocator, in bytes."""

    reserved: int
    allocated: int
    available: int | None


class Refused(msgspec.Struct, kw_only=True, tag=True):
    """The worker that has said :class:`Join` is not taken."""

    message: str


class Start(msgspec.Struct, kw_only=True, tag=True):
    """Build what a rank is made of, and answer when steps can come."""

    number: int
    config: EngineConfig
    folder: str | None
    """Where the weights are, if not in the configuration's folder."""
    group: str
    """How to reach the group, as ``collectives.py`` has it."""
    sharing: int
    """Ranks on the machine of this one."""


class Agreed(msgspec.Struct, kw_only=True, tag=True):
    """The smallest of what all ranks have offered."""

    value: int


class Step(msgspec.Struct, kw_only=True, tag=True):
    """Execute a step; one frame follows with its arrays (``plans.py``)."""

    number: int
    plan: msgspec.Raw


class SetLastTokens(msgspec.Struct, kw_only=True, tag=True):
    """See :meth:`~..forward.Runner.set_last_tokens`."""

    number: int
    slots: list[int]
    tokens: list[int]


class Synchronize(msgspec.Struct, kw_only=True, tag=True):
    """Answer when every step before has left the device."""

    number: int


class Recover(msgspec.Struct, kw_only=True, tag=True):
    """A step has failed on some rank: form the group again, and drop the graphs that hold its connections."""

    number: int


class Folder(msgspec.Struct, kw_only=True, tag=True):
    """A checkpoint that every rank reads for itself."""

    path: str
    digest: str
    """The files that rank 0 has found there; others are refused."""


class Buffers(msgspec.Struct, kw_only=True, tag=True):
    """Tensors in the frames that follow."""

    name: str
    specs: list[TensorSpec]


class Shared(msgspec.Struct, kw_only=True, tag=True):
    """Tensors in memory that another process shares."""

    name: str
    specs: list[TensorSpec]
    handle: SharedMemoryHandle | CudaIPCHandle
    start: int
    nbytes: int


class Broadcast(msgspec.Struct, kw_only=True, tag=True):
    """Tensors that a trainer broadcasts to every rank."""

    request: UpdateWeightsFromDistributedReqInput


Source = Folder | Buffers | Shared | Broadcast


class Open(msgspec.Struct, kw_only=True, tag=True):
    """Open and check a source of weights; answered when its first piece is here, and nothing is written yet."""

    number: int
    source: Source
    fresh: bool
    """No tensor has been written since the last commit, or since a failure."""


class Write(msgspec.Struct, kw_only=True, tag=True):
    """Write all of the source that is open. The answer's value is the names of those tensors that differed from what was there."""

    number: int


class Abandon(msgspec.Struct, kw_only=True, tag=True):
    """Break off what is under way; answered when nothing is written any more."""

    number: int


class Derive(msgspec.Struct, kw_only=True, tag=True):
    """Derive what depends on several parameters, and be ready for a commit."""

    number: int
    check_finite: bool


class Keep(msgspec.Struct, kw_only=True, tag=True):
    """Copy the values of those tags to the host that are backed up."""

    number: int
    tags: list[MemoryTag]


class GiveUp(msgspec.Struct, kw_only=True, tag=True):
    """Drop the copies of these tags, which are resident: they are not released after all."""

    number: int
    tags: list[MemoryTag]


class Release(msgspec.Struct, kw_only=True, tag=True):
    """Give the memory of these tags back to the system."""

    number: int
    tags: list[MemoryTag]


class Resume(msgspec.Struct, kw_only=True, tag=True):
    """Take the memory of these tags again, all of it or none."""

    number: int
    tags: list[MemoryTag]


class Capture(msgspec.Struct, kw_only=True, tag=True):
    """Capture the graphs that a release or :class:`Recover` has dropped."""

    number: int


class EmptyCache(msgspec.Struct, kw_only=True, tag=True):
    """Return the allocator's unused blocks. The answer's value is what was reserved before and after."""

    number: int
    place: str


class Checksums(msgspec.Struct, kw_only=True, tag=True):
    """The answer's value is a checksum of each parameter and derived tensor by name."""

    number: int


class Read(msgspec.Struct, kw_only=True, tag=True):
    """The answer's value is a list of :class:`~..weights.reading.Held`, what this rank holds of each of these tensors."""

    number: int
    names: list[str]


class ResetTensors(msgspec.Struct, kw_only=True, tag=True):
    """Overwrite all weights."""

    number: int


class JoinGroup(msgspec.Struct, kw_only=True, tag=True):
    """Join a trainer's process group; the rank in it is rank 0's and this one's own together."""

    number: int
    request: InitWeightsUpdateGroupReqInput


class LeaveGroup(msgspec.Struct, kw_only=True, tag=True):
    """Leave it, in whatever state; ``reason`` as of :meth:`WeightsUpdateGroups.out_of_step`, None: it is destroyed."""

    number: int
    name: str
    reason: str | None


class Stop(msgspec.Struct, kw_only=True, tag=True):
    """End the process."""


Call = (
    Start
    | Step
    | SetLastTokens
    | Synchronize
    | Recover
    | Open
    | Write
    | Abandon
    | Derive
    | Keep
    | GiveUp
    | Release
    | Resume
    | Capture
    | EmptyCache
    | Checksums
    | Read
    | ResetTensors
    | JoinGroup
    | LeaveGroup
)
encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call | Agreed | Refused | Stop).decode
decode_said = msgspec.msgpack.Decoder(Join | Offer | Answer).decode


def failure_of(error: BaseException, *, out_of_memory: bool, follows: bool = False) -> Failure:
    """What :meth:`error_of` raises elsewhere."""
    if isinstance(error, CaesuraError):
        return Failure(
            message=error.message,
            code=error.code,
            detail=msgspec.to_builtins(error.detail, str_keys=True),
            out_of_memory=out_of_memory or error.code == ErrorCode.OUT_OF_MEMORY,
            typed=True,
            follows=follows,
        )
    return Failure(
        message=f"{type(error).__name__}: {error}",
        code=ErrorCode.OUT_OF_MEMORY if out_of_memory else ErrorCode.INTERNAL,
        out_of_memory=out_of_memory,
        follows=follows,
    )
