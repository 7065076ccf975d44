"""Pause, continue, flush, status: the control messages (semantics: docs/lifecycle.md)."""

from typing import Annotated, Literal

import msgspec

from .base import Label, Reply, ReplyRecord, Request
from .score import ReferenceStatus

PauseMode = Literal["abort", "retract", "in_place"]
GenerationState = Literal["running", "pausing", "paused"]
WeightsState = Literal["valid", "updating", "poisoned", "invalid"]
MemoryState = Literal["resident", "released"]
LeaseAction = Literal["continue", "abort", "stay"]
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
MAX_DURATION_S = 86400.0
"""Longest time that a command may ask for: a day. Infinity and NaN are refused with it."""
Duration = Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION_S)]
PositiveDuration = Annotated[float, msgspec.Meta(gt=0, le=MAX_DURATION_S)]


class ControlRequest(Request, kw_only=True):
    """A command about the engine rather than about one generation."""

    owner: Label | None = None
    """Token of who controls the pause. Any command that carries the owner's token renews its lease. None: nobody."""


class PauseGenerationReqInput(ControlRequest, kw_only=True):
    """Stop at the next step boundary. The reply is a barrier: no step is in flight any more.

    ``abort`` ends every request with its partial tokens; ``retract`` gives their KV back and requeues them;
    ``in_place`` freezes everything, KV included. Pausing a paused engine changes the mode.
    """

    mode: PauseMode = "abort"
    """What happens to the live requests, as described above."""
    lease_s: PositiveDuration | None = None
    """Seconds without a sign of life from the owner, after which ``on_lease_expiry`` happens; needs ``owner``. None: the
    pause lasts until continue."""
    on_lease_expiry: LeaseAction = "continue"
    """``continue``: as if the owner had continued (an open session is aborted first). ``abort``: every request ends with
    its partial tokens, the engine stays paused. ``stay``: only the ownership ends."""


class PauseGenerationReqOutput(Reply, kw_only=True):
    """The state at the barrier."""

    mode: PauseMode
    """The mode that the engine is paused in now, which is the one that was asked for."""
    step: int
    """Steps launched so far; no later one runs before continue."""
    held_requests: int
    """Requests that keep KV through this pause."""
    held_tokens: int
    """KV token slots that live requests hold (whole pages)."""
    waiting_requests: int
    """Requests queued without KV, retracted ones included."""
    aborted_requests: int
    """Samples this pause ended."""


class ContinueGenerationReqInput(ControlRequest, kw_only=True):
    """Go on. While still paused, the device allocator's unused blocks are returned first."""

    torch_empty_cache: bool = True
    """False: the allocator keeps its unused blocks, and the reply has no figures."""
    force: bool = False
    """Continue a pause that somebody else owns, and commit an implicit session that somebody else opened."""


class ContinueGenerationReqOutput(Reply, kw_only=True):
    """Device memory around the empty-cache step, in bytes; all three are None when the step did not run."""

    was_paused: bool
    """False: the engine was running and nothing was done."""
    reserved_before: int | None = None
    """Bytes that the device allocator held before its unused blocks were returned."""
    reserved_after: int | None = None
    """Bytes that it held afterwards."""
    freed: int | None = None
    """``reserved_before - reserved_after``; may be negative."""


class FlushCacheReqInput(ControlRequest, kw_only=True):
    """Clear the engine's own KV pools. Needs a fully idle engine; waiting requests are ignored only while paused."""

    torch_empty_cache: bool = True
    """Also return the allocator's unused blocks to the system."""
    timeout_s: Duration = 0.0
    """Wait this long for the engine to become idle. 0: answer at once."""
    force: bool = False
    """Commit an implicit session that somebody else opened. Else the flush is refused while one is open, unless its sender
    owns the pause."""


class FlushCacheReqOutput(Reply, kw_only=True):
    """What the flush cleared; both figures in bytes are None when ``torch_empty_cache`` was off."""

    freed_tokens: int
    """KV token slots that were cached and are free now."""
    reserved_before: int | None = None
    """Bytes that the device allocator held before its unused blocks were returned."""
    reserved_after: int | None = None
    """Bytes that it held afterwards."""


class ReleaseMemoryOccupationReqInput(ControlRequest, kw_only=True):
    """Give device memory back to the system; answered when it is really free. Releasing what is released is harmless.

    ``kv_cache`` needs that no live request holds KV, and drops the prefix cache. ``weights`` and ``cuda_graph`` need a
    completed pause or an idle engine; weights are dropped without a copy, so they are invalid until a complete update.
    """

    tags: list[MemoryTag] | None = None
    """None: all."""


class ReleaseMemoryOccupationReqOutput(Reply, kw_only=True):
    """Nothing is launched until everything is resident again."""

    released_tags: list[MemoryTag]
    """All that is released now."""
    freed_bytes: dict[MemoryTag, int]
    """What this call released, by tag: sizes of the components, resident or not."""
    reserved_before: int
    """Bytes that the device allocator held before the release."""
    reserved_after: int
    """Bytes that it held afterwards; the same where nothing was left to release."""


class ResumeMemoryOccupationReqInput(ControlRequest, kw_only=True):
    """Take released memory back, all of ``tags`` or none: a shortage is ``out_of_memory`` with need and free bytes.

    Weights come back without their values: send a complete update. Resuming what is resident is harmless.
    """

    tags: list[MemoryTag] | None = None
    """None: all."""


class ResumeMemoryOccupationReqOutput(Reply, kw_only=True):
    """The memory is there."""

    released_tags: list[MemoryTag]
    """What is still released."""
    resumed_bytes: dict[MemoryTag, int]
    """What this call took back, by tag."""


class RenewPauseLeaseReqInput(ControlRequest, kw_only=True):
    """A sign of life from the owner of a pause that has nothing else to say. Never busy."""


class RenewPauseLeaseReqOutput(Reply, kw_only=True):
    """The lease after the renewal."""

    renewed: bool
    """False: there is no pause, it has no lease, or the owner is another."""
    lease_left_s: float | None = None
    """Seconds until it expires. None: no lease."""


class KVUsage(ReplyRecord, kw_only=True, frozen=True):
    """The KV ledger in token slots: ``free + cached + held == total``, always."""

    free: int
    """Slots that nobody owns."""
    cached: int
    """In the prefix cache, locked by nobody, evictable."""
    held: int
    """Owned or locked by live requests."""
    total: int
    """Slots of the whole pool."""
    page_size: int
    """Slots per page; pages are handed out whole."""
    bytes_per_token: int
    """Of KV, over all layers."""
    routing_bytes_per_token: int = 0
    """Bytes beside it for the ids of the experts that computed the token; 0 for a model without experts."""


class DeviceMemory(ReplyRecord, kw_only=True, frozen=True):
    """The device allocator's view, in bytes. On the CPU: glibc's heap and the process's anonymous pages."""

    reserved: int
    """Bytes that the allocator has taken from the system, in use or not."""
    allocated: int
    """Bytes that the allocator has handed out; 0 where it does not tell. On the CPU the mappings of weights and KV are not among
    them, though their pages are reserved."""
    available: int | None
    """Free on the device (CPU: the smaller of MemAvailable and what the cgroup leaves). None: its backend does not tell."""
    weights: int
    """Parameters and buffers of the model."""
    kv_cache: int
    """The paged KV pool."""


class UpdateProgress(ReplyRecord, kw_only=True, frozen=True):
    """A weight update that is running now."""

    source: str
    """The transport: ``disk``, ``tensor``, ``ipc``, ``distributed`` or ``checkpoint_engine``."""
    written_bytes: int
    """Bytes of tensors that this call has written so far, before any cast. ``checkpoint_engine``: in all its buckets."""
    total_bytes: int
    """Bytes of all tensors that this call names, those that the model ignores included. ``checkpoint_engine``: of the present
    bucket alone."""
    age_s: float
    """Seconds since this call began to load, waiting for its first tensor included. ``checkpoint_engine``: since the present
    bucket came."""


class SessionStatus(ReplyRecord, kw_only=True, frozen=True):
    """The open weight-update session."""

    kind: Literal["explicit", "implicit", "single"]
    """``explicit``: opened by ``begin``. ``implicit``: by a call while paused, and more may follow. ``single``: a call while
    running, which ends it."""
    session_id: str
    """Drawn by the engine; names the session in calls and ``end``."""
    owner: str | None
    """The owner token of the message that opened it. None: it carried none."""
    age_s: float
    """Seconds since it was opened."""
    deadline_s: float | None
    """Seconds left; None: no deadline."""
    written_tensors: int
    """Checkpoint tensors that its calls have written, without the call that is under way."""


class StageStatus(ReplyRecord, kw_only=True, frozen=True):
    """Where time goes: one named stage since start, in seconds. Stages may lie inside others."""

    name: str
    """``receive``, ``schedule``, ``prefill``, ``decode``, ``sample``, ``process``, ``pause``, ``update.…``, ``release.…``."""
    count: int
    """Number of runs."""
    total_s: float
    """Seconds of all runs together."""
    median_s: float
    """Median seconds of the last 64 runs."""
    longest_s: float
    """Seconds of the longest run."""


class StepFailures(ReplyRecord, kw_only=True, frozen=True):
    """What went wrong with steps, since start (docs/lifecycle.md, "After a failure")."""

    failed: int = 0
    """Steps that raised, while they were built, computed or taken in."""
    retried: int = 0
    """Steps that failed, or were lost with one that did, and whose requests went on."""
    splits: int = 0
    """Times that memory did not suffice for a step and the next ones were made smaller."""
    token_limit: int | None = None
    """Tokens that a step may have now, for want of memory. None: as many as it wants."""


class MemoryByTag(ReplyRecord, kw_only=True, frozen=True):
    """Reserved memory by what holds it, in bytes; the parts add up to ``reserved``.

    On the CPU only pages that have been written count. What is released counts 0.
    """

    weights: int
    """Parameters of the policy."""
    derived: int
    """What its layers derive from them at commit."""
    kv: int
    """The paged KV pool, and the expert ids beside it."""
    reference: int
    """Other models, as far as they are on the device."""
    graphs: int
    """Captured decode steps."""
    workspace: int
    """What else the engine has asked of the allocator since it began to be built: workspaces, temporaries; on the CPU also
    its own objects."""
    runtime: int
    """What the process held before: Python and torch; next to nothing on accelerators."""
    other: int
    """The rest: blocks that the allocator holds unused, and what nobody has asked it for."""


class PauseTotal(ReplyRecord, kw_only=True, frozen=True):
    """Pauses in one mode since start, the one that lasts included. A pause whose mode was changed counts in both."""

    mode: PauseMode
    """The pause mode that is counted."""
    count: int
    """How often the engine came into this mode."""
    seconds: float
    """From the acknowledgement to the continue, or to the change of mode."""


class UpdateTotal(ReplyRecord, kw_only=True, frozen=True):
    """Weight updates from one source since start. What was refused before its first byte is not among them."""

    source: str
    """The transport that came last in the session: ``disk``, ``tensor``, …; empty: nothing came."""
    committed: int
    """Sessions that ended with a commit."""
    failed: int
    """Left the weights poisoned."""


class EmptyCacheTotal(ReplyRecord, kw_only=True, frozen=True):
    """How often one place has emptied the device allocator's cache since start."""

    place: str
    """``continue``, ``flush``, ``update``, ``failure``, … (docs/memory.md lists them)."""
    count: int
    """How often."""
    freed_bytes: int
    """Bytes returned to the system; an emptying during which more was allocated counts as 0."""


class EngineTotals(ReplyRecord, kw_only=True, frozen=True):
    """What has been counted since start."""

    prompt_tokens: int = 0
    """Of requests that have begun to run."""
    cached_tokens: int = 0
    """How many of them came from the prefix cache."""
    finished_requests: dict[str, int] = {}
    """Samples that have ended, by the type of their finish reason."""
    pauses: list[PauseTotal] = []
    """Pauses by mode; a mode that was never used is left out."""
    updates: list[UpdateTotal] = []
    """Weight updates by source; a source that was never used is left out."""
    emptied: list[EmptyCacheTotal] = []
    """Emptyings of the device allocator's cache, by place."""


class GetStatusReqInput(ControlRequest, kw_only=True):
    """Everything a supervisor asks. Answered by the control loop, during updates too; generates no token."""


class GetStatusReqOutput(Reply, kw_only=True):
    """One consistent snapshot, taken between two steps."""

    incarnation: str
    """Drawn at random at each start: epochs and message ids of another incarnation mean nothing to this one."""
    generation: GenerationState
    """``pausing``: a pause waits for the step in flight. Steps run in ``running`` only, and only while weights are ``valid``
    and memory is ``resident``."""
    pause_mode: PauseMode | None = None
    """None unless paused."""
    pause_age_s: float | None = None
    """None unless paused."""
    pause_owner: str | None = None
    """None: no pause, or one without an owner."""
    lease_left_s: float | None = None
    """Seconds until the pause's lease expires. None: no lease."""
    weights: WeightsState
    """``updating``: bytes were written and not committed. ``poisoned``: an update failed after its first byte. ``invalid``:
    the values were released, or lost in a restart."""
    weights_detail: str | None = None
    """Why the weights are not valid; None when they are."""
    memory: MemoryState
    """``released`` while ``released_tags`` names any."""
    released_tags: list[MemoryTag] = []
    """Tags whose memory is released, in alphabetical order."""
    weight_version: str
    """Public label of the weights: the last one that came with a commit, ``default`` before any has."""
    weights_epoch: int
    """Counts commits: 0 at start, one more at each. With a state file a start begins above its predecessor's."""
    session: SessionStatus | None = None
    """None: no open session."""
    update: UpdateProgress | None = None
    """None: no update is running."""
    running_requests: int
    """Requests that hold KV and sample tokens."""
    prefilling_requests: int
    """Requests that hold KV and have prompt left to compute."""
    waiting_requests: int
    """Samples queued without KV: new, retracted and preempted ones."""
    step: int
    """Steps launched since start."""
    last_step_age_s: float | None = None
    """Seconds since a step last finished; None: none yet."""
    generated_tokens: int
    """Tokens sampled since start."""
    num_retractions: int
    """Since start, for want of memory or by a pause."""
    step_failures: StepFailures = StepFailures()
    """What went wrong with steps, and whether they are small for want of memory."""
    kv: KVUsage
    """The KV pool's ledger."""
    device_memory: DeviceMemory
    """The device allocator's figures, read for this answer."""
    memory_by_tag: MemoryByTag | None = None
    """As of the last memory event. None: there is none yet."""
    totals: EngineTotals = EngineTotals()
    """Counters since start."""
    stages: list[StageStatus] = []
    """In the order of their first run."""
    reference: ReferenceStatus | None = None
    """None: no reference is loaded."""
    model_path: str
    """Folder of the last disk update that was committed, else of the start; other transports do not change it."""
    dtype: str
    """Data type that the model computes in: ``bfloat16``, ``float32``, …"""
    device: str
    """Device that the model runs on: ``cpu``, ``cuda``, …, with an index where one was configured."""
    kernels: dict[str, str] = {}
    """Operation to what serves it: ``torch``, an instruction set of the compiled CPU kernels (``avx2``, ``avx512``,
    ``avx512bf16``, ``amx``), or the library of attention kernels that a GPU has. Operations that the model does not have are
    absent."""
    kernels_reason: str | None = None
    """Why ``torch`` serves some of them on a CPU. None: it does not, or the device is no CPU."""
    context_len: int
    """Longest prompt plus output of a request, in tokens."""
    vocab_size: int
    """Number of token ids of the model; every id is below it."""
    max_running_requests: int
    """Samples that may hold KV at a time."""
    uptime_s: float
    """Seconds since the engine had loaded and began to serve."""
    pid: int
    """Process id of the engine, in its own pid namespace."""
    version: str
    """Version of the engine's software."""


class ShutdownReqInput(Request, kw_only=True):
    """Stop the process after ending every request. Answered at once; every request gets its terminal message first.

    Sent again, it can bring the end nearer, and never put it off.
    """

    drain: bool | None = None
    """Let the requests that are there go on, and refuse new ones with ``shutting_down``. False: end them at once. None: as
    the engine's ``shutdown_mode`` says."""
    timeout_s: Duration | None = None
    """With drain: after so many seconds what is left ends as aborted. None: the engine's ``drain_timeout_s``."""


class ShutdownReqOutput(Reply, kw_only=True):
    """Acknowledged; the process exits next, or when it has drained."""

    drain_s: float = 0.0
    """How much longer requests may go on, at most, in seconds; 0: they have ended."""
