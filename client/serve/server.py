"""uvicorn's server and its protocol, with the limits that it lacks: of heads, bodies and idle connections.

Invariants:
- Every connection ends, whatever its peer does: first byte, head, body, idle time and the reading of a
  response have deadlines, the first two before keys are checked; only a complete request being answered has
  none.
- The size of received data that no handler has taken yet is limited.
- At the limit, a connection without a request is closed for a new one, first those that never had a request.
  If all have requests, some more are accepted for health, load and commands.
- What is left :data:`SHUTDOWN_S` after the end of the server is dropped.
"""

import asyncio
import contextlib
import json
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import unquote

import uvicorn
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .error_responses import RETRY_AFTER_S

SHUTDOWN_S = 10
HANDSHAKE_S = 10.0
"""Seconds for a TLS handshake, before it counts as a connection."""
OTHER_DESCRIPTORS = 256
_SWEEP_TICKS = 5
MAX_HEAD_BYTES = 64 << 10
"""Maximum bytes of a request's line and headers, or trailers; one more read is still held."""
MAX_PIPELINED = 16
"""Maximum requests behind the one that is answered."""
RESERVED = "caesura.reserved"
"""Extension of a scope whose connection is over the limit: generation is refused."""
ENCODED_SLASH = "\0"
"""Character of a scope's path in place of a percent-encoded slash, which separates nothing."""
CONNECTION = "caesura.connection"
"""Extension of a scope: ``protocol`` is its :class:`BoundedProtocol`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that a peer may take."""

    first_byte: float = 20.0
    head: float = 10.0
    """From the first byte of a head to its last."""
    body: float = 20.0
    """Beside what :attr:`body_rate` gives."""
    body_rate: float = 64 << 10
    """Bytes per second that a body must reach on average, after :attr:`body`."""
    linger: float = 5.0
    """For the rest of a body that was answered before it was complete."""
    keep_alive: float = 120.0
    """Between requests; trainers keep connections during an update."""
    stalled: float = 600.0
    """Without reading any of the bytes that wait."""


class _Awaited(Enum):
    """Expected next from the peer; the value is the reason if it does not come."""

    FIRST_BYTE = "first_byte"
    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"  # a complete request is being answered
    IDLE = "keep_alive"


class Connections:
    def __init__(self, limit: int = 4096, reserve: int = 64, deadlines: Deadlines | None = None) -> None:
        """Allow ``limit`` connections of any kind, and ``reserve`` more for health and commands."""
        self.limit = limit
        self.reserve = reserve
        self.deadlines = deadlines or Deadlines()
        self.closed: Counter[str] = Counter()
        """Connections that the server ended, by reason."""
        self._all: set[BoundedProtocol] = set()
        self._strangers: dict[BoundedProtocol, None] = {}  # have never had a request, oldest first
        self._idle: dict[BoundedProtocol, None] = {}  # have no request now, longest first

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: "BoundedProtocol") -> bool:
        if len(self._all) >= self.limit:
            longest = next(iter(self._strangers or self._idle), None)
            if longest is not None:
                longest.end("crowded")
            elif len(self._all) >= self.limit + self.reserve:
                self.closed["refused"] += 1
                return False
            else:
                connection.reserved = True
        self._all.add(connection)
        self._strangers[connection] = None
        return True

    def working(self, connection: "BoundedProtocol") -> None:
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def rests(self, connection: "BoundedProtocol") -> None:
        self._idle[connection] = None

    def forget(self, connection: "BoundedProtocol") -> None:
        self._all.discard(connection)
        self.working(connection)

    def sweep(self, now: float) -> None:
        for connection in list(self._all):
            connection.check(now)

    def stop(self, now: float) -> None:
        for connection in list(self._all):
            connection.hurry(now + 1.0)

    def abort(self) -> None:
        for connection in list(self._all):
            connection.end("shutdown", abort=True)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with deadlines, and with limits for heads, trailers and pipelined requests."""

    def __init__(self, table: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.reserved = False
        self._table = table
        self._limits = table.deadlines
        self._held = 0  # bytes since the parser last handed something on
        self._awaited = _Awaited.FIRST_BYTE
        self._since = 0.0  # when that began
        self._received = 0  # bytes of the body
        self._until = float("inf")  # a deadline beside the others
        self._unread, self._unread_since = 0, 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        if not self._table.admit(self):
            self._answer(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._awaited is _Awaited.BODY:
            self._received += len(data)
        elif self._awaited is not _Awaited.HEAD:
            self._await(_Awaited.HEAD)
        self._held += len(data)
        super().data_received(data)
        if self._held > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._table.closed["head_size"] += 1
            self.send_400_response(f"A request's head is over the limit of {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Begin a request; OverflowError ends the parsing, with 400, if too many wait."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._table.closed["pipelined"] += 1
            raise OverflowError
        self._held = self._received = 0
        self._until = float("inf")
        self._table.working(self)
        self._await(_Awaited.BODY)
        self.scope["extensions"] = {CONNECTION: {"protocol": self}}
        if self.reserved:
            self.scope["extensions"][RESERVED] = {}
        super().on_headers_complete()
        if b"%2f" in self.url.lower() and "raw_path" in self.scope:
            parts = self.scope["raw_path"].decode("ascii").split("/")
            self.scope["path"] = "/".join(unquote(part).replace("/", ENCODED_SLASH) for part in parts)
        if self.reserved:
            self.cycle.keep_alive = False

    @property
    def writable(self) -> bool:
        """True if the peer is there, and reads what it is sent."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, data: bytes) -> None:
        """Write a part of the response that is being sent in chunks, past the application's ``send``."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def on_body(self, body: bytes) -> None:
        self._held = 0  # the middleware limits bodies
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held = 0
        super().on_message_complete()
        self._await(_Awaited.NOTHING)
        if self._answered:
            self._rest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        if not self._answered:  # the next request was pipelined
            return
        if self._awaited is _Awaited.BODY:
            self._until = min(self._until, self.loop.time() + self._limits.linger)
            self._table.rests(self)
        elif self._awaited is _Awaited.HEAD:
            self._since = self.loop.time()
        else:
            self._rest()

    def shutdown(self) -> None:
        """Accept no further request; one whose head is not complete is not accepted yet."""
        if self._awaited in (_Awaited.FIRST_BYTE, _Awaited.HEAD) and self._answered:
            self.end("shutdown")
        else:
            super().shutdown()

    def hurry(self, until: float) -> None:
        if self._awaited is not _Awaited.NOTHING:
            self._until = until

    def check(self, now: float) -> None:
        if self._stalls(now):
            self.end("stalled", abort=True)
        elif not self.transport.is_closing() and now > self._deadline(now):
            started = self.cycle is not None and self.cycle.response_started
            unanswered = self._awaited is _Awaited.HEAD or (self._awaited is _Awaited.BODY and not started)
            self.end(self._awaited.value, 408 if unanswered else None)

    def end(self, reason: str, status: int | None = None, *, abort: bool = False) -> None:
        """Close the connection, with an answer of ``status`` if given; ``abort`` drops what is unread."""
        self._table.closed[reason] += 1
        if abort:
            self.transport.abort()
        elif status is not None:
            self._answer(status, "the request did not come in time")
        else:
            self.transport.close()
        self._table.working(self)

    @property
    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await(self, awaited: _Awaited) -> None:
        self._awaited, self._since = awaited, self.loop.time()

    def _rest(self) -> None:
        if not self.transport.is_closing():
            self._await(_Awaited.IDLE)
            self._until = float("inf")
            self._table.rests(self)

    def _deadline(self, now: float) -> float:
        awaited, limits = self._awaited, self._limits
        if awaited is _Awaited.NOTHING or (awaited is _Awaited.HEAD and not self._answered):
            return float("inf")
        if awaited is _Awaited.BODY:
            if self.flow.read_paused:  # the peer waits for this server
                self._since = now
            allowed = limits.body + self._received / limits.body_rate
        else:
            if self._unread:  # the peer is still reading
                self._since = now
            allowed = getattr(limits, awaited.value)
        return min(self._until, self._since + allowed)

    def _stalls(self, now: float) -> bool:
        unread, closing = self.transport.get_write_buffer_size(), self.transport.is_closing()
        if unread != self._unread or (unread == 0 and not closing):
            self._unread, self._unread_since = unread, now
            return False
        return now > self._unread_since + (self._limits.stalled if unread else self._limits.linger)

    def _answer(self, status: int, message: str) -> None:
        body = json.dumps({"object": "error", "message": message, "code": status, "retryable": True}).encode()
        phrase = {408: "Request Timeout", 503: "Service Unavailable"}[status]
        retry = f"retry-after: {RETRY_AFTER_S}\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn without its signal handlers and its logging; ``announce`` is called once it listens."""

    def __init__(
        self,
        app: Litestar,
        announce: Callable[[], None],
        *,
        connections: Connections | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.connections = Connections() if connections is None else connections
        keep_alive = self.connections.deadlines.keep_alive
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(keep_alive) + 10,  # after ours
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._announce = announce
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with as many connections as the process may have descriptors, and announce it."""
        loop, config, connections = asyncio.get_running_loop(), self.config, self.connections
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY:
            available = descriptors - connections.reserve - OTHER_DESCRIPTORS
            connections.limit = min(connections.limit, max(1, available))

        def protocol() -> BoundedProtocol:
            state = self.server_state
            return BoundedProtocol(
                connections, config=config, server_state=state, app_state=self.lifespan.state, _loop=loop
            )

        handshake = None if self._tls is None else HANDSHAKE_S
        self.servers = [
            await loop.create_server(
                protocol,
                sock=each,
                ssl=self._tls,
                backlog=config.backlog,
                ssl_handshake_timeout=handshake,
            )
            for each in sockets or ()
        ]
        self.started = True
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        if counter % _SWEEP_TICKS == 0:
            self.connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer complete requests, and drop what is left shortly after :data:`SHUTDOWN_S`."""
        self.connections.stop(asyncio.get_running_loop().time())
        sweeping = asyncio.ensure_future(self._sweep())
        try:
            await super().shutdown(sockets)
        finally:
            sweeping.cancel()
            self.connections.abort()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.connections.sweep(asyncio.get_running_loop().time())

    def stop_accepting(self) -> None:
        for server in self.servers:
            server.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
