"""Weight updates: sessions, the four transports and the checker (semantics: docs/lifecycle.md)."""

from typing import Annotated, Literal

import msgspec

from .base import FolderPath, Identifier, Label, Record, Reply, ReplyRecord, SessionId, TensorSpec
from .control import ControlRequest, PositiveDuration

DEFAULT_GROUP_NAME = "weight_update_group"
"""SGLang's."""

DEFAULT_BUCKET_BYTES = 64 << 20
"""What a sender puts into one call of the tensor and ipc transports unless told otherwise."""


class BeginWeightUpdateReqInput(ControlRequest, kw_only=True):
    """Open an explicit session; what follows is committed together by ``end``."""

    manifest: list[TensorSpec] | None = None
    """All tensors of the checkpoint: checked at once, nothing may be missing, and required by ``end``. None: each call is
    checked on its own, and a part of the checkpoint will do."""
    deadline_s: PositiveDuration | None = None
    """Abort the session after this long. None: the engine's default."""


class BeginWeightUpdateReqOutput(Reply, kw_only=True):
    """The session is open."""

    session_id: str
    """Names the session: every call that belongs to it and its ``end`` carry it. The ``id`` of the ``begin`` message names it, too,
    for those who gave up waiting for this answer."""
    weights_epoch: int
    """The epoch before the session."""


class EndWeightUpdateReqInput(ControlRequest, kw_only=True):
    """Close the session: commit it, or abort it (valid if nothing was written, else poisoned).

    The prefix cache is flushed at commit if any call of the session asked for it.
    """

    commit: bool = True
    """True: commit; refused, and the session stays open, while a tensor of the manifest or rows of one that was begun are
    missing. False: abort."""
    session_id: Identifier | None = None
    """Which session, explicit or implicit. None: the implicit session that this sender's own calls opened."""
    force: bool = False
    """Abort whatever session is open, whoever opened it and whatever ``session_id`` says; only with ``commit=False``. For the
    successor of a dead trainer."""
    weight_version: Label | None = None
    """The new public label. None: the last one sent within the session, else unchanged."""


class StageTimes(ReplyRecord, kw_only=True, frozen=True):
    """Seconds spent per stage of an update."""

    receive: float = 0.0
    """Reading files or taking buffers off the wire."""
    copy: float = 0.0
    """Writing parameters in place, comparison for the changed count included."""
    derive: float = 0.0
    """``finalize_weights`` at commit."""
    flush: float = 0.0
    """Dropping stale KV and emptying the allocator."""
    total: float = 0.0
    """Wall time from accepting the call to its reply, other work of the loop in between included."""


class WeightUpdateReqOutput(Reply, kw_only=True):
    """The answer to every update call and to ``end``."""

    committed: bool
    """True: these weights serve now. False: the session is still open, or was aborted."""
    session_id: SessionId | None = None
    """The session that is still open for more, by explicit ``begin`` or implicitly. None: none is."""
    weights: Literal["valid", "updating", "poisoned", "invalid"]
    """State of the weights after this call, as in status."""
    weights_epoch: int
    """Weights epoch after this call."""
    weight_version: str
    """The public label after this call."""
    written_tensors: int
    """Checkpoint tensors written by this call (for ``end``: by the session)."""
    written_bytes: int
    """Bytes of the rows that were written, as they came: before any cast, unchanged ones included."""
    changed_tensors: int
    """How many of them differed from what was there."""
    cast_tensors: int
    """How many were cast from another float dtype, as a cold load would."""
    skipped_tensors: int
    """Names this model ignores by its own list (rotary buffers, a tied lm_head, …)."""
    flushed: bool
    """True: the prefix cache was cleared by this call."""
    stages: StageTimes
    """Where the time of this call went (for ``end``: of the session)."""


class WeightUpdateOptions(ControlRequest, kw_only=True):
    """What every update call may say."""

    session_id: Identifier | None = None
    """The open session that this call belongs to. None: refused as ``session_open`` while an explicit one is open; while paused,
    such calls of one sender (``owner``, else its socket) make an implicit one."""
    flush_cache: bool = True
    """Running: retract requests and clear the cache. False: freeze them in place and go on with their old KV."""
    torch_empty_cache: bool = False
    """True: the commit of the session returns the allocator's unused blocks to the system."""
    weight_version: Label | None = None
    """The new public label, at commit. None: unchanged."""
    abort_all_requests: bool = False
    """True: every request ends as aborted, once the call has been checked and its first tensor is there."""


class UpdateWeightFromDiskReqInput(WeightUpdateOptions, kw_only=True):
    """Load a complete checkpoint folder in place. Every header is checked before the first byte is written."""

    model_path: FolderPath
    """Folder with config.json and *.safetensors, as the engine's process sees it."""
    load_format: Label | None = None
    """None, ``"auto"`` or ``"safetensors"``; nothing else is ever read."""


class UpdateWeightsFromTensorReqInput(WeightUpdateOptions, kw_only=True):
    """Tensors in the frames that follow the header: one per frame, or many in one ("flattened bucket"), as specs say."""

    specs: list[TensorSpec]
    """Which tensors lie where in the frames, whole or in pieces in row order."""


class SharedMemoryHandle(Record, kw_only=True, frozen=True, tag=True):
    """A memfd of the sender, opened by the engine through ``/proc/{pid}/fd/{fd}``: nothing has a name to leave behind.

    It must be sealed against shrinking and growing, so that no later truncation can fault the engine.
    """

    pid: Annotated[int, msgspec.Meta(gt=0)]
    """Process id of the sender, in the engine's pid namespace."""
    fd: Annotated[int, msgspec.Meta(ge=0)]
    """Descriptor of the memfd in the sender; stays open until the engine has answered."""
    inode: int
    """Inode number of the memfd, as ``fstat`` gives it; anything else under that descriptor is refused."""
    nbytes: Annotated[int, msgspec.Meta(gt=0)]
    """Size of the memfd in bytes, exactly."""


class CudaIPCHandle(Record, kw_only=True, frozen=True, tag=True):
    """Memory of a CUDA device, exported by another process of the same host: what torch's IPC rebuilds a storage from.

    Plain fields, checked before they reach the driver: the device must be the engine's own, sizes and offsets must fit.
    """

    device_uuid: Annotated[str, msgspec.Meta(max_length=64)]
    """Of the device that holds the memory, as ``torch.cuda.get_device_properties(i).uuid`` prints it."""
    handle: Annotated[bytes, msgspec.Meta(min_length=1, max_length=256)]
    """Opaque to everybody but the driver."""
    nbytes: Annotated[int, msgspec.Meta(gt=0)]
    """Bytes of the storage."""
    offset: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes from the start of the exported allocation to the storage."""
    ref_counter_handle: Annotated[bytes, msgspec.Meta(max_length=256)]
    """Name of the shared reference counter through which the exporting process learns that the storage was let go."""
    ref_counter_offset: Annotated[int, msgspec.Meta(ge=0)]
    """Index of the counter under that name, below 10,000."""
    event_handle: Annotated[bytes, msgspec.Meta(max_length=256)]
    """Event to wait for before reading; empty: none."""
    event_sync_required: bool
    """True: reading waits for ``event_handle``, which has 64 bytes then."""


class UpdateWeightsFromIPCReqInput(WeightUpdateOptions, kw_only=True):
    """Tensors in memory shared by a process of the same host and user; it may be reused once the reply is there."""

    handle: SharedMemoryHandle | CudaIPCHandle
    """The memory that all tensors of this call lie in; CUDA memory for an engine on that device only."""
    specs: list[TensorSpec]
    """Which tensors lie where in that memory, whole or in pieces in row order."""


class UpdateWeightsFromCheckpointEngineReqInput(WeightUpdateOptions, kw_only=True):
    """Let a checkpoint-engine parameter server drive a whole update: SGLang's ``update_weights_from_ipc``.

    The engine connects to the address of its own device, and answers when the server has sent its last bucket. Refused as
    ``unsupported`` unless the engine was started with ``allow_legacy_pickle``: that protocol's messages are pickles, which
    are parsed into plain fields, never executed.
    """

    zmq_handles: dict[str, str]
    """Device uuid to ``ipc://`` address of the server's REQ socket; a CPU engine's device is ``"cpu"``."""
    timeout_s: PositiveDuration = 300.0
    """Longest silence of the server."""


class InitWeightsUpdateGroupReqInput(ControlRequest, kw_only=True):
    """Join the process group over which a trainer broadcasts weights; answered when every rank has joined.

    The group is PyTorch's own: a ``tcp://`` rendezvous at the master's address with ``PrefixStore(group_name)``. The
    trainer is rank 0, this engine is rank ``rank_offset``. The same group twice is answered at once. Too many groups that
    wait for their ranks are ``queue_full``.
    """

    master_address: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    """Host name or IP address where rank 0 holds the store."""
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """TCP port of the store."""
    rank_offset: Annotated[int, msgspec.Meta(ge=1)]
    """Rank of this engine; below ``world_size``."""
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    """Number of ranks in the group, the trainer included; at most 16,384."""
    group_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] = DEFAULT_GROUP_NAME
    """Name of the group in later calls, and of its keys in the store; the same for all ranks."""
    backend: Literal["gloo", "nccl"] | None = None
    """None: nccl on CUDA, else gloo. All ranks must use the same."""
    timeout_s: PositiveDuration = 60.0
    """Longest wait for the other ranks to join, and later for each broadcast. A broadcast that times out leaves the group
    dead: destroy it and make it again."""


class InitWeightsUpdateGroupReqOutput(Reply, kw_only=True):
    """Every rank has joined."""

    rank: int
    """Rank of this engine in the group."""
    world_size: int
    """Number of ranks in the group, the trainer included."""


class DestroyWeightsUpdateGroupReqInput(ControlRequest, kw_only=True):
    """Leave a group. One that does not exist is ``group_error``."""

    group_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] = DEFAULT_GROUP_NAME
    """Name of the group to leave, joined or still joining."""


class DestroyWeightsUpdateGroupReqOutput(Reply, kw_only=True):
    """The group is gone."""


class UpdateWeightsFromDistributedReqInput(WeightUpdateOptions, kw_only=True):
    """Tensors that rank 0 of a group broadcasts while this call runs, in the order of ``specs``."""

    specs: list[TensorSpec]
    """Names, shapes and dtypes; whole tensors only, offsets are not looked at."""
    group_name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] = DEFAULT_GROUP_NAME
    """Name of the group that broadcasts; every rank must have joined it."""
    load_format: Literal["flattened_bucket"] | None = None
    """None: one broadcast per tensor. ``flattened_bucket``: one broadcast of uint8, the tensors' bytes one after the other
    without padding."""


class WeightsCheckerReqInput(ControlRequest, kw_only=True):
    """Prove what the weights are. ``snapshot`` keeps checksums, ``compare`` holds the weights against them."""

    action: Literal["checksum", "snapshot", "compare", "reset_tensors"] = "checksum"
    """``checksum``: of all weights. ``snapshot``: keep these, in place of earlier ones. ``compare``: name what differs from
    the snapshot; ``invalid_request`` without one. ``reset_tensors``: overwrite every parameter with NaN (integers with 0),
    which leaves the weights poisoned."""


class WeightsCheckerReqOutput(Reply, kw_only=True):
    """Result of a checker verb."""

    checksums: dict[str, str] = {}
    """``checksum`` and ``snapshot``: parameter or derived buffer name to 128-bit BLAKE2b of its bytes, hex. Otherwise empty."""
    total: str = ""
    """One checksum over all of them, by ``compare`` too; empty for ``reset_tensors``."""
    changed: list[str] = []
    """``compare``: names whose bytes differ from the snapshot."""
