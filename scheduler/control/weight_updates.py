"""Commands that update weights: check, write and commit, the same for every transport.

Life of a session (``weight_sessions.py`` decides to whom it belongs and who may do what):

    open --call--> open, written --end(commit), continue, flush, every parameter written--> none, committed
                                 --end(abort), failure, deadline--> none, POISONED
    open, nothing written --end(abort), deadline--> none, VALID as before

Invariants:
- Everything that can be checked before the first byte is written is checked before it: session, headers, sizes, names, shapes,
  dtypes, rows, config, and whether a flush is possible. A refused call changes neither the weights nor any request.
- I5: no step is launched between the first written byte and the commit; a failure in between leaves the weights POISONED.
- I7: bytes are written in place, casts are those of a cold load, derived tensors are computed once, at commit.
- Loading yields every few milliseconds (or once per piece, if that takes longer), so status and abort are answered meanwhile.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Any

from ...io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    EndWeightUpdateReqInput,
    ErrorCode,
    StageTimes,
    UpdateProgress,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateOptions,
    WeightUpdateReqOutput,
)
from ..memory.workspace import Workspace
from ..observability.stage_profiler import StageProfiler
from ..runtime.background import Task
from ..weights.components import ComponentSource, chosen, in_component, renamed
from ..weights.loader import END, LoadCounts, write_some
from ..weights.source import BufferSource, WeightPiece, WeightSource
from ..weights.transports.disk import DiskSource
from ..weights.transports.ipc import SharedMemoryMaps
from ..weights.upload import pieces_of, uploader_of
from .idle import barrier, held_kind, pending
from .operations import Operation, Wait
from .pause_ownership import Sender
from .weight_commit import WeightCommit
from .weight_sessions import Route, Session

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


class WeightUpdates:
    """The handlers of begin, end and the updates."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._uploader = uploader_of(engine.write_stream, engine.loaded.device)
        self._weight_commit = WeightCommit(engine)
        self._progress: tuple[WeightSource, float] | None = None
        self._workspace = Workspace()
        self._maps = SharedMemoryMaps(engine.config.device)
        self.model_path = engine.initial_weights.folder or engine.config.model_path
        """The last committed checkpoint folder."""

    @property
    def keeps_memory(self) -> bool:
        """Whether shared memory of other processes is mapped, which must be unmapped when they are gone."""
        return len(self._maps) > 0

    def collect(self) -> None:
        """Unmap shared memory whose owner is gone, unless a session is open that may still read it."""
        if self._engine.sessions.current is None:
            self._maps.collect()

    def progress(self) -> UpdateProgress | None:
        """Progress of the update under way, for status. None: there is none."""
        if self._progress is None:
            return None
        source, started = self._progress
        return UpdateProgress(
            source=source.name,
            written_bytes=self._engine.loader.counts.written_bytes,
            total_bytes=source.total_bytes,
            age_s=monotonic() - started,
        )

    def begin(self, request: BeginWeightUpdateReqInput, sender: Sender) -> Operation:
        """Open an explicit session; generation goes on until the first byte is written."""
        engine = self._engine
        yield from ()
        engine.sessions.require_none(sender)
        manifest = None
        if request.manifest is not None:
            specs = renamed(request.manifest, chosen(engine.model.components, request.component))
            manifest = frozenset(engine.loader.check(specs, complete=True))
        session = engine.sessions.begin(request, sender, manifest, self.profiler())
        return BeginWeightUpdateReqOutput(
            id=request.id, session_id=session.id, weights_epoch=engine.state.stamp.epoch
        )

    def end(self, request: EndWeightUpdateReqInput, sender: Sender) -> Operation:
        """Commit or abort a session."""
        engine = self._engine
        session = engine.sessions.session_to_end(request, sender)
        stages, started = session.stages, session.opened
        if not request.commit:
            self.abort_session(session, "the session was ended without commit")
            return self._reply(request.id, session.counts, stages, started, committed=False, flushed=False)
        engine.state.require_resident("weights")  # the commit derives from them
        self._require_complete(session)
        self._require_flushable(session.flush)
        yield from self._stop_steps(session)  # the commit needs it even if nothing was written
        if request.weight_version is not None:
            session.version = request.weight_version
        yield from self._commit(session, stages)
        return self._reply(request.id, session.counts, stages, started, committed=True, flushed=session.flush)

    def from_disk(self, request: UpdateWeightFromDiskReqInput, sender: Sender) -> Operation:
        """Update from a complete checkpoint folder."""
        engine = self._engine
        if request.load_format not in (None, "auto", "safetensors"):
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST,
                f"load_format {request.load_format!r}: only safetensors is read",
                field="load_format",
                value=request.load_format,
            )
        path, route = request.model_path, ("disk", None)
        session = engine.sessions.session_for_call(request, sender, route)
        # In a thread, because the disk may be slow and the headers may be of any size.
        component = chosen(engine.model.components, request.component)
        loader, workspace = engine.loader, self._workspace
        opening = Task(
            lambda: DiskSource(engine.open_folder(path, component), workspace, loader.owned),
            engine.wakeup.set,
        )
        while not opening.done:
            yield Wait.THREAD
        if session is not None:
            engine.sessions.require_open(session)
        return (yield from self.call(request, sender, route, opening.result, opening.seconds))

    def from_tensor(
        self, request: UpdateWeightsFromTensorReqInput, sender: Sender, frames: Sequence[memoryview]
    ) -> Operation:
        """Update from tensors in the frames of the message."""
        return self.call(
            request, sender, ("tensor", None), lambda: BufferSource("tensor", request.specs, frames)
        )

    def from_ipc(self, request: UpdateWeightsFromIPCReqInput, sender: Sender) -> Operation:
        """Update from tensors in shared memory."""
        return self.call(request, sender, ("ipc", None), lambda: self._maps.open(request))

    def commit_implicit_session(self, session: Session) -> Generator[Wait, None, None]:
        """Commit an implicit session before a ``continue`` or an explicit ``flush_cache``.

        Raises:
            CaesuraError: ``weight_mismatch`` if a tensor lacks rows, or if the weights are poisoned or invalid and the updates
                since do not cover every parameter.
        """
        self._require_complete(session)
        yield from self._commit(session, session.stages)

    def call(
        self,
        request: WeightUpdateOptions,
        sender: Sender,
        route: Route,
        open_source: Callable[[], WeightSource],
        opening_s: float = 0.0,
    ) -> Operation:
        """One call of any transport: check everything, then write, then commit if the session is complete."""
        engine = self._engine
        stages, started = self.profiler(), monotonic() - opening_s
        if opening_s:
            stages.record("receive", opening_s)
        session = engine.sessions.session_for_call(request, sender, route)
        component = chosen(engine.model.components, request.component)
        try:
            with stages.stage("receive"):
                source, names = self.open_checked(open_source, session, request.component)
            if session is None and source.specs and not names:
                return (yield from self._ignored(request, source, stages, started))
            session = self.join_session(request, sender, route)
        except CaesuraError:
            if engine.sessions.current is None:  # otherwise the end of that session unmaps what was opened
                self._maps.end_session()
            raise
        inner = source.inner if isinstance(source, ComponentSource) else source
        if component not in (None, *engine.model.components[:1]):
            session.wrote_other_component = True
        elif isinstance(inner, DiskSource):
            session.model_path, session.digest = inner.path, inner.local_digest
        work = self.load(source, session, stages)
        return (yield from self.run_and_commit(request.id, session, stages, started, work))

    def _ignored(
        self, request: WeightUpdateOptions, source: WeightSource, stages: StageProfiler, started: float
    ) -> Operation:
        """A call whose tensors the model ignores stops no step and opens no session; who broadcasts them waits for their receipt."""
        engine = self._engine
        engine.loader.take_counts()
        own = pieces_of(source, engine.loader, None, engine.config.load_bucket_bytes)
        with (
            engine.sessions.working(),
            contextlib.closing(engine.executor.pieces(source, own, engine.loader)) as pieces,
            stages.stage("receive"),
        ):
            while next(pieces, END) is not END:
                yield Wait.THREAD
        self._maps.end_session()
        counts, serviceable = engine.loader.take_counts(), engine.state.serviceable
        return self._reply(request.id, counts, stages, started, committed=serviceable, flushed=False)

    def join_session(self, request: WeightUpdateOptions, sender: Sender, route: Route) -> Session:
        """The session that this call belongs to, opened if there is none; nothing is written yet.

        Raises:
            CaesuraError: as :meth:`Sessions.session_for_call`; ``memory_released`` if the weights are released; ``not_idle`` if
                the call's flush is impossible.
        """
        engine = self._engine
        engine.state.require_resident("weights")
        self._require_flushable(request.flush_cache and not request.abort_all_requests)
        paused = engine.state.generation != "running"
        return engine.sessions.join_or_open(request, sender, route, paused=paused, stages=self.profiler())

    def load(
        self, source: WeightSource, session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, None]:
        """Write all of ``source``. Steps go on until its first piece has arrived."""
        engine = self._engine
        started = monotonic()
        component = source.component if isinstance(source, ComponentSource) else None
        kept = component in engine.model.kept_components  # written on the host
        uploader = None if kept else self._uploader
        own = pieces_of(source, engine.loader, uploader, engine.config.load_bucket_bytes)
        with contextlib.closing(engine.executor.pieces(source, own, engine.loader)) as pieces:
            try:
                self._progress = source, started
                piece = yield from self._next_piece(pieces, session, stages)
                if session.abort_all:  # only now is it certain that there is something to write
                    session.abort_all = False
                    engine.outputs.abort_all(f"Aborted by a weight update from {session.source}")
                yield from self._stop_steps(session)
                if session.flush and engine.state.generation == "running":
                    engine.batcher.retract_all()
                if not session.touched:
                    engine.history.note("update_begin", str(session))
                while piece is not END:
                    session.touched = True
                    with engine.runner.on_stream():
                        piece = write_some(engine.loader.write, piece, pieces, stages)
                    yield Wait.SLICE
                    engine.sessions.require_open(session)
                    if piece is None:
                        piece = yield from self._next_piece(pieces, session, stages)
            finally:
                self._progress = None
        engine.runner.synchronize()

    def run_and_commit(
        self,
        message_id: str,
        session: Session,
        stages: StageProfiler,
        started: float,
        work: Generator[Wait, None, None],
        *,
        is_last_call: bool = False,
    ) -> Operation:
        """Run ``work``, which loads, then commit if the session is complete. Any failure aborts the session.

        Args:
            is_last_call: the sender has declared the update complete, so it commits even while paused.
        """
        engine = self._engine
        engine.loader.take_counts()
        with engine.sessions.working():
            try:
                yield from work
                counts = engine.loader.take_counts()
                session.counts.add(counts)
                session.stages.add(stages)
                committed = self._should_commit(session, is_last_call)
                if committed:
                    yield from self._commit(session, stages)
                elif session.kind == "single":
                    self._close_session()  # poisoned or invalid weights stay incomplete; later calls may complete them
            except BaseException as error:
                self.abort_session(session, f"an update failed: {error}")
                raise
        return self._reply(
            message_id, counts, stages, started, committed=committed, flushed=committed and session.flush
        )

    def _should_commit(self, session: Session, is_last_call: bool) -> bool:
        """Whether the session is complete, so that it commits without an explicit end."""
        engine = self._engine
        if session.kind == "explicit":
            return False
        covered = engine.loader.is_whole and not engine.loader.missing(engine.loader.written)
        last = is_last_call or session.kind == "single"
        return covered or (last and engine.state.serviceable)

    def expire(self) -> None:
        """Abort the open session, because its deadline has passed or its client is gone."""
        session = self._engine.sessions.current
        if session is not None:
            orphaned = session.deadline is None or monotonic() < session.deadline
            self.abort_session(session, "its client is gone" if orphaned else "the session's deadline passed")

    def expire_with_lease(self, owner: Sender) -> None:
        """Abort the session of ``owner``, whose pause lease expires; also an implicit session without a written byte."""
        session = self._engine.sessions.current
        if session is None:
            return
        idle = session.kind == "implicit" and not session.touched
        if idle or session.sender.is_same(owner):
            self.abort_session(session, "the pause lease of its sender expired")

    def forget(self) -> None:
        """Close the session and forget which parameters were written, because the weights' memory is released."""
        engine = self._engine
        self._close_session()
        engine.loader.release_written(lost=engine.state.weights == "invalid")

    def profiler(self) -> StageProfiler:
        """A profiler for one call or session; its times count in the engine's stage times as well."""
        return StageProfiler(self._engine.stages, "update.")

    def open_checked(
        self, open_source: Callable[[], WeightSource], session: Session | None, named: str | None
    ) -> tuple[WeightSource, set[str]]:
        """Open a source and check it, before this call's first byte is written; with the names of the model's tensors in it.

        A refusal poisons the weights only if ``session`` has written before.

        Args:
            session: the open session that the call belongs to; None if the call opens one.
            named: the component that the call names.
        """
        engine = self._engine
        try:
            source = in_component(open_source(), chosen(engine.model.components, named))
            single = session is None and engine.state.generation == "running"
            last = single and engine.state.serviceable
            names = engine.loader.check(source.specs, complete=source.complete, last=last)
        except CaesuraError as error:
            if session is not None and session.touched:
                self.abort_session(session, f"a later call of the session failed: {error.message}")
            raise
        return source, names

    def _require_flushable(self, flush: bool) -> None:
        """Refuse a flush that is impossible because requests are frozen with their KV or latents."""
        engine = self._engine
        frozen = engine.state.generation == "paused" and engine.batcher.num_holding > 0
        if flush and frozen:
            raise CaesuraError(
                ErrorCode.NOT_IDLE,
                f"flush_cache cannot be honoured: requests are frozen in place with their {held_kind(engine)}; send flush_cache=false",
                **pending(engine),
            )

    def _stop_steps(self, session: Session) -> Generator[Wait, None, None]:
        """Close the gate for steps and wait for the step in flight; raises if the session expires meanwhile."""
        engine = self._engine
        engine.state.start_writing()
        for wait in barrier(engine):
            yield wait
            engine.sessions.require_open(session)

    def _require_complete(self, session: Session) -> None:
        """Raise if a tensor lacks rows, if one of the manifest was not written, or, unless the weights are serviceable, if any
        parameter was not written since they became POISONED or INVALID."""
        engine = self._engine
        engine.loader.require_whole()
        written = engine.loader.written
        missing = sorted((session.manifest or frozenset()) - written)
        if not missing and not engine.state.serviceable:
            missing = engine.loader.missing(written)
        if missing:
            raise CaesuraError(
                ErrorCode.WEIGHT_MISMATCH, f"the session lacks {len(missing)} tensors", missing=missing
            )

    def _next_piece(
        self, pieces: Iterator[WeightPiece | None], session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, Any]:
        """Wait, without blocking the loop, for the next piece, or for ``END``."""
        with stages.stage("receive"):
            while (piece := next(pieces, END)) is None:
                yield Wait.THREAD
                self._engine.sessions.require_open(session)
        return piece

    def _commit(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """Make the new weights serve. A failure leaves the weights poisoned."""
        engine = self._engine
        try:
            report = yield from self._weight_commit.run(session, stages)
        except BaseException as error:
            self.abort_session(session, f"the commit failed: {error}")
            raise
        self._close_session()
        self.model_path = session.model_path or self.model_path
        engine.loader.forget_written()
        engine.history.note(
            "update_commit",
            f"{session}, {session.counts.written_tensors} tensors",
            returned=None if report is None else report.freed,
        )

    def abort_session(self, session: Session, reason: str) -> None:
        """Abort ``session`` if it is still open. The weights become POISONED if it has written, else they stay as they were."""
        engine = self._engine
        if engine.sessions.current is not session:
            return
        self._close_session()
        if session.touched:
            self.poison(reason)
            engine.state.count_failed_update(session.source)
            engine.history.note("update_failed", reason)
        else:
            engine.state.stop_writing()

    def poison(self, reason: str) -> None:
        """Poison the weights; from here on, a complete update must write every parameter again."""
        engine = self._engine
        engine.loader.lose_written()
        engine.state.poison(reason)

    def _close_session(self) -> None:
        self._engine.sessions.current = None
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
        engine = self._engine
        each = {name: stages.seconds(name) for name in ("receive", "copy", "derive", "flush")}
        times = StageTimes(**each, total=monotonic() - started)
        stamp = engine.state.stamp
        logger.info(
            "weight update: %d tensors, %.1f MiB, %d changed, %s, epoch %d, version %r, %.1f ms",
            counts.written_tensors, counts.written_bytes / 2**20, counts.changed_tensors,
            "committed" if committed else "not committed", stamp.epoch, stamp.version, 1e3 * times.total,
        )  # fmt: skip
        return WeightUpdateReqOutput(
            id=message_id,
            committed=committed,
            durable=engine.weights_file.durable if committed else None,
            session_id=None if engine.sessions.current is None else engine.sessions.current.id,
            weights=engine.state.weights,
            weights_epoch=stamp.epoch,
            weight_version=stamp.version,
            **asdict(counts),
            flushed=flushed,
            stages=times,
        )
