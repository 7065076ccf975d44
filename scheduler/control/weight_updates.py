"""Weight updates: receive, check, stop steps, write and commit, the same for every transport.

    open --call--> open, written --end(commit), continue, flush, every parameter written--> none, committed
                                 --end(abort), failure, deadline--> none, POISONED
    open, nothing written --end(abort), deadline--> none, VALID as before

- Everything that can be checked before the first byte is written is checked before it. A refused call changes
  neither the weights nor any request.
- I5: no step is launched between the first written byte and the commit; a failure in between poisons.
- A delta is staged while steps go on; its commit swaps it in, and a commit that fails swaps it out again.
  One without tensors changes the label, as any other update without tensors.
- I7: bytes are written in place, casts are those of a cold load, derived tensors are computed once, at
  commit.
- I12: the record of the state file is superseded before the epoch changes, and everything that can refuse a
  commit has passed on every rank before that.
- Loading and checking yield every few milliseconds (or once per piece, if that takes longer), so status and
  abort are answered meanwhile. The specs of a message are checked at once, some 7 µs each, and the commit of
  an engine of one rank without ``check_finite`` does not yield.
"""

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from ... import io_struct as wire
from ...io_struct import CaesuraError, ErrorCode
from ...transfer.weight_delta import DELTA_FILE
from ..memory.workspace import Workspace
from ..observability.stage_profiler import StageProfiler
from ..runtime.background import Task
from ..scheduling.request import WeightStamp
from ..weights.changes import Compared, UpdateChanges, refused, unusual
from ..weights.digests import DigestedRows
from ..weights.loader import END, LoadCounts, WeightLoader, write_some
from ..weights.reading import require_finite
from ..weights.source import (
    BufferSource,
    BySpecs,
    ComponentSource,
    Fitting,
    WeightPiece,
    WeightSource,
    chosen,
    in_component,
    renamed,
)
from ..weights.transports.disk import Checkpoint, open_delta
from ..weights.transports.ipc import SharedMemoryMaps
from ..weights.upload import pieces_of
from .adapter_loading import publish
from .engine_state import Sender
from .operations import Operation, Wait, barrier, held_kind, pending, waiting
from .weight_sessions import Route, Session

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..weights.transports.distributed import DistributedSource

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")


class WeightUpdates:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._progress: tuple[WeightSource, float] | None = None
        self._before: WeightStamp | None = None
        """Stamp of the weights that a rollback returns to."""
        self._workspace = Workspace()
        self.maps = SharedMemoryMaps(engine.config.device)
        self._fitting: Fitting = BySpecs()
        self.model_path = engine.initial_weights.folder or engine.config.model_path
        """The last committed checkpoint folder."""

    @property
    def keeps_memory(self) -> bool:
        """True if shared memory of other processes is mapped, which must be unmapped when they are gone."""
        return len(self.maps) > 0

    def collect(self) -> None:
        """Unmap shared memory whose owner is gone, unless a session is open that may still read it."""
        if self._engine.sessions.current is None:
            self.maps.collect()

    def progress(self) -> wire.UpdateProgress | None:
        if self._progress is None:
            return None
        source, started = self._progress
        return wire.UpdateProgress(
            source=source.name,
            written_bytes=self._engine.loader.counts.written_bytes,
            total_bytes=source.total_bytes,
            age_s=monotonic() - started,
        )

    def profiler(self) -> StageProfiler:
        return StageProfiler(self._engine.stages, "update.")

    def begin(self, request: wire.BeginWeightUpdateReqInput, sender: Sender) -> Operation:
        """Open an explicit session; generation goes on until the first byte is written."""
        engine = self._engine
        yield from ()
        engine.sessions.require_none(sender)
        manifest = None
        if request.manifest is not None:
            specs = renamed(request.manifest, chosen(engine.model.components, request.component))
            manifest = frozenset(engine.loader.check(specs, complete=True))
        session = engine.sessions.begin(request, sender, manifest, self.profiler())
        return wire.BeginWeightUpdateReqOutput(
            id=request.id, session_id=session.id, weights_epoch=engine.state.stamp.epoch
        )

    def from_disk(self, request: wire.UpdateWeightFromDiskReqInput, sender: Sender) -> Operation:
        if request.load_format not in (None, "auto", "safetensors"):
            reason = f"load_format {request.load_format!r}: only safetensors is read"
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST, reason, field="load_format", value=request.load_format
            )
        engine = self._engine

        def open_source() -> WeightSource:
            component = chosen(engine.model.components, request.component)
            delta = open_delta(request.model_path, request.delta)
            if delta is not None:
                source, version = delta
                if request.weight_version is None:
                    request.weight_version = version
                return source
            if request.delta is not None:
                reason = f"{request.model_path} has no {DELTA_FILE}: a whole checkpoint has no base"
                raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="delta")
            checkpoint = engine.open_folder(request.model_path, component)
            return checkpoint.into(self._workspace, engine.loader.owned)

        # In a thread, because the disk may be slow and the headers may be of any size.
        return (yield from self._update(request, sender, ("disk", None), open_source, in_thread=True))

    def from_tensor(
        self, request: wire.UpdateWeightsFromTensorReqInput, sender: Sender, frames: Sequence[memoryview]
    ) -> Operation:
        def open_source() -> WeightSource:
            specs, delta = request.specs, request.delta
            return BufferSource("tensor", specs, frames, delta=delta, fitting=self._fitting)

        return self._update(request, sender, ("tensor", None), open_source)

    def from_ipc(self, request: wire.UpdateWeightsFromIPCReqInput, sender: Sender) -> Operation:
        return self._update(request, sender, ("ipc", None), lambda: self.maps.open(request, self._fitting))

    def from_distributed(
        self, request: wire.UpdateWeightsFromDistributedReqInput, sender: Sender
    ) -> Operation:
        """Update from rank 0's broadcasts, and relay them if asked.

        Rank 0 broadcasts even if this engine refuses, so a failed call ends both groups, unless it is foreign
        to the session that the group serves. A failed relay is in the reply: this engine has its weights.
        """
        engine, route = self._engine, ("distributed", request.group_name)
        opened: list[DistributedSource] = []

        def open_source() -> WeightSource:
            opened.append(engine.process_groups.open(request))
            return opened[-1]

        try:
            reply = yield from self._update(request, sender, route, open_source)
        except BaseException as error:
            self.end_group(error, request.group_name, request.relay_to)
            raise
        assert isinstance(reply, wire.WeightUpdateReqOutput)
        reply.relay_error = opened[-1].relay_error
        return reply

    def end_group(self, error: BaseException, name: str, relay_to: str | None = None) -> None:
        """End a group after a failed call, as rank 0 broadcasts anyway, unless the open session uses it."""
        engine = self._engine
        if engine.sessions.protects(("distributed", name), error):
            return
        reason = f"an update failed: {error}"
        for each in (name, *filter(None, [relay_to])):
            engine.process_groups.out_of_step(each, reason)
        engine.executor.call("leave_group", name, reason)

    def rollback(self, request: wire.RollbackWeightsReqInput, sender: Sender) -> Operation:
        """Return to the weights before the last commit, if it was a delta's."""
        engine, stages, started = self._engine, self.profiler(), monotonic()
        engine.sessions.require_none(sender)
        epoch = engine.state.stamp.epoch
        if self._before is None or engine.delta.before is None:
            reason = f"the values before weights epoch {epoch} are not kept: send a full update"
            raise CaesuraError(ErrorCode.NO_ROLLBACK, reason, weights_epoch=epoch)
        if request.to_digest not in (None, self._before.digest):
            reason = f"the weights before have the digest {self._before.digest}, not {request.to_digest}"
            raise CaesuraError(ErrorCode.NO_ROLLBACK, reason, weights_epoch=epoch)
        options = wire.WeightUpdateOptions(
            flush_cache=request.flush_cache,
            torch_empty_cache=request.torch_empty_cache,
            weight_version=self._before.version,
        )
        session = self.join(None, options, sender, ("rollback", None))
        session.delta = wire.DeltaBase(base_epoch=epoch)
        with self.call(session):
            engine.delta.take_back()
            engine.executor.call("take_back")
            return (yield from self.finish(request.id, session, stages, started, last=True))

    def _update(
        self,
        request: wire.WeightUpdateOptions,
        sender: Sender,
        route: Route,
        open_source: Callable[[], WeightSource],
        *,
        in_thread: bool = False,
    ) -> Operation:
        """Receive, check, stop steps, write, and commit if the session is complete."""
        engine, stages, started = self._engine, self.profiler(), monotonic()
        found = engine.sessions.find(request, sender, route)
        component = chosen(engine.model.components, request.component)
        if in_thread:
            opening = Task(open_source, engine.wakeup.set)
            while not opening.done:
                yield Wait.THREAD
            if found is not None:
                engine.sessions.require_open(found)
            stages.record("receive", opening.seconds)
            started, open_source = monotonic() - opening.seconds, opening.result
        try:
            with stages.stage("receive"):
                source, names = self.check(open_source, found, component)
            is_ignored = found is None and source.delta is None and bool(source.specs) and not names
            session = None if is_ignored else self.join(found, request, sender, route)
            if session is not None:
                session.delta = source.delta
        except CaesuraError:
            if engine.sessions.current is None:  # otherwise its end unmaps what was opened
                self.maps.end_session()
            raise
        if session is None:
            counts = yield from self._receive_ignored(source, stages)
            return self._reply(request.id, counts, stages, started, committed=engine.state.serviceable)
        self._note_folder(session, source)
        with self.call(session):
            if source.delta is None:
                yield from self._foresee(source, session, stages)
                yield from self.write(source, session, stages)
            else:
                yield from self._stage(source, session, stages)
            return (yield from self.finish(request.id, session, stages, started))

    def check(
        self, open_source: Callable[[], WeightSource], session: Session | None, component: str | None
    ) -> tuple[WeightSource, set[str]]:
        """Check a source; return it with the model's tensors in it. Poisons if ``session`` has written."""
        engine = self._engine
        try:
            source = in_component(open_source(), component)
            self._require_base(source, session)
            single = session is None and engine.state.generation == "running"
            last = single and engine.state.serviceable
            return source, self._loader(source).check(source.specs, complete=source.complete, last=last)
        except CaesuraError as error:
            if session is not None and session.touched:
                self.abort_session(session, f"a later call of the session failed: {error.message}")
            raise

    def _loader(self, source: WeightSource) -> WeightLoader:
        return self._engine.loader if source.delta is None else self._engine.delta

    def _require_base(self, source: WeightSource, session: Session | None) -> None:
        """Refuse a delta of other weights than these, or of other ones than its session's calls before."""
        delta = source.delta
        if session is not None and session.route is not None and session.delta != delta:
            reason = "the calls of a session have all one base (delta), or none"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="delta")
        if delta is None:
            return
        if session is not None and session.manifest is not None:
            reason = "a session with a manifest takes whole weights, not a delta"
            raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field="delta")
        self._require_valid()
        stamp = self._engine.state.stamp
        if delta.base_epoch not in (None, stamp.epoch):
            raise _other_base(f"they are of epoch {stamp.epoch}", stamp, base_epoch=delta.base_epoch)
        if delta.base_version not in (None, stamp.version):
            reason = f"they are version {stamp.version!r}, not {delta.base_version!r}"
            raise _other_base(reason, stamp, base_version=delta.base_version, got=stamp.version)
        if (delta.base_digest or delta.digest) and not stamp.digest:
            raise CaesuraError(ErrorCode.UNSUPPORTED, "the engine keeps no digest: weights_digest is off")
        if delta.base_digest not in (None, stamp.digest):
            reason = f"their digest is {stamp.digest}, not {delta.base_digest}"
            raise _other_base(reason, stamp, base_digest=delta.base_digest, got=stamp.digest)

    def _require_valid(self) -> None:
        """Refuse a change of weights that are not valid: it would leave them so."""
        state = self._engine.state
        if not state.serviceable:
            raise _other_base(f"they are {state.weights}", state.stamp, weights=state.weights)

    def _require_promised(self, delta: wire.DeltaBase, digest: str) -> None:
        """Refuse a delta that makes other weights than it says, before its first write."""
        if delta.digest not in (None, digest):
            reason = f"after it their digest is {digest}, not {delta.digest}"
            raise _other_base(reason, self._engine.state.stamp, digest=delta.digest, got=digest)

    def join(
        self, found: Session | None, request: wire.WeightUpdateOptions, sender: Sender, route: Route
    ) -> Session:
        engine = self._engine
        engine.state.require_resident("weights")
        self._require_flushable(request.flush_cache and not request.abort_all_requests)
        paused = engine.state.generation != "running"
        session = engine.sessions.join(found, request, sender, route, paused=paused, stages=self.profiler())
        self._note_bounds(session, request)
        return session

    def _note_bounds(self, session: Session, request: wire.WeightUpdateOptions) -> None:
        config = self._engine.config
        low, high = request.min_changed, request.max_rel_norm
        session.min_changed = config.min_changed if low is None else low
        session.max_rel_norm = config.max_rel_norm if high is None else high
        refuse, kind = request.refuse_beyond, request.report or config.update_report
        session.refuse_beyond = config.refuse_beyond if refuse is None else refuse
        is_bounded = session.min_changed is not None or session.max_rel_norm is not None
        if session.changes is None and (kind != "off" or is_bounded):
            session.changes = UpdateChanges(full=kind == "full")

    def _foresee(
        self, source: WeightSource, session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, None]:
        """Compare all that a source brings before the first write, if the update may be refused for it."""
        engine, changes = self._engine, session.changes
        can_refuse = session.refuse_beyond and session.kind == "single" and not session.touched
        if changes is None or not can_refuse or source.name == "distributed":
            return
        own = pieces_of(source, engine.loader, engine.write_stream, engine.config.load_bucket_bytes)
        skipped = engine.loader.counts.skipped_tensors
        foreseen = engine.executor.pieces(source, own, engine.loader, changes, method="foresee")
        with contextlib.closing(foreseen) as pieces, stages.stage("receive"):
            for piece in pieces:
                if piece is not None:
                    with engine.runner.on_stream():
                        engine.loader.foresee(piece, changes)
                yield Wait.SLICE
                engine.sessions.require_open(session)
        engine.loader.counts.skipped_tensors = skipped
        changes.is_foreseen = True
        self._require_usual(session)

    def _require_usual(self, session: Session) -> None:
        """Warn of an update beyond its bounds; raise ``update_refused`` if it is to be refused."""
        if session.changes is None:
            return
        report = session.changes.report()
        reasons = unusual(report, session.min_changed, session.max_rel_norm)
        if reasons and session.refuse_beyond:
            raise refused(report, reasons)
        if reasons:
            logger.warning("weight update: %s", "; ".join(reasons))

    @contextlib.contextmanager
    def call(self, session: Session) -> Iterator[None]:
        """Do the work of one call of ``session`` in a ``with`` block; any failure aborts the session."""
        self._engine.loader.take_counts()
        self._engine.delta.take_counts()
        with self._engine.sessions.working():
            try:
                yield
            except BaseException as error:
                self.abort_session(session, f"an update failed: {error}")
                raise

    def _note_folder(self, session: Session, source: WeightSource) -> None:
        """Record what a restart would have to load again."""
        component, inner = _component(source), source.inner if isinstance(source, ComponentSource) else source
        if component not in (None, *self._engine.model.components[:1]):
            session.wrote_other_component = True
        elif isinstance(inner, Checkpoint):
            session.model_path, session.digest = str(inner.path), inner.local_digest

    def _receive_ignored(
        self, source: WeightSource, stages: StageProfiler
    ) -> Generator[Wait, None, LoadCounts]:
        """Receive tensors that the model ignores: no step stops, no session opens, but the sender waits."""
        engine = self._engine
        engine.loader.take_counts()
        own = pieces_of(source, engine.loader, None, engine.config.load_bucket_bytes)
        try:
            with (
                engine.sessions.working(),
                contextlib.closing(engine.executor.pieces(source, own, engine.loader)) as pieces,
                stages.stage("receive"),
            ):
                while next(pieces, END) is not END:
                    yield Wait.THREAD
        finally:
            self.maps.end_session()
        return engine.loader.take_counts()

    def write(
        self, source: WeightSource, session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, None]:
        engine = self._engine
        kept = _component(source) in engine.model.kept_components  # written on the host
        stream = None if kept else engine.write_stream
        bucket_bytes = engine.config.load_bucket_bytes
        if stream is None:
            own = engine.loader.pieces(source, bucket_bytes)
        else:
            own = pieces_of(source, engine.loader, stream, bucket_bytes)
        elsewhere = engine.executor.pieces(source, own, engine.loader, session.changes)
        with contextlib.closing(elsewhere) as pieces:
            try:
                self._progress = source, monotonic()
                engine.loader.changes = session.changes
                piece = yield from self._next_piece(pieces, session, stages)
                if session.abort_all:  # only now is it certain that there is something to write
                    session.abort_all = False
                    engine.outputs.abort_all(f"Aborted by a weight update from {session.source}")
                yield from self._stop_steps(session)
                if session.flush and engine.state.generation == "running":
                    engine.batcher.retract_all()
                if not session.touched:
                    engine.history.note("update_begin", str(session))
                if piece is not END:
                    engine.delta.forget()
                while piece is not END:
                    session.touched = True
                    with engine.runner.on_stream():
                        piece = write_some(engine.loader.write, piece, pieces, stages)
                    yield Wait.SLICE
                    engine.sessions.require_open(session)
                    if piece is None:
                        piece = yield from self._next_piece(pieces, session, stages)
            finally:
                self._progress = engine.loader.changes = None
        engine.runner.synchronize()

    def _stage(
        self, source: WeightSource, session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, None]:
        """Receive a delta and stage it, while steps go on."""
        engine, delta = self._engine, self._engine.delta
        own = pieces_of(source, delta, None, engine.config.load_bucket_bytes)
        elsewhere = engine.executor.pieces(source, own, delta, session.changes)
        with contextlib.closing(elsewhere) as pieces:
            self._progress, delta.changes = (source, monotonic()), session.changes
            try:
                piece = yield from self._next_piece(pieces, session, stages)
                while piece is not END:
                    with stages.stage("receive"):
                        delta.write(piece)
                    yield Wait.SLICE
                    engine.sessions.require_open(session)
                    piece = yield from self._next_piece(pieces, session, stages)
            finally:
                self._progress = delta.changes = None

    def _swap(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """Put what is staged in place, on all ranks or on none; the steps stop here."""
        engine, delta = self._engine, self._engine.delta
        yield from self._stop_steps(session)
        if session.abort_all:
            session.abort_all = False
            engine.outputs.abort_all(f"Aborted by a weight update from {session.source}")
        if session.flush and engine.state.generation == "running":
            engine.batcher.retract_all()
        engine.history.note("update_begin", str(session))
        if not delta.written:
            return
        session.is_swapping = True
        swapping = engine.executor.call("swap", reply=set[str])
        with stages.stage("copy"), engine.runner.on_stream():
            changed = delta.swap()
        engine.runner.synchronize()
        elsewhere: list[set[str]] = yield from waiting(swapping)
        engine.sessions.require_open(session)
        session.counts.changed_tensors = len(changed.union(*elsewhere))

    def _restore(self, session: Session) -> None:
        """Undo a swap that cannot commit, on every rank: the weights are as they were, bit for bit."""
        engine = self._engine
        session.touched = True  # unless all of it succeeds
        restoring = engine.executor.call("restore")
        with engine.runner.on_stream():
            if engine.delta.restore():
                engine.model.finalize_weights()
        engine.runner.synchronize()
        restoring.wait()
        session.touched = False

    def _next_piece(
        self, pieces: Iterator[WeightPiece | None], session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, Any]:
        with stages.stage("receive"):
            while (piece := next(pieces, END)) is None:
                yield Wait.THREAD
                self._engine.sessions.require_open(session)
        return piece

    def _stop_steps(self, session: Session) -> Generator[Wait, None, None]:
        """Close the gate for steps, wait for the step in flight; raise if the session expires meanwhile."""
        self._engine.state.start_writing()
        yield from self._while_open(barrier(self._engine), session)

    def _while_open(
        self, waits: Generator[Wait, None, _Value], session: Session
    ) -> Generator[Wait, None, _Value]:
        while True:
            try:
                wait = next(waits)
            except StopIteration as end:
                value: _Value = end.value
                return value
            yield wait
            self._engine.sessions.require_open(session)

    def finish(
        self, message_id: str, session: Session, stages: StageProfiler, started: float, *, last: bool = False
    ) -> Operation:
        """Commit a complete session (if ``last`` even while paused), close one without calls, and reply."""
        engine = self._engine
        loader = engine.loader if session.delta is None else engine.delta
        counts, committed = loader.take_counts(), False
        session.counts.add(counts)
        session.stages.add(stages)
        if session.kind != "explicit":
            covered = engine.loader.is_whole and not engine.loader.missing(engine.loader.written)
            ends = last or session.kind == "single"
            committed = covered or (ends and engine.state.serviceable)
        if committed:
            yield from self._commit(session, stages)
            if session.delta is not None:  # known since the swap
                counts.changed_tensors = session.counts.changed_tensors
        elif session.kind == "single":
            # Poisoned or invalid weights stay incomplete; later calls may complete them
            self._close_session()
        flushed = committed and session.flush
        reply = self._reply(message_id, counts, stages, started, committed=committed, flushed=flushed)
        reply.report = _report(session) if committed else None
        return reply

    def end(self, request: wire.EndWeightUpdateReqInput, sender: Sender) -> Operation:
        engine = self._engine
        session = engine.sessions.to_end(request, sender)
        stages, started = session.stages, session.opened
        if not request.commit:
            self.abort_session(session, "the session was ended without commit")
            return self._reply(request.id, session.counts, stages, started, committed=False)
        if session.has_only_adapters and request.weight_version is None:
            self._close_session()
            reply = self._reply(request.id, session.counts, stages, started, committed=True)
            reply.switched = yield from publish(engine, list(session.adapters.values()))
            return reply
        engine.state.require_resident("weights")  # the commit derives from them
        self._require_complete(session)
        self._require_flushable(session.flush and not session.abort_all)
        yield from self._stop_steps(session)  # the commit needs it even if nothing was written
        if request.weight_version is not None:
            session.version = request.weight_version
        yield from self._commit(session, stages)
        reply = self._reply(
            request.id, session.counts, stages, started, committed=True, flushed=session.flush
        )
        reply.report = _report(session)
        reply.switched = yield from publish(engine, list(session.adapters.values()))
        return reply

    def commit_implicit_session(self, session: Session) -> Generator[Wait, None, None]:
        """Commit an implicit session before a ``continue`` or ``flush_cache``; raises ``weight_mismatch``."""
        self._require_complete(session)
        yield from self._commit(session, session.stages)

    def _commit(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """Make the new weights serve. A failure aborts the session, because the weights are half new."""
        engine, before = self._engine, self._engine.state.stamp
        try:
            if session.delta is not None:
                digest = yield from self._while_open(self._digest(staged=True), session)
                self._require_promised(session.delta, digest)
                if session.changes is not None:
                    untouched = engine.executor.call("untouched", session.changes.full, reply=Compared)
                    engine.delta.add_untouched(session.changes)
                    elsewhere: list[Compared]
                    elsewhere = yield from self._while_open(waiting(untouched), session)
                    session.changes.add_elsewhere(elsewhere)
                    self._require_usual(session)
                yield from self._swap(session, stages)
            yield from self._derive(session, stages)
            if session.delta is None:
                digest = yield from self._while_open(self._digest(), session)
                self._require_usual(session)
            engine.weights_file.supersede()
            session.touched |= session.is_swapping
            session.is_swapping = False
            with stages.stage("flush"):
                if session.flush:
                    engine.batcher.retract_all()
                returned = self._before if session.source == "rollback" else None
                same_as = None if returned is None else returned.epoch
                engine.state.commit_weights(session.version, session.source, digest, same_as)
                engine.weights_file.committed(engine.state.stamp, session)
                if session.flush:
                    engine.cache.flush(keep_tier=True)
                report = engine.device_cache.empty("update") if session.empty else None
        except BaseException as error:
            self.abort_session(session, f"the commit failed: {error}")
            raise
        committing: Generator[None, None, list[None]] | None = None
        if engine.delta.written:
            self._before = before if session.source != "rollback" else None
            engine.delta.commit(keep=self._before is not None)
            committing = engine.executor.call("commit_delta", self._before is not None)
        living = {engine.state.stamp.epoch}
        if self._before is not None and engine.delta.before is not None:
            living.add(self._before.epoch)
        engine.cache.keep_epochs(living)
        _warn_of_commit(session.counts, before, engine.state.stamp)
        self._close_session()
        self.model_path = session.model_path or self.model_path
        engine.loader.forget_written()
        engine.history.note(
            "update_commit",
            f"{session}, {session.counts.written_tensors} tensors",
            returned=None if report is None else report.freed,
        )
        if committing is not None:  # a rank that is lost now is still told of by the answer
            yield from waiting(committing)

    def _digest(self, *, staged: bool = False) -> Generator[Wait, None, str]:
        engine = self._engine
        digests = (engine.delta.digests if staged else None) or engine.loader.digests
        if digests is None:
            return ""
        elsewhere = engine.executor.call("digests", staged, reply=list[DigestedRows])
        return digests.total((yield from waiting(elsewhere)))

    def _derive(self, session: Session, stages: StageProfiler) -> Generator[Wait, None, None]:
        """Do everything in a commit that can fail, on every rank: all are ready afterwards, or it raises."""
        engine = self._engine
        engine.loader.require_whole()
        written = engine.loader.written | engine.delta.written
        check_finite = engine.config.check_finite and bool(written)
        derived = engine.executor.call("derive", check_finite)
        own: CaesuraError | None = None

        @contextlib.contextmanager
        def deriving() -> Iterator[None]:
            with stages.stage("derive"), engine.runner.on_stream():
                yield

        try:
            with deriving():
                engine.model.finalize_weights()
            engine.runner.synchronize()
            if check_finite:
                finite = require_finite(engine.model, written, deriving)
                yield from self._while_open(waiting(finite, Wait.SLICE), session)
        except CaesuraError as error:
            own = error
        yield from self._while_open(waiting(derived.settle(own)), session)

    def _require_complete(self, session: Session) -> None:
        """Raise if rows or tensors of the manifest are missing, or any tensor where weights do not serve."""
        engine = self._engine
        engine.loader.require_whole()
        engine.delta.require_whole()
        if session.delta is not None:
            self._require_valid()
        written = engine.loader.written
        missing = sorted((session.manifest or frozenset()) - written)
        if not missing and not engine.state.serviceable:
            missing = engine.loader.missing(written)
        if missing:
            reason = f"the session lacks {len(missing)} tensors"
            raise CaesuraError(ErrorCode.WEIGHT_MISMATCH, reason, missing=missing)

    def _require_flushable(self, flush: bool) -> None:
        engine = self._engine
        if flush:
            engine.drift.cancel()
        if flush and engine.state.generation == "paused" and engine.batcher.num_holding > 0:
            reason = (
                "flush_cache cannot be honoured: requests are frozen in place with their"
                f" {held_kind(engine)}; send flush_cache=false"
            )
            raise CaesuraError(ErrorCode.NOT_IDLE, reason, **pending(engine))

    def expire(self) -> None:
        """Abort the open session, because its deadline has passed or its client is gone."""
        session = self._engine.sessions.current
        if session is not None:
            orphaned = session.deadline is None or monotonic() < session.deadline
            self.abort_session(session, "its client is gone" if orphaned else "the session's deadline passed")

    def expire_with_lease(self, owner: Sender) -> None:
        """Abort the session of ``owner``, whose lease expires, or an implicit one without a written byte."""
        session = self._engine.sessions.current
        if session is None:
            return
        idle = session.kind == "implicit" and not session.touched
        if idle or session.sender.is_same(owner):
            self.abort_session(session, "the pause lease of its sender expired")

    def forget(self) -> None:
        """Close the session and forget what was written, because the weights' memory is released."""
        self._close_session()
        self._forget_delta()
        self._engine.loader.release_written(lost=self._engine.state.weights == "invalid")

    def abort_session(self, session: Session, reason: str) -> None:
        """Abort ``session`` if it is still open. The weights become POISONED if it has written."""
        engine = self._engine
        if engine.sessions.current is not session:
            return
        if session.is_swapping:
            try:
                self._restore(session)
            except (CaesuraError, RuntimeError, MemoryError, OSError):  # torch's are RuntimeErrors
                logger.exception("a delta could not be undone")
        self._close_session()
        if session.touched:
            self.poison(reason)
            engine.state.count_failed_update(session.source)
            engine.history.note("update_failed", reason)
        else:
            engine.state.stop_writing()

    def poison(self, reason: str) -> None:
        """Poison the weights; a complete update must write every parameter again."""
        self._engine.loader.lose_written()
        self._forget_delta()
        self._engine.state.poison(reason)

    def _forget_delta(self) -> None:
        """Forget what is staged, and the version before the last commit."""
        self._engine.delta.forget_written()
        self._engine.delta.forget()
        self._engine.executor.call("forget_delta")

    def _close_session(self) -> None:
        session, self._engine.sessions.current = self._engine.sessions.current, None
        if session is not None and session.delta is not None:
            self._engine.delta.forget_written()
            self._engine.executor.call("forget_staged")
        self.maps.end_session()

    def _reply(
        self,
        message_id: str,
        counts: LoadCounts,
        stages: StageProfiler,
        started: float,
        *,
        committed: bool,
        flushed: bool = False,
    ) -> wire.WeightUpdateReqOutput:
        engine = self._engine
        each = {name: stages.seconds(name) for name in ("receive", "copy", "derive", "flush")}
        times = wire.StageTimes(**each, total=monotonic() - started)
        stamp = engine.state.stamp
        logger.info(
            "weight update: %d tensors, %.1f MiB, %d changed, %s, epoch %d, version %r, %.1f ms",
            counts.written_tensors, counts.written_bytes / 2**20, counts.changed_tensors,
            "committed" if committed else "not committed", stamp.epoch, stamp.version, 1e3 * times.total,
        )  # fmt: skip
        return wire.WeightUpdateReqOutput(
            id=message_id,
            committed=committed,
            durable=engine.weights_file.durable if committed else None,
            session_id=None if engine.sessions.current is None else engine.sessions.current.id,
            weights=engine.state.weights,
            weights_epoch=stamp.epoch,
            weight_version=stamp.version,
            digest=stamp.digest,
            **asdict(counts),
            flushed=flushed,
            stages=times,
        )


def _report(session: Session) -> wire.UpdateReport | None:
    return None if session.changes is None else session.changes.report()


def _component(source: WeightSource) -> str | None:
    return source.component if isinstance(source, ComponentSource) else None


def _other_base(reason: str, stamp: WeightStamp, **differing: object) -> CaesuraError:
    text = f"the delta is not of these weights: {reason}; send a full update"
    return CaesuraError(ErrorCode.BASE_MISMATCH, text, weights_epoch=stamp.epoch, **differing)


def _warn_of_commit(counts: LoadCounts, before: WeightStamp, after: WeightStamp) -> None:
    if not counts.written_tensors:
        return
    if not counts.changed_tensors:
        logger.warning("weight update changed no tensor: is the trainer sending what it trained?")
    elif before.version == after.version:
        logger.warning(
            "weight update changed %d tensors and left the label at %r (epoch %d): send weight_version with "
            "the update, so that its tokens can be told from those of older weights",
            counts.changed_tensors, after.version, after.epoch,
        )  # fmt: skip
