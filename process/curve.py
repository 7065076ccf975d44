"""CURVE keys: the files that ``caesura keygen`` writes, and a server's answers to handshakes.

Invariants: files are ZeroMQ certificates, a secret one readable by its owner only; no error and no ``repr``
shows a secret. zmq.auth is not used: its loader checks no permissions and waits for whoever holds a FIFO, and
its authenticator leaves a handshake unanswered when its callback raises.
"""

import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from ..io_struct.errors import CaesuraError, ErrorCode

logger = logging.getLogger(__name__)
MAX_FILE_BYTES = 1 << 20
PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"
NODES_VARIABLE = "CAESURA_NODES_SECRET"
_LEAST_SECRET = 32
"""Minimum characters of a secret: who has recorded a handshake can try short ones."""

_Z85 = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"
_ENTRY = re.compile(rf'^\s*(public|secret)-key\s*=\s*"({_Z85})"\s*$', re.MULTILINE)
AnyPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One party's keys, 40 characters of Z85 each."""

    public: bytes
    secret: bytes = field(repr=False)


def key_file(public: bytes, secret: bytes | None = None) -> str:
    kind = "Public key" if secret is None else "Secret key: keep it, and let nobody else read it"
    head = f"#   {kind} of caesura, for ZeroMQ's CURVE.\nmetadata\ncurve\n"
    own = "" if secret is None else f'    secret-key = "{secret.decode()}"\n'
    return f'{head}    public-key = "{public.decode()}"\n{own}'


def read_key_pair(path: AnyPath, name: str) -> KeyPair:
    """Read both keys of the file ``path``, which the option ``name`` has given, or refuse the option."""
    with _refusals(path, name):
        mode = os.stat(path).st_mode
    if stat.S_IMODE(mode) & 0o077:
        raise _refused(path, name, "others may read this secret key: chmod 600 it")
    entries = dict(_entries(path, name))
    if set(entries) != {"public", "secret"}:
        reason = "does not hold a public and a secret key (caesura keygen writes such files)"
        raise _refused(path, name, reason)
    return KeyPair(entries["public"], entries["secret"])


def shared_key_pair(environment: Mapping[str, str] = os.environ) -> KeyPair | None:
    """Return the key pair of all ranks of an engine, if the environment has the secret that it is made of."""
    secret = environment.get(NODES_VARIABLE)
    if not secret:
        return None
    if len(secret) < _LEAST_SECRET:
        reason = f"{NODES_VARIABLE} needs {_LEAST_SECRET} characters or more: openssl rand -hex 32"
        raise CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=NODES_VARIABLE)
    key = z85.encode(hashlib.sha256(b"caesura nodes\0" + secret.encode()).digest())
    return KeyPair(zmq.curve_public(key), key)


def read_public_keys(path: AnyPath, name: str) -> frozenset[bytes]:
    """Read all public keys in a file, at least one, or in the ``*.key`` files of a folder."""
    with _refusals(path, name):
        files = sorted(Path(path).glob("*" + PUBLIC_SUFFIX)) if os.path.isdir(path) else [Path(path)]
    keys: set[bytes] = set()
    for file in files:
        found = [key for kind, key in _entries(file, name) if kind == "public"]
        if not found:
            raise _refused(file, name, "holds no public key")
        keys.update(found)
    return frozenset(keys)


def server_key(given: str, name: str) -> bytes:
    """Return a public key that is given as its 40 characters, or as the file that holds it."""
    if re.fullmatch(_Z85, given) and not os.path.exists(given):
        return given.encode()
    keys = read_public_keys(given, name)
    if os.path.isdir(given) or len(keys) != 1:
        raise _refused(given, name, "must hold one public key, the engine's")
    return next(iter(keys))


def _entries(path: AnyPath, name: str) -> list[tuple[str, bytes]]:
    # O_NONBLOCK: whoever opens a FIFO waits for its other end.
    with _refusals(path, name), open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _refused(path, name, "is not a regular file")
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise _refused(path, name, "is too long for a file of keys")
    return [(kind, key.encode()) for kind, key in _ENTRY.findall(text.decode("utf-8", "replace"))]


@contextlib.contextmanager
def _refusals(path: AnyPath, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(path, name, f"cannot be read: {reason}") from error


def _refused(path: AnyPath, name: str, reason: str) -> CaesuraError:
    shown = os.fspath(path)
    return CaesuraError(ErrorCode.INVALID_REQUEST, f"{name} = {shown!r}: {reason}", field=name, value=shown)


class Handshakes:
    """Makes a socket not bound yet accept only the keys in ``authorized``, read each time (RFC 27, ZAP).

    Invariants: ZeroMQ accepts nobody while :meth:`answer` is not called; every error is a refusal.
    """

    def __init__(
        self,
        server: "zmq.Socket[bytes]",
        context: "zmq.Context[zmq.Socket[bytes]]",
        own: KeyPair,
        authorized: Callable[[], Collection[bytes]],
        peer: str,
    ) -> None:
        """``peer`` names the other side in the log, as "client"."""
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        server.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
        server.setsockopt(zmq.ZAP_DOMAIN, b"caesura")
        # without it ZeroMQ accepts everybody while nobody answers
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._authorized = authorized
        self._peer = peer
        self.socket = context.socket(zmq.REP)
        """Readable when a handshake waits for :meth:`answer`."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        while self.socket.poll(0):
            _, number, _, address, _, mechanism, *credentials = self.socket.recv_multipart()
            status, text = b"400", b"this key is not authorized"
            try:
                if mechanism == b"CURVE" and z85.encode(credentials[0]) in self._authorized():
                    status, text = b"200", b"OK"
                else:
                    logger.warning(
                        "refused a %s of %s: its key is not authorized", self._peer, address.decode()
                    )
            except Exception:  # a question must be answered, and every error means a refusal
                logger.exception("refused a %s, since the authorized keys cannot be read", self._peer)
            self.socket.send_multipart([b"1.0", number, status, text, b"", b""])
