"""The scheduler's ROUTER socket: who may bind it, what it does when a client reads slowly or vanishes.

Invariants:
- A send never blocks and never drops silently: what a full client cannot take waits in its queue here, in order.
- A client's queue is bounded by its own requests: stream deltas coalesce (the terminal result carries everything),
  terminal results and replies are always kept until the client takes them or is gone.
- One scheduler per endpoint: an ``flock`` on a sidecar file is taken first, since a second bind on the same ipc path
  would succeed and steal the traffic.
- ipc paths fit ``sockaddr_un`` (107 bytes); tcp binds loopback addresses only.
"""

import fcntl
import ipaddress
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np
import zmq

from ..io_struct import BatchTokenOutput, CaesuraError, ErrorCode, Keepalive, Message, StreamDelta, encode

logger = logging.getLogger(__name__)

MAX_IPC_PATH = 107
MAX_MESSAGE_BYTES = 1 << 30
HIGH_WATER_MARK = 1000
RECEIVE_HIGH_WATER_MARK = 8192
"""Messages queued inside ZeroMQ per client, before ours begins."""
MAX_PENDING_DELTA_TOKENS = 1 << 20
"""Per client: beyond this, stream deltas are dropped (a gap in ``starts``); results are not."""
MESSAGES_PER_DRAIN = 512
"""Messages taken per tick, so that a flood cannot stop generation."""


class Router:
    """Non-blocking sends to any number of clients, and their messages in the order of arrival."""

    def __init__(self, endpoint: str, on_gone: Callable[[bytes], None]) -> None:
        """Bind ``endpoint``; ``on_gone(client)`` is called once when a client turns out to have left.

        Raises:
            CaesuraError: ``endpoint_in_use`` or ``invalid_request``.
        """
        self._on_gone = on_gone
        self._queues: dict[bytes, deque[Message]] = {}
        self._lock = _lock_endpoint(endpoint)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise CaesuraError(
                ErrorCode.ENDPOINT_IN_USE, f"cannot bind {endpoint}: {error}", endpoint=endpoint
            ) from error
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.endpoint.startswith("ipc://"):
            os.chmod(self.endpoint.removeprefix("ipc://"), 0o600)

    @property
    def has_backlog(self) -> bool:
        """Some client has not taken everything yet."""
        return bool(self._queues)

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """(client, frames) of what has arrived, a bounded number per call; never blocks."""
        for _ in range(MESSAGES_PER_DRAIN):
            try:
                client, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield client, frames

    def send(self, client: bytes, message: Message) -> None:
        """Hand ``message`` to the socket, or to the client's queue where the socket is full."""
        queue = self._queues.get(client)
        if queue is not None:
            _append_coalesced(queue, message)
        elif not self._try_send(client, message):
            self._queues[client] = deque([message])

    def retry(self) -> None:
        """Try again what clients could not take."""
        for client, queue in list(self._queues.items()):
            while queue and self._try_send(client, queue[0]):
                queue.popleft()
            if not queue:
                self._queues.pop(client, None)

    def keepalive(self, clients: set[bytes], step: int) -> None:
        """Find out which of ``clients`` are gone; ZeroMQ never says so by itself."""
        message = Keepalive(step=step)
        for client in clients:
            if client not in self._queues:
                self._try_send(client, message)

    def close(self) -> None:
        """Give ZeroMQ up to a second to deliver, then let go of socket and lock."""
        self.retry()
        self.socket.close()
        self._context.term()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _try_send(self, client: bytes, message: Message) -> bool:
        """False: the client's pipe is full. A client that is gone counts as sent."""
        try:
            self.socket.send_multipart([client, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._queues.pop(client, None)
            self._on_gone(client)
        return True


def _append_coalesced(queue: deque[Message], message: Message) -> None:
    """Append, merging token outputs that follow each other into one."""
    last = queue[-1] if queue else None
    if not (isinstance(message, BatchTokenOutput) and isinstance(last, BatchTokenOutput)):
        queue.append(message)
        return
    finished = last.finished + message.finished
    ended = {(result.rid, result.index) for result in finished}
    queue[-1] = BatchTokenOutput(
        step=message.step, finished=finished, delta=_merge([last.delta, message.delta], ended)
    )


def _merge(deltas: list[StreamDelta | None], ended: set[tuple[str, int]]) -> StreamDelta | None:
    """One delta for several, without rows whose terminal result follows; None when nothing is left or it is too much."""
    rids: list[str] = []
    columns: dict[str, list[np.ndarray]] = {
        name: [] for name in ("indices", "starts", "counts", "tokens", "logprobs")
    }
    for delta in deltas:
        if delta is None:
            continue
        indices = np.frombuffer(delta.indices, "<i4")
        counts = np.frombuffer(delta.counts, "<i4")
        keep = np.fromiter(
            ((rid, index) not in ended for rid, index in zip(delta.rids, indices.tolist(), strict=True)),
            np.bool_,
        )
        token_keep = np.repeat(keep, counts)
        rids += [rid for rid, kept in zip(delta.rids, keep, strict=True) if kept]
        columns["indices"].append(indices[keep])
        columns["starts"].append(np.frombuffer(delta.starts, "<i4")[keep])
        columns["counts"].append(counts[keep])
        columns["tokens"].append(np.frombuffer(delta.tokens, "<i4")[token_keep])
        columns["logprobs"].append(np.frombuffer(delta.logprobs, "<f4")[token_keep])
    if not rids or sum(len(part) for part in columns["tokens"]) > MAX_PENDING_DELTA_TOKENS:
        return None
    return StreamDelta(
        rids=rids, **{name: np.concatenate(parts).tobytes() for name, parts in columns.items()}
    )


def _lock_endpoint(endpoint: str) -> IO[bytes] | None:
    """Check the address and, for ipc, take its lock; the file object holds it."""
    if endpoint.startswith("tcp://"):
        _check_loopback(endpoint)
        return None
    path = endpoint.removeprefix("ipc://")
    if not endpoint.startswith("ipc://") or not os.path.isabs(path):
        raise _bad_endpoint(endpoint, "must be ipc:///absolute/path or tcp://loopback:port")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise _bad_endpoint(endpoint, f"ipc paths are limited to {MAX_IPC_PATH} bytes")
    try:
        lock = open(path + ".lock", "wb")  # noqa: SIM115  (held until close)
    except OSError as error:
        raise _bad_endpoint(endpoint, f"cannot create its lock file: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise CaesuraError(
            ErrorCode.ENDPOINT_IN_USE, f"another scheduler owns {endpoint}", endpoint=endpoint
        ) from error
    return lock


def _check_loopback(endpoint: str) -> None:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise _bad_endpoint(endpoint, "tcp endpoints bind loopback addresses only")


def _bad_endpoint(endpoint: str, reason: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, f"endpoint {endpoint!r}: {reason}", field="endpoint", value=endpoint
    )
