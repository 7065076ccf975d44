"""The engine's state and its only writer.

Three independent facts: generation (running, pausing, paused in a mode), weights (valid, updating, poisoned, invalid)
and memory (resident, released). A step is launched only when running, valid and resident. docs/lifecycle.md carries
the table *command x state -> result*; a test drives a real scheduler through every cell of it.

Invariants:
- I4: a pause is acknowledged only when no step is in flight and the forward stream is idle.
- Every operation is a generator that the loop advances; it never blocks, and never runs while another one does.
- Weights become valid again after a failed update only through a complete one.
- The weights epoch and the public label change in :meth:`Lifecycle.commit_weights` and nowhere else.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from enum import Enum
from time import monotonic

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
from ..batching.batcher import Batcher
from ..batching.output_processor import OutputProcessor
from ..batching.request import WeightStamp
from ..batching.waiting_queue import WaitingQueue
from ..cache.manager import CacheManager
from ..config import PAGE_SIZE
from ..forward import Runner
from ..memory.device_cache import DeviceCache
from ..memory.device_memory import EmptyCacheReport
from ..observability.memory_history import MemoryHistory
from ..observability.stage_profiler import StageProfiler
from .pause_ownership import PauseOwnership, Sender
from .weight_sessions import Session, Sessions

logger = logging.getLogger(__name__)


class Wait(Enum):
    """What an operation waits for when it yields."""

    STEP = "step"
    """The step in flight must land; the operation has already stopped further launches."""
    SLICE = "slice"
    """Nothing: it has more to do and lets the loop look at the inbox."""
    OUTSIDE = "outside"
    """A thread beside the loop (background.py), which will wake it; the operation keeps its place in the queue."""
    CHANGE = "change"
    """The engine must change (become idle); other operations may run meanwhile."""


Operation = Generator[Wait, None, Reply]
"""A command that takes more than one tick; returns its reply or raises :class:`CaesuraError`."""


class Lifecycle:
    """State, pause, continue and flush."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        batcher: Batcher,
        waiting: WaitingQueue,
        outputs: OutputProcessor,
        cache: CacheManager,
        runner: Runner,
        device_cache: DeviceCache,
        stamp: WeightStamp,
        history: MemoryHistory,
        stages: StageProfiler,
        lost: str | None,
        serve_lost: bool,
    ) -> None:
        """``lost``: which weights could not be had again at this start; nothing is served in their place unless ``serve_lost``."""
        self.sessions = sessions
        self.ownership = PauseOwnership()
        self._batcher = batcher
        self._waiting = waiting
        self._outputs = outputs
        self._cache = cache
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
        if lost is not None and not serve_lost:
            self._weights, self._weights_detail = "invalid", lost
        if lost is not None:
            now = (
                "those of the start are served"
                if serve_lost
                else "nothing is served until an update is complete"
            )
            logger.error("weights are LOST: %s; %s", lost, now)
        self._mode_since = 0.0
        self._pauses: Counter[PauseMode] = Counter()
        self._pause_s: dict[PauseMode, float] = {}
        self._commits: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._released: frozenset[MemoryTag] = frozenset()
        self._step = 0
        self._commit_session: Callable[[Session], None] | None = None

    @property
    def step(self) -> int:
        """Number of the last step that was executed; 0 before the first."""
        return self._step

    def begin_step(self) -> None:
        """The loop is about to execute the next step."""
        self._step += 1

    def commit_sessions_by(self, commit: Callable[[Session], None]) -> None:
        """``commit`` commits an implicit session for :meth:`continue_generation` and :meth:`flush`."""
        self._commit_session = commit

    @property
    def may_execute(self) -> bool:
        """The gate of every step."""
        return self._generation == "running" and self._weights == "valid" and not self._released

    @property
    def generation(self) -> GenerationState:
        """running, pausing or paused."""
        return self._generation

    @property
    def pause_mode(self) -> PauseMode | None:
        """None unless paused."""
        return self._mode

    @property
    def pause_age_s(self) -> float | None:
        """Seconds since the pause was acknowledged; None unless paused."""
        return None if self._paused_at is None else monotonic() - self._paused_at

    @property
    def pause_owner(self) -> str | None:
        """Owner token of the pause."""
        return self.ownership.owner

    @property
    def lease_left_s(self) -> float | None:
        """Seconds until the pause's lease expires; None without one."""
        lease = self.ownership.lease
        return None if lease is None else lease.expires - monotonic()

    @property
    def weights(self) -> WeightsState:
        """valid, updating, poisoned or invalid."""
        return self._weights

    @property
    def weights_detail(self) -> str | None:
        """Why the weights are not valid."""
        return self._weights_detail

    @property
    def released(self) -> frozenset[MemoryTag]:
        """Tags whose memory was given back."""
        return self._released

    @property
    def stamp(self) -> WeightStamp:
        """Epoch and label of the weights that serve."""
        return self._stamp

    @property
    def in_flight(self) -> bool:
        """A launched step has not been consumed."""
        return self._batcher.in_flight

    def pause(self, request: PauseGenerationReqInput, sender: Sender) -> Operation:
        """Stop at the step boundary; see the module's invariants and docs/lifecycle.md."""
        if request.lease_s is not None and request.owner is None:
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, "a pause with a lease needs an owner", field="owner", value=None
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
        logger.info(
            "pause_generation: %s at step %d, %d requests hold %d tokens of KV, %d wait",
            request.mode, self._step, self._batcher.num_holding, held_pages * PAGE_SIZE, len(self._waiting),
        )  # fmt: skip
        self._history.note("pause", f"{request.mode}, {self._batcher.num_holding} requests hold KV")
        return PauseGenerationReqOutput(
            id=request.id,
            mode=request.mode,
            step=self._step,
            held_requests=self._batcher.num_holding,
            held_tokens=held_pages * PAGE_SIZE,
            waiting_requests=len(self._waiting),
            aborted_requests=aborted,
        )

    def continue_generation(self, request: ContinueGenerationReqInput, sender: Sender) -> Operation:
        """Empty the device cache while still paused, then run; harmless when running."""
        yield from ()
        if self._generation == "running":
            return ContinueGenerationReqOutput(id=request.id, was_paused=False)
        self.ownership.require_continue(sender, request.force)
        if self.sessions.is_explicit:
            raise CaesuraError(ErrorCode.SESSION_OPEN, "a weight session is open: end it before continuing")
        self._settle(sender, request.force)
        self.require_serviceable("cannot continue")
        report = self._device_cache.empty("continue") if request.torch_empty_cache else None
        self._history.note("continue", self._mode or "", returned=_freed(report))
        self._run()
        return ContinueGenerationReqOutput(id=request.id, was_paused=True, **_bytes(report, freed=True))

    def flush(self, request: FlushCacheReqInput, sender: Sender) -> Operation:
        """Clear the KV pools once the engine is fully idle, or refuse with what is pending; commits an implicit session."""
        deadline = monotonic() + request.timeout_s
        while not self.is_idle():
            if monotonic() >= deadline:
                raise CaesuraError(
                    ErrorCode.NOT_IDLE,
                    "flush_cache needs an idle engine: requests are pending",
                    **self.pending(),
                )
            yield Wait.CHANGE
        self._settle(sender, request.force)
        freed = self._cache.flush()
        report = self._device_cache.empty("flush") if request.torch_empty_cache else None
        self._history.note("flush", f"{freed * PAGE_SIZE} tokens", returned=_freed(report))
        return FlushCacheReqOutput(
            id=request.id, freed_tokens=freed * PAGE_SIZE, **_bytes(report, freed=False)
        )

    def renew_lease(self, owner: str | None) -> None:
        """A message that carries ``owner`` has come; it renews the lease if the pause is that owner's."""
        self.ownership.renew(owner, monotonic())

    def expire_lease(self) -> None:
        """The owner has given no sign of life: do what the pause asked for. No command is under way."""
        lease, owner = self.ownership.lease, self.ownership.owner
        assert lease is not None
        self.ownership.end()
        logger.warning(
            "pause lease of %r expired after %.1f s without a sign of life: %s",
            owner,
            lease.seconds,
            lease.action,
        )
        if lease.action == "abort":
            self._outputs.abort_all("Aborted: the pause lease expired")
        elif lease.action == "continue" and self._weights == "valid":
            report = self._device_cache.empty("lease_expiry")
            self._history.note("lease_expiry", f"of {owner!r}", returned=report.freed)
            self._run()
        elif lease.action == "continue":
            logger.error("cannot continue: weights are %s; staying paused", self._weights)

    def barrier(self) -> Generator[Wait, None, None]:
        """Until no step is in flight and the forward stream is idle. The caller has stopped further launches."""
        while self.in_flight:
            yield Wait.STEP
        self._runner.synchronize()

    def is_idle(self) -> bool:
        """Nothing running, prefilling, in flight, held or half written; waiting requests count unless paused."""
        waiting_blocks = len(self._waiting) > 0 and self._generation != "paused"
        holding = self._batcher.num_holding > 0 or self.in_flight
        return not (holding or waiting_blocks or self.sessions.is_working)

    def pending(self) -> dict[str, int]:
        """What keeps the engine from being idle."""
        return {
            "running": self._batcher.num_running,
            "prefilling": self._batcher.num_prefilling,
            "waiting": len(self._waiting),
            "held_tokens": self._cache.usage().held * PAGE_SIZE,
        }

    def pause_totals(self) -> list[PauseTotal]:
        """Pauses since start, by mode."""
        return [
            PauseTotal(mode=mode, count=count, seconds=self._seconds_in(mode))
            for mode, count in self._pauses.items()
        ]

    def count_failed_update(self, source: str) -> None:
        """An update from ``source`` has left the weights poisoned."""
        self._failures[source] += 1

    def update_totals(self) -> list[UpdateTotal]:
        """Weight updates since start, by transport."""
        return [
            UpdateTotal(source=source, committed=self._commits[source], failed=self._failures[source])
            for source in {**self._commits, **self._failures}
        ]

    @property
    def serviceable(self) -> bool:
        """The weights are valid, or will be when the update under way commits."""
        return self._weights in ("valid", "updating")

    def require_serviceable(self, what: str) -> None:
        """Raise unless the weights could serve (an update may be under way)."""
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
        """Raise unless the weights are at least those of epoch ``minimum``. Those of a start that stand in for lost
        ones are older than anything that was ever committed."""
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
        """The first byte of an update comes next: nothing is launched until commit."""
        if self._weights == "valid":
            self._weights = "updating"

    def stop_writing(self) -> None:
        """An update ended before its first byte: what was valid still is."""
        if self._weights == "updating":
            self._weights = "valid"

    def poison(self, reason: str) -> None:
        """Weights may be half new; refuse to serve until a complete update commits."""
        self._weights, self._weights_detail = "poisoned", reason
        logger.error("weights are POISONED: %s", reason)

    def set_released(self, released: frozenset[MemoryTag]) -> None:
        """Memory was given back or taken; weights that lost theirs are invalid until a complete update."""
        if "weights" in released - self._released:
            self._weights, self._weights_detail = "invalid", "their memory was released"
        self._released = released

    def commit_weights(self, version: str | None, source: str) -> None:
        """New weights serve from now on: next epoch, new label if one was sent; no KV crosses (I6)."""
        self._commits[source] += 1
        label = version if version is not None else self._stamp.version
        self._stamp = replace(self._stamp, epoch=self._stamp.epoch + 1, version=label)
        self._cache.commit_epoch(self._stamp.epoch)
        self._batcher.restart_prefills()
        self._batcher.mark_stale()
        self._outputs.set_stamp(self._stamp)
        self._weights, self._weights_detail = "valid", None
        if source:  # not a new label alone
            self._lost = None

    def _settle(self, sender: Sender, force: bool) -> None:
        """Commit the implicit session, if one is open and ``sender`` may."""
        session = self.sessions.settling(sender, may_settle=force or self.ownership.is_owner(sender))
        if session is not None:
            assert self._commit_session is not None, "updates are wired before commands come"
            self._commit_session(session)

    def _enter(self, mode: PauseMode | None) -> None:
        """Paused in ``mode`` from now on; None: paused no more."""
        if self._mode is not None:
            self._pause_s[self._mode] = self._seconds_in(self._mode)
        if mode is not None and mode != self._mode:
            self._pauses[mode] += 1
        self._mode, self._mode_since = mode, monotonic()

    def _seconds_in(self, mode: PauseMode) -> float:
        lasting = monotonic() - self._mode_since if mode == self._mode else 0.0
        return self._pause_s.get(mode, 0.0) + lasting

    def _run(self) -> None:
        self._generation = "running"
        self._enter(None)
        self._paused_at = None
        self.ownership.end()


def _freed(report: EmptyCacheReport | None) -> int | None:
    return None if report is None else report.freed


def _bytes(report: EmptyCacheReport | None, *, freed: bool) -> dict[str, int]:
    if report is None:
        return {}
    fields = {"reserved_before": report.reserved_before, "reserved_after": report.reserved_after}
    return fields | ({"freed": report.freed} if freed else {})
