"""Weight updates as commands: sessions, and what is the same for every transport.

Session states, above the handlers that move between them:

    none --begin--> open(explicit) --call--> open, written --end(commit)--> none, committed
                                                          --end(abort), failure, deadline--> none, POISONED
                    open, nothing written --end(abort), deadline--> none, VALID as before
    none --call while running--> open(single) --all of it written--> none, committed
    none --call while paused--> open(implicit) --continue, flush, end, or every parameter written--> none, committed

Invariants:
- Everything that can be known before the first written byte is checked before it: headers, sizes, names, shapes,
  dtypes, the config, whether the flush can be honoured. Refusals leave the weights as they were.
- I5: between the first written byte and the commit nothing is launched; a failure there leaves POISONED.
- I7: bytes are written in place, casts are those of a cold load, derivations run once, at commit.
- Loading yields every few milliseconds, or pieces where one takes longer, so status and abort are answered meanwhile.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from time import monotonic
from typing import Any

from ..io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    EndWeightUpdateReqInput,
    ErrorCode,
    SessionStatus,
    StageTimes,
    UpdateProgress,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateOptions,
    WeightUpdateReqOutput,
    new_id,
)
from .batching import Batcher
from .cache.manager import CacheManager
from .config import EngineConfig
from .device.memory import empty_device_cache_with_report
from .forward import Runner
from .lifecycle import Lifecycle, Operation, Wait
from .models.base import CausalLM
from .models.config import config_difference, load_model_config
from .observability.memory_history import MemoryHistory
from .observability.stage_profiler import StageProfiler
from .results import Results
from .weights.loader import LoadCounts, WeightLoader, WeightPiece
from .weights.session import Session, SessionKind
from .weights.source import WeightSource
from .weights.transports.disk import DiskSource, ReadBucket, open_checkpoint
from .weights.transports.distributed import WeightsUpdateGroups
from .weights.transports.ipc import SharedMemoryMaps
from .weights.transports.tensor import open_frames
from .weights.writing import END, write_some
from .weights_record import WeightsFile

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
        batcher: Batcher,
        results: Results,
        cache: CacheManager,
        device_module: Any,
        groups: WeightsUpdateGroups,
        history: MemoryHistory,
        stages: StageProfiler,
        weights_file: WeightsFile,
        model_path: str,
    ) -> None:
        self._config = config
        self._model = model
        self._loader = loader
        self._runner = runner
        self._lifecycle = lifecycle
        self._batcher = batcher
        self._results = results
        self._cache = cache
        self._device_module = device_module
        self._history = history
        self._stages = stages
        self._session: Session | None = None
        self._progress: tuple[WeightSource, float] | None = None
        self._read_bucket = ReadBucket()
        self._maps = SharedMemoryMaps(config.device)
        self._groups = groups
        lifecycle.settle = self.settle
        self._weights_file = weights_file
        self.model_path = model_path
        """The checkpoint folder last committed."""

    @property
    def deadline(self) -> float | None:
        """When the open session expires, on the monotonic clock."""
        return None if self._session is None else self._session.deadline

    @property
    def keeps_memory(self) -> bool:
        """Shared memory is mapped, whose owner may go away at any time."""
        return len(self._maps) > 0

    def collect(self) -> None:
        """Let go of shared memory whose owner is gone, unless a session may still read it."""
        if self._session is None:
            self._maps.collect()

    def session_status(self) -> SessionStatus | None:
        """The open session, for status."""
        return None if self._session is None else self._session.status()

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

    def begin(self, request: BeginWeightUpdateReqInput) -> Operation:
        """Open an explicit session; generation goes on until the first byte is written."""
        yield from ()
        if self._session is not None:
            raise CaesuraError(
                ErrorCode.SESSION_OPEN,
                "a weight session is open already",
                age_s=monotonic() - self._session.opened,
            )
        manifest = None
        if request.manifest is not None:
            self._loader.check(request.manifest, complete=True)
            names = (spec.name for spec in request.manifest)
            manifest = frozenset(name for name in names if not self._model.is_skipped(name))
        self._session = self._open("explicit", request.deadline_s, manifest)
        self._lifecycle.explicit_session = True
        return BeginWeightUpdateReqOutput(
            id=request.id, session_id=self._session.id, weights_epoch=self._lifecycle.stamp.epoch
        )

    def end(self, request: EndWeightUpdateReqInput) -> Operation:
        """Commit or abort the explicit session."""
        session = self._session
        if session is None or session.kind == "single":
            raise CaesuraError(ErrorCode.NO_SESSION, "no weight session is open")
        stages, started = session.stages, session.opened
        if not request.commit:
            self._abandon(session, "the session was ended without commit")
            return self._reply(request.id, session.counts, stages, started, committed=False, flushed=False)
        self._require_complete(session)
        self._require_flushable(session.flush)
        yield from self._stop_steps(session)  # for the commit, also where nothing was written
        if request.weight_version is not None:
            session.version = request.weight_version
        self._commit(session, stages)
        return self._reply(request.id, session.counts, stages, started, committed=True, flushed=session.flush)

    def from_disk(self, request: UpdateWeightFromDiskReqInput) -> Operation:
        """A complete checkpoint folder, in place."""
        if request.load_format not in (None, "auto", "safetensors"):
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST,
                f"load_format {request.load_format!r}: only safetensors is read",
                field="load_format",
                value=request.load_format,
            )
        return self._update(request, lambda: self._open_checkpoint(request.model_path))

    def from_tensor(
        self, request: UpdateWeightsFromTensorReqInput, frames: Sequence[memoryview]
    ) -> Operation:
        """Tensors in the frames of the message."""
        return self._update(request, lambda: open_frames(request, frames))

    def from_ipc(self, request: UpdateWeightsFromIPCReqInput) -> Operation:
        """Tensors in shared memory."""
        return self._update(request, lambda: self._maps.open(request))

    def from_distributed(self, request: UpdateWeightsFromDistributedReqInput) -> Operation:
        """Tensors that a trainer broadcasts, whether this engine listens or not: a call that fails ends the group."""
        try:
            return (yield from self._update(request, lambda: self._groups.open(request)))
        except BaseException as error:
            self._groups.out_of_step(request.group_name, f"an update failed: {error}")
            raise

    def settle(self) -> None:
        """Commit the implicit session, if one is open: before continue, and at an explicit flush.

        Raises:
            CaesuraError: ``weight_mismatch``, weights are poisoned and the session does not cover every parameter.
        """
        session = self._session
        if session is not None and session.kind == "implicit":
            self._require_complete(session)
            self._commit(session, session.stages)

    def _update(
        self,
        request: WeightUpdateOptions,
        open_source: Callable[[], WeightSource],
    ) -> Operation:
        """One call of any transport: check everything, then write, then commit if the call is all there is."""
        stages, started = self.profiler(), monotonic()
        try:
            with stages.stage("receive"):
                source = self.open_checked(open_source)
            session = self.enter(request, source.name)
        except CaesuraError:
            if self._session is None:  # nobody else will let go of what was opened
                self._maps.end_session()
            raise
        if isinstance(source, DiskSource):
            session.model_path, session.digest = source.path, source.digest
        return (
            yield from self.conclude(request.id, session, stages, started, self.load(source, session, stages))
        )

    def enter(self, request: WeightUpdateOptions, source_name: str) -> Session:
        """The session that this call belongs to, opened if there is none; nothing is written yet.

        Raises:
            CaesuraError: ``memory_released``, the weights have no memory; ``not_idle``, its flush cannot be honoured.
        """
        self._lifecycle.require_resident("weights")
        self._require_flushable(request.flush_cache and not request.abort_all_requests)
        session = self._session or self._open(
            "single" if self._lifecycle.generation == "running" else "implicit", None, None
        )
        self._session = session
        session.source = source_name
        session.flush |= request.flush_cache
        session.empty |= request.torch_empty_cache
        session.version = request.weight_version if request.weight_version is not None else session.version
        if request.abort_all_requests:
            self._results.abort_all(f"Aborted by a weight update from {source_name}")
        return session

    def load(
        self, source: WeightSource, session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, None]:
        """Write all of ``source``; steps are stopped once its first piece is there, and not for one that never comes."""
        started = monotonic()
        with contextlib.closing(source.pieces(self._config.load_bucket_bytes, self._loader.skip)) as pieces:
            try:
                self._progress = source, started
                piece = yield from self._next_piece(pieces, session, stages)
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
            self._abandon(session, f"an update failed: {error}")
            raise
        finally:
            self._lifecycle.loading = False
        return self._reply(
            message_id, counts, stages, started, committed=committed, flushed=committed and session.flush
        )

    def _is_all(self, session: Session, whole: bool) -> bool:
        """Whether nothing more can belong to this session."""
        if session.kind == "explicit":
            return False
        covered = not self._loader.missing(self._loader.written)
        return covered or ((whole or session.kind == "single") and self._lifecycle.serviceable)

    def expire(self) -> None:
        """The session's deadline has passed."""
        if self._session is not None:
            self._abandon(self._session, "the session's deadline passed")

    def forget(self) -> None:
        """The weights lose their memory: what an update that has not been committed wrote is gone with it."""
        self._close_session()
        self._loader.forget_written()

    def profiler(self) -> StageProfiler:
        """Of one call or session; the engine's counts with it."""
        return StageProfiler(self._stages, "update.")

    def _open(self, kind: SessionKind, deadline_s: float | None, manifest: frozenset[str] | None) -> Session:
        now = monotonic()
        # A single call ends by itself; only a session that somebody must end can be forgotten.
        limit = deadline_s if deadline_s is not None else self._config.session_deadline_s
        deadline = None if kind == "single" else now + limit
        return Session(kind, new_id(), now, deadline, manifest=manifest, stages=self.profiler())

    def _open_checkpoint(self, path: str) -> DiskSource:
        checkpoint = open_checkpoint(path)
        differing = config_difference(self._model.config, load_model_config(path))
        if differing:
            raise CaesuraError(
                ErrorCode.WEIGHT_MISMATCH,
                f"{path}/config.json differs in what the forward reads: {', '.join(differing)}",
                config=differing,
            )
        return DiskSource(checkpoint, self._read_bucket)

    def open_checked(self, open_source: Callable[[], WeightSource]) -> WeightSource:
        """Everything that can be refused before this call's first byte; with bytes written before, that poisons."""
        try:
            source = open_source()
            self._loader.check(source.specs, complete=source.complete)
        except CaesuraError as error:
            if self._session is not None and self._session.touched:
                self._abandon(self._session, f"a later call of the session failed: {error.message}")
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
        if self._session is not session:
            raise CaesuraError(ErrorCode.DEADLINE_EXCEEDED, "the session expired during the update")

    def _stop_steps(self, session: Session) -> Generator[Wait, None, None]:
        """Until the step in flight has landed; raises if the session expires meanwhile, which lets steps go on."""
        self._lifecycle.start_writing()
        for wait in self._lifecycle.barrier():
            yield wait
            self.require_open(session)

    def _require_complete(self, session: Session) -> None:
        """A manifest must be fulfilled; leaving POISONED or INVALID takes every parameter, over all calls since."""
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
                    report = empty_device_cache_with_report(self._device_module)
        except BaseException as error:
            self._abandon(session, f"the commit failed: {error}")
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

    def _abandon(self, session: Session, reason: str) -> None:
        if self._session is not session:
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
        self._session = None
        self._maps.end_session()
        self._lifecycle.explicit_session = False

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
        times = StageTimes(
            receive=stages.seconds("receive"),
            copy=stages.seconds("copy"),
            derive=stages.seconds("derive"),
            flush=stages.seconds("flush"),
            total=monotonic() - started,
        )
        stamp = self._lifecycle.stamp
        logger.info(
            "weight update: %d tensors, %.1f MB, %d changed, %s, epoch %d, version %r, %.1f ms",
            counts.written_tensors, counts.written_bytes / 2**20, counts.changed_tensors,
            "committed" if committed else "not committed", stamp.epoch, stamp.version, 1e3 * times.total,
        )  # fmt: skip
        return WeightUpdateReqOutput(
            id=message_id,
            committed=committed,
            weights=self._lifecycle.weights,
            weights_epoch=stamp.epoch,
            weight_version=stamp.version,
            written_tensors=counts.written_tensors,
            written_bytes=counts.written_bytes,
            changed_tensors=counts.changed_tensors,
            cast_tensors=counts.cast_tensors,
            skipped_tensors=counts.skipped_tensors,
            flushed=flushed,
            stages=times,
        )
