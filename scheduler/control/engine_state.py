"""The engine's state and its only writer: generation, weights and memory, three independent facts.

docs/reference/states.md says what each command does in each state; a test drives a real engine through every
cell of it. After a failed update, weights become valid again only by a complete update. The weights epoch and
the public label change in :meth:`EngineState.commit_weights` and nowhere else.
"""

import logging
from collections import Counter
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ...io_struct.control import LeaseAction
from ..scheduling.request import WeightStamp

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sender:
    """Two senders are the same by their owner token or, where one of them has none, by their socket."""

    client: bytes
    owner: str | None = None

    def is_same(self, other: "Sender") -> bool:
        if self.owner is not None and other.owner is not None:
            return self.owner == other.owner
        return self.client == other.client


@dataclass(slots=True)
class Lease:
    """Seconds that the owner may send nothing, and what the engine does after that."""

    seconds: float
    action: LeaseAction
    expires: float


class PauseOwnership:
    """Owner and lease of the pause, the first sender's until it ends or expires; None while running.

    A later pause changes only the mode; one without a token is not taken over by another sender's lease.
    """

    def __init__(self) -> None:
        self.sender: Sender | None = None
        """Sender that paused, or None if the engine is not paused or the lease has expired."""
        self.lease: Lease | None = None

    @property
    def owner(self) -> str | None:
        return None if self.sender is None else self.sender.owner

    def take(self, sender: Sender, request: wire.PauseGenerationReqInput) -> None:
        """Record a completed pause. The first sender stays the owner, and may change its token and lease."""
        if self.sender is None or (self.sender.owner is None and self.sender.client == sender.client):
            self.sender = sender
        if request.lease_s is not None and sender.owner == self.owner:
            self.lease = Lease(request.lease_s, request.on_lease_expiry, monotonic() + request.lease_s)

    def renew(self, owner: str | None) -> None:
        """Renew the lease if a message carried the token of the pause's owner."""
        if self.lease is not None and owner is not None and owner == self.owner:
            self.lease.expires = monotonic() + self.lease.seconds

    def end(self) -> None:
        self.sender = self.lease = None

    def require_continue(self, sender: Sender, force: bool) -> None:
        """Raise ``not_owner`` unless ``sender`` may end the pause; anybody may end one without a token."""
        if self.owner is not None and sender.owner != self.owner and not force:
            reason = f"the pause belongs to {self.owner!r}; use force"
            raise CaesuraError(ErrorCode.NOT_OWNER, reason, owner=self.owner)

    def is_owner(self, sender: Sender) -> bool:
        return self.sender is not None and self.sender.is_same(sender)


class EngineState:
    """Generation, weights and memory, with totals since start. Only its methods write its attributes."""

    def __init__(self, engine: "Engine", stamp: WeightStamp, lost: str | None) -> None:
        """``lost`` says which committed weights could not be restored at this start."""
        self._engine = engine
        self.generation: wire.GenerationState = "running"
        self.pause_mode: wire.PauseMode | None = None
        self.ownership = PauseOwnership()
        self.weights: wire.WeightsState = "valid"
        self.weights_detail: str | None = None
        """Reason why the weights are poisoned or invalid."""
        self.stamp = stamp
        self.released: frozenset[wire.MemoryTag] = frozenset()
        self.step = 0
        """Number of the last launched step; 0 before the first."""
        self._lost = lost
        self._paused_at: float | None = None
        self._lease_ended_at: float | None = None
        self._mode_entered_at = 0.0
        self._pauses: Counter[wire.PauseMode] = Counter()
        self._pause_s: dict[wire.PauseMode, float] = {}
        self._commits: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        if lost is not None and engine.config.on_lost_weights == "serve_initial":
            logger.error("weights are LOST: %s; the initial weights are served", lost)
        elif lost is not None:
            self.weights, self.weights_detail = "invalid", lost
            logger.error("weights are LOST: %s; nothing is served until a complete update commits", lost)

    @property
    def may_execute(self) -> bool:
        """The gate of every step: True if the next step may be launched."""
        return self.generation == "running" and self.weights == "valid" and not self.released

    def begin_step(self) -> None:
        self.step += 1

    # generation

    def begin_pause(self) -> None:
        if self.generation == "running":
            self.generation = "pausing"

    def complete_pause(self, request: wire.PauseGenerationReqInput, sender: Sender) -> None:
        """Enter the mode of ``request``. A pause of a paused engine changes the mode."""
        self.generation = "paused"
        self._enter(request.mode)
        self._paused_at = self._paused_at if self._paused_at is not None else monotonic()
        self.ownership.take(sender, request)

    def run(self) -> None:
        self.generation = "running"
        self._enter(None)
        self._paused_at = self._lease_ended_at = None
        self.ownership.end()

    def renew_lease(self, owner: str | None) -> None:
        """Renew the pause's lease if ``owner``, the token of a received message, owns the pause."""
        self.ownership.renew(owner)

    def end_lease(self) -> None:
        self.ownership.end()
        self._lease_ended_at = monotonic()

    @property
    def pause_age_s(self) -> float | None:
        return None if self._paused_at is None else monotonic() - self._paused_at

    @property
    def unleased_since(self) -> float | None:
        """Monotonic time since when the pause has had no lease, or None unless paused without one."""
        if self._paused_at is None or self.ownership.lease is not None:
            return None
        return self._paused_at if self._lease_ended_at is None else self._lease_ended_at

    @property
    def paused_by(self) -> str:
        if self.ownership.owner is not None:
            return f"owner {self.ownership.owner!r}"
        return (
            "a client without an owner token"
            if self._lease_ended_at is None
            else "an owner whose lease has expired"
        )

    @property
    def lease_left_s(self) -> float | None:
        lease = self.ownership.lease
        return None if lease is None else lease.expires - monotonic()

    def pause_totals(self) -> list[wire.PauseTotal]:
        return [
            wire.PauseTotal(mode=mode, count=count, seconds=self._seconds_in(mode))
            for mode, count in self._pauses.items()
        ]

    def _enter(self, mode: wire.PauseMode | None) -> None:
        if self.pause_mode is not None:
            self._pause_s[self.pause_mode] = self._seconds_in(self.pause_mode)
        if mode is not None and mode != self.pause_mode:
            self._pauses[mode] += 1
        self.pause_mode, self._mode_entered_at = mode, monotonic()

    def _seconds_in(self, mode: wire.PauseMode) -> float:
        lasting = monotonic() - self._mode_entered_at if mode == self.pause_mode else 0.0
        return self._pause_s.get(mode, 0.0) + lasting

    # weights

    @property
    def serviceable(self) -> bool:
        """True if the weights are valid, or will be once the update under way commits."""
        return self.weights in ("valid", "updating")

    def require_serviceable(self, what: str) -> None:
        """Raise ``weights_poisoned`` or ``weights_invalid`` if they are; an update under way is no reason."""
        codes = {"poisoned": ErrorCode.WEIGHTS_POISONED, "invalid": ErrorCode.WEIGHTS_INVALID}
        if (code := codes.get(self.weights)) is not None:
            reason = f"{what}: weights are {self.weights} ({self.weights_detail}); send a complete update"
            raise CaesuraError(code, reason)

    def require_epoch(self, minimum: int | None) -> None:
        """Raise ``epoch_behind`` if weights are older than ``minimum``, or initial in place of lost ones."""
        epoch = self.stamp.epoch
        if minimum is None or (minimum <= epoch and (self._lost is None or minimum <= 0)):
            return
        lost = "" if self._lost is None else f" ({self._lost})"
        reason = f"weights epoch is {epoch}{lost}, the request needs {minimum}"
        raise CaesuraError(ErrorCode.EPOCH_BEHIND, reason, weights_epoch=epoch, min_weights_epoch=minimum)

    def start_writing(self) -> None:
        """Close the gate for steps until the commit; called before the first byte of an update is written."""
        if self.weights == "valid":
            self.weights = "updating"

    def stop_writing(self) -> None:
        """Open the gate again after an update that ended before its first byte was written."""
        if self.weights == "updating":
            self.weights = "valid"

    def poison(self, reason: str) -> None:
        """Mark the weights as partly overwritten; nothing is served until a complete update commits."""
        self.weights, self.weights_detail = "poisoned", reason
        logger.error("weights are POISONED: %s", reason)

    def note_digest(self, digest: str) -> None:
        """Set the digest of the weights of the start, before the first step."""
        self.stamp = replace(self.stamp, digest=digest)
        self._engine.outputs.set_stamp(self.stamp)

    def commit_weights(
        self, version: str | None, source: str, digest: str = "", same_as: int | None = None
    ) -> None:
        """Make the new weights serve: next epoch, and the label that was sent. No older KV is reused (I6).

        ``same_as`` is the epoch of the weights that a rollback returns to.
        """
        self._commits[source] += 1
        label = version if version is not None else self.stamp.version
        self.stamp = replace(self.stamp, epoch=self.stamp.epoch + 1, version=label, digest=digest)
        self._engine.cache.commit_epoch(self.stamp.epoch, same_as)
        self._engine.batcher.restart_prefills()
        self._engine.batcher.mark_stale()
        self._engine.outputs.set_stamp(self.stamp)
        self.weights, self.weights_detail = "valid", None
        if source:  # empty for a session that only changed the label: then the lost weights are still missing
            self._lost = None
            self._engine.drift.updated(None)

    def count_failed_update(self, source: str) -> None:
        self._failures[source] += 1

    def update_totals(self) -> list[wire.UpdateTotal]:
        return [
            wire.UpdateTotal(source=source, committed=self._commits[source], failed=self._failures[source])
            for source in {**self._commits, **self._failures}
        ]

    # memory

    @property
    def keeps_weights(self) -> bool:
        """True if a release of the weights' memory keeps their values."""
        return self._engine.config.weights_cpu_backup or self._engine.residency.nbytes("weights") == 0

    def require_resident(self, tag: wire.MemoryTag) -> None:
        if tag in self.released:
            reason = f"the memory of {tag} is released: resume it first"
            raise CaesuraError(ErrorCode.MEMORY_RELEASED, reason, released=sorted(self.released))

    def set_released(self, released: frozenset[wire.MemoryTag]) -> None:
        """Set the released tags. A release of weights whose values are not kept makes them invalid."""
        if "weights" in released - self.released and not self.keeps_weights:
            self.weights = "invalid"
            self.weights_detail = (
                "their memory was released without a copy, which --enable-weights-cpu-backup would keep"
            )
        self.released = released
