"""Commands that release and resume memory occupation: device memory, by tag.

Invariants:
- A release is refused with an error if a live request holds the KV, if an update is writing the weights, or if the engine is
  neither paused nor idle.
- No step is launched while any tag is released: the gate closes before memory is released and opens after it has been
  resumed. Weights become INVALID before their memory is released, unless they are backed up: then their values are copied
  to the host behind the closed gate, and a copy that fails opens it again, with nothing released.
- A release also drops what depends on the memory: with the KV the prefix cache, with the weights the record of what an
  uncommitted update has written, with either the encoded prompts that are kept.
- A resume that fails changes nothing. Resuming what is resident, and releasing what is released, has no effect.
- Without captured graphs the tag ``cuda_graph`` stands for nothing, and is never called released.
- Captured graphs are dropped with the tag ``cuda_graph``, and with every tag whose memory they read and that moves on
  release. The resume that makes everything resident captures them again before the next step.
"""

import logging
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

from ...io_struct import (
    CaesuraError,
    ErrorCode,
    MemoryTag,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
)
from ..cache.manager import CacheManager
from ..execution.graphs import DecodeGraphs
from ..executor.executor import Executor
from ..memory.device_cache import DeviceCache
from ..memory.residency import MEMORY_TAGS, ComponentResidencyManager
from ..observability.memory_history import MemoryHistory
from ..observability.stage_profiler import StageProfiler
from ..runtime.watchdog import Heartbeat
from ..scheduling.stepping import KeptPrompts, StepRunner
from .lifecycle import SLICE_S, Lifecycle, Operation, Wait, waiting
from .weight_updates import WeightUpdates

logger = logging.getLogger(__name__)

_END: Any = object()


class MemoryOccupation:
    """The handlers of release and resume."""

    def __init__(
        self,
        *,
        residency: ComponentResidencyManager,
        lifecycle: Lifecycle,
        updates: WeightUpdates,
        cache: CacheManager,
        prompts: KeptPrompts | None,
        runner: StepRunner,
        executor: Executor,
        graphs: DecodeGraphs | None,
        device_cache: DeviceCache,
        history: MemoryHistory,
        stages: StageProfiler,
        heartbeat: Heartbeat,
    ) -> None:
        """``graphs`` is None if this engine captures no graphs."""
        self._residency = residency
        self._graphs = graphs
        self._lifecycle = lifecycle
        self._updates = updates
        self._cache = cache
        self._prompts = prompts
        self._runner = runner
        self._executor = executor
        self._device_cache = device_cache
        self._history = history
        self._stages = stages
        self._heartbeat = heartbeat

    def release(self, request: ReleaseMemoryOccupationReqInput) -> Operation:
        """Release memory; the reply is sent once it has been given back to the system."""
        lifecycle = self._lifecycle
        requested = _requested_tags(request.tags) - lifecycle.released
        tags = requested - {"cuda_graph"} if self._graphs is None else requested
        before = after = self._device_cache.reserved
        freed: dict[MemoryTag, int] = {}
        if requested:
            self._require_releasable(requested)
        if tags:
            yield from lifecycle.barrier()  # the engine is paused or idle, so this waits for the forward stream only
            yield from self._close_gate(tags)
            if "kv_cache" in tags:
                self._cache.flush()
            if "weights" in tags:
                self._updates.forget()
            if self._prompts is not None and not tags.isdisjoint(("kv_cache", "weights")):
                self._prompts.clear()
            if self._graphs is not None and ("cuda_graph" in tags or self._residency.moves(tags)):
                self._graphs.drop()
            for tag in sorted(tags):
                freed[tag] = self._occupied(tag)
                with self._stages.stage(f"release.{tag}"):
                    yield from self._advance(self._residency.release([tag]), "release")
            yield from waiting(self._executor.call("release", sorted(tags)))
            with self._stages.stage("release.empty_cache"):
                after = self._device_cache.empty("release", reserved_before=before).reserved_after
            self._history.note("release", ", ".join(sorted(tags)), returned=before - after)
        return ReleaseMemoryOccupationReqOutput(
            id=request.id,
            released_tags=sorted(lifecycle.released),
            freed_bytes=freed,
            reserved_before=before,
            reserved_after=after,
            weights_kept=lifecycle.keeps_weights if "weights" in lifecycle.released else None,
        )

    def _close_gate(self, tags: frozenset[MemoryTag]) -> Generator[Wait, None, None]:
        """Call ``tags`` released, and copy what is backed up to the host. If that fails, nothing has changed."""
        lifecycle = self._lifecycle
        before = lifecycle.released
        lifecycle.set_released(before | tags)
        if not self._residency.backs_up(tags):
            return
        try:
            with self._stages.stage("release.keep"):
                elsewhere = self._executor.call("keep", sorted(tags))
                yield from self._advance(self._residency.keep(tags), "keep", self._runner.on_stream)
                yield from waiting(elsewhere)
        except BaseException:
            lifecycle.set_released(before)
            self._residency.give_up(tags)
            self._executor.call("give_up", sorted(tags))
            raise

    def resume(self, request: ResumeMemoryOccupationReqInput) -> Operation:
        """Allocate released memory again: all requested tags or none. Weights come back with their values if they are backed
        up, else without."""
        lifecycle = self._lifecycle
        tags = _requested_tags(request.tags) & lifecycle.released
        if tags:
            yield from self._resume(tags)
            if self._graphs is not None and lifecycle.released == tags:
                elsewhere = self._executor.call("capture")
                yield from self._advance(self._graphs.capture(), "capture")
                yield from waiting(elsewhere)
            self._runner.synchronize()
            lifecycle.set_released(lifecycle.released - tags)
            self._history.note("resume", ", ".join(sorted(tags)))
            missing = ", ".join(sorted(lifecycle.released))
            rest = missing and f"; no step runs before {missing} is back"
            logger.info(
                "resume_memory: %s, weights are %s%s",
                ", ".join(sorted(tags)), lifecycle.weights, rest,
            )  # fmt: skip
        return ResumeMemoryOccupationReqOutput(
            id=request.id, released_tags=sorted(lifecycle.released), resumed_bytes=self._sizes(tags)
        )

    def _resume(self, tags: frozenset[MemoryTag]) -> Generator[Wait, None, None]:
        """Resume on every rank or on none: the workers first, which release again where one rank fails."""
        try:
            yield from waiting(self._executor.call("resume", sorted(tags)))
            yield from self._advance(self._residency.resume(tags), "resume", self._runner.on_stream)
        except CaesuraError:
            yield from waiting(self._executor.call("keep", sorted(tags)))
            yield from waiting(self._executor.call("release", sorted(tags)))
            raise

    def _advance(
        self,
        steps: Iterator[None],
        what: str,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Generator[Wait, None, None]:
        """Run ``steps`` to their end, each slice of them within ``context``: ``on_stream`` for what copies, since updates write
        and steps read there.

        A slice, not a step, is declared as a long operation: one step may move all of a model's memory, many are short, and
        the declaration takes a tenth of a millisecond.
        """
        unfinished = True
        while unfinished:
            until = perf_counter() + SLICE_S
            with context(), self._heartbeat.long_operation(what):
                while (unfinished := next(steps, _END) is not _END) and perf_counter() < until:
                    pass
            if unfinished:
                yield Wait.SLICE

    def _require_releasable(self, tags: Collection[MemoryTag]) -> None:
        lifecycle = self._lifecycle
        if self._updates.sessions.is_explicit or lifecycle.weights == "updating":
            raise CaesuraError(
                ErrorCode.SESSION_OPEN,
                "cannot release memory: a weight update is open; end it (an implicit one: continue, or flush_cache)",
            )
        pending = lifecycle.pending()
        if "kv_cache" in tags and pending["held_tokens"]:
            raise CaesuraError(
                ErrorCode.NOT_IDLE,
                "cannot release kv_cache: live requests hold KV; abort or retract them",
                **pending,
            )
        if not {"weights", "cuda_graph"}.isdisjoint(tags) and not (
            lifecycle.generation == "paused" or lifecycle.is_idle()
        ):
            raise CaesuraError(
                ErrorCode.NOT_IDLE,
                "cannot release weights or cuda_graph: pause first, or let requests end",
                **pending,
            )

    def _occupied(self, tag: MemoryTag) -> int:
        """Bytes that a release of ``tag`` gives back now."""
        if tag == "cuda_graph":
            return 0 if self._graphs is None else self._graphs.nbytes
        return self._residency.occupied_bytes(tag)

    def _sizes(self, tags: Collection[MemoryTag]) -> dict[MemoryTag, int]:
        sizes = {tag: self._residency.nbytes(tag) for tag in sorted(tags)}
        if self._graphs is not None and "cuda_graph" in sizes:
            sizes["cuda_graph"] = self._graphs.nbytes
        return sizes


def _requested_tags(tags: list[MemoryTag] | None) -> frozenset[MemoryTag]:
    return frozenset(MEMORY_TAGS if tags is None else tags)
