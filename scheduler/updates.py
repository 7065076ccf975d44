"""Weight updates as commands: sessions, the disk path, the checker.

Session states, above the handlers that move between them:

    none --begin--> open(explicit) --call--> open, written --end(commit)--> none, committed
                                                          --end(abort), failure, deadline--> none, POISONED
                    open, nothing written --end(abort), deadline--> none, VALID as before
    none --disk call--> open(single while running, implicit while paused) --all written--> none, committed

Invariants:
- Everything that can be known before the first written byte is checked before it: headers, sizes, names, shapes,
  dtypes, the config, whether the flush can be honoured. Refusals leave the weights as they were.
- I5: between the first written byte and the commit nothing is launched; a failure there leaves POISONED.
- I7: bytes are written in place, casts are those of a cold load, derivations run once, at commit.
- Loading yields after each bucket, so status and abort are answered meanwhile.
"""

import hashlib
import logging
from collections.abc import Generator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

import torch

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
    WeightsCheckerReqInput,
    WeightsCheckerReqOutput,
    WeightUpdateReqOutput,
)
from .batching import Batcher
from .cache.manager import CacheManager
from .config import EngineConfig
from .device.memory import empty_device_cache
from .forward import Runner
from .lifecycle import Lifecycle, Operation, Wait
from .models.base import CausalLM
from .models.config import config_difference, load_model_config
from .observability.stage_profiler import StageProfiler
from .results import Results
from .weights.loader import LoadCounts, WeightLoader
from .weights.transports.disk import Checkpoint, open_checkpoint

logger = logging.getLogger(__name__)

SessionKind = Literal["explicit", "implicit", "single"]
_HASH_SLICE = 8 << 20


@dataclass(slots=True)
class Session:
    """One update, from its first call to its commit or end."""

    kind: SessionKind
    opened: float
    deadline: float | None
    """On the monotonic clock; None: no deadline."""
    manifest: frozenset[str] | None = None
    """Names that must all come; None: unknown."""
    counts: LoadCounts = field(default_factory=LoadCounts)
    touched: bool = False
    """A byte has been written."""
    version: str | None = None
    model_path: str | None = None
    """The folder that came last, if one did."""
    flush: bool = False
    empty: bool = False


class WeightUpdates:
    """The handlers of begin, end, the disk update and the checker."""

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
        self._session: Session | None = None
        self._progress: UpdateProgress | None = None
        self._snapshot: dict[str, str] = {}
        self.model_path = config.model_path
        """The checkpoint folder last committed."""

    @property
    def deadline(self) -> float | None:
        """When the open session expires, on the monotonic clock."""
        return None if self._session is None else self._session.deadline

    def session_status(self) -> SessionStatus | None:
        """The open session, for status."""
        session, now = self._session, monotonic()
        if session is None:
            return None
        return SessionStatus(
            kind=session.kind,
            age_s=now - session.opened,
            deadline_s=None if session.deadline is None else session.deadline - now,
            written_tensors=session.counts.written_tensors,
        )

    def progress(self) -> UpdateProgress | None:
        """The update that is running, for status."""
        return self._progress

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
            manifest = frozenset(spec.name for spec in request.manifest)
        self._session = self._open("explicit", request.deadline_s, manifest)
        self._lifecycle.explicit_session = True
        return BeginWeightUpdateReqOutput(id=request.id, weights_epoch=self._lifecycle.stamp.epoch)

    def end(self, request: EndWeightUpdateReqInput) -> Operation:
        """Commit or abort the explicit session."""
        session = self._session
        if session is None or session.kind != "explicit":
            raise CaesuraError(ErrorCode.NO_SESSION, "no weight session is open")
        stages, started = StageProfiler(), monotonic()
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
        stages, started = StageProfiler(), monotonic()
        if request.load_format not in (None, "auto", "safetensors"):
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST,
                f"load_format {request.load_format!r}: only safetensors is read",
                field="load_format",
                value=request.load_format,
            )
        with stages.stage("receive"):
            checkpoint = self._open_checked(request.model_path)
        self._require_flushable(request.flush_cache and not request.abort_all_requests)
        session = self._session or self._open(
            "single" if self._lifecycle.generation == "running" else "implicit", None, None
        )
        self._session = session
        session.flush |= request.flush_cache
        session.empty |= request.torch_empty_cache
        session.version = request.weight_version if request.weight_version is not None else session.version
        session.model_path = request.model_path
        if request.abort_all_requests:
            self._results.abort_all("Aborted by update_weights_from_disk")
        committed = session.kind != "explicit"
        try:
            yield from self._stop_steps(session)
            if session.flush and self._lifecycle.generation == "running":
                self._batcher.retract_all()
            yield from self._write(checkpoint, session, stages)
            counts = self._loader.take_counts()
            session.counts.add(counts)
            if committed:
                self._commit(session, stages)
        except BaseException as error:
            self._abandon(session, f"update from disk failed: {error}")
            raise
        return self._reply(
            request.id, counts, stages, started, committed=committed, flushed=committed and session.flush
        )

    def check(self, request: WeightsCheckerReqInput) -> Operation:
        """Checksums of parameters and derived tensors, or scramble them to prove that an update lands."""
        if request.action == "reset_tensors":
            self._lifecycle.start_writing()
            yield from self._lifecycle.barrier()
            for _, tensor in self._model.named_storage():
                with self._runner.on_stream():
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
                yield Wait.SLICE
            self._runner.synchronize()
            self._poison("reset by weights_checker")
            return WeightsCheckerReqOutput(id=request.id)
        found = yield from self._checksums()
        total = hashlib.blake2b(
            "".join(found[name] for name in sorted(found)).encode(), digest_size=16
        ).hexdigest()
        if request.action == "snapshot":
            self._snapshot = found
        if request.action == "compare":
            if not self._snapshot:
                raise CaesuraError(
                    ErrorCode.INVALID_REQUEST, "compare needs a snapshot first", field="action"
                )
            changed = sorted(name for name in found if self._snapshot.get(name) != found[name])
            return WeightsCheckerReqOutput(id=request.id, total=total, changed=changed)
        return WeightsCheckerReqOutput(id=request.id, checksums=found, total=total)

    def expire(self) -> None:
        """The session's deadline has passed."""
        if self._session is not None:
            self._abandon(self._session, "the session's deadline passed")

    def _open(self, kind: SessionKind, deadline_s: float | None, manifest: frozenset[str] | None) -> Session:
        now = monotonic()
        # A call that is a session of its own ends with the call; only a session left open by its owner can expire.
        limit = deadline_s if deadline_s is not None else self._config.session_deadline_s
        return Session(kind, now, now + limit if kind == "explicit" else None, manifest)

    def _open_checked(self, path: str) -> Checkpoint:
        """Everything that can be refused before the first byte."""
        checkpoint = open_checkpoint(path)
        differing = config_difference(self._model.config, load_model_config(path))
        if differing:
            raise CaesuraError(
                ErrorCode.WEIGHT_MISMATCH,
                f"{path}/config.json differs in what the forward reads: {', '.join(differing)}",
                config=differing,
            )
        self._loader.check(checkpoint.specs, complete=True)
        return checkpoint

    def _require_flushable(self, flush: bool) -> None:
        """A flush that the frozen requests forbid is refused before weights change."""
        frozen = self._lifecycle.generation == "paused" and self._batcher.num_holding > 0
        if flush and frozen:
            raise CaesuraError(
                ErrorCode.NOT_IDLE,
                "flush_cache cannot be honoured: requests are frozen in place with their KV; send flush_cache=false",
                **self._lifecycle.pending(),
            )

    def _require_open(self, session: Session) -> None:
        if self._session is not session:
            raise CaesuraError(ErrorCode.DEADLINE_EXCEEDED, "the session expired during the update")

    def _stop_steps(self, session: Session) -> Generator[Wait, None, None]:
        """Until the step in flight has landed; raises if the session expires meanwhile, which lets steps go on."""
        self._lifecycle.start_writing()
        for wait in self._lifecycle.barrier():
            yield wait
            self._require_open(session)

    def _require_complete(self, session: Session) -> None:
        """A manifest must be fulfilled; leaving POISONED takes every parameter, over all calls since."""
        written = self._loader.written
        missing = sorted((session.manifest or frozenset()) - written)
        if not missing and self._lifecycle.weights == "poisoned":
            missing = self._loader.missing(written)
        if missing:
            raise CaesuraError(
                ErrorCode.WEIGHT_MISMATCH, f"the session lacks {len(missing)} tensors", missing=missing
            )

    def _write(
        self, checkpoint: Checkpoint, session: Session, stages: StageProfiler
    ) -> Generator[Wait, None, None]:
        """Read and copy, bucket by bucket; a failure after the first byte poisons."""
        bucket = torch.empty(self._config.load_bucket_bytes, dtype=torch.uint8)
        pieces = checkpoint.pieces(bucket, skip=self._loader.skip)
        self._loader.take_counts()
        started = monotonic()
        try:
            while True:
                with stages.stage("receive"):
                    piece = next(pieces, None)
                if piece is None:
                    break
                session.touched = True
                with stages.stage("copy"), self._runner.on_stream():
                    self._loader.write(piece)
                self._progress = UpdateProgress(
                    source="disk",
                    written_bytes=self._loader.counts.written_bytes,
                    total_bytes=checkpoint.total_bytes,
                    age_s=monotonic() - started,
                )
                yield Wait.SLICE
                self._require_open(session)
        finally:
            self._progress = None
        self._runner.synchronize()

    def _commit(self, session: Session, stages: StageProfiler) -> None:
        """Derive, then make the new weights serve. Nothing here may fail half-way through the state changes."""
        try:
            with stages.stage("derive"), self._runner.on_stream():
                self._model.finalize_weights()
            self._runner.synchronize()
        except BaseException as error:
            self._abandon(session, f"deriving failed: {error}")
            raise
        self._close_session()
        self.model_path = session.model_path or self.model_path
        self._loader.forget_written()
        with stages.stage("flush"):
            if session.flush:
                self._batcher.retract_all()
            self._lifecycle.commit_weights(session.version)
            if session.flush:
                self._cache.flush()
            if session.empty:
                empty_device_cache(self._device_module)
        if session.counts.written_tensors and not session.counts.changed_tensors:
            logger.warning("weight update changed no tensor: is the trainer sending what it trained?")

    def _abandon(self, session: Session, reason: str) -> None:
        if self._session is not session:
            return
        self._close_session()
        if session.touched:
            self._poison(reason)
        else:
            self._lifecycle.stop_writing()

    def _poison(self, reason: str) -> None:
        self._loader.forget_written()
        self._lifecycle.poison(reason)

    def _close_session(self) -> None:
        self._session = None
        self._lifecycle.explicit_session = False

    def _checksums(self) -> Generator[Wait, None, dict[str, str]]:
        """Name to 128-bit BLAKE2b of the bytes, parameters and derived tensors; yields between slices."""
        found: dict[str, str] = {}
        for name, tensor in self._model.named_storage():
            digest = hashlib.blake2b(digest_size=16)
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            for start in range(0, len(flat), _HASH_SLICE):
                digest.update(flat[start : start + _HASH_SLICE].cpu().numpy().data)
                yield Wait.SLICE
            found[name] = digest.hexdigest()
        return found

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
