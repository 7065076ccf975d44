"""The scheduler's ROUTER socket: who may bind it, what it does when a client reads slowly or vanishes.

Invariants:
- A send never blocks and never drops silently: what a full client cannot take waits in its queue here, in order.
- A client's queue is bounded (``send_queues.py``); a client that leaves more than that unread counts as gone.
- Receiving is bounded per tick, in messages and in frames: a message of many frames is read on in the next ticks. One of
  more frames or bytes than a message may have is refused, its rest is read and dropped, and a client that sends such
  messages again and again counts as gone and is not heard any more.
- One slow client costs the others nothing: whatever waits is merged and encoded once, however often it is offered.
- What may be bound is decided in ``endpoint.py``, who may connect in ``client_access.py``.
"""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from ...io_struct import CaesuraError, ErrorCode, Keepalive, Message, encode, encode_reply
from ...io_struct.base import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES
from ...io_struct.codec import readable_id
from .client_access import Access, ServerKeys
from .endpoint import Endpoint
from .send_queues import Backlogs

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1000
"""Messages queued inside ZeroMQ per client, before our own queue begins."""
RECEIVE_HIGH_WATER_MARK = 8192
"""Messages of one client that ZeroMQ takes in before it holds the client back."""
LINGER_S = 1.0
"""How long closing waits for slow clients to take their last messages."""
MESSAGES_PER_DRAIN = 512
"""Messages taken per tick, so that a flood cannot stop generation."""
FRAMES_PER_DRAIN = 4096
"""Frames taken per tick behind headers; they cost about 2 us each."""
DISCARDED_PER_DRAIN = 16_384
"""Frames dropped per tick of a message that is refused: nothing else can be heard before its end, so more of them."""
OVERLONG_MESSAGES = 3
"""Messages over the limit that a client may send; with the next one it counts as gone."""
_REMEMBERED_OFFENDERS = 1024


class Router:
    """Non-blocking sends to any number of clients, and their messages in the order of arrival."""

    def __init__(
        self, endpoint: str, on_gone: Callable[[bytes], None], keys: ServerKeys | None = None
    ) -> None:
        """Bind ``endpoint``; ``on_gone(client)`` is called whenever something cannot be sent because a client has left.

        Args:
            keys: only clients with an authorized key are heard. None: whoever can open the socket is.

        Raises:
            CaesuraError: ``endpoint_in_use`` or ``invalid_request``.
        """
        self._on_gone = on_gone
        self._backlogs = Backlogs()
        self._incoming: _Incoming | None = None
        self._offenders: OrderedDict[bytes, int] = OrderedDict()
        """How many over-long messages clients have sent."""
        self._cleanup = contextlib.ExitStack()
        try:
            self._endpoint = Endpoint(endpoint, has_keys=keys is not None)
            self._cleanup.callback(self._endpoint.close)
            self._open(keys)
        except BaseException:
            self._cleanup.close()
            raise
        self.endpoint = self._endpoint.address

    def _open(self, keys: ServerKeys | None) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._cleanup.callback(context.term)
        self.socket = context.socket(zmq.ROUTER)
        self._cleanup.callback(self.socket.close)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, round(LINGER_S * 1000))
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._access = Access(self.socket, context, self._endpoint, keys)
        self._cleanup.callback(self._access.close)
        self._endpoint.bind(self.socket)

    @property
    def has_backlog(self) -> bool:
        """Some client has not taken everything yet."""
        return bool(self._backlogs)

    def receive(self) -> Iterator[tuple[bytes, bytes, list[memoryview]]]:
        """(client, header, buffers) of what has arrived, a bounded number per call; never blocks.

        Buffers are views of libzmq's own memory, valid while they are referenced.
        """
        socket, frames = self.socket, FRAMES_PER_DRAIN
        for _ in range(MESSAGES_PER_DRAIN):
            message = self._incoming
            if message is None:
                client = b""
                try:
                    client = socket.recv(zmq.NOBLOCK)
                    header = socket.recv() if socket.rcvmore else b""
                except zmq.Again:
                    return
                except MemoryError as error:
                    self._incoming = self._without_memory(client, error)
                    continue
                is_muted = bool(self._offenders) and self._offenders.get(client, 0) > OVERLONG_MESSAGES
                if not socket.rcvmore:
                    if not is_muted:
                        yield client, header, []
                    continue
                message = self._incoming = _Incoming(client, header, is_refused=is_muted)
            if frames == 0:
                return
            frames = self._read_on(message, frames)
            if socket.rcvmore:
                return
            self._incoming = None
            if not message.is_refused:
                yield message.client, message.header, message.buffers

    def _read_on(self, message: "_Incoming", frames: int) -> int:
        """Up to ``frames`` further frames of ``message``; how many are left of them."""
        socket = self.socket
        while not message.is_refused and frames and socket.rcvmore:
            try:
                message.add(socket.recv(copy=False).buffer)
            except MemoryError as error:
                self._without_memory(message.client, error)
                message.is_refused, message.buffers = True, []
                break
            frames -= 1
            if message.is_too_long:
                self._refuse(message)
        if message.is_refused:
            for _ in range(DISCARDED_PER_DRAIN):
                if not socket.rcvmore:
                    break
                socket.recv(zmq.NOBLOCK)
            frames = 0
        return frames

    def _without_memory(self, client: bytes, error: MemoryError) -> "_Incoming":
        """Answer a message that there is no memory for; what comes of it is to be dropped."""
        logger.error("no memory for a message of client %s", client.hex(), exc_info=error)
        if client:
            self.send(client, CaesuraError(ErrorCode.OUT_OF_MEMORY, "no memory for a message").to_reply(""))
        return _Incoming(client, b"", is_refused=True)

    def _refuse(self, message: "_Incoming") -> None:
        """Answer an over-long message, and let go of what was read of it."""
        client = message.client
        message.is_refused, message.buffers = True, []
        offences = self._offenders.pop(client, 0) + 1
        self._offenders[client] = offences
        if len(self._offenders) > _REMEMBERED_OFFENDERS:
            self._offenders.popitem(last=False)
        reason = f"a message has at most {MAX_FRAMES} frames and {MAX_MESSAGE_BYTES} bytes"
        logger.warning("client %s: %s; it sent more, %d times so far", client.hex(), reason, offences)
        self.send(
            client, CaesuraError(ErrorCode.MALFORMED_MESSAGE, reason).to_reply(readable_id(message.header))
        )
        if offences > OVERLONG_MESSAGES:
            self._forget(client)

    def send(self, client: bytes, message: Message) -> None:
        """Hand ``message`` to the socket, or to the client's queue where the socket is full."""
        if client in self._backlogs:
            over = self._backlogs.append(client, message)
        else:
            frame = encode_reply(message)
            if self._offer(client, frame):
                return
            over = self._backlogs.begin(client, frame)
        for each in over:
            load = self._backlogs[each].load
            logger.warning(
                "client %s has left %d replies and results unread, %d bytes: treated as gone",
                each.hex(),
                load.messages,
                load.nbytes,
            )
            self._forget(each)

    def retry(self) -> None:
        """Try again what clients could not take."""
        for client, backlog in self._backlogs.items():
            while (frame := backlog.head()) is not None and self._offer(client, frame):
                if client not in self._backlogs:
                    break  # gone
                backlog.pop()
            else:
                if frame is None:
                    self._backlogs.forget(client)

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
        self._cleanup.close()

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
        self._backlogs.forget(client)
        self._on_gone(client)


@dataclass(slots=True)
class _Incoming:
    """A message of several frames while it is read."""

    client: bytes
    header: bytes
    buffers: list[memoryview] = field(default_factory=list)
    nbytes: int = 0
    """Of the buffers."""
    is_refused: bool = False
    """What is left of it is read and dropped."""

    def add(self, buffer: memoryview) -> None:
        """The next frame."""
        self.buffers.append(buffer)
        self.nbytes += len(buffer)

    @property
    def is_too_long(self) -> bool:
        """It has more frames or bytes than a message may have."""
        return len(self.buffers) >= MAX_FRAMES or self.nbytes + len(self.header) > MAX_MESSAGE_BYTES
