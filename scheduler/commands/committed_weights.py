"""What a start must know of the engine before it: which weights were committed last, in one small file.

Invariants:
- The file is written before anybody can hear of a commit, so an engine that is killed has never acknowledged, nor
  sampled under, weights that its successor does not know of. Epochs do not repeat.
- It is replaced, never edited: who reads it finds the old record or the new one. The disk is waited for by a thread
  beside the loop; that matters for a host that loses power, and then nobody is left who knew the epochs.
- A record is evidence, never a command: what cannot be read, or is of another model, is ignored with a warning; a
  folder whose files are not those that were committed is not loaded.
- One engine writes a file at a time (a lock beside it).
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from ...io_struct import CaesuraError, ErrorCode
from ..batching.request import WeightStamp
from ..config import EngineConfig
from ..weights.transports.disk import open_checkpoint
from .weight_sessions import Session

logger = logging.getLogger(__name__)

INITIAL_VERSION = "default"
"""The public label before any update, as in SGLang."""

_MAX_BYTES = 64 << 10
"""Of a file that can be a record."""
_CLOSE_S = 5.0
"""How long an engine that ends waits for the disk."""


_Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the file."""

    caesura_weights_record: Literal[1]
    """Names the format."""
    incarnation: str
    """The engine that wrote it."""
    weights_epoch: _Epoch
    """The last that was served under."""
    committed_epoch: _Epoch
    """The one that these weights were committed as."""
    weight_version: str
    model_path: str
    """The folder that engine was started with."""
    updated: bool
    """The weights came by an update; False: they are those of ``model_path``."""
    source: str | None
    """The folder that has them; None: no folder does, they came over a transport."""
    digest: str | None
    """Of that folder's files."""
    time: float
    """When it was written, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a start takes over from the engine before it."""

    epoch: int = 0
    version: str = INITIAL_VERSION
    folder: str | None = None
    """Has the weights; None: ``model_path`` does."""
    lost: str | None = None
    """Which weights cannot be had again, and why; None: nothing is lost."""


class WeightsFile:
    """The file of one engine; without a path it remembers nothing."""

    def __init__(self, config: EngineConfig) -> None:
        """Takes the lock and reads what is there.

        Raises:
            CaesuraError: ``invalid_request``, another engine writes this file, or nobody can.
        """
        self._config = config
        self._path = config.state_file
        self._record: WeightsRecord | None = None
        self._lock: int | None = None
        self._syncer: _Syncer | None = None
        if self._path is not None:
            self._lock = _lock(self._path)
            self._record = read_record(self._path)

    def close(self) -> None:
        """Wait for the disk, within bounds, and let go of the file."""
        if self._syncer is not None:
            self._syncer.close()
            self._syncer = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def start(self) -> Start:
        """Which weights to load, and as what they count."""
        record, model_path = self._record, self._config.model_path
        if record is None:
            return Start()
        epoch = record.weights_epoch + 1
        if record.model_path != os.path.abspath(model_path):
            logger.warning(
                "%s is ignored but for its epoch: it is of %s, not of %s",
                self._path,
                record.model_path,
                model_path,
            )
            self._record = None
            return Start(epoch)
        if not record.updated:
            return Start(epoch, record.weight_version)
        reason = _why_lost(record)
        if reason is None:
            assert record.source is not None
            logger.info(
                "resuming with version %r from %s, epoch %d", record.weight_version, record.source, epoch
            )
            return Start(epoch, record.weight_version, folder=record.source)
        lost = f"version {record.weight_version!r} (epoch {record.committed_epoch}) was lost in a restart: {reason}"
        return Start(epoch, lost=lost)

    def begin(self, stamp: WeightStamp, digest: str) -> None:
        """This engine serves from now on, with weights that were loaded from files of ``digest``.

        Raises:
            CaesuraError: ``invalid_request``, the file cannot be written.
        """
        if self._path is None:
            return
        before, folder = self._record, os.path.abspath(self._config.model_path)
        if before is not None and not before.updated and before.digest != digest:
            logger.warning("%s has changed since the engine before this one loaded it", folder)
        if (
            before is not None and before.updated
        ):  # restored, or lost: then the loss is remembered until a commit
            record = msgspec.structs.replace(
                before, incarnation=stamp.incarnation, weights_epoch=stamp.epoch, time=time.time()
            )
        else:
            record = WeightsRecord(
                caesura_weights_record=1,
                incarnation=stamp.incarnation,
                weights_epoch=stamp.epoch,
                committed_epoch=stamp.epoch,
                weight_version=stamp.version,
                model_path=folder,
                updated=False,
                source=folder,
                digest=digest,
                time=time.time(),
            )
        try:
            self._write(record)
        except (OSError, UnicodeEncodeError) as error:
            raise _unusable(self._path, str(error)) from error
        self._syncer = _Syncer(self._path)

    def committed(self, stamp: WeightStamp, session: Session) -> None:
        """``session`` has been committed; called before its reply. A file that cannot be written is logged: the commit stands."""
        if self._record is None:
            return
        source, digest = self._record.source, self._record.digest
        if session.touched:  # a folder is always complete: what came last from one is all there is
            from_disk = session.source == "disk" and session.model_path is not None
            source = os.path.abspath(session.model_path or "") if from_disk else None
            digest = session.digest if from_disk else None
        record = msgspec.structs.replace(
            self._record,
            weights_epoch=stamp.epoch,
            committed_epoch=stamp.epoch,
            weight_version=stamp.version,
            updated=True,
            source=source,
            digest=digest,
            time=time.time(),
        )
        try:
            self._write(record)
        except (OSError, UnicodeEncodeError) as error:
            logger.error(
                "%s could not be written: a restart would not know of epoch %d (%s)",
                self._path, stamp.epoch, error,
            )  # fmt: skip
        if self._syncer is not None:
            self._syncer.wake()

    def _write(self, record: WeightsRecord) -> None:
        assert self._path is not None
        self._record = record
        folder, name = os.path.split(self._path)
        temporary = os.path.join(folder, f".{name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(record) + b"\n")
        os.replace(temporary, self._path)


def read_record(path: str) -> WeightsRecord | None:
    """The record in ``path``; None, with a warning where there is something else."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s is ignored: it cannot be read: %s", path, error.strerror)
        return None
    try:
        if raw is None or len(raw) > _MAX_BYTES:
            raise msgspec.ValidationError("it is no file of a record's size")
        return msgspec.json.decode(raw, type=WeightsRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.warning("%s is ignored: it is not a record of weights: %s", path, error)
        return None


def _why_lost(record: WeightsRecord) -> str | None:
    """Why the weights of ``record`` cannot be loaded again; None: they can."""
    if record.source is None:
        return "they had come over a transport, which leaves no copy"
    try:
        digest = open_checkpoint(record.source).digest
    except CaesuraError as error:
        return error.message
    return None if digest == record.digest else f"the files of {record.source} have changed"


def _lock(path: str) -> int:
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(path, str(error)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise _unusable(path, "another engine writes it") from error
    return descriptor


def _unusable(path: str, reason: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, f"state_file = {path!r}: {reason}", field="state_file", value=path
    )


class _Syncer:
    """Makes the disk keep what the file is; several commits while it is slow are one wait."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._due = threading.Event()
        self._closing = False
        self._due.set()
        self._thread = threading.Thread(target=self._run, name="caesura-weights-record", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """The file has been replaced."""
        self._due.set()

    def close(self) -> None:
        """End the thread once the disk has the last record, or has taken too long."""
        self._closing = True
        self._due.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        ending = False
        while not ending:
            self._due.wait()
            self._due.clear()
            ending = self._closing  # looked at first: what was written before the close is waited for
            for path in (self._path, os.path.dirname(self._path)):
                with contextlib.suppress(OSError):  # gone, or a file system that has no such thing
                    _sync(path)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
