"""The engine's state and its only writer.

The state has three independent parts: generation (running, pausing, paused in a mode), weights (valid, updating, poisoned,
invalid) and memory (resident, released). A step is launched only when they are running, valid and resident.
docs/reference/states.md says what each command does in each state; a test drives a real scheduler through every cell of it.

Invariants:
- I4: a pause is acknowledged only when no step is in flight and the forward stream is idle.
- Every operation is a generator that the loop advances. It never blocks, and only one of them runs at a time.
- After a failed update, weights become valid again only by a complete update.
- The weights epoch and the public label change in :meth:`Lifecycle.commit_weights` and nowhere else.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sized
from dataclasses import replace
from enum import Enum
from time import monotonic
from typing import Any, TypeVar

from ...io_struct import (
    CaesuraError,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ErrorCode,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GenerationState,
    MemoryTag,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    PauseTotal,
    Reply,
    UpdateTotal,
    WeightsState,
)
from ..cache.manager import CacheManager
from ..memory.device_cache import DeviceCache
from ..memory.device_memory import EmptyCacheReport
from ..observability.memory_history import MemoryHistory
from ..observability.stage_profiler import StageProfiler
from ..runtime.config import PAGE_SIZE
from ..scheduling.request import WeightStamp
from ..scheduling.stepping import KeptPrompts, StepBatcher, StepOutputs, StepRunner
from .pause_ownership import PauseOwnership, Sender
from .weight_sessions import Session, Sessions

logger = logging.getLogger(__name__)


SLICE_S = 0.010
"""Longest time that operations run before the loop receives messages again."""


class Wait(Enum):
    """What an operation waits for when it yields."""

    STEP = "step"
    """Until the step in flight is completed or rolled back. The operation has already closed the gate for further steps."""
    SLICE = "slice"
    """Nothing. The operation has more work, and lets the loop receive messages first."""
    THREAD = "thread"
    """Until a background thread (background.py) wakes the loop. The operation keeps its place at the head of the queue."""
    CHANGE = "change"
    """Until the engine changes, for example becomes idle. The operation steps aside: the next command may run meanwhile."""


Operation = Generator[Wait, None, Reply]
"""A command that may take several ticks; it returns its reply or raises :class:`CaesuraError`."""

_Result = TypeVar("_Result")


def waiting(
    work: Generator[None, None, _Result] | Iterator[None], wait: Wait = Wait.THREAD
) -> Generator[Wait, None, _Result]:
    """Part of an operation that yields what it waits for: by default something that wakes the loop, as other ranks do."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        yield wait


class Lifecycle:
    """The engine's state, and the operations pause, continue and flush."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        batcher: StepBatcher,
        waiting: Sized,
        outputs: StepOutputs,
        cache: CacheManager,
        runner: StepRunner,
        device_cache: DeviceCache,
        stamp: WeightStamp,
        history: MemoryHistory,
        stages: StageProfiler,
        lost: str | None,
        serve_lost: bool,
        keeps_weights: bool,
        prompts: KeptPrompts | None,
    ) -> None:
        """Make the lifecycle of an engine that runs.

        Args:
            lost: says which committed weights could not be restored at this start; None if none were lost.
            serve_lost: serve the initial weights although the committed ones were lost.
            keeps_weights: a release of the weights' memory keeps their values.
        """
        self.sessions = sessions
        self.ownership = PauseOwnership()
        self._batcher = batcher
        self._waiting = waiting
        self._outputs = outputs
        self._cache = cache
        self._prompts = prompts
        self._runner = runner
        self._device_cache = device_cache
        self._history = history
        self._stages = stages
        self._generation: GenerationState = "running"
        self._mode: PauseMode | None = None
        self._paused_at: float | None = None
        self._weights: WeightsState = "valid"
        self._weights_detail: str | None = None
        self._stamp = stamp
        self._lost = lost
        self._mode_entered_at = 0.0
        self._pauses: Counter[PauseMode] = Counter()
        self._pause_s: dict[PauseMode, float] = {}
        self._commits: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._released: frozenset[MemoryTag] = frozenset()
        self.keeps_weights = keeps_weights
        self._step = 0
        self._commit_session: Callable[[Session], Generator[Wait, None, None]] | None = None
        self._lease_ended_at: float | None = None
        if lost is not None:
            self._begin_without(lost, served=serve_lost)

    def _begin_without(self, lost: str, *, served: bool) -> None:
        if served:
            logger.error("weights are LOST: %s; the initial weights are served", lost)
        else:
            self._weights, self._weights_detail = "invalid", lost
            logger.error("weights are LOST: %s; nothing is served until a complete update commits", lost)

    @property
    def step(self) -> int:
        """Number of the last launched step; 0 before the first."""
        return self._step

    def begin_step(self) -> None:
        """Count the step that the loop is about to execute."""
        self._step += 1

    def commit_sessions_by(self, commit: Callable[[Session], Generator[Wait, None, None]]) -> None:
        """Set the function by which :meth:`continue_generation` and :meth:`flush` commit an implicit session."""
        self._commit_session = commit

    @property
    def may_execute(self) -> bool:
        """The gate of every step: whether the next step may be launched."""
        return self._generation == "running" and self._weights == "valid" and not self._released

    @property
    def generation(self) -> GenerationState:
        """running, pausing or paused."""
        return self._generation

    @property
    def pause_mode(self) -> PauseMode | None:
        """Mode of the pause; None unless paused."""
        return self._mode

    @property
    def pause_age_s(self) -> float | None:
        """Seconds since the pause was acknowledged; None unless paused."""
        return None if self._paused_at is None else monotonic() - self._paused_at

    @property
    def unleased_since(self) -> float | None:
        """Since when, on the monotonic clock, the pause has been without a lease; None unless paused without one."""
        if self._paused_at is None or self.ownership.lease is not None:
            return None
        return self._paused_at if self._lease_ended_at is None else self._lease_ended_at

    @property
    def pause_owner(self) -> str | None:
        """Owner token of the pause; None if it has none."""
        return self.ownership.owner

    @property
    def paused_by(self) -> str:
        """Who has paused, for people."""
        if self.pause_owner is not None:
            return f"owner {self.pause_owner!r}"
        return (
            "a client without an owner token"
            if self._lease_ended_at is None
            else "an owner whose lease has expired"
        )

    @property
    def lease_left_s(self) -> float | None:
        """Seconds until the pause's lease expires; None if it has none."""
        lease = self.ownership.lease
        return None if lease is None else lease.expires - monotonic()

    @property
    def weights(self) -> WeightsState:
        """valid, updating, poisoned or invalid."""
        return self._weights

    @property
    def weights_detail(self) -> str | None:
        """Why the weights are poisoned or invalid; None if they are not."""
        return self._weights_detail

    @property
    def released(self) -> frozenset[MemoryTag]:
        """Tags whose memory is released."""
        return self._released

    @property
    def stamp(self) -> WeightStamp:
        """Epoch and label of the committed weights."""
        return self._stamp

    @property
    def in_flight(self) -> bool:
        """Whether a launched step is neither completed nor rolled back."""
        return self._batcher.in_flight

    def pause(self, request: PauseGenerationReqInput, sender: Sender) -> Operation:
        """Pause at a step boundary; see the module's invariants and docs/reference/lifecycle.md."""
        if request.lease_s is not None and request.owner is None:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, "lease_s needs an owner: any name", field="owner", value=None
            )
        if self._generation == "running":
            self._generation = "pausing"
        aborted = 0
        with self._stages.stage("pause"):
            yield from self.barrier()
            if request.mode == "abort":
                aborted = self._outputs.abort_all("Aborted by pause_generation")
            elif request.mode == "retract":
                self._batcher.retract_all()
        self._generation = "paused"
        self._enter(request.mode)
        self._paused_at = self._paused_at if self._paused_at is not None else monotonic()
        self.ownership.take(sender, request, monotonic())
        held_pages = self._cache.usage().held
        holding, kind = self._batcher.num_holding, self.held_kind
        logger.info(
            "pause_generation: %s at step %d, %d requests hold %s, %d wait",
            request.mode, self._step, holding, kind if kind != "KV" else f"{held_pages * PAGE_SIZE} tokens of KV",
            len(self._waiting),
        )  # fmt: skip
        self._history.note("pause", f"{request.mode}, {holding} requests hold {kind}")
        return PauseGenerationReqOutput(
            id=request.id,
            mode=request.mode,
            step=self._step,
            held_requests=holding,
            held_tokens=held_pages * PAGE_SIZE,
            waiting_requests=len(self._waiting),
            aborted_requests=aborted,
            owner=self.pause_owner,
        )

    def continue_generation(self, request: ContinueGenerationReqInput, sender: Sender) -> Operation:
        """Empty the device cache while still paused, then run. Has no effect if the engine runs already."""
        if self._generation == "running":
            return ContinueGenerationReqOutput(id=request.id, was_paused=False)
        self.ownership.require_continue(sender, request.force)
        if self.sessions.is_explicit:
            raise CaesuraError(ErrorCode.SESSION_OPEN, "a weight session is open: end it before continuing")
        yield from self._commit_implicit_session(sender, request.force)
        self.require_serviceable("cannot continue")
        with self._stages.stage("continue"):
            report = self._device_cache.empty("continue") if request.torch_empty_cache else None
        self._history.note("continue", self._mode or "", returned=_freed(report))
        self._run()
        return ContinueGenerationReqOutput(id=request.id, was_paused=True, **_bytes(report, freed=True))

    def flush(self, request: FlushCacheReqInput, sender: Sender) -> Operation:
        """Clear the prefix cache once the engine is idle, and commit an implicit session; refuse at the deadline."""
        deadline = monotonic() + request.timeout_s
        while not self.is_idle():
            if monotonic() >= deadline:
                raise CaesuraError(
                    ErrorCode.NOT_IDLE,
                    f"flush_cache needs an idle engine: requests are pending, or hold {self.held_kind}",
                    **self.pending(),
                )
            yield Wait.CHANGE
        yield from self._commit_implicit_session(sender, request.force)
        freed = self._cache.flush()
        if self._prompts is not None:
            self._prompts.clear()
        report = self._device_cache.empty("flush") if request.torch_empty_cache else None
        self._history.note("flush", f"{freed * PAGE_SIZE} tokens", returned=_freed(report))
        return FlushCacheReqOutput(
            id=request.id, freed_tokens=freed * PAGE_SIZE, **_bytes(report, freed=False)
        )

    def renew_lease(self, owner: str | None) -> None:
        """Renew the pause's lease if ``owner``, the token of a received message, owns the pause."""
        self.ownership.renew(owner, monotonic())

    def expire_lease(self) -> None:
        """Do what the pause asked for in case its lease expires. No command may be under way."""
        lease, owner = self.ownership.lease, self.ownership.owner
        assert lease is not None
        self.ownership.end()
        self._lease_ended_at = monotonic()
        logger.warning(
            "pause lease of %r expired after %.1f s without a message from the owner: %s",
            owner, lease.seconds, lease.action,
        )  # fmt: skip
        if lease.action == "abort":
            self._outputs.abort_all("Aborted: the pause lease expired")
        elif lease.action == "continue" and self._weights == "valid":
            report = self._device_cache.empty("lease_expiry")
            self._history.note("lease_expiry", f"of {owner!r}", returned=report.freed)
            self._run()
        elif lease.action == "continue":
            logger.error("cannot continue: weights are %s; staying paused", self._weights)

    def barrier(self) -> Generator[Wait, None, None]:
        """Wait until no step is in flight and the forward stream is idle. The caller has closed the gate for further steps."""
        while self.in_flight:
            yield Wait.STEP
        self._runner.synchronize()

    def is_idle(self) -> bool:
        """Whether no request holds KV, no step is in flight, and no update is being written; and, unless paused, none waits."""
        waiting_blocks = len(self._waiting) > 0 and self._generation != "paused"
        holding = self._batcher.num_holding > 0 or self.in_flight
        return not (holding or waiting_blocks or self.sessions.is_working)

    @property
    def held_kind(self) -> str:
        """What requests hold that a pause in place freezes, for people."""
        return "KV" if self._batcher.images is None else "latents"

    def pending(self) -> dict[str, int]:
        """Counts of the work that keeps the engine from being idle."""
        return {
            "running": self._batcher.num_running,
            "prefilling": self._batcher.num_prefilling,
            "waiting": len(self._waiting),
            "held_tokens": self._cache.usage().held * PAGE_SIZE,
        }

    def pause_totals(self) -> list[PauseTotal]:
        """Number and duration of pauses since start, by mode."""
        return [
            PauseTotal(mode=mode, count=count, seconds=self._seconds_in(mode))
            for mode, count in self._pauses.items()
        ]

    def count_failed_update(self, source: str) -> None:
        """Count an update from ``source`` that left the weights poisoned."""
        self._failures[source] += 1

    def update_totals(self) -> list[UpdateTotal]:
        """Number of committed and failed weight updates since start, by transport."""
        return [
            UpdateTotal(source=source, committed=self._commits[source], failed=self._failures[source])
            for source in {**self._commits, **self._failures}
        ]

    @property
    def serviceable(self) -> bool:
        """Whether the weights are valid, or will be once the update under way commits."""
        return self._weights in ("valid", "updating")

    def require_serviceable(self, what: str) -> None:
        """Raise if the weights are poisoned or invalid; an update under way is no reason."""
        if self._weights == "poisoned":
            raise CaesuraError(
                ErrorCode.WEIGHTS_POISONED,
                f"{what}: weights are poisoned ({self._weights_detail}); send a complete update",
            )
        if self._weights == "invalid":
            raise CaesuraError(
                ErrorCode.WEIGHTS_INVALID,
                f"{what}: weights are invalid ({self._weights_detail}); send a complete update",
            )

    def require_epoch(self, minimum: int | None) -> None:
        """Raise if the weights are older than epoch ``minimum``.

        Initial weights that are served in place of lost ones count as older than every committed epoch.
        """
        epoch = self._stamp.epoch
        if minimum is None or (minimum <= epoch and (self._lost is None or minimum <= 0)):
            return
        lost = "" if self._lost is None else f" ({self._lost})"
        raise CaesuraError(
            ErrorCode.EPOCH_BEHIND,
            f"weights epoch is {epoch}{lost}, the request needs {minimum}",
            weights_epoch=epoch,
            min_weights_epoch=minimum,
        )

    def require_resident(self, tag: MemoryTag) -> None:
        """Raise if the memory of ``tag`` is released."""
        if tag in self._released:
            raise CaesuraError(
                ErrorCode.MEMORY_RELEASED,
                f"the memory of {tag} is released: resume it first",
                released=sorted(self._released),
            )

    def start_writing(self) -> None:
        """Close the gate for steps until the commit; called before the first byte of an update is written."""
        if self._weights == "valid":
            self._weights = "updating"

    def stop_writing(self) -> None:
        """Open the gate again after an update that ended before its first byte was written."""
        if self._weights == "updating":
            self._weights = "valid"

    def poison(self, reason: str) -> None:
        """Mark the weights as partly overwritten; nothing is served until a complete update commits."""
        self._weights, self._weights_detail = "poisoned", reason
        logger.error("weights are POISONED: %s", reason)

    def set_released(self, released: frozenset[MemoryTag]) -> None:
        """Set the released tags. Weights whose values are not kept become invalid when their memory is released, until a
        complete update commits."""
        if "weights" in released - self._released and not self.keeps_weights:
            self._weights = "invalid"
            self._weights_detail = (
                "their memory was released without a copy, which --enable-weights-cpu-backup would keep"
            )
        self._released = released

    def commit_weights(self, version: str | None, source: str) -> None:
        """Make the new weights serve: next epoch, and the new label if one was sent. No cached KV is reused after it (I6)."""
        self._commits[source] += 1
        label = version if version is not None else self._stamp.version
        self._stamp = replace(self._stamp, epoch=self._stamp.epoch + 1, version=label)
        self._cache.commit_epoch(self._stamp.epoch)
        self._batcher.restart_prefills()
        self._batcher.mark_stale()
        self._outputs.set_stamp(self._stamp)
        self._weights, self._weights_detail = "valid", None
        if source:  # empty for a session that only changed the label: then the lost weights are still missing
            self._lost = None

    def _commit_implicit_session(self, sender: Sender, force: bool) -> Generator[Wait, None, None]:
        """Commit the implicit session if one is open; raise if ``sender`` may not commit it."""
        session = self.sessions.session_to_commit(sender, may_commit=force or self.ownership.is_owner(sender))
        if session is not None:
            assert self._commit_session is not None, "WeightUpdates calls commit_sessions_by at start"
            yield from self._commit_session(session)

    def _enter(self, mode: PauseMode | None) -> None:
        """Record a change of the pause's mode; None means that the pause ends."""
        if self._mode is not None:
            self._pause_s[self._mode] = self._seconds_in(self._mode)
        if mode is not None and mode != self._mode:
            self._pauses[mode] += 1
        self._mode, self._mode_entered_at = mode, monotonic()

    def _seconds_in(self, mode: PauseMode) -> float:
        lasting = monotonic() - self._mode_entered_at if mode == self._mode else 0.0
        return self._pause_s.get(mode, 0.0) + lasting

    def _run(self) -> None:
        self._generation = "running"
        self._enter(None)
        self._paused_at = self._lease_ended_at = None
        self.ownership.end()


def _freed(report: EmptyCacheReport | None) -> int | None:
    return None if report is None else report.freed


def _bytes(report: EmptyCacheReport | None, *, freed: bool) -> dict[str, Any]:
    if report is None:
        return {}
    fields = {"reserved_before": report.reserved_before, "reserved_after": report.reserved_after}
    return fields | ({"freed": report.freed, "ranks": list(report.others)} if freed else {})
