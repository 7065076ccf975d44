"""The scheduler's ROUTER socket: who may bind it, what it does when a client reads slowly or vanishes.

Invariants:
- A send never blocks and never drops silently: what a full client cannot take waits in its queue here, in order.
- A client's queue is bounded: stream deltas coalesce and are dropped beyond a limit (the terminal result carries
  everything); terminal results and replies are kept until the client takes them or is gone, and a client that leaves
  :data:`MAX_PENDING_FRAMES` of them unread counts as gone.
- One slow client costs the others nothing: whatever waits is merged and encoded once, however often it is offered.
- One scheduler per endpoint: an ``flock`` on a sidecar file is taken first, since a second bind on the same ipc path
  would succeed and steal the traffic.
- ipc paths fit ``sockaddr_un`` (107 bytes) and never replace a file that is no socket; tcp binds loopback addresses only.
"""

import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import zmq

from ..io_struct import (
    BatchTokenOutput,
    CaesuraError,
    DeltaLogprobs,
    ErrorCode,
    GenerateReqOutput,
    Keepalive,
    Message,
    StreamDelta,
    encode,
    encode_reply,
)

logger = logging.getLogger(__name__)

MAX_IPC_PATH = 107
MAX_PORT = 65535
MAX_MESSAGE_BYTES = 1 << 30
HIGH_WATER_MARK = 1000
"""Messages queued inside ZeroMQ per client, before our own queue begins."""
RECEIVE_HIGH_WATER_MARK = 8192
"""Messages of one client that ZeroMQ takes in before it holds the client back."""
MAX_PENDING_DELTA_TOKENS = 1 << 16
"""Per client: beyond this, stream deltas are dropped (a gap in ``starts``); results are not."""
MAX_PENDING_FRAMES = 1 << 16
"""Per client: one that leaves more replies than this unread counts as gone."""
LINGER_S = 1.0
"""How long closing waits for slow clients to take their last messages."""
MESSAGES_PER_DRAIN = 512
"""Messages taken per tick, so that a flood cannot stop generation."""


class Router:
    """Non-blocking sends to any number of clients, and their messages in the order of arrival."""

    def __init__(self, endpoint: str, on_gone: Callable[[bytes], None]) -> None:
        """Bind ``endpoint``; ``on_gone(client)`` is called whenever something cannot be sent because a client has left.

        Raises:
            CaesuraError: ``endpoint_in_use`` or ``invalid_request``.
        """
        self._on_gone = on_gone
        self._backlogs: dict[bytes, _Backlog] = {}
        self._path: str | None = None
        self._lock = _lock_endpoint(endpoint)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, round(LINGER_S * 1000))
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            if error.errno != errno.EADDRINUSE:
                raise _bad_endpoint(endpoint, f"cannot be bound: {error}") from error
            raise CaesuraError(
                ErrorCode.ENDPOINT_IN_USE, f"cannot bind {endpoint}: {error}", endpoint=endpoint
            ) from error
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.endpoint.startswith("ipc://"):
            self._path = self.endpoint.removeprefix("ipc://")
            os.chmod(self._path, 0o600)

    @property
    def has_backlog(self) -> bool:
        """Some client has not taken everything yet."""
        return bool(self._backlogs)

    def receive(self) -> Iterator[tuple[bytes, bytes, list[memoryview]]]:
        """(client, header, buffers) of what has arrived, a bounded number per call; never blocks.

        Buffers are views of libzmq's own memory, valid while they are referenced.
        """
        socket = self.socket
        for _ in range(MESSAGES_PER_DRAIN):
            client, buffers = b"", list[memoryview]()
            try:
                client = socket.recv(zmq.NOBLOCK)
                header = socket.recv() if socket.rcvmore else b""
                while socket.rcvmore:
                    buffers.append(socket.recv(copy=False).buffer)
            except zmq.Again:
                return
            except MemoryError as error:
                self._drop_rest(client, error)
                continue
            yield client, header, buffers

    def _drop_rest(self, client: bytes, error: MemoryError) -> None:
        """Of a message that there is no memory for: what comes next on the socket is another message."""
        while self.socket.rcvmore:
            self.socket.recv(copy=False)
        logger.error("no memory for a message of client %s", client.hex(), exc_info=error)
        if client:
            self.send(client, CaesuraError(ErrorCode.OUT_OF_MEMORY, "no memory for a message").to_reply(""))

    def send(self, client: bytes, message: Message) -> None:
        """Hand ``message`` to the socket, or to the client's queue where the socket is full."""
        backlog = self._backlogs.get(client)
        if backlog is None:
            frame = encode_reply(message)
            if not self._offer(client, frame):
                self._backlogs[client] = _Backlog(frame)
            return
        backlog.append(message)
        if len(backlog) > MAX_PENDING_FRAMES:
            logger.warning(
                "client %s has left %d replies unread: treated as gone", client.hex(), len(backlog)
            )
            self._forget(client)

    def retry(self) -> None:
        """Try again what clients could not take."""
        for client, backlog in list(self._backlogs.items()):
            while (frame := backlog.head()) is not None and self._offer(client, frame):
                if self._backlogs.get(client) is not backlog:
                    break  # gone
                backlog.pop()
            else:
                if frame is None:
                    self._backlogs.pop(client, None)

    def keepalive(self, clients: set[bytes], step: int) -> None:
        """Find out which of ``clients`` are gone; ZeroMQ never says so by itself."""
        frame = encode(Keepalive(step=step))
        for client in clients:
            if client not in self._backlogs:
                self._offer(client, frame)

    def close(self) -> None:
        """Give clients up to :data:`LINGER_S` to take what is left, then let go of socket and lock."""
        deadline = time.monotonic() + LINGER_S
        self.retry()
        while self._backlogs and time.monotonic() < deadline:
            self.socket.poll(1)  # a ROUTER never says who became writable, but notices here who has left
            for _ in self.receive():
                pass  # too late
            self.retry()
        self.socket.close()
        self._context.term()
        if self._path is not None:  # ZeroMQ leaves it; ours as long as we hold the lock
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._path = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _offer(self, client: bytes, frame: bytes) -> bool:
        """False: the client's pipe is full. A client that is gone counts as having taken it."""
        try:
            self.socket.send_multipart([client, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(client)
        return True

    def _forget(self, client: bytes) -> None:
        self._backlogs.pop(client, None)
        self._on_gone(client)


class _Backlog:
    """What one client has not taken yet, in order: encoded frames, then token outputs that still coalesce."""

    def __init__(self, first: bytes) -> None:
        self._frames: deque[tuple[bytes, int]] = deque([(first, 0)])
        self._delta_tokens = 0
        """In frames and open deltas together."""
        self._is_open = False
        self._step = 0
        self._finished: list[GenerateReqOutput] = []
        self._deltas: list[StreamDelta] = []
        self._open_tokens = 0

    def __len__(self) -> int:
        """Frames; token outputs that still coalesce count for nothing, since they are bounded by live requests."""
        return len(self._frames)

    def append(self, message: Message) -> None:
        """Put ``message`` behind everything else."""
        if not isinstance(message, BatchTokenOutput):
            self._seal()
            self._frames.append((encode_reply(message), 0))
            return
        self._is_open = True
        self._step = message.step
        self._finished += message.finished
        if message.delta is not None:
            self._add_delta(message.delta)

    def head(self) -> bytes | None:
        """The frame to send next; None when there is none."""
        if not self._frames:
            self._seal()
        return self._frames[0][0] if self._frames else None

    def pop(self) -> None:
        """The client has taken :meth:`head`."""
        self._delta_tokens -= self._frames.popleft()[1]

    def _add_delta(self, delta: StreamDelta) -> None:
        tokens = len(delta.tokens) // 4
        if self._delta_tokens + tokens > MAX_PENDING_DELTA_TOKENS:
            self._delta_tokens -= self._open_tokens
            self._deltas, self._open_tokens = [], 0
            return
        self._deltas.append(delta)
        self._open_tokens += tokens
        self._delta_tokens += tokens

    def _seal(self) -> None:
        """Merge and encode the token outputs gathered so far: once, whatever happens to the frame afterwards."""
        if not self._is_open:
            return
        ended = {(result.rid, result.index) for result in self._finished}
        delta = _merge(self._deltas, ended) if self._deltas else None
        if delta is not None or self._finished:
            output = BatchTokenOutput(step=self._step, finished=self._finished, delta=delta)
            self._frames.append((encode_reply(output), self._open_tokens))
        else:
            self._delta_tokens -= self._open_tokens
        self._is_open = False
        self._finished, self._deltas, self._open_tokens = [], [], 0


def _merge(deltas: list[StreamDelta], ended: set[tuple[str, int]]) -> StreamDelta | None:
    """One delta for several: a row per unbroken run of a sample's tokens, none for samples whose result follows.

    None when nothing is left.
    """
    numbers: dict[tuple[str, int], int] = {}
    indices = np.concatenate([np.frombuffer(delta.indices, "<i4") for delta in deltas])
    rids = [rid for delta in deltas for rid in delta.rids]
    keys = list(zip(rids, indices.tolist(), strict=True))
    samples = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(keys))
    starts = np.concatenate([np.frombuffer(delta.starts, "<i4") for delta in deltas])
    counts = np.concatenate([np.frombuffer(delta.counts, "<i4") for delta in deltas])
    tokens = np.concatenate([np.frombuffer(delta.tokens, "<i4") for delta in deltas])
    logprobs = np.concatenate([np.frombuffer(delta.logprobs, "<f4") for delta in deltas])

    dead = np.fromiter((key in ended for key in numbers), np.bool_, len(numbers))
    order = np.argsort(samples, kind="stable")  # by sample, and within it by time
    order = order[~dead[samples[order]]]
    if not len(order):
        return None
    samples, starts, row_counts = samples[order], starts[order], counts[order]
    continues = (samples[1:] == samples[:-1]) & (starts[1:] == starts[:-1] + row_counts[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    places = _places(counts, order)
    names = list(numbers)
    return StreamDelta(
        rids=[names[sample][0] for sample in samples[first].tolist()],
        indices=np.asarray([names[sample][1] for sample in samples[first].tolist()], "<i4").tobytes(),
        starts=starts[first].astype("<i4").tobytes(),
        counts=np.add.reduceat(row_counts, first).astype("<i4").tobytes(),
        tokens=tokens[places].tobytes(),
        logprobs=logprobs[places].tobytes(),
        top=_merge_further([(delta, delta.top) for delta in deltas], counts, order, first),
        given=_merge_further([(delta, delta.given) for delta in deltas], counts, order, first),
    )


def _places(lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Where the values of the rows ``order`` lie, one row after the other, if all rows lie in a line with ``lengths`` each."""
    begins, taken = (np.cumsum(lengths) - lengths)[order], lengths[order]
    offsets = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    places: np.ndarray = np.repeat(begins, taken) + offsets
    return places


def _merge_further(
    deltas: list[tuple[StreamDelta, DeltaLogprobs | None]],
    counts: np.ndarray,
    order: np.ndarray,
    first: np.ndarray,
) -> DeltaLogprobs | None:
    """The further logprobs of the rows ``order``, merged into runs that begin at its entries ``first``."""
    if not any(further for _, further in deltas):
        return None
    ks = np.concatenate(
        [
            np.zeros(len(delta.rids), np.int32) if further is None else np.frombuffer(further.ks, "<i4")
            for delta, further in deltas
        ]
    )
    known = [further for _, further in deltas if further is not None]
    ids = np.concatenate([np.frombuffer(further.ids, "<i4") for further in known])
    logprobs = np.concatenate([np.frombuffer(further.logprobs, "<f4") for further in known])
    places = _places(counts * ks, order)
    return DeltaLogprobs(
        ks=ks[order][first].astype("<i4").tobytes(),
        ids=ids[places].tobytes(),
        logprobs=logprobs[places].tobytes(),
    )


def _lock_endpoint(endpoint: str) -> int | None:
    """Check the address and, for ipc, take its lock; the descriptor holds it."""
    if endpoint.startswith("tcp://"):
        _check_loopback(endpoint)
        return None
    path = endpoint.removeprefix("ipc://")
    if not endpoint.startswith("ipc://") or not os.path.isabs(path):
        raise _bad_endpoint(endpoint, "must be ipc:///absolute/path or tcp://loopback:port")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise _bad_endpoint(endpoint, f"ipc paths are limited to {MAX_IPC_PATH} bytes")
    try:
        # Neither truncated nor removed: what lies there under this name may be somebody's, and the lock is on its inode.
        lock = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _bad_endpoint(endpoint, f"cannot create its lock file: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _refuse_other_files(endpoint, path)
    except BlockingIOError as error:
        os.close(lock)
        raise CaesuraError(
            ErrorCode.ENDPOINT_IN_USE, f"another scheduler owns {endpoint}", endpoint=endpoint
        ) from error
    except CaesuraError:
        os.close(lock)
        raise
    return lock


def _refuse_other_files(endpoint: str, path: str) -> None:
    """Binding unlinks whatever is there: only a socket that a former run left may go."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise _bad_endpoint(endpoint, "a file that is not a socket lies there")


def _check_loopback(endpoint: str) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):  # ZeroMQ takes 99999 modulo 65536
        raise _bad_endpoint(endpoint, f"needs a port from 0 (any free one) to {MAX_PORT}")
    if host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise _bad_endpoint(endpoint, "tcp endpoints bind loopback addresses only")


def _bad_endpoint(endpoint: str, reason: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, f"endpoint {endpoint!r}: {reason}", field="endpoint", value=endpoint
    )
