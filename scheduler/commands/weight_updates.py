"""Weight updates as commands: checks, writing and commit, the same for every transport.

What happens to a session (``weight_sessions.py`` says whose it is and who may do what):

    open --call--> open, written --end(commit), continue, flush, every parameter written--> none, committed
                                 --end(abort), failure, deadline--> none, POISONED
    open, nothing written --end(abort), deadline--> none, VALID as before

Invariants:
- Everything that can be known before the first written byte is checked before it: the session, headers, sizes, names, shapes,
  dtypes, rows, the config, whether the flush can be honoured. Refusals leave the weights as they were, and every request alone.
- I5: between the first written byte and the commit nothing is launched; a failure there leaves POISONED.
- I7: bytes are written in place, casts are those of a cold load, derivations run once, at commit.
- Loading yields every few milliseconds, or pieces where one takes longer, so status and abort are answered meanwhile.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any

from ...io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    EndWeightUpdateReqInput,
    ErrorCode,
    StageTimes,
    TensorSpec,
    UpdateProgress,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateOptions,
    WeightUpdateReqOutput,
)
from ..background import Task
from ..batching.batcher import Batcher
from ..batching.output_processor import OutputProcessor
from ..cache.manager import CacheManager
from ..config import EngineConfig
from ..forward import Runner
from ..memory.device_cache import DeviceCache
from ..memory.workspace import Workspace
from ..models.base import CausalLM
from ..observability.memory_history import MemoryHistory
from ..observability.stage_profiler import StageProfiler
from ..weights.loader import LoadCounts, WeightLoader, WeightPiece
from ..weights.source import BufferSource, WeightSource
from ..weights.transports.disk import DiskSource, open_fitting
from ..weights.transports.distributed import WeightsUpdateGroups
from ..weights.transports.ipc import SharedMemoryMaps
from ..weights.writing import END, write_some
from .committed_weights import WeightsFile
from .lifecycle import Lifecycle, Operation, Wait
from .pause_ownership import Sender
from .weight_sessions import Route, Session, Sessions

logger = logging.getLogger(__name__)


class WeightUpdates:
    """The handlers of begin, end and the updates."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        model: CausalLM,
        loader: WeightLoader,
        runner: Runner,
        lifecycle: Lifecycle,
        sessions: Sessions,
        batcher: Batcher,
        outputs: OutputProcessor,
        cache: CacheManager,
        device_cache: DeviceCache,
        groups: WeightsUpdateGroups,
        history: MemoryHistory,
        stages: StageProfiler,
        weights_file: WeightsFile,
        model_path: str,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` ends the loop's sleep."""
        self._wake = wake
        self._config = config
        self._model = model
        self._loader = loader
        self._runner = runner
        self._lifecycle = lifecycle
        self._batcher = batcher
        self._outputs = outputs
        self._cache = cache
        self._device_cache = device_cache
        self._history = history
        self._stages = stages
        self.sessions = sessions
        self._progress: tuple[WeightSource, float] | None = None
        self._workspace = Workspace()
        self._maps = SharedMemoryMaps(config.device)
        self._groups = groups
        lifecycle.settle = self._settle
        self._weights_file = weights_file
        self.model_path = model_path
        """The checkpoint folder last committed."""

    @property
    def keeps_memory(self) -> bool:
        """Shared memory is mapped, whose owner may go away at any time."""
        return len(self._maps) > 0

    def collect(self) -> None:
        """Let go of shared memory whose owner is gone, unless a session may still read it."""
        if self.sessions.current is None:
            self._maps.collect()

    def progress(self) -> UpdateProgress | None:
        """The update that is running, for status."""
        if self._progress is None:
            return None
        source, started = self._progress
        return UpdateProgress(
            source=source.name,
            written_bytes=self._loader.counts.written_bytes,
            total_bytes=source.total_bytes,
            age_s=monotonic() - started,
        )

    def begin(self, request: BeginWeightUpdateReqInput, sender: Sender) -> Operation:
        """Open an explicit session; generation goes on until the first byte is written."""
        yield from ()
        self.sessions.require_none(sender)
        manifest = None
        if request.manifest is not None:
            self._loader.check(request.manifest, complete=True)
            names = (spec.name for spec in request.manifest)
            manifest = frozenset(name for name in names if not self._model.is_skipped(name))
        session = self.sessions.begin(request, sender, manifest, self.profiler())
        return BeginWeightUpdateReqOutput(
            id=request.id, session_id=session.id, weights_epoch=self._lifecycle.stamp.epoch
        )

    def end(self, request: EndWeightUpdateReqInput, sender: Sender) -> Operation:
        """Commit or abort a session."""
        session = self.sessions.ending(request, sender)
        stages, started = session.stages, session.opened
        if not request.commit:
            self.abandon(session, "the session was ended without commit")
            return self._reply(request.id, session.counts, stages, started, committed=False, flushed=False)
        self._require_complete(session)
        self._require_flushable(session.flush)
        yield from self._stop_steps(session)  # for the commit, also where nothing was written
        if request.weight_version is not None:
            session.version = request.weight_version
        self._commit(session, stages)
        return self._reply(request.id, session.counts, stages, started, committed=True, flushed=session.flush)

    def from_disk(self, request: UpdateWeightFromDiskReqInput, sender: Sender) -> Operation:
        """A complete checkpoint folder, in place."""
        if request.load_format not in (None, "auto", "safetensors"):
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST,
                f"load_format {request.load_format!r}: only safetensors is read",
                field="load_format",
                value=request.load_format,
            )
        path, session = request.model_path, self.sessions.admitted(request, sender, ("disk", None))
        # Beside the loop: the folder may be on a slow disk, and its headers anybody's.
        opening = Task(
            lambda: open_fitting(path, self._model.config, self._loader, self._workspace), self._wake
        )
        while not opening.done:
            yield Wait.OUTSIDE
        if session is not None:
            self.require_open(session)
        route = ("disk", None)
        return (yield from self._update(request, sender, route, opening.result, opening.seconds))

    def from_tensor(
        self, request: UpdateWeightsFromTensorReqInput, sender: Sender, frames: Sequence[memoryview]
    ) -> Operation:
        """Tensors in the frames of the message."""
        return self._update(
            request, sender, ("tensor", None), lambda: BufferSource("tensor", request.specs, frames)
        )

    def from_ipc(self, request: UpdateWeightsFromIPCReqInput, sender: Sender) -> Operation:
        """Tensors in shared memory."""
        return self._update(request, sender, ("ipc", None), lambda: self._maps.open(request))

    def from_distributed(self, request: UpdateWeightsFromDistributedReqInput, sender: Sender) -> Operation:
        """Tensors that a trainer broadcasts, whether this engine listens or not: a call that fails ends the group, unless the
        group serves the session of another."""
        route = ("distributed", request.group_name)
        try:
            return (yield from self._update(request, sender, route, lambda: self._groups.open(request)))
        except BaseException as error:
            if not self.sessions.protects(route, error):
                self._groups.out_of_step(request.group_name, f"an update failed: {error}")
            raise

    def _settle(self, session: Session) -> None:
        """Commit an implicit session: before continue, and at an explicit flush.

        Raises:
            CaesuraError: ``weight_mismatch``, a tensor lacks rows, or weights are poisoned and the session does not cover every
                parameter.
        """
        self._require_complete(session)
        self._commit(session, session.stages)

    def _update(
        self,
        request: WeightUpdateOptions,
        sender: Sender,
        route: Route,
        open_source: Callable[[], WeightSource],
        opening_s: float = 0.0,
    ) -> Operation:
        """One call of any transport: check everything, then write, then commit if the call is all there is."""
        stages, started = self.profiler(), monotonic() - opening_s
        if opening_s:
            stages.record("receive", opening_s)
        session = self.sessions.admitted(request, sender, route)
        try:
            with stages.stage("receive"):
                source = self.open_checked(open_source, session)
            session = self.enter(request, sender, route)
        except CaesuraError:
            if self.sessions.current is None:  # nobody else will let go of what was opened
                self._maps.end_session()
            raise
        if isinstance(source, DiskSource):
            session.model_path, session.digest = source.path, source.digest
        work = self.load(source, session, stages)
        return (yield from self.conclude(request.id, session, stages, started, work))

    def enter(self, request: WeightUpdateOptions, sender: Sender, route: Route) -> Session:
        """The session that this call belongs to, opened if there is none; nothing is written yet.

        Raises:
            CaesuraError: as :meth:`Sessions.admitted`; ``memory_released``, the weights have no memory; ``not_idle``, its flush
                cannot be honoured.
        """
        self._lifecycle.require_resident("weights")
        self._require_flushable(request.flush_cache and not request.abort_all_requests)
        paused = self._lifecycle.generation != "running"
        return self.sessions.joined(request, sender, route, paused=paused, stages=self.profiler())

    def load(
        self, source: WeightSource, session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, None]:
        """Write all of ``source``; steps are stopped once its first piece is there, and not for one that never comes."""
        started = monotonic()
        with contextlib.closing(source.pieces(self._config.load_bucket_bytes, self._loader.skip)) as pieces:
            try:
                self._progress = source, started
                piece = yield from self._next_piece(pieces, session, stages)
                if session.abort_all:  # not before it is known that there is something to write
                    session.abort_all = False
                    self._outputs.abort_all(f"Aborted by a weight update from {session.source}")
                yield from self._stop_steps(session)
                if session.flush and self._lifecycle.generation == "running":
                    self._batcher.retract_all()
                if not session.touched:
                    self._history.note("update_begin", str(session))
                while piece is not END:
                    session.touched = True
                    with self._runner.on_stream():
                        piece = write_some(self._loader.write, piece, pieces, stages)
                    yield Wait.SLICE
                    self.require_open(session)
                    if piece is None:
                        piece = yield from self._next_piece(pieces, session, stages)
            finally:
                self._progress = None
        self._runner.synchronize()

    def conclude(
        self,
        message_id: str,
        session: Session,
        stages: StageProfiler,
        started: float,
        work: Generator[Wait, None, None],
        *,
        whole: bool = False,
    ) -> Operation:
        """Run ``work``, which loads, then commit if nothing more can belong to the session; any failure abandons it.

        ``whole``: the sender has said that this was everything, while paused, too.
        """
        self._loader.take_counts()
        self.sessions.is_working = True
        self._lifecycle.loading = True  # a flush that waits for idleness must not commit what is half written
        try:
            yield from work
            counts = self._loader.take_counts()
            session.counts.add(counts)
            session.stages.add(stages)
            committed = self._is_all(session, whole)
            if committed:
                self._commit(session, stages)
            elif session.kind == "single":
                self._close_session()  # not serviceable, and still incomplete: what was written counts
        except BaseException as error:
            self.abandon(session, f"an update failed: {error}")
            raise
        finally:
            self._lifecycle.loading = self.sessions.is_working = False
        return self._reply(
            message_id, counts, stages, started, committed=committed, flushed=committed and session.flush
        )

    def _is_all(self, session: Session, whole: bool) -> bool:
        """Whether nothing more can belong to this session."""
        if session.kind == "explicit":
            return False
        covered = not self._loader.missing(self._loader.written)
        return (covered and self._loader.is_whole) or (
            (whole or session.kind == "single") and self._lifecycle.serviceable
        )

    def expire(self) -> None:
        """Nobody has ended the session in time, or its client is gone."""
        session = self.sessions.current
        if session is not None:
            orphaned = session.deadline is None or monotonic() < session.deadline
            self.abandon(session, "its client is gone" if orphaned else "the session's deadline passed")

    def expire_with_lease(self, owner: Sender) -> None:
        """The pause lease of ``owner`` expires: so does its session, and one in which nothing was written that needs the pause."""
        session = self.sessions.current
        if session is None:
            return
        idle = session.kind == "implicit" and not session.touched
        if idle or session.sender.is_same(owner):
            self.abandon(session, "the pause lease of its sender expired")

    def forget(self) -> None:
        """The weights lose their memory: what an update that has not been committed wrote is gone with it."""
        self._close_session()
        self._loader.forget_written()

    def profiler(self) -> StageProfiler:
        """Of one call or session; the engine's counts with it."""
        return StageProfiler(self._stages, "update.")

    def open_checked(self, open_source: Callable[[], WeightSource], session: Session | None) -> WeightSource:
        """Everything that can be refused before this call's first byte; with bytes written by ``session`` before, that poisons.

        Args:
            session: which the call has been admitted to. None: it opens one.
        """
        try:
            source = open_source()
            self._loader.check(source.specs, complete=source.complete)
            rows = [spec for spec in source.specs if isinstance(spec, TensorSpec)]  # files hold whole tensors
            single = session is None and self._lifecycle.generation == "running"
            self._loader.check_rows(rows, whole=single and self._lifecycle.serviceable)
        except CaesuraError as error:
            if session is not None and session.touched:
                self.abandon(session, f"a later call of the session failed: {error.message}")
            raise
        return source

    def _require_flushable(self, flush: bool) -> None:
        """A flush that the frozen requests forbid is refused before weights change."""
        frozen = self._lifecycle.generation == "paused" and self._batcher.num_holding > 0
        if flush and frozen:
            raise CaesuraError(
                ErrorCode.NOT_IDLE,
                "flush_cache cannot be honoured: requests are frozen in place with their KV; send flush_cache=false",
                **self._lifecycle.pending(),
            )

    def require_open(self, session: Session) -> None:
        """Raise if the session has expired."""
        if self.sessions.current is not session:
            raise CaesuraError(ErrorCode.DEADLINE_EXCEEDED, "the session expired during the update")

    def _stop_steps(self, session: Session) -> Generator[Wait, None, None]:
        """Until the step in flight has landed; raises if the session expires meanwhile, which lets steps go on."""
        self._lifecycle.start_writing()
        for wait in self._lifecycle.barrier():
            yield wait
            self.require_open(session)

    def _require_complete(self, session: Session) -> None:
        """No tensor may lack rows; a manifest must be fulfilled; leaving POISONED or INVALID takes every parameter, over all calls
        since."""
        self._loader.require_whole()
        written = self._loader.written
        missing = sorted((session.manifest or frozenset()) - written)
        if not missing and not self._lifecycle.serviceable:
            missing = self._loader.missing(written)
        if missing:
            raise CaesuraError(
                ErrorCode.WEIGHT_MISMATCH, f"the session lacks {len(missing)} tensors", missing=missing
            )

    def _next_piece(
        self, pieces: Iterator[WeightPiece | None], session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, Any]:
        """The next piece, or ``END``; waits for it beside the loop."""
        with stages.stage("receive"):
            while (piece := next(pieces, END)) is None:
                yield Wait.OUTSIDE
                self.require_open(session)
        return piece

    def _commit(self, session: Session, stages: StageProfiler) -> None:
        """Derive, then make the new weights serve; a failure anywhere leaves them poisoned."""
        report = None
        try:
            with stages.stage("derive"), self._runner.on_stream():
                self._loader.require_whole()
                self._model.finalize_weights()
            self._runner.synchronize()
            with stages.stage("flush"):
                if session.flush:
                    self._batcher.retract_all()
                self._lifecycle.commit_weights(session.version, session.source)
                if session.flush:
                    self._cache.flush()
                if session.empty:
                    report = self._device_cache.empty("update")
        except BaseException as error:
            self.abandon(session, f"the commit failed: {error}")
            raise
        self._weights_file.committed(self._lifecycle.stamp, session)
        self._close_session()
        self.model_path = session.model_path or self.model_path
        self._loader.forget_written()
        self._history.note(
            "update_commit",
            f"{session}, {session.counts.written_tensors} tensors",
            returned=None if report is None else report.freed,
        )
        if session.counts.written_tensors and not session.counts.changed_tensors:
            logger.warning("weight update changed no tensor: is the trainer sending what it trained?")

    def abandon(self, session: Session, reason: str) -> None:
        """End ``session`` without a commit, if it is still open: as before where nothing was written, else POISONED."""
        if self.sessions.current is not session:
            return
        self._close_session()
        if session.touched:
            self.poison(reason)
            self._lifecycle.count_failed_update(session.source)
            self._history.note("update_failed", reason)
        else:
            self._lifecycle.stop_writing()

    def poison(self, reason: str) -> None:
        """Weights were written to and not committed: only a complete update helps, counted from here."""
        self._loader.forget_written()
        self._lifecycle.poison(reason)

    def _close_session(self) -> None:
        self.sessions.current = None
        self._maps.end_session()

    def _reply(
        self,
        message_id: str,
        counts: LoadCounts,
        stages: StageProfiler,
        started: float,
        *,
        committed: bool,
        flushed: bool,
    ) -> WeightUpdateReqOutput:
        each = {name: stages.seconds(name) for name in ("receive", "copy", "derive", "flush")}
        times = StageTimes(**each, total=monotonic() - started)
        stamp = self._lifecycle.stamp
        logger.info(
            "weight update: %d tensors, %.1f MB, %d changed, %s, epoch %d, version %r, %.1f ms",
            counts.written_tensors, counts.written_bytes / 2**20, counts.changed_tensors,
            "committed" if committed else "not committed", stamp.epoch, stamp.version, 1e3 * times.total,
        )  # fmt: skip
        return WeightUpdateReqOutput(
            id=message_id,
            committed=committed,
            session_id=None if self.sessions.current is None else self.sessions.current.id,
            weights=self._lifecycle.weights,
            weights_epoch=stamp.epoch,
            weight_version=stamp.version,
            **asdict(counts),
            flushed=flushed,
            stages=times,
        )
