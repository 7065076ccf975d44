"""Files of CURVE keys: what ``caesura keygen`` writes, and what both sides read.

Invariants: the format is that of ZeroMQ's certificates, so their tools read it; a secret key is taken only
from a file that only its owner can read; no error and no ``repr`` shows a secret.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ..io_struct.errors import CaesuraError, ErrorCode

MAX_FILE_BYTES = 1 << 20
"""A longer file is no file of keys."""
PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"

_Z85 = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_ENTRY = re.compile(rf'^\s*(public|secret)-key\s*=\s*"({_Z85})"\s*$', re.MULTILINE)
AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One party's keys, 40 characters of Z85 each."""

    public: bytes
    secret: bytes = field(repr=False)


def key_file(public: bytes, secret: bytes | None = None) -> str:
    """The text of a file with these keys."""
    kind = "Public key" if secret is None else "Secret key: keep it, and let nobody else read it"
    own = "" if secret is None else f'    secret-key = "{secret.decode()}"\n'
    return f'#   {kind} of caesura, for ZeroMQ\'s CURVE.\nmetadata\ncurve\n    public-key = "{public.decode()}"\n{own}'


def read_key_pair(path: AnyPath, name: str) -> KeyPair:
    """Both keys of the file ``path``, which the option ``name`` has given.

    Raises:
        CaesuraError: ``invalid_request``: it cannot be read, others may read it, or it holds no such keys.
    """
    with _Refusals(path, name):
        mode = os.stat(path).st_mode
    if stat.S_IMODE(mode) & 0o077:
        raise _refused(path, name, "others may read this secret key: chmod 600 it")
    entries = dict(_entries(path, name))
    if set(entries) != {"public", "secret"}:
        raise _refused(
            path, name, "does not hold a public and a secret key (caesura keygen writes such files)"
        )
    return KeyPair(entries["public"], entries["secret"])


def read_public_keys(path: AnyPath, name: str) -> frozenset[bytes]:
    """All public keys in a file, or in the ``*.key`` files of a folder.

    Raises:
        CaesuraError: ``invalid_request``: something cannot be read, or a file holds none.
    """
    with _Refusals(path, name):
        files = sorted(Path(path).glob("*" + PUBLIC_SUFFIX)) if os.path.isdir(path) else [Path(path)]
    keys: set[bytes] = set()
    for file in files:
        found = [key for kind, key in _entries(file, name) if kind == "public"]
        if not found:
            raise _refused(file, name, "holds no public key")
        keys.update(found)
    return frozenset(keys)


def server_key(given: str, name: str) -> bytes:
    """A public key that is given as its 40 characters, or as the file that holds it.

    Raises:
        CaesuraError: ``invalid_request``.
    """
    if re.fullmatch(_Z85, given) and not os.path.exists(given):
        return given.encode()
    keys = read_public_keys(given, name)
    if os.path.isdir(given) or len(keys) != 1:
        raise _refused(given, name, "must hold one public key, the engine's")
    return next(iter(keys))


def _entries(path: AnyPath, name: str) -> list[tuple[str, bytes]]:
    # Without waiting: whoever opens a FIFO waits for its other end.
    with _Refusals(path, name), open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _refused(path, name, "is not a regular file")
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise _refused(path, name, "is too long for a file of keys")
    return [(kind, key.encode()) for kind, key in _ENTRY.findall(text.decode("utf-8", "replace"))]


class _Refusals:
    """System errors within are refusals of the option."""

    def __init__(self, path: AnyPath, name: str) -> None:
        self._path, self._name = path, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (OSError, ValueError)):
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise _refused(self._path, self._name, f"cannot be read: {reason}") from error


def _refused(path: AnyPath, name: str, reason: str) -> CaesuraError:
    shown = os.fspath(path)
    return CaesuraError(ErrorCode.INVALID_REQUEST, f"{name} = {shown!r}: {reason}", field=name, value=shown)
