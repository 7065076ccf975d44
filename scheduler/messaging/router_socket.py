"""The scheduler's ROUTER socket: receives messages, and sends to clients that may read slowly or vanish.

Invariants:
- A send never blocks and never drops a message silently: one for a client whose pipe is full waits in that
  client's queue, in order, merged and encoded once, without delay for others (``send_queues.py``).
- Receiving is bounded per tick, in messages and in frames; the rest of a long message is read in the next
  ticks.
- A message with too many frames or bytes is refused, and its rest dropped. A client that sends several of
  them counts as gone, and its later messages are dropped.
"""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from ...io_struct import CaesuraError, ErrorCode, Keepalive, Message, encode
from ...io_struct.base import MAX_FRAME_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES
from ...io_struct.codec import readable_id
from .endpoint import Access, Endpoint, ServerKeys
from .send_queues import Backlogs
from .stored_answers import Frames, frames_of

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1000
RECEIVE_HIGH_WATER_MARK = 8192
LINGER_S = 1.0
MESSAGES_PER_DRAIN = 512
"""Messages taken per tick, so that a flood cannot stop generation."""
FRAMES_PER_DRAIN = 4096
"""Frames after the header taken per tick; each costs about 2 us."""
DISCARDED_PER_DRAIN = 16_384
"""Frames of a refused message dropped per tick. No other message can be received before its last frame."""
OVERLONG_MESSAGES = 3
"""Messages over the limit that a client may send; the next one makes it count as gone."""
_REMEMBERED_OFFENDERS = 1024


class Router:
    def __init__(
        self, endpoint: str, on_gone: Callable[[bytes], None], keys: ServerKeys | None = None
    ) -> None:
        """Bind ``endpoint``; ``on_gone`` gets clients that left. Without ``keys`` all may connect."""
        self._on_gone = on_gone
        self.backlogs = Backlogs()
        self._incoming: _Incoming | None = None
        self._offenders: OrderedDict[bytes, int] = OrderedDict()
        self._cleanup = contextlib.ExitStack()
        try:
            self._endpoint = Endpoint(endpoint, has_keys=keys is not None)
            self._cleanup.callback(self._endpoint.close)
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
        except BaseException:
            self._cleanup.close()
            raise
        self.endpoint = self._endpoint.address

    @property
    def has_backlog(self) -> bool:
        return bool(self.backlogs)

    def receive(self) -> Iterator[tuple[bytes, bytes, list[memoryview]]]:
        """Yield ``(client, header, buffers)``, a bounded number; buffers are views of libzmq's memory."""
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
                    self._incoming = self._refuse_without_memory(client, error)
                    continue
                is_muted = bool(self._offenders) and self._offenders.get(client, 0) > OVERLONG_MESSAGES
                if not socket.rcvmore:
                    if not is_muted:
                        yield client, header, []
                    continue
                message = self._incoming = _Incoming(client, header, nbytes=len(header), is_refused=is_muted)
            if frames == 0:
                return
            frames = self._read_frames(message, frames)
            if socket.rcvmore:
                return
            self._incoming = None
            if not message.is_refused:
                yield message.client, message.header, message.buffers

    def _read_frames(self, message: "_Incoming", frames: int) -> int:
        socket = self.socket
        while not message.is_refused and frames and socket.rcvmore:
            try:
                buffer = socket.recv(copy=False).buffer
            except MemoryError as error:
                self._refuse_without_memory(message.client, error)
                message.is_refused, message.buffers = True, []
                break
            message.buffers.append(buffer)
            message.nbytes += len(buffer)
            frames -= 1
            if len(message.buffers) >= MAX_FRAMES or message.nbytes > MAX_MESSAGE_BYTES:
                self._refuse(message)
        if message.is_refused:
            for _ in range(DISCARDED_PER_DRAIN):
                if not socket.rcvmore:
                    break
                socket.recv(zmq.NOBLOCK)
            frames = 0
        return frames

    def _refuse_without_memory(self, client: bytes, error: MemoryError) -> "_Incoming":
        logger.error("no memory for a message of client %s", client.hex(), exc_info=error)
        if client:
            self.send(client, CaesuraError(ErrorCode.OUT_OF_MEMORY, "no memory for a message").to_reply(""))
        return _Incoming(client, b"", is_refused=True)

    def _refuse(self, message: "_Incoming") -> None:
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
            self._drop_client(client)

    def send(self, client: bytes, message: Message) -> None:
        if client in self.backlogs:
            over = self.backlogs.append(client, message)
        else:
            frames = frames_of(message)
            if self._offer(client, frames):
                return
            over = self.backlogs.begin(client, frames)
        for each in over:
            load = self.backlogs[each].load
            logger.warning(
                "client %s has left %d replies and results unread, %d bytes: treated as gone",
                each.hex(),
                load.messages,
                load.nbytes,
            )
            self._drop_client(each)

    def retry(self) -> None:
        for client, backlog in list(self.backlogs.items()):
            while (frames := backlog.head()) is not None and self._offer(client, frames):
                if client not in self.backlogs:
                    break  # the send has found the client gone
                backlog.pop()
            else:
                if frames is None:
                    self.backlogs.forget(client)

    def keepalive(self, clients: set[bytes], step: int) -> None:
        """Send a keepalive to ``clients``: only a send reveals which of them are gone."""
        frame = encode(Keepalive(step=step))
        for client in clients:
            if client not in self.backlogs:
                self._offer(client, (frame,))

    def close(self) -> None:
        deadline = time.monotonic() + LINGER_S
        self.retry()
        while self.backlogs and time.monotonic() < deadline:
            self.socket.poll(1)  # a ROUTER does not report writability; this lets it notice clients that left
            for _ in self.receive():
                pass  # messages are ignored while the engine stops
            self.retry()
        self._cleanup.close()

    def _offer(self, client: bytes, frames: Frames) -> bool:
        """Try to send; return False if the client's pipe is full. A client that is gone takes all."""
        try:
            self.socket.send_multipart([client, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._drop_client(client)
        return True

    def _drop_client(self, client: bytes) -> None:
        self.backlogs.forget(client)
        self._on_gone(client)


@dataclass(slots=True)
class _Incoming:
    client: bytes
    header: bytes
    buffers: list[memoryview] = field(default_factory=list)
    nbytes: int = 0
    is_refused: bool = False
