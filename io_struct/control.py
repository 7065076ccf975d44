"""Pause, continue, flush, status: the control messages (semantics: docs/reference/lifecycle.md)."""

from typing import Annotated, ClassVar, Literal

import msgspec

from .base import Label, Reply, ReplyRecord, Request
from .distribution import Distribution
from .drift import DriftReport
from .images import ImageLoad

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: dict[PauseMode, str] = {
    "abort": "end all requests",
    "retract": "free their KV cache and requeue them",
    "in_place": "freeze them with their KV cache",
}
"""Treatment of the live requests, by mode."""
GenerationState = Literal["running", "pausing", "paused"]
WeightsState = Literal["valid", "updating", "poisoned", "invalid"]
MemoryState = Literal["resident", "released"]
LeaseAction = Literal["continue", "abort", "stay"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
MAX_DURATION_S = 86400.0
"""Maximum duration in a command: one day. Infinity and NaN are refused as well."""
Duration = Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION_S)]
PositiveDuration = Annotated[float, msgspec.Meta(gt=0, le=MAX_DURATION_S)]
Residency = Literal["resident", "offload", "layerwise"]
"""When a component is on the device: always; while it is used; while it is used, layer by layer."""
MAX_TRACE_STEPS = 1000
"""Steps after which a trace ends whatever was asked for: events stay in memory until it is written."""
TraceActivity = Literal["CPU", "GPU"]
TraceStage = Literal["prefill", "decode"]
TraceName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$", max_length=128)]
TraceSteps = Annotated[int, msgspec.Meta(ge=1, le=MAX_TRACE_STEPS)]
Version = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class HelloReqInput(Request, kw_only=True):
    """The first message of a connection; another major version is refused as ``version_mismatch``."""

    wire_major: Version
    """Major version of the client's wire; must equal the engine's."""
    wire_minor: Version
    """Minor version of the client's wire; the engine accepts any."""
    client: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Name and version of the client's software, for the engine's log. Empty means unknown."""


class HelloReqOutput(Reply, kw_only=True):
    """Version and incarnation of the engine."""

    wire_major: int
    """Major version of the engine's wire; equals the client's."""
    wire_minor: int
    """Minor version of the engine's wire; may be higher or lower than the client's."""
    incarnation: str
    """Random id of this start of the engine; another process knows no earlier requests."""
    version: str
    """Version of the engine's software."""
    pid: int
    """Process id of the engine, in its own pid namespace."""


class ControlRequest(Request, kw_only=True):
    """A command to the engine, as opposed to one generation."""

    owner: Label | None = None
    """Owner token of a pause; a command with it renews the pause's lease. None means no owner."""


class PauseGenerationReqInput(ControlRequest, kw_only=True):
    """Pause generation at the next step boundary. The reply is a barrier: no step is in flight any more.

    ``abort`` ends every request with its partial tokens. ``retract`` frees the KV cache of the requests and
    requeues them. ``in_place`` freezes them with their KV cache. Pausing a paused engine changes the mode.
    """

    mode: PauseMode = "abort"
    """Treatment of the live requests."""
    lease_s: PositiveDuration | None = None
    """Seconds without a command of the owner until the lease expires; needs ``owner``. None: no lease."""
    on_lease_expiry: LeaseAction = "continue"
    """``continue`` (its session is aborted), ``abort`` requests but stay paused, or ``stay``, unowned."""


class PauseGenerationReqOutput(Reply, kw_only=True):
    """The engine is paused."""

    OF_GROUP: ClassVar = {"owner": "differing"}
    mode: PauseMode
    step: int
    """Steps started since the engine's start."""
    held_requests: int
    """Requests that keep their KV cache through this pause."""
    held_tokens: int
    """KV token slots held by live requests (whole pages)."""
    waiting_requests: int
    """Requests in the waiting queue, retracted ones included."""
    aborted_requests: int
    """Samples that this pause aborted."""
    owner: str | None = None
    """Owner token of the pause, or None. If another owner paused first, the pause stays theirs."""


class ContinueGenerationReqInput(ControlRequest, kw_only=True):
    """Continue generation. Before that, while still paused, the device allocator's cache is emptied."""

    torch_empty_cache: bool = True
    """False: the cache is not emptied, and the reply has no memory figures."""
    force: bool = False
    """Continue although the pause has another owner, and commit an implicit session of another sender."""


class RankMemory(ReplyRecord, kw_only=True, frozen=True):
    """Bytes that another rank of an engine had reserved around an emptying of its device cache."""

    rank: int
    """From 1; the reply's own figures are those of rank 0."""
    reserved_before: int
    reserved_after: int


class ContinueGenerationReqOutput(Reply, kw_only=True):
    """Device memory before and after the cache was emptied, in bytes; all three are None where it was not."""

    OF_GROUP: ClassVar = {"was_paused": "any"}
    was_paused: bool
    """False: the engine was running already and nothing was done."""
    reserved_before: int | None = None
    """Bytes reserved by the device allocator before the command."""
    reserved_after: int | None = None
    """Bytes reserved after it."""
    freed: int | None = None
    """Bytes returned to the system; 0 if more was allocated meanwhile."""
    ranks: list[RankMemory] = []


class FlushCacheReqInput(ControlRequest, kw_only=True):
    """Flush the prefix cache. No live request may hold KV and, unless paused, none may be waiting."""

    torch_empty_cache: bool = True
    """Also empty the device allocator's cache."""
    timeout_s: Duration = 0.0
    """Seconds to wait for the engine to become idle. 0: reply at once."""
    force: bool = False
    """Commit an implicit session of another sender; without it only the owner of the pause may do so."""


class FlushCacheReqOutput(Reply, kw_only=True):
    """Result of a flush. Both byte counts are None without ``torch_empty_cache``."""

    OF_GROUP: ClassVar = {}
    freed_tokens: int
    """KV token slots that were cached and are free now."""
    reserved_before: int | None = None
    reserved_after: int | None = None


class ReleaseMemoryOccupationReqInput(ControlRequest, kw_only=True):
    """Release device memory to the system; replied when it is free, repeating has no effect.

    ``kv_cache`` requires that no live request holds KV, and drops the prefix cache; the others, a completed
    pause or an idle engine. Weights need a complete update then, unless started with ``weights_cpu_backup``.
    """

    tags: list[MemoryTag] | None = None
    """Memory to release. None means all of it."""


class ReleaseMemoryOccupationReqOutput(Reply, kw_only=True):
    """The memory is released. No step runs until all of it is resident again."""

    OF_GROUP: ClassVar = {"released_tags": "united"}
    released_tags: list[MemoryTag]
    """All tags that are released now, in alphabetical order."""
    freed_bytes: dict[MemoryTag, int]
    """Bytes that this call gave back, by tag; on a CPU without KV pages that were never written."""
    reserved_before: int
    """Bytes reserved by the device allocator before the command."""
    reserved_after: int
    """Bytes reserved after it."""
    weights_kept: bool | None = None
    """True: a resume restores the weights. False: they need a complete update then. None: not released."""


class ResumeMemoryOccupationReqInput(ControlRequest, kw_only=True):
    """Allocate ``tags`` again, or none of them (``out_of_memory``); repeating has no effect."""

    tags: list[MemoryTag] | None = None
    """Memory to resume. None means all of it."""


class ResumeMemoryOccupationReqOutput(Reply, kw_only=True):
    """The memory is resident again."""

    OF_GROUP: ClassVar = {"released_tags": "united"}
    released_tags: list[MemoryTag]
    resumed_bytes: dict[MemoryTag, int]
    """Sizes of what this call took again, by tag. On a CPU, pages take memory as they are written."""


class RenewPauseLeaseReqInput(ControlRequest, kw_only=True):
    """Renews the lease of a pause, for an owner with no other command to send. Never refused as ``busy``."""


class RenewPauseLeaseReqOutput(Reply, kw_only=True):
    """The lease after the renewal."""

    OF_GROUP: ClassVar = {"renewed": "all", "lease_left_s": "least"}
    renewed: bool
    """False: there is no pause, it has no lease, or it has another owner."""
    lease_left_s: float | None = None
    """Seconds until the lease expires. None means no lease."""


class KVUsage(ReplyRecord, kw_only=True, frozen=True):
    """Use of the KV cache pool in token slots: ``free + cached + held == total``, always."""

    free: int
    """Free slots."""
    cached: int
    """Slots held by the prefix cache alone; they can be evicted."""
    held: int
    """Slots owned or locked by live requests."""
    total: int
    """Slots of the whole pool."""
    page_size: int
    """Slots per page, the unit of allocation."""
    bytes_per_token: int
    """Bytes of KV per token that the pool has room for, over all layers; fewer for layers with a window."""
    routing_bytes_per_token: int = 0
    """Bytes per token for the ids of the experts that computed it; 0 for a model without experts."""


class DeviceMemory(ReplyRecord, kw_only=True, frozen=True):
    """The device allocator's figures in bytes; on the CPU those of glibc's heap and of anonymous mappings."""

    reserved: int
    """Bytes that the allocator has taken from the system, in use or not."""
    allocated: int
    """Bytes in use; 0 if not reported. On the CPU without the mappings of weights and KV."""
    available: int | None
    """Free bytes on the device (CPU: of MemAvailable and the cgroup). None means not reported."""
    weights: int
    """Bytes of the model's parameters and buffers."""
    kv_cache: int
    """Bytes of the paged KV cache pool."""
    weights_backup: int = 0
    """Bytes of the host copy of released weights: a file on the CPU, else pinned; not in ``reserved``."""
    components: int = 0
    """Bytes on the device of components that come and go (:class:`ComponentStatus`)."""
    components_peak: int = 0
    """The most of them at one time, since the engine has loaded its models."""


class UpdateProgress(ReplyRecord, kw_only=True, frozen=True):
    """A weight update in progress."""

    source: str
    """The transport: ``disk``, ``tensor``, ``ipc``, ``distributed`` or ``checkpoint_engine``."""
    written_bytes: int
    """Bytes that this call has written, before any cast; for ``checkpoint_engine`` of all its buckets."""
    total_bytes: int
    """Bytes of all tensors of this call, ignored ones too; ``checkpoint_engine``: of the current bucket."""
    age_s: float
    """Seconds since this call began to load; for ``checkpoint_engine`` since the current bucket arrived."""


class SessionStatus(ReplyRecord, kw_only=True, frozen=True):
    """The open weight update session."""

    kind: Literal["explicit", "implicit", "single"]
    """``explicit``: by ``begin``; ``implicit``: by a call while paused; ``single``: a call while running."""
    session_id: str
    """Generated by the engine; identifies the session in update calls and in ``end``."""
    owner: str | None
    """The owner token of the message that opened the session. None means that it had none."""
    age_s: float
    """Seconds since it was opened."""
    deadline_s: float | None
    """Seconds until its deadline. None means no deadline."""
    written_tensors: int
    """Checkpoint tensors written by its completed calls."""


class StageStatus(ReplyRecord, kw_only=True, frozen=True):
    """Time spent in one named stage since start. Stages can be nested."""

    name: str
    """``receive``, ``schedule``, ``prefill``, ``decode``, ``sample``, ``process``, ``pause``, ``continue``,
    ``update.…``, ``release.…``; of images ``encode``, ``denoise``, ``decode``, ``components.…``."""
    count: int
    """Number of times."""
    total_s: float
    """Seconds of all runs together."""
    median_s: float
    """Median seconds of the last 64 runs."""
    longest_s: float
    """Seconds of the longest run."""


class StepFailures(ReplyRecord, kw_only=True, frozen=True):
    """Failures of steps since start (docs/reference/lifecycle.md, "After a failure")."""

    failed: int = 0
    """Steps that failed, while they were scheduled, executed or processed."""
    retried: int = 0
    """Steps that failed, or were discarded because of one that did, and were computed again."""
    splits: int = 0
    """Times that a step ran out of memory and the next steps were made smaller."""
    token_limit: int | None = None
    """Limit on the tokens (images: samples) of a step after running out of memory. None: no limit."""


class MemoryByTag(ReplyRecord, kw_only=True, frozen=True):
    """Bytes of ``reserved`` by purpose; released memory counts 0, as do pages of a CPU never written."""

    weights: int
    """Parameters of the policy model."""
    derived: int
    """Tensors that its layers derive from the parameters at commit."""
    kv: int
    """The paged KV cache pool, and the expert ids stored with it."""
    reference: int
    """Other models, as far as they are on the device."""
    graphs: int
    """Captured CUDA graphs of decode steps."""
    answers: int = 0
    """On the CPU, what is allocated at start for answers to retries and results of clients that left."""
    workspace: int
    """All else allocated since construction began: temporaries, on the CPU also Python objects."""
    runtime: int
    """Bytes that the process used before: Python and torch. Almost nothing on accelerators."""
    other: int
    """The rest: blocks that the allocator caches, and memory that was not allocated through it."""


class PauseTotal(ReplyRecord, kw_only=True, frozen=True):
    """Pauses in one mode since start, the current one too. One that changed its mode counts in both."""

    mode: PauseMode
    count: int
    seconds: float
    """Total time from the acknowledgement to continue, or to the change of mode."""


class UpdateTotal(ReplyRecord, kw_only=True, frozen=True):
    """Weight updates from one source since start, except those refused before their first byte."""

    source: str
    """The transport of the session's last call: ``disk``, ``tensor``, …; empty if it had none."""
    committed: int
    """Sessions that were committed."""
    failed: int
    """Sessions that failed and left the weights poisoned."""


class EmptyCacheTotal(ReplyRecord, kw_only=True, frozen=True):
    """How often the device allocator's cache was emptied at one place since start."""

    place: str
    """``continue``, ``flush``, ``update``, ``failure``, … (docs/explanation/memory.md lists them)."""
    count: int
    freed_bytes: int
    """Bytes returned to the system; if more was allocated meanwhile, that emptying counts as 0."""


class EngineTotals(ReplyRecord, kw_only=True, frozen=True):
    """Counters since start."""

    prompt_tokens: int = 0
    """Prompt tokens of requests that have been scheduled."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    drafts: int = 0
    """Times that a request had drafted tokens in a step."""
    drafted_tokens: int = 0
    """Tokens that speculation drafted."""
    accepted_tokens: int = 0
    """Drafted tokens that were sampled and became output."""
    finished_requests: dict[str, int] = {}
    """Finished samples, by the type of their finish reason."""
    pauses: list[PauseTotal] = []
    """By mode; unused modes are left out."""
    updates: list[UpdateTotal] = []
    """By source; unused sources are left out."""
    emptied: list[EmptyCacheTotal] = []
    """Times that the device allocator's cache was emptied, by place."""
    queue_time: Distribution = Distribution()
    """Seconds from arrival to the first scheduled step, of finished samples."""
    latency_s: Distribution = Distribution()
    """Seconds from arrival to the end, of finished samples."""
    staleness: Distribution = Distribution()
    """Commits of weights between the first and the last token of a finished sample."""


class KVTierStatus(ReplyRecord, kw_only=True, frozen=True):
    """KV that has left the pool (``kv_tier_bytes``), of rank 0, and what it has saved since start."""

    host_bytes: int
    """Bytes of it in host memory."""
    file_bytes: int
    """Bytes of it in the file."""
    limit_bytes: int
    """Most bytes in host memory."""
    file_limit_bytes: int
    """Most bytes in the file; 0 without one."""
    hit_tokens: int
    """Tokens whose KV was copied back to the pool instead of computed."""
    stored_tokens: int
    """Tokens whose KV was copied out of the pool."""
    load_s: float
    """Seconds that copying back took."""
    store_s: float
    """Seconds that copying to host memory and to the file took."""
    saved_prefill_s: float
    """Seconds that computing ``hit_tokens`` would have taken, by the mean cost of a prompt token then."""
    failures: int
    """Copies that failed: full disks, and short memory. Their tokens are computed again."""


class GrammarStatus(ReplyRecord, kw_only=True, frozen=True):
    """Grammars of ``SamplingParams.grammar`` since start, and the time that they took."""

    compiled: int
    """Grammars compiled, and compiled again after they were forgotten."""
    failed: int
    """Grammars that did not compile, or not in time."""
    waiting: int
    """Requests that wait for their grammar."""
    wait_s: float
    """Seconds that requests have waited for grammars, in all."""
    masks: int
    """Positions for which the allowed tokens were computed."""
    mask_s: float
    """Seconds that this took."""


class RankStatus(ReplyRecord, kw_only=True, frozen=True):
    """Another rank of an engine (``tp``): its process, and its allocator's figures within the last second."""

    rank: int
    """Number of the rank, from 1."""
    pid: int
    """Process id of the rank, on its machine."""
    host: str
    """Name of its machine."""
    reserved: int
    allocated: int
    available: int | None


class ComponentStatus(ReplyRecord, kw_only=True, frozen=True):
    """A component with a strategy of its own (docs/explanation/memory.md, "Components that come and go")."""

    name: str
    """``vae``, ``text_encoder``, …; ``reference`` and ``reference_kv`` of the reference model."""
    residency: Residency
    """``resident``: always on the device; ``offload``: while it is used; ``layerwise``: layer by layer."""
    nbytes: int
    """Size in bytes, wherever the component is."""
    device_bytes: int
    """Bytes on the device now, or on their way there."""


class PromptCacheStatus(ReplyRecord, kw_only=True, frozen=True):
    """Encoded prompts that an image engine keeps for later requests."""

    entries: int
    """Prompts, those of guidance included."""
    nbytes: int
    """Bytes of their embeddings, on the device; part of ``workspace`` in ``memory_by_tag``."""
    limit_bytes: int
    """Most bytes (``prompt_cache_bytes``); 0: nothing is kept."""
    hits: int
    """Prompts since start that were found."""
    misses: int
    """Prompts since start that were encoded."""


class ReferenceStatus(ReplyRecord, kw_only=True, frozen=True):
    """State of the reference model."""

    model_path: str
    """Checkpoint folder of the reference model."""
    residency: Residency
    """``resident``: always on the device; ``offload``: during scoring; ``layerwise``: layer by layer."""
    weights: int
    """Size of its weights in bytes."""
    device_bytes: int
    pending_sequences: int
    """Accepted sequences that are not scored completely."""
    scored_tokens: int
    """Tokens scored since start."""


class GetStatusReqInput(ControlRequest, kw_only=True):
    """Get the state of the engine. Answered by the control loop in every state, also during updates."""


class AdapterStatus(ReplyRecord, kw_only=True, frozen=True):
    """One version of an adapter."""

    name: str
    """Name that requests choose it by."""
    adapter_epoch: int
    """Number of this version: the engine's count of loaded adapters."""
    path: str
    """Folder that it was loaded from; empty for one from tensors."""
    rank: int
    """Largest rank of its modules."""
    pinned: bool
    """It is never unloaded to make room for another."""
    running: int
    """Live samples that have it."""
    replaced: bool = False
    """True: only these samples have it; it is unloaded, or another version has its name."""
    digest: str = ""
    """BLAKE2b-128 of all tensors and their scales, in hex."""
    resident: bool = True
    """False: only the host has a copy; one goes to the device when a request comes."""


class GetStatusReqOutput(Reply, kw_only=True):
    """A consistent snapshot, taken between two steps."""

    incarnation: str
    """Random id of this start of the engine; epochs and message ids belong to it."""
    generation: GenerationState
    """``pausing`` waits for the step in flight; steps run in ``running`` with valid resident weights."""
    pause_mode: PauseMode | None = None
    """None unless paused."""
    pause_age_s: float | None = None
    """None unless paused."""
    pause_owner: str | None = None
    """None unless paused by a command with an owner."""
    lease_left_s: float | None = None
    """Seconds until the pause's lease expires. None means no lease."""
    weights: WeightsState
    """``updating``: not committed; ``poisoned``: failed after a byte; ``invalid``: released or lost."""
    weights_detail: str | None = None
    """Why the weights are not valid. None if they are."""
    memory: MemoryState
    """``released`` if ``released_tags`` is not empty."""
    released_tags: list[MemoryTag] = []
    weight_version: str
    """Public version label of the weights: the last one given with a commit, or ``default``."""
    weights_epoch: int
    """Commit counter: 0 at start, or above the previous start's with a state file."""
    digest: str = ""
    """Digest of the weights as last committed, in hex. Empty: the engine keeps none (``weights_digest``)."""
    session: SessionStatus | None = None
    """The open weight update session. None means that none is open."""
    update: UpdateProgress | None = None
    """The update in progress. None means that there is none."""
    running_requests: int
    """Requests that hold KV and decode."""
    prefilling_requests: int
    """Requests that hold KV and whose prefill is not complete."""
    waiting_requests: int
    """Samples in the waiting queue: new, retracted and preempted ones."""
    step: int
    """Steps started since the engine's start."""
    last_step_age_s: float | None = None
    """Seconds since the last step finished. None means that there was none yet."""
    generated_tokens: int
    """Tokens generated since start; of an image engine, denoise steps of samples."""
    gen_throughput: float = 0.0
    """Tokens generated per second over the last five seconds, or since the first token if that was later."""
    images: ImageLoad | None = None
    """Samples by stage. None: the engine serves a language model."""
    latent_bytes_per_pixel: float | None = None
    """Bytes of a latent of a result for each pixel of its image. None: the engine serves a language model."""
    num_retractions: int
    """Retractions since start: by a pause, or because the KV cache was full."""
    step_failures: StepFailures = StepFailures()
    kv: KVUsage
    device_memory: DeviceMemory
    """Read for this reply, of rank 0; ``available`` is the smallest of all ranks'."""
    ranks: list[RankStatus] = []
    memory_by_tag: MemoryByTag | None = None
    """Reserved memory by purpose, at the last memory event. None means that there was none yet."""
    totals: EngineTotals = EngineTotals()
    stages: list[StageStatus] = []
    components: list[ComponentStatus] = []
    """Components that come and go, and the reference model's parts."""
    prompt_cache: PromptCacheStatus | None = None
    """Encoded prompts. None means that the engine makes no images."""
    reference: ReferenceStatus | None = None
    """The reference model. None means that none is loaded."""
    drift: DriftReport | None = None
    """The last self-check. None means that there was none yet."""
    kv_tier: KVTierStatus | None = None
    """KV beside the pool. None means that ``kv_tier_bytes`` is 0."""
    grammars: GrammarStatus | None = None
    """Grammars of samples. None means that no request had one yet."""
    model_path: str
    """Folder of the last committed update from disk, or of the start."""
    dtype: str
    """Data type of computation: ``bfloat16``, ``float32`` or ``float16``."""
    device: str
    """Device that the model runs on: ``cpu``, ``cuda``, …, with an index where one was configured."""
    weights_cpu_backup: bool = False
    """A release of the weights keeps a copy on the host, and a resume restores it."""
    max_loras: int = 0
    """Maximum number of adapters whose requests run at once; 0 means that none are served."""
    max_loaded_loras: int = 0
    """Maximum number of loaded adapters, those with a copy on the host alone included."""
    max_lora_rank: int = 0
    """Largest rank of an adapter; 0 means that none are served."""
    adapters: list[AdapterStatus] = []
    """Loaded adapters, and replaced versions that samples still have."""
    kernels: dict[str, str] = {}
    """Operation to what serves it: ``torch``, an instruction set of the CPU kernels (``avx2``, ``avx512``,
    ``avx512bf16``, ``amx``, ``neon``, ``neonbf16``), or a GPU library. Operations that the model does not
    have are absent."""
    kernels_reason: str | None = None
    """Why ``torch`` serves some of them, or no better library attention. None: nothing better is missing."""
    context_len: int
    """Maximum length of prompt plus output, in tokens."""
    vocab_size: int
    """Number of token ids of the model; every id is below it."""
    max_running_requests: int
    """Maximum number of samples that hold KV."""
    uptime_s: float
    """Seconds since the engine became ready."""
    pid: int
    """Process id of the engine, in its own pid namespace."""
    version: str
    """Version of the engine's software."""


class ShutdownReqInput(Request, kw_only=True):
    """End every request, then stop; acknowledged at once. A repeat makes the end earlier, never later."""

    drain: bool | None = None
    """True: finish accepted requests and refuse new ones. False: end them now. None: ``shutdown_mode``."""
    timeout_s: Duration | None = None
    """With drain: seconds until the rest is aborted. None means the engine's ``drain_timeout_s``."""
    requested_by: Label = ""
    """Sender as text for the engine's log: a program, its process and its host. Empty means unknown."""


class ShutdownReqOutput(Reply, kw_only=True):
    """The shutdown is acknowledged; the process exits next, or when it has drained."""

    drain_s: float = 0.0
    """Maximum seconds for the remaining requests; 0: they have ended."""


class StartProfileReqInput(ControlRequest, kw_only=True):
    """Record a trace of the next steps, which are slower; ``busy`` while another is recorded or written."""

    output_dir: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    """Folder under the engine's ``profile_dir``, created if missing. None means that folder itself."""
    num_steps: TraceSteps | None = None
    """Steps after which the trace ends by itself. None means at ``StopProfileReqInput``, or after 1,000."""
    start_step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of the first step, as status counts them. None, and one that is past, means the next step."""
    stages: Annotated[list[TraceStage], msgspec.Meta(min_length=1, max_length=2)] | None = None
    """Kinds of steps that get a file each, of ``num_steps`` steps in a row. None means one file for all."""
    profile_id: TraceName | None = None
    """Files are ``{id}-TP-0``, then -EXTEND or -DECODE by stages. None means a name of the engine."""
    prefix: TraceName | None = None
    """Beginning of the files' names. None means none."""
    activities: list[TraceActivity] | None = None
    """Activities to record; ``GPU`` counts where the engine has one. None means both."""
    with_stack: bool = False
    """Also record the Python stack of each operation, which is slow."""
    record_shapes: bool = False
    """Also record the shapes of the operations' inputs."""


class StartProfileReqOutput(Reply, kw_only=True):
    """The trace has begun."""

    OF_GROUP: ClassVar = {"path": "joined", "num_steps": "first"}
    path: str
    """The file on the engine's machine, which appears when it is complete."""
    num_steps: int
    """Number of steps after which the trace ends by itself."""


class StopProfileReqInput(ControlRequest, kw_only=True):
    """End the trace; the reply comes when its file is written. ``invalid_request`` if none was started."""

    wait: bool = False
    """True: the trace is not ended, but waited for until it ends by itself."""


class StopProfileReqOutput(Reply, kw_only=True):
    """The trace is written; also the answer where the trace had ended by itself before."""

    OF_GROUP: ClassVar = {"path": "joined"}
    path: str
    """The file, on the engine's machine: Chrome's trace format, compressed with gzip."""
    steps: int
    """Number of steps that were recorded."""
