"""Weight updates: sessions, four transports and the checker (semantics: docs/reference/lifecycle.md); LoRA
adapters (docs/howto/adapters.md).
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from .base import FolderPath, Identifier, Label, Record, Reply, ReplyRecord, SessionId, TensorSpec
from .control import ControlRequest, PositiveDuration, WeightsState

DEFAULT_GROUP_NAME = "weight_update_group"
"""SGLang's default."""
GroupName = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
ReportKind = Literal["off", "sampled", "full"]
OnRunning = Literal["finish_old", "retract", "keep"]
CheckerAction = Literal["checksum", "snapshot", "compare", "reset_tensors"]
BroadcastSizes = Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(min_length=1)]
DEFAULT_BROADCAST_TIMEOUT_S = 300.0
"""Longest time between two broadcasts of an update: a trainer may gather a tensor from its ranks."""
PRESENT = "caesura/present/"
"""Key under which a rank of an NCCL group says in the store that it is there; its number follows. If rank 0
says it, each engine waits for all ranks before it replies to the init."""
DEFAULT_BUCKET_BYTES = 64 << 20
"""Default size of the bucket that one call of the tensor and ipc transports carries."""


class BeginWeightUpdateReqInput(ControlRequest, kw_only=True):
    """Open an explicit weight update session; ``end`` commits all its calls together."""

    manifest: list[TensorSpec] | None = None
    """All tensors of the checkpoint, checked now, required by ``end``. None: each call is checked alone."""
    component: Label | None = None
    deadline_s: PositiveDuration | None = None
    """Seconds after which the session is aborted. None means the engine's ``session_deadline_s``."""


class BeginWeightUpdateReqOutput(Reply, kw_only=True):
    """The session is open."""

    session_id: str
    """Session id for its calls and its ``end``; for them the ``id`` of ``begin`` is another name of it."""
    weights_epoch: int


class EndWeightUpdateReqInput(ControlRequest, kw_only=True):
    """Commit, with a flush if any call asked, or abort, which poisons the weights if a byte was written."""

    commit: bool = True
    """True: commit; refused while tensors of the manifest or rows of a tensor are missing. False: abort."""
    session_id: Identifier | None = None
    """The session. None means the implicit one that this sender's own calls opened."""
    force: bool = False
    """With ``commit=False``: abort whatever session is open, as the successor of a dead trainer does."""
    weight_version: Label | None = None
    """The new version label. None means the last one sent within the session, if any."""


class StageTimes(ReplyRecord, kw_only=True, frozen=True):
    """Seconds spent in each stage of an update."""

    receive: float = 0.0
    """Reading files or receiving buffers."""
    copy: float = 0.0
    """Writing parameters in place, including the comparison for the changed count."""
    derive: float = 0.0
    """``finalize_weights`` at commit."""
    flush: float = 0.0
    """Freeing stale KV and emptying the device allocator's cache."""
    total: float = 0.0
    """Wall time from accepting the call to its reply, including other work of the loop meanwhile."""


class TensorChange(ReplyRecord, kw_only=True, frozen=True):
    """Change of a group of tensors."""

    elements: int
    """Number of elements."""
    changed: float
    """Share of them whose bits changed."""
    norm: float
    """Frobenius norm of the change."""
    rel_norm: float
    """The norm over that of the values before."""


class UpdateReport(ReplyRecord, kw_only=True, frozen=True):
    """Changes by an update; ``full`` or as an estimate."""

    total: TensorChange
    groups: dict[str, TensorChange]
    """By part of the model: ``attention``, ``mlp``, ``experts``, ``norms``, ``embeddings``, ``head``, else
    ``others``. Tensors that the engine quantises itself are in none."""
    unchanged: list[str] = []
    """Names of the first 20 tensors whose bytes were the same."""
    unchanged_tensors: int = 0
    """Number of these tensors."""
    sampled: bool = False
    """True: figures are estimates, by a selection of the elements."""


class WeightUpdateReqOutput(Reply, kw_only=True):
    """The reply to every update call and to ``end``."""

    committed: bool
    """True: these weights are in use now. False: the session is still open, or was aborted."""
    session_id: SessionId | None = None
    """The session that is still open, explicit or implicit. None means that none is open."""
    weights: WeightsState
    """State of the weights after this call, as in status."""
    weights_epoch: int
    weight_version: str
    written_tensors: int
    """Checkpoint tensors written by this call (for ``end``: by the session)."""
    written_bytes: int
    """Bytes of these tensors as received: before any cast, unchanged ones included."""
    changed_tensors: int
    """How many of them differ from the previous values."""
    cast_tensors: int
    """How many were cast from another float dtype, as in a cold load."""
    skipped_tensors: int
    """Tensors that the model ignores (rotary buffers, a tied lm_head, …)."""
    flushed: bool
    """True: this call flushed the prefix cache."""
    stages: StageTimes
    digest: str = ""
    """Digest of the weights as last committed, in hex. Empty: the engine keeps none (``weights_digest``)."""
    report: UpdateReport | None = None
    """Changes by the update; None if no report was asked for, and before the commit."""
    durable: bool | None = None
    """True: the state file has this commit. False: a restart is ``invalid``. None: no commit, or no file."""
    switched: int = 0
    """Samples that went on with a new version of an adapter, which the session had loaded."""
    relay_error: str | None = None
    """Why engines behind ``relay_to`` did not get everything; None if they did, or there are none."""


class DeltaBase(Record, kw_only=True, frozen=True):
    """Weights that a delta changes, else ``base_mismatch``: nothing is written."""

    base_epoch: int | None = None
    """Their ``weights_epoch``. None: not compared."""
    base_digest: Label | None = None
    """Their digest. None: not compared."""
    base_version: Label | None = None
    """Their ``weight_version``. None: not compared."""
    digest: Label | None = None
    """Digest of the weights after the delta, computed before the first write. None: not compared."""


class WeightUpdateOptions(ControlRequest, kw_only=True):
    """Fields of every update call."""

    delta: DeltaBase | None = None
    """Weights of which the call changes some elements or tensors. It is received, checked and staged on the
    host while generation goes on, and the session's commit writes it. None: the call writes tensors."""

    session_id: Identifier | None = None
    """The open session of this call. None: an explicit session refuses the call as ``session_open``; while
    paused, such calls of one sender (``owner``, else its socket) form an implicit session."""
    flush_cache: bool = True
    """While running: True retracts requests and flushes the prefix cache; False freezes them with KV."""
    torch_empty_cache: bool = False
    """True: the commit of the session empties the device allocator's cache."""
    weight_version: Label | None = None
    """The new version label, set at commit. None means unchanged."""
    component: Label | None = None
    """Folder of a diffusion pipeline's component: ``text_encoder``, ``vae``, …; None: its transformer."""
    abort_all_requests: bool = False
    """True: abort every request, after the call has been checked and its first tensor has arrived."""
    report: ReportKind | None = None
    """Say in the commit's reply what was changed: ``full``, or by a selection of elements, ``sampled``. None
    means the engine's ``update_report``."""
    min_changed: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Least share of the elements that changes. None means the engine's ``min_changed``."""
    max_rel_norm: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Largest norm of the change of a group of tensors, over that of their values. None: the engine's."""
    refuse_beyond: bool | None = None
    """Beyond these bounds: True refuses the update (``update_refused``), False warns. None: the engine's."""


class RollbackWeightsReqInput(ControlRequest, kw_only=True):
    """Return to the weights, and their label, before the last commit, which must have been a delta's.

    Their old values are kept on the host until the next update, failure or release of weights; then it is
    ``no_rollback``. Replied as an update: the epoch is a new one.
    """

    to_digest: Label | None = None
    """Digest of the weights to return to, else ``no_rollback``. None: not compared."""
    flush_cache: bool = True
    """Same as of an update: retract requests and flush, or freeze them with KV."""
    torch_empty_cache: bool = False
    """True: the device allocator's cache is emptied, too."""


class UpdateWeightFromDiskReqInput(WeightUpdateOptions, kw_only=True):
    """Load a checkpoint folder in place; headers are checked before the first byte is written."""

    model_path: FolderPath
    """Folder with config.json and *.safetensors, as seen by the engine's process. One with delta.safetensors
    is a delta, of the base that it names unless ``delta`` does."""
    load_format: Label | None = None
    """None, ``"auto"`` or ``"safetensors"``; other formats are not supported."""


class UpdateWeightsFromTensorReqInput(WeightUpdateOptions, kw_only=True):
    """Tensors in the frames after the header: one per frame, or many in one ("flattened bucket")."""

    specs: list[TensorSpec]
    """Names, dtypes, shapes and places of the tensors. A tensor can come in pieces, in row order."""


class SharedMemoryHandle(Record, kw_only=True, frozen=True, tag=True):
    """Sender's memfd (``/proc/{pid}/fd/{fd}``), sealed against shrinking (which would crash) and growing."""

    pid: Annotated[int, msgspec.Meta(gt=0)]
    """Process id of the sender, in the engine's pid namespace."""
    fd: Annotated[int, msgspec.Meta(ge=0)]
    """Descriptor of the memfd in the sender; stays open until the engine has answered."""
    inode: int
    """Inode number of the memfd, from ``fstat``; a different file is refused."""
    nbytes: Annotated[int, msgspec.Meta(gt=0)]
    """Size of the memfd in bytes, exactly."""


class CudaIPCHandle(Record, kw_only=True, frozen=True, tag=True):
    """CUDA memory of a process of the host, as torch's rebuilt storage; checked before the driver sees it."""

    device_uuid: Annotated[str, msgspec.Meta(max_length=64)]
    """UUID of the device of the memory, as in ``torch.cuda.get_device_properties(i).uuid``."""
    handle: Annotated[bytes, msgspec.Meta(min_length=1, max_length=256)]
    """The driver's opaque IPC handle."""
    nbytes: Annotated[int, msgspec.Meta(gt=0)]
    """Size of the storage in bytes."""
    offset: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes from the start of the exported allocation to the storage."""
    ref_counter_handle: Annotated[bytes, msgspec.Meta(max_length=256)]
    """Name of the shared reference counter, which tells the exporting process of the release."""
    ref_counter_offset: Annotated[int, msgspec.Meta(ge=0)]
    """Index of the counter under that name, below 10,000."""
    event_handle: Annotated[bytes, msgspec.Meta(max_length=256)]
    """Event to wait for before reading; empty means none."""
    event_sync_required: bool
    """True: reading waits for ``event_handle``, which has 64 bytes then."""


class UpdateWeightsFromIPCReqInput(WeightUpdateOptions, kw_only=True):
    """Tensors in memory shared by a process of the same host and user, free for reuse after the reply."""

    handle: SharedMemoryHandle | CudaIPCHandle
    """The shared memory with all tensors of this call. CUDA memory requires an engine on the same device."""
    specs: list[TensorSpec]
    """Names, dtypes, shapes and places of the tensors. A tensor can come in pieces, in row order."""


class UpdateWeightsFromCheckpointEngineReqInput(WeightUpdateOptions, kw_only=True):
    """Let a checkpoint-engine server run a whole update: SGLang's ``update_weights_from_ipc``.

    Replied after the last bucket; ``unsupported`` without ``allow_legacy_pickle``, though pickles are only
    parsed.
    """

    zmq_handles: dict[str, str]
    """Device UUID (``"cpu"`` of a CPU engine) to the ``ipc://`` address of the server's REQ socket."""
    timeout_s: PositiveDuration = 300.0
    """Maximum seconds without a message from the server."""


class InitWeightsUpdateGroupReqInput(ControlRequest, kw_only=True):
    """Join the torch.distributed group whose rank 0 broadcasts weights; replied when all ranks have.

    The group is PyTorch's own: a ``tcp://`` rendezvous at the master with ``PrefixStore(group_name)``. Rank 0
    is a trainer, or an engine that sends or relays. The same init again is answered at once; too many groups
    that wait for their ranks are ``queue_full``.
    """

    master_address: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    """Host of the process that holds the store, which an engine never does."""
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    """TCP port of the store."""
    rank_offset: Annotated[int, msgspec.Meta(ge=0)]
    """Rank of this engine; below ``world_size``. As rank 0 it sends, as any other it receives."""
    world_size: Annotated[int, msgspec.Meta(ge=2)]
    """Number of ranks in the group, rank 0 included; at most 16,384."""
    group_name: GroupName = DEFAULT_GROUP_NAME
    """Name of the group in later calls, and prefix of its keys in the store; the same for all ranks."""
    backend: Literal["gloo", "nccl", "vllm_nccl"] | None = None
    """None means nccl on CUDA, else gloo. All ranks must use the same. ``vllm_nccl``: vLLM's communicator."""
    nccl_unique_id: Annotated[bytes, msgspec.Meta(min_length=128, max_length=128)] | None = None
    """``vllm_nccl``: id of the communicator, by which ranks meet without a store: the address is not used."""
    timeout_s: PositiveDuration = 60.0
    """Maximum seconds for all ranks to join."""
    broadcast_timeout_s: PositiveDuration = DEFAULT_BROADCAST_TIMEOUT_S
    """Maximum seconds for each broadcast; after a timeout the group is dead: destroy and create it again."""


class InitWeightsUpdateGroupReqOutput(Reply, kw_only=True):
    """Every rank has joined."""

    rank: int
    """Rank of this engine in the group."""
    world_size: int
    """Number of ranks in the group, rank 0 included."""


class DestroyWeightsUpdateGroupReqInput(ControlRequest, kw_only=True):
    """Leave a weight update group. An unknown group is ``group_error``."""

    group_name: GroupName = DEFAULT_GROUP_NAME


class DestroyWeightsUpdateGroupReqOutput(Reply, kw_only=True):
    """The group is gone."""


class UpdateWeightsFromDistributedReqInput(WeightUpdateOptions, kw_only=True):
    """Tensors that rank 0 of a group broadcasts while this call runs, in the order of ``specs``."""

    specs: list[TensorSpec]
    """Names, shapes and dtypes; whole tensors only, offsets are ignored."""
    group_name: GroupName = DEFAULT_GROUP_NAME
    load_format: Literal["flattened_bucket"] | None = None
    """Layout of the broadcasts. None means one for each tensor; ``flattened_bucket``: one of all tensors'
    bytes, without padding."""
    tensors_per_broadcast: BroadcastSizes | None = None
    """With ``flattened_bucket``: number of tensors in each broadcast, in order. None means all in one."""
    relay_to: GroupName | None = None
    """Group with this engine as rank 0 to relay to (``relay_error``); ends if this call fails. None: none."""


class GetWeightsManifestReqInput(ControlRequest, kw_only=True):
    """Return names, shapes and dtypes of the weights as stored: what ``SendWeightsReqInput`` can send."""

    component: Label | None = None


class StoredTensor(ReplyRecord, kw_only=True, frozen=True):
    """A tensor of the checkpoint as an engine stores it."""

    name: str
    """Name of the tensor in the checkpoint."""
    dtype: str
    """Safetensors name of the stored type, which may not be the checkpoint's."""
    shape: list[int]
    nbytes: int
    """Size in bytes."""

    def spec(self) -> TensorSpec:
        """Return the spec by which messages name the tensor."""
        return TensorSpec(name=self.name, dtype=self.dtype, shape=self.shape, nbytes=self.nbytes)


class GetWeightsManifestReqOutput(Reply, kw_only=True):
    """The tensors of a complete update."""

    tensors: list[StoredTensor]
    """In the order of the model."""
    weights_epoch: int
    weight_version: str


class SendWeightsReqInput(ControlRequest, kw_only=True):
    """Broadcast the weights of one commit as rank 0 of a group, while generation goes on.

    The others use ``UpdateWeightsFromDistributedReqInput``. Commands that would change or release the weights
    wait; invalid weights are refused; a failed call ends the group.
    """

    specs: list[TensorSpec]
    """Tensors as stored (``GetWeightsManifestReqInput``), in sending order; else ``weight_mismatch``."""
    group_name: GroupName = DEFAULT_GROUP_NAME
    load_format: Literal["flattened_bucket"] | None = None
    tensors_per_broadcast: BroadcastSizes | None = None
    component: Label | None = None


class SendWeightsReqOutput(Reply, kw_only=True):
    """Every receiver has got everything."""

    weights_epoch: int
    weight_version: str
    sent_tensors: int
    """Number of tensors."""
    sent_bytes: int
    """Their bytes, counted once however many receivers there are."""
    seconds: float
    """From the first byte that was read to the end of the last broadcast."""


class WeightsCheckerReqInput(ControlRequest, kw_only=True):
    """Compute checksums of the weights, or compare the weights with a snapshot of their checksums."""

    action: CheckerAction = "checksum"
    """``checksum`` of all weights; ``snapshot``: also store them; ``compare`` with it; ``reset_tensors`` to
    NaN (integers to 0), which poisons the weights."""


class WeightsCheckerReqOutput(Reply, kw_only=True):
    """Result of the weights checker."""

    OF_GROUP: ClassVar = {"checksums": "first", "changed": "united"}
    checksums: dict[str, str] = {}
    """``checksum`` and ``snapshot``: parameter or derived buffer to the BLAKE2b-128 of its bytes, in hex."""
    total: str = ""
    """``checksum``, ``snapshot`` and ``compare``: one checksum over all of them. Otherwise empty."""
    changed: list[str] = []
    """``compare``: names whose bytes differ from the snapshot."""


class LoadAdapterReqInput(ControlRequest, kw_only=True):
    """Load an adapter while generation goes on, or replace the one of this name, at a step boundary.

    It is checked before its first byte is read; a failed load changes nothing.
    """

    name: Identifier
    """Name that generate requests choose it by."""
    path: FolderPath | None = None
    """Folder with adapter_config.json and adapter_model.safetensors, as PEFT saves them. None means that
    tensors come with the message."""
    config: dict[str, Any] | None = None
    """The content of adapter_config.json. None means that ``path`` has it."""
    specs: list[TensorSpec] = []
    """Tensors by the names of adapter_model.safetensors, unless ``path`` has them."""
    handle: SharedMemoryHandle | None = None
    """Shared memory of the same host and user with all tensors, free for reuse after the reply. None means
    that they are frames of the message, in ``path``, or come from a group."""
    group_name: GroupName | None = None
    """Weight update group whose rank 0 broadcasts the tensors one by one, in the order of ``specs``, during
    the call. A call that fails before it has all of them ends the group. None: no group."""
    expected_checksums: dict[str, str] | None = None
    """SHA-256 of every tensor's bytes, in hex; ``weight_mismatch`` if one differs. None: not compared."""
    replace: bool = True
    """False: refuse (``adapter_exists``) if an adapter of this name is loaded."""
    session_id: Identifier | None = None
    """Explicit session whose commit makes the name mean this version; a commit of adapters alone leaves the
    weights' label and epoch as they are. None: at once."""
    adapter_epoch: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)] | None = None
    """Number of this version, as several engines with the same adapters count. None: the engine's next."""
    evict: list[Identifier] = []
    """Adapters to unload when it counts, if they are loaded. More are only if there is no room."""
    pinned: bool = False
    """True: it is never unloaded to make room for another."""
    on_running: OnRunning = "finish_old"
    """Fate of samples of the replaced version. ``finish_old``: they end with it. ``retract``: they go on with
    the new one, and their KV is computed again. ``keep``: likewise, over the KV that they have."""


class LoadAdapterReqOutput(Reply, kw_only=True):
    """The adapter serves all requests that arrive from now on."""

    adapter_epoch: int
    """Number of this version: the engine's count of loaded adapters."""
    tensors: int
    """Number of tensors that were read."""
    changed_tensors: int
    """Tensors that differ, or whose scale does, from those of the version before; all, if there was none."""
    norm: float
    """Frobenius norm of the change of the weights, over all modules; 0 for an adapter without effect."""
    rank: int
    """Largest rank of its modules."""
    evicted: list[str] = []
    """Names of the adapters that were unloaded to make room."""
    switched: int = 0
    """Samples that went on with the new version; of a session, the reply to its commit counts them."""
    digest: str = ""
    """BLAKE2b-128 of all tensors and their scales, in hex: equal for equal adapters."""


class UnloadAdapterReqInput(ControlRequest, kw_only=True):
    """Unload an adapter. Requests that have it end with it; new ones are refused at once."""

    name: Identifier
    """Name that it was loaded by."""


class UnloadAdapterReqOutput(Reply, kw_only=True):
    """No new request can have the adapter."""

    running: int
    """Samples that still end with it."""
