"""The default place of an engine's socket: a private directory, made by launcher or engine.

Invariants:
- It is fresh, mode 0700, and its socket's path fits into an ``ipc://`` address.
- Whoever made it holds a lock on it until it is removed or the process ends, however that happens; the engine
  in it holds the lock of its socket, and of its state file where that is here too.
- :func:`make` removes what killed processes left: directories with names that it makes, of this user, mode
  0700, all of whose locks are free and which hold only files of an engine, or key files beside a lock. An
  empty one may be fresh and not locked yet: its maker notices the removal and makes another.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .contract import MAX_IPC_PATH, SHUT_SUFFIX
from .curve import PUBLIC_SUFFIX, SECRET_SUFFIX

PREFIX = "caesura-"
SOCKET = "scheduler.sock"
LOCK = SOCKET + ".lock"
STATE_FILE = "weights.json"
"""State file of a supervised engine without ``--state-file``."""
STATE_LOCK = STATE_FILE + ".lock"

_OURS = {SOCKET, SOCKET + SHUT_SUFFIX, LOCK, STATE_FILE, f".{STATE_FILE}.new", STATE_LOCK}
"""Names that an engine makes here, those of a shut socket and of a state file being replaced included."""

_held: dict[str, int] = {}


def make() -> Path:
    """Return a fresh directory, after removing what killed processes left beside it."""
    path = _make_fresh()
    while not _lock(path):
        path = _make_fresh()
    remove_stale(os.path.dirname(path))
    return Path(path)


def make_with(files: Mapping[str, str]) -> Path:
    """Return a fresh directory with key files, name to text, that only this user can read."""
    path = make()
    (path / LOCK).touch()  # so that the files go with the directory if this process is killed
    for name, text in files.items():
        with open(os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    return path


def _make_fresh() -> str:
    path = tempfile.mkdtemp(prefix=PREFIX)
    address = f"{path}/{SOCKET}"
    socket = os.fsencode(address)
    if len(socket) > MAX_IPC_PATH or socket.decode(errors="replace") != address:  # ZeroMQ's are text
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
    return path


def _lock(path: str) -> bool:
    """Take the lock; return False if another process is removing the directory as stale."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:  # a file system without locks: then nobody removes it but its owner
        pass
    if not os.path.isdir(path):
        os.close(descriptor)
        return False
    _held[path] = descriptor
    return True


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a directory that :func:`make` returned, with everything in it. Never raises; idempotent."""
    shutil.rmtree(path, ignore_errors=True)
    descriptor = _held.pop(os.fspath(path), None)
    if descriptor is not None:
        os.close(descriptor)


def remove_stale(parent: str) -> None:
    """Remove the directories in ``parent`` whose makers and engines were killed."""
    for path in Path(parent).glob(f"{PREFIX}*"):
        if "-" not in path.name.removeprefix(PREFIX):
            with contextlib.suppress(OSError):  # somebody's, in use, or just gone
                _remove_if_stale(str(path))


def _remove_if_stale(path: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    directory = os.open(path, flags | os.O_DIRECTORY)
    try:
        facts = os.fstat(directory)
        if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) != 0o700:
            return
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = set(os.listdir(directory))
        locks = found & {LOCK, STATE_LOCK}
        if (locks or not found) and all(
            each in _OURS or each.endswith((PUBLIC_SUFFIX, SECRET_SUFFIX)) for each in found
        ):
            with contextlib.ExitStack() as opened:
                for name in locks:
                    lock = os.open(name, flags, dir_fd=directory)
                    opened.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in found:
                    os.unlink(name, dir_fd=directory)
                os.rmdir(path)
    finally:
        os.close(directory)
