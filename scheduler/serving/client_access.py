"""Who may connect, and how many: a thread beside the loop, which answers within milliseconds whatever a step takes.

Invariants:
- With keys, a connection is used only after this thread has said that its key is among the authorized ones. Whatever goes
  wrong says no: a question without an answer ends with the handshake's time, and ZeroMQ refuses everybody when nobody
  is there to ask.
- Authorized keys are read afresh for each handshake: adding and removing files takes effect without a restart.
- The endpoint is shut before the process runs out of descriptors (ZeroMQ aborts the process then, or takes a core for
  trying again and again), and opened when there is room.
- The thread reads every event that ZeroMQ reports here until it is told to stop, and nothing it meets ends it earlier.
"""

import logging
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ...io_struct import CaesuraError, ErrorCode
from ...io_struct.key_files import KeyPair, read_key_pair, read_public_keys
from .endpoint import Endpoint

logger = logging.getLogger(__name__)

HANDSHAKE_MS = 10_000
"""A connection that has not introduced itself by then is closed."""
HEARTBEAT_MS = 10_000
"""Over tcp, how often a silent peer is asked whether it is there."""
DEAD_PEER_MS = 60_000
"""Over tcp, a peer that has not answered for so long is gone, however that came; it is told to think so of the engine, too."""
MAX_RESERVE = 1024
"""Descriptors that connections leave to the rest of the process: a quarter of the limit, at most so many."""
RECHECK_MS = 1000
"""How often it is looked whether a shut endpoint can be opened."""
_DOMAIN = b"caesura"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The engine's keys, and where those of its clients are."""

    own: KeyPair
    authorized: Path
    """A file of public keys, or a folder of such files."""

    @classmethod
    def read(cls, secret_key_file: str | None, authorized_clients: str | None) -> "ServerKeys | None":
        """From two options of which both are given, or none.

        Raises:
            CaesuraError: ``invalid_request``.
        """
        if secret_key_file is None and authorized_clients is None:
            return None
        if secret_key_file is None or authorized_clients is None:
            missing = "curve_secret_key_file" if secret_key_file is None else "curve_authorized_clients"
            raise CaesuraError(
                ErrorCode.INVALID_REQUEST,
                f"{missing} is missing: curve_secret_key_file and curve_authorized_clients belong together",
                field=missing,
                value=None,
            )
        keys = cls(read_key_pair(secret_key_file, "curve_secret_key_file"), Path(authorized_clients))
        keys.clients()
        return keys

    def clients(self) -> frozenset[bytes]:
        """The public keys that may connect, now."""
        return read_public_keys(self.authorized, "curve_authorized_clients")


class Access:
    """The thread, from before the bind to after the last send."""

    def __init__(
        self,
        router: "zmq.Socket[bytes]",
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: Endpoint,
        keys: ServerKeys | None,
    ) -> None:
        """Prepare ``router``, which is not bound yet."""
        self._router = router
        self._endpoint = endpoint
        self._keys = keys
        self._crowd = _Crowd(endpoint)
        self._questions: zmq.Socket[bytes] | None = None
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if endpoint.address.startswith("tcp://"):
            router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            router.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_PEER_MS)
            router.setsockopt(zmq.HEARTBEAT_TTL, DEAD_PEER_MS)
        if keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
            router.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
            router.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
            router.setsockopt(
                zmq.ZAP_ENFORCE_DOMAIN, 1
            )  # without it, ZeroMQ admits everybody when nobody answers
            self._questions = context.socket(zmq.REP)
            self._questions.setsockopt(zmq.LINGER, 0)
            self._questions.bind(_ZAP_ENDPOINT)
        address = f"inproc://caesura-access-{id(self)}"
        router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(
            zmq.RCVHWM, 0
        )  # ZeroMQ's I/O thread waits for a full one, and then nothing goes on
        self._events.connect(address)
        self._thread = threading.Thread(target=self._run, name="caesura-access", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, while ``router`` is still there; nobody is admitted any more. Idempotent."""
        if self._thread.is_alive():
            self._router.disable_monitor()
            self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        sockets = [self._events] if self._questions is None else [self._events, self._questions]
        for each in sockets:
            poller.register(each, zmq.POLLIN)
        while True:
            try:
                poller.poll(RECHECK_MS if self._crowd.is_shut_out else None)
                if not self._count():
                    break
                self._answer_all()
            except Exception:  # the engine must hear of the next one; who asked now is refused by its time
                logger.exception("a connection could not be looked at")
                time.sleep(0.1)
        for each in sockets:
            each.close()

    def _count(self) -> bool:
        """Take the events of connections in; False when these end."""
        self._crowd.came(0)
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event == zmq.EVENT_ACCEPTED:
                self._crowd.came(1)
        return True

    def _answer_all(self) -> None:
        """ZeroMQ's questions (RFC 27, ZAP): yes only to a key that is authorized now."""
        while self._questions is not None and self._questions.poll(0):
            _, number, _, address, _, mechanism, *credentials = self._questions.recv_multipart()
            status, text = b"400", b"this key is not authorized"
            try:
                assert self._keys is not None
                if mechanism == b"CURVE" and z85.encode(credentials[0]) in self._keys.clients():
                    status, text = b"200", b"OK"
                else:
                    logger.warning("refused a client of %s: its key is not authorized", address.decode())
            except Exception:  # whatever is wrong with the files: the answer is no, and must be given
                logger.exception("refused a client, since the authorized keys cannot be read")
            self._questions.send_multipart([_VERSION, number, status, text, b"", b""])


class _Crowd:
    """Shuts the endpoint when descriptors run short, and opens it again."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.is_shut_out = False
        self._endpoint = endpoint
        self._room = 0
        self._since = 0

    def came(self, accepted: int) -> None:
        """So many connections more; looks at the descriptors when these may have become few."""
        self._since += accepted
        if not self.is_shut_out and 4 * self._since < self._room:
            return
        if (
            self.is_shut_out and accepted
        ):  # they were on their way; it is looked again when something has ended
            return
        used, limit = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reserve = min(limit // 4, MAX_RESERVE)
        self._since, self._room = 0, limit - reserve - used
        if not self.is_shut_out and self._room <= 0:
            self._endpoint.shut()
            self.is_shut_out = True
            logger.warning(
                "%d of %d descriptors are in use: no further connections until some are free (ulimit -n)",
                used,
                limit,
            )
        elif self.is_shut_out and self._room > reserve // 4:
            self._endpoint.open()
            self.is_shut_out = False
            logger.warning("%d of %d descriptors are in use: connections are taken again", used, limit)
