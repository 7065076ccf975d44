"""The state file: a small record of the weights that were committed last, and of the adapters, for a restart.

- I12: an epoch names one state of the weights, across restarts, full disks and owners that die.
- The record is written before a commit is acknowledged and before a token is sampled under it. Just before
  the commit, one byte of the old record is overwritten in place, which needs no space on the disk: it marks
  the record as superseded until the new one replaces it, atomically. A commit that cannot be marked is
  refused. One that is marked and not recorded stands, and its reply says so.
- A start that does not know which weights were committed last, or whose folder has other files now, begins
  invalid, above every epoch that was given out.
- The record has an adapter's version before its name means it: one that cannot be recorded is not published.
- fsync, in a thread, matters only if the host loses power. A lock file ensures that one engine writes a file.
"""

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from ...io_struct import CaesuraError, ErrorCode
from ..runtime.background import Worker
from ..runtime.engine_config import EngineConfig
from ..scheduling.request import WeightStamp
from ..weights.transports.disk import open_checkpoint
from .weight_sessions import Session

logger = logging.getLogger(__name__)

INITIAL_VERSION = "default"
"""The public label before any update, as in SGLang."""

_MAX_BYTES = 1 << 20
_CLOSE_S = 5.0
"""Seconds that a stopping engine waits for the last fsync."""
_UNRECORDED = 1 << 24
"""More epochs than an engine can give out while its state file cannot be written."""
_BEFORE_MARK = b'{"caesura_weights_record":1,"superseded":'
"""Begin of every record; the byte that follows is the mark."""


_Epoch = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: str
    """Folder that it came from; empty for tensors, which leave no copy."""
    pinned: bool
    epoch: int
    digest: str


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    caesura_weights_record: Literal[1]
    """Identifies the file format and its version."""
    superseded: Literal[0, 1] = 0
    """1 from just before a commit until its own record is in place."""
    incarnation: str
    weights_epoch: _Epoch
    committed_epoch: _Epoch
    weight_version: str
    model_path: str
    updated: bool
    """True if an update brought the weights; False if they are those of ``model_path``."""
    source: str | None
    """The folder that contains the weights; None if they came over a transport other than disk."""
    digest: str | None
    other_components: bool = False
    """True if updates since the engine's start have brought components that ``source`` does not contain."""
    adapters: list[AdapterRecord] = []
    """Adapters that are loaded, in the order in which they were."""
    lost: str | None = None
    """Why it is unknown which weights were committed last; None if this record says it."""
    time: float


@dataclass(frozen=True, slots=True)
class Start:
    epoch: int = 0
    version: str = INITIAL_VERSION
    folder: str | None = None
    """The folder to load the weights from; None means ``model_path``."""
    lost: str | None = None
    """Which committed weights cannot be loaded again, and why."""


class WeightsFile:
    """The state file of one engine; without a configured path it does nothing."""

    def __init__(self, config: EngineConfig) -> None:
        """Take the lock and read the record; raises ``state_file_error``."""
        self._config = config
        self._path = config.state_file
        self._record: WeightsRecord | None = None
        self._lock: int | None = None
        self._worker: Worker | None = None
        """Calls fsync; several commits during a slow one share the next one."""
        self._sync_due = False
        self._other_components = False
        self.adapters: list[AdapterRecord] = []
        """Adapters of the record that was read, until others are recorded."""
        self.durable: bool | None = None
        """True if the file has the last commit; None without a file."""
        if self._path is not None:
            self._lock = _lock(self._path)
            self._record = self._read(self._path)
            self.adapters = [] if self._record is None else self._record.adapters

    def close(self) -> None:
        """Wait for the last fsync, for a bounded time, and release the lock."""
        if self._worker is not None:
            synced = threading.Event()
            self._worker.submit(synced.set)
            self._worker.close()
            synced.wait(_CLOSE_S)
            self._worker = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def start(self) -> Start:
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
            self._record, self.adapters = None, []
            return Start(epoch)
        if record.lost is not None:
            return Start(epoch, lost=record.lost)
        if not record.updated:
            return Start(epoch, record.weight_version)
        reason = _why_lost(record)
        if reason is None:
            assert record.source is not None
            logger.info(
                "resuming with version %r from %s, epoch %d", record.weight_version, record.source, epoch
            )
            return Start(epoch, record.weight_version, folder=record.source)
        lost = f"version {record.weight_version!r} (epoch {record.committed_epoch})"
        return Start(epoch, lost=f"{lost} was lost in a restart: {reason}")

    def begin(self, stamp: WeightStamp, digest: str) -> None:
        """Write the record of this start, with ``digest`` of its files; raises ``state_file_error``."""
        if self._path is None:
            return
        before, folder = self._record, os.path.abspath(self._config.model_path)
        if before is not None and not before.updated and before.digest != digest:
            logger.warning("%s has changed since the engine before this one loaded it", folder)
        if before is not None and before.updated:
            # These weights were restored, or they were lost; a loss must stay on record until a commit.
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
                adapters=self.adapters,
                time=time.time(),
            )
        try:
            self._write(record)
        except (OSError, UnicodeEncodeError) as error:
            raise _unusable(self._path, str(error)) from error
        self.durable = True
        self._worker = Worker()
        self._sync_soon()

    def keep_adapters(self, adapters: list[AdapterRecord]) -> None:
        """Record the adapters, just before they are published; raises ``state_file_error``."""
        before = self._record
        if before is None or adapters == self.adapters:
            return
        try:
            self._write(msgspec.structs.replace(before, adapters=adapters, time=time.time()))
        except (OSError, UnicodeEncodeError) as error:
            self._record = before
            raise _unusable(str(self._path), str(error)) from error
        self.adapters = adapters
        self._sync_soon()

    def supersede(self) -> None:
        """Mark the record as out of date, just before a commit; raises ``state_file_error`` if that fails."""
        if self._path is None:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, b"1", len(_BEFORE_MARK))
            finally:
                os.close(descriptor)
        except FileNotFoundError:  # removed by somebody who wants to start from ``model_path`` again
            return
        except OSError as error:
            raise _unusable(self._path, str(error)) from error

    def committed(self, stamp: WeightStamp, session: Session) -> None:
        """Write the record of a committed session, before its reply is sent. An error is only logged."""
        if self._record is None:
            return
        source, digest, lost = self._record.source, self._record.digest, self._record.lost
        if session.touched:
            # A folder is always a complete checkpoint, so it replaces whatever was written before it.
            from_disk = session.source == "disk" and session.model_path is not None
            source = os.path.abspath(session.model_path or "") if from_disk else None
            digest, lost = session.digest if from_disk else None, None
        self._other_components |= session.wrote_other_component
        record = msgspec.structs.replace(
            self._record,
            weights_epoch=stamp.epoch,
            committed_epoch=stamp.epoch,
            other_components=self._other_components,
            weight_version=stamp.version,
            updated=True,
            source=source,
            digest=digest,
            lost=lost,
            time=time.time(),
        )
        try:
            self._write(record)
            self.durable = True
        except (OSError, UnicodeEncodeError) as error:
            self.durable = False
            logger.error(
                "%s could not be written: a restart would begin with invalid weights, not with epoch %d (%s)",
                self._path, stamp.epoch, error,
            )  # fmt: skip
        self._sync_soon()

    def _read(self, path: str) -> WeightsRecord | None:
        """Return the record; one that gives the reason if the file cannot tell the last commit."""
        try:
            record = read_record(path)
        except OSError as error:
            raise _unusable(path, str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            with contextlib.suppress(OSError):  # kept for whoever it belongs to
                os.link(path, f"{path}.unreadable")
            lost, now = f"{path} is no record of weights: {error}", time.time()
            logger.warning("%s", lost)
            return WeightsRecord(
                caesura_weights_record=1,
                incarnation="",
                weights_epoch=int(now * 1000),
                committed_epoch=0,
                weight_version=INITIAL_VERSION,
                model_path=os.path.abspath(self._config.model_path),
                updated=True,
                source=None,
                digest=None,
                lost=lost,
                time=now,
            )
        if record is None or not record.superseded:
            return record
        last = f"version {record.weight_version!r} (epoch {record.committed_epoch})"
        return msgspec.structs.replace(
            record,
            superseded=0,
            weights_epoch=record.weights_epoch + _UNRECORDED,
            updated=True,
            source=None,
            digest=None,
            lost=f"what was committed after {last} is not on record in {path}",
        )

    def _sync_soon(self) -> None:
        if self._worker is not None:
            self._sync_due = True
            self._worker.submit(self._sync)

    def _sync(self) -> None:
        assert self._path is not None
        if not self._sync_due:
            return
        self._sync_due = False
        for path in (self._path, os.path.dirname(self._path)):
            with contextlib.suppress(OSError):  # the file is gone, or the file system has no fsync
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    def _write(self, record: WeightsRecord) -> None:
        assert self._path is not None
        self._record = record
        folder, name = os.path.split(self._path)
        temporary = os.path.join(folder, f".{name}.new")
        # A killed engine's may be there; opening a FIFO would never return.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        encoded = msgspec.json.encode(record)
        if len(encoded) >= _MAX_BYTES:
            raise OSError(f"a record of {len(encoded)} bytes is too large")
        assert encoded.startswith(_BEFORE_MARK), encoded
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(encoded + b"\n")
        os.replace(temporary, self._path)


def read_record(path: str) -> WeightsRecord | None:
    """Return the record in ``path``, or None. Raises OSError, or an error of decoding if it is no record."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise msgspec.ValidationError(f"it has more than {_MAX_BYTES} bytes")
    return msgspec.json.decode(raw, type=WeightsRecord)


def _why_lost(record: WeightsRecord) -> str | None:
    if record.source is None:
        return "they had come over a transport, which leaves no copy"
    if record.other_components:
        return f"components beside that of {record.source} had been updated, too"
    try:
        digest = open_checkpoint(record.source).local_digest
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
    message = f"state_file = {path!r}: {reason}"
    return CaesuraError(ErrorCode.STATE_FILE_ERROR, message, path=path, reason=reason)
