"""The commands pause, continue and flush, and what happens when a pause's lease expires.

Invariant I4: a pause is acknowledged only when no step is in flight and the forward stream is idle.
"""

import logging
from collections.abc import Generator
from time import monotonic
from typing import TYPE_CHECKING, Any

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ..memory.device_memory import EmptyCacheReport
from ..runtime.engine_config import PAGE_SIZE
from .engine_state import Sender
from .operations import Operation, Wait, barrier, held_kind, is_idle, pending

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


def pause(engine: "Engine", request: wire.PauseGenerationReqInput, sender: Sender) -> Operation:
    """Pause at a step boundary; see docs/reference/lifecycle.md."""
    if request.lease_s is not None and request.owner is None:
        reason = "lease_s needs an owner: any name"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="owner", value=None)
    state, aborted = engine.state, 0
    state.begin_pause()
    with engine.stages.stage("pause"):
        yield from barrier(engine)
        if request.mode == "abort":
            aborted = engine.outputs.abort_all("Aborted by pause_generation")
        elif request.mode == "retract":
            engine.batcher.retract_all(keep_prefix=engine.cache.tier is not None)
    state.complete_pause(request, sender)
    held_tokens = engine.cache.usage().held * PAGE_SIZE
    checks_hold, checks_wait = engine.drift.counts()
    holding, waiting = engine.batcher.num_holding - checks_hold, len(engine.waiting) - checks_wait
    kind = held_kind(engine)
    logger.info(
        "pause_generation: %s at step %d, %d requests hold %s, %d wait",
        request.mode, state.step, holding, kind if kind != "KV" else f"{held_tokens} tokens of KV", waiting,
    )  # fmt: skip
    engine.history.note("pause", f"{request.mode}, {holding} requests hold {kind}")
    return wire.PauseGenerationReqOutput(
        id=request.id,
        mode=request.mode,
        step=state.step,
        held_requests=holding,
        held_tokens=held_tokens,
        waiting_requests=waiting,
        aborted_requests=aborted,
        owner=state.ownership.owner,
    )


def continue_generation(
    engine: "Engine", request: wire.ContinueGenerationReqInput, sender: Sender
) -> Operation:
    """Empty the device cache while still paused, then run. Has no effect if the engine runs already."""
    state = engine.state
    if state.generation == "running":
        return wire.ContinueGenerationReqOutput(id=request.id, was_paused=False)
    state.ownership.require_continue(sender, request.force)
    if engine.sessions.is_explicit:
        raise CaesuraError(ErrorCode.SESSION_OPEN, "a weight session is open: end it before continuing")
    yield from _commit_implicit_session(engine, sender, request.force)
    state.require_serviceable("cannot continue")
    with engine.stages.stage("continue"):
        report = engine.device_cache.empty("continue") if request.torch_empty_cache else None
    engine.history.note("continue", state.pause_mode or "", returned=None if report is None else report.freed)
    state.run()
    fields = _reserved(report)
    if report is not None:
        fields |= {"freed": report.freed, "ranks": list(report.others)}
    return wire.ContinueGenerationReqOutput(id=request.id, was_paused=True, **fields)


def flush(engine: "Engine", request: wire.FlushCacheReqInput, sender: Sender) -> Operation:
    """Clear the prefix cache once the engine is idle, and commit an implicit session; refuse if too late."""
    deadline = monotonic() + request.timeout_s
    engine.drift.cancel()
    while not is_idle(engine):
        if monotonic() >= deadline:
            reason = f"flush_cache needs an idle engine: requests are pending, or hold {held_kind(engine)}"
            raise CaesuraError(ErrorCode.NOT_IDLE, reason, **pending(engine))
        yield Wait.CHANGE
    yield from _commit_implicit_session(engine, sender, request.force)
    freed = engine.cache.flush() * PAGE_SIZE
    if engine.prompts is not None:
        engine.prompts.clear()
    report = engine.device_cache.empty("flush") if request.torch_empty_cache else None
    engine.history.note("flush", f"{freed} tokens", returned=None if report is None else report.freed)
    return wire.FlushCacheReqOutput(id=request.id, freed_tokens=freed, **_reserved(report))


def expire_lease(engine: "Engine") -> None:
    """Do what the pause asked for in case its lease expires. No command may be under way."""
    state = engine.state
    lease, owner = state.ownership.lease, state.ownership.owner
    assert lease is not None
    state.end_lease()
    logger.warning(
        "pause lease of %r expired after %.1f s without a message from the owner: %s",
        owner, lease.seconds, lease.action,
    )  # fmt: skip
    if lease.action == "abort":
        engine.outputs.abort_all("Aborted: the pause lease expired")
    elif lease.action == "continue" and state.weights == "valid":
        report = engine.device_cache.empty("lease_expiry")
        engine.history.note("lease_expiry", f"of {owner!r}", returned=report.freed)
        state.run()
    elif lease.action == "continue":
        logger.error("cannot continue: weights are %s; staying paused", state.weights)


def _commit_implicit_session(engine: "Engine", sender: Sender, force: bool) -> Generator[Wait, None, None]:
    """Commit the implicit session if one is open; raise if ``sender`` may not commit it."""
    may_commit = force or engine.state.ownership.is_owner(sender)
    session = engine.sessions.to_commit(sender, may_commit=may_commit)
    if session is not None:
        yield from engine.updates.commit_implicit_session(session)


def _reserved(report: EmptyCacheReport | None) -> dict[str, Any]:
    if report is None:
        return {}
    return {"reserved_before": report.reserved_before, "reserved_after": report.reserved_after}
