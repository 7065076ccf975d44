"""Commands that release and resume memory occupation: device memory, by tag.

- No step is launched while any tag is released. Weights become INVALID before their release, unless they are
  backed up: then they are copied to the host behind the closed gate, and a copy that fails opens it again.
- A release also drops what depends on the memory: the prefix cache, the record of an uncommitted update,
  encoded prompts. Captured graphs stay, unless their tag is released; the resume that makes everything
  resident captures them again before the next step if anything has moved.
- A resume that fails changes nothing. Both commands ignore tags that are as they ask, and ``cuda_graph``
  where no graphs are captured.
"""

import logging
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ..memory.residency import MEMORY_TAGS
from .engine_state import Sender
from .operations import SLICE_S, Operation, Wait, barrier, is_idle, pending, waiting

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)

_END: Any = object()


def release_memory(
    engine: "Engine", request: wire.ReleaseMemoryOccupationReqInput, sender: Sender
) -> Operation:
    state = engine.state
    requested = _requested_tags(request.tags) - state.released
    tags = requested - {"cuda_graph"} if engine.graphs is None else requested
    before = after = engine.device_cache.reserved
    freed: dict[wire.MemoryTag, int] = {}
    if requested:
        _require_releasable(engine, requested)
    if tags:
        yield from barrier(engine)  # the engine is paused or idle, so this waits for the forward stream only
        yield from _close_gate(engine, tags)
        if "kv_cache" in tags:
            yield from _advance(engine, engine.cache.save(), "release")
            engine.cache.flush(keep_tier=True)
        if "weights" in tags:
            engine.updates.forget()
        if engine.prompts is not None and not tags.isdisjoint(("kv_cache", "weights")):
            engine.prompts.clear()
        if engine.graphs is not None and "cuda_graph" in tags:
            engine.graphs.drop()
        for tag in sorted(tags):
            freed[tag] = _occupied(engine, tag)
            with engine.stages.stage(f"release.{tag}"):
                yield from _advance(engine, engine.residency.release([tag]), "release")
        yield from waiting(engine.executor.call("release", sorted(tags)))
        with engine.stages.stage("release.empty_cache"):
            after = engine.device_cache.empty("release", reserved_before=before).reserved_after
        engine.history.note("release", ", ".join(sorted(tags)), returned=before - after)
    return wire.ReleaseMemoryOccupationReqOutput(
        id=request.id,
        released_tags=sorted(state.released),
        freed_bytes=freed,
        reserved_before=before,
        reserved_after=after,
        weights_kept=state.keeps_weights if "weights" in state.released else None,
    )


def _close_gate(engine: "Engine", tags: frozenset[wire.MemoryTag]) -> Generator[Wait, None, None]:
    """Mark ``tags`` as released, and copy what is backed up to the host. A failure changes nothing."""
    state = engine.state
    before = state.released
    state.set_released(before | tags)
    if not engine.residency.backs_up(tags):
        return
    try:
        with engine.stages.stage("release.keep"):
            elsewhere = engine.executor.call("keep", sorted(tags))
            yield from _advance(engine, engine.residency.keep(tags), "keep", engine.runner.on_stream)
            yield from waiting(elsewhere)
    except BaseException:
        state.set_released(before)
        engine.residency.give_up(tags)
        engine.executor.call("give_up", sorted(tags))
        raise


def resume_memory(
    engine: "Engine", request: wire.ResumeMemoryOccupationReqInput, sender: Sender
) -> Operation:
    """Allocate released memory again: all requested tags or none. Only backed up weights have values."""
    state = engine.state
    tags = _requested_tags(request.tags) & state.released
    if tags:
        yield from _resume(engine, tags)
        if engine.graphs is not None and state.released == tags:
            elsewhere = engine.executor.call("capture")
            yield from _advance(engine, engine.graphs.capture(), "capture")
            yield from waiting(elsewhere)
        engine.runner.synchronize()
        state.set_released(state.released - tags)
        engine.history.note("resume", ", ".join(sorted(tags)))
        missing = ", ".join(sorted(state.released))
        rest = missing and f"; no step runs before {missing} is back"
        logger.info(
            "resume_memory: %s, weights are %s%s",
            ", ".join(sorted(tags)), state.weights, rest,
        )  # fmt: skip
    return wire.ResumeMemoryOccupationReqOutput(
        id=request.id, released_tags=sorted(state.released), resumed_bytes=_sizes(engine, tags)
    )


def _resume(engine: "Engine", tags: frozenset[wire.MemoryTag]) -> Generator[Wait, None, None]:
    """Resume on every rank or on none: the workers first, which release again if one rank fails."""
    yield from waiting(engine.executor.call("resume", sorted(tags)))
    try:
        yield from _advance(engine, engine.residency.resume(tags), "resume", engine.runner.on_stream)
    except CaesuraError:
        yield from waiting(engine.executor.call("keep", sorted(tags)))
        yield from waiting(engine.executor.call("release", sorted(tags)))
        raise


def _advance(
    engine: "Engine",
    steps: Iterator[None],
    what: str,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Generator[Wait, None, None]:
    """Run ``steps``, each slice in ``context``: copies need ``on_stream``, since updates write there.

    A slice, not a step, is declared as long: declarations take a tenth of a millisecond, a step may move all.
    """
    unfinished = True
    while unfinished:
        until = perf_counter() + SLICE_S
        with context(), engine.heartbeat.long_operation(what):
            while (unfinished := next(steps, _END) is not _END) and perf_counter() < until:
                pass
        if unfinished:
            yield Wait.SLICE


def _require_releasable(engine: "Engine", tags: Collection[wire.MemoryTag]) -> None:
    state = engine.state
    engine.drift.cancel()
    if engine.sessions.is_explicit or state.weights == "updating":
        raise CaesuraError(
            ErrorCode.SESSION_OPEN,
            "cannot release memory: a weight update is open; end it (an implicit one: continue, or "
            "flush_cache)",
        )
    counts = pending(engine)
    if "kv_cache" in tags and counts["held_tokens"]:
        reason = "cannot release kv_cache: live requests hold KV; abort or retract them"
        raise CaesuraError(ErrorCode.NOT_IDLE, reason, **counts)
    if not {"weights", "cuda_graph"}.isdisjoint(tags) and not (
        state.generation == "paused" or is_idle(engine)
    ):
        reason = "cannot release weights or cuda_graph: pause first, or let requests end"
        raise CaesuraError(ErrorCode.NOT_IDLE, reason, **counts)


def _occupied(engine: "Engine", tag: wire.MemoryTag) -> int:
    if tag == "cuda_graph":
        return 0 if engine.graphs is None else engine.graphs.nbytes
    return engine.residency.occupied_bytes(tag)


def _sizes(engine: "Engine", tags: Collection[wire.MemoryTag]) -> dict[wire.MemoryTag, int]:
    sizes = {tag: engine.residency.nbytes(tag) for tag in sorted(tags)}
    if engine.graphs is not None and "cuda_graph" in sizes:
        sizes["cuda_graph"] = engine.graphs.nbytes
    return sizes


def _requested_tags(tags: list[wire.MemoryTag] | None) -> frozenset[wire.MemoryTag]:
    return frozenset(MEMORY_TAGS if tags is None else tags)
