"""Decides which clients may connect, and how many, in a thread that answers even during long steps.

Invariants:
- With keys, ZeroMQ uses a connection only after this thread has accepted its key; keys are read for each
  handshake.
- The endpoint is shut before the process runs out of descriptors, and opened again when enough are free:
  without, ZeroMQ would abort the process, or keep a core busy. Its I/O thread cannot get ahead: it waits once
  about 1,000 accepted connections have not been looked at.
- The thread reads every event that ZeroMQ reports until it is told to stop; no exception ends it.
"""

import logging
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...io_struct import CaesuraError, ErrorCode
from ...process.curve import Handshakes, KeyPair, read_key_pair, read_public_keys
from .endpoint import Endpoint

logger = logging.getLogger(__name__)

HANDSHAKE_MS = 10_000
HEARTBEAT_MS = 10_000
DEAD_PEER_MS = 60_000
"""Milliseconds after which a silent peer counts as gone, over tcp, and the engine for it."""
MAX_RESERVE = 1536
"""Descriptors that connections leave free, or half of the limit if that is less. More than ZeroMQ can accept
before this thread has looked: 1,002, and the backlog of the endpoint.
"""
RECHECK_MS = 1000


@dataclass(frozen=True, slots=True)
class ServerKeys:
    own: KeyPair
    authorized: Path

    @classmethod
    def read(cls, secret_key_file: str | None, authorized_clients: str | None) -> "ServerKeys | None":
        """Read the keys; None if neither option is set. Raise ``invalid_request`` for one alone or an
        unreadable file.
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
        return read_public_keys(self.authorized, "curve_authorized_clients")


class Access:
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
        self._descriptor_guard = _DescriptorGuard(endpoint)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if endpoint.address.startswith("tcp://"):
            router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            router.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_PEER_MS)
            router.setsockopt(zmq.HEARTBEAT_TTL, DEAD_PEER_MS)
        self._handshakes = (
            None if keys is None else Handshakes(router, context, keys.own, keys.clients, "client")
        )
        address = f"inproc://caesura-access-{id(self)}"
        router.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        # With 1,000 of ZeroMQ's own: its I/O thread waits when so many have not been read.
        self._events.setsockopt(zmq.RCVHWM, 1)
        self._events.connect(address)
        self._thread = threading.Thread(target=self._run, name="caesura-access", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close ``router``; its last event ends the thread. Idempotent."""
        # Disable_monitor would wait with the GIL for an I/O thread that waits for this thread
        self._router.close()
        self._thread.join()

    def _run(self) -> None:
        poller = zmq.Poller()
        sockets = [self._events] + ([] if self._handshakes is None else [self._handshakes.socket])
        for each in sockets:
            poller.register(each, zmq.POLLIN)
        while True:
            try:
                poller.poll(RECHECK_MS if self._descriptor_guard.is_shut else None)
                if not self._process_events():
                    break
                if self._handshakes is not None:
                    self._handshakes.answer()
            except Exception:  # the thread must go on; the handshake timeout refuses this client
                logger.exception("a connection could not be checked")
                time.sleep(0.1)
        for each in sockets:
            each.close()

    def _process_events(self) -> bool:
        self._descriptor_guard.note_accepted(0)
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event == zmq.EVENT_ACCEPTED:
                self._descriptor_guard.note_accepted(1)
        return True


class _DescriptorGuard:
    def __init__(self, endpoint: Endpoint) -> None:
        self.is_shut = False
        self._endpoint = endpoint
        self._free_descriptors = 0
        self._accepted_since = 0
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit < 2 * MAX_RESERVE:
            logger.warning(
                "%d descriptors are few: many connections at once can end the engine; allow %d (ulimit -Hn)",
                limit,
                2 * MAX_RESERVE,
            )

    def note_accepted(self, accepted: int) -> None:
        """Count accepted connections, and check the free descriptors if they may have run short."""
        self._accepted_since += accepted
        if not self.is_shut and 4 * self._accepted_since < self._free_descriptors:
            return
        if self.is_shut and accepted:  # they were on their way; it is looked again when something has ended
            return
        used, limit = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        reserve = min(limit // 2, MAX_RESERVE)
        self._accepted_since, self._free_descriptors = 0, limit - reserve - used
        if not self.is_shut and self._free_descriptors <= 0:
            self._endpoint.shut()
            self.is_shut = True
            logger.warning(
                "%d of %d descriptors are in use: no further connections until some are free (ulimit -n)",
                used,
                limit,
            )
        elif self.is_shut and self._free_descriptors > reserve // 4:
            self._endpoint.open()
            self.is_shut = False
            logger.warning("%d of %d descriptors are in use: connections are taken again", used, limit)
