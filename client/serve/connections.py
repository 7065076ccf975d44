"""Connections of the HTTP server: their maximum number, and deadlines for reading and writing.

Invariants:
- Every connection ends, whatever its peer does: first byte, head, body, idle time and the reading of a response have their
  own deadlines, the first two before keys are checked. Only a complete request that is being answered has none, since
  generation can take any time.
- The size of received data that no handler has taken yet is limited.
- At the limit, a connection without a request is closed for a new one, first those that never had a request. If all have
  requests, some connections are reserved for health, load and commands.
"""

import json
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers, or its trailers; the read that goes beyond is still held."""
MAX_PIPELINED = 16
"""Requests of one connection that wait behind the one that is answered; nothing more is read meanwhile."""
RESERVED = "caesura.reserved"
"""Key among a scope's extensions: this connection is over the limit, so only what is not generation is answered."""
RETRY_AFTER_S = 1
"""What ``Retry-After`` says with every 503."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that a peer may take."""

    first_byte: float = 20.0
    """From the connection to its first byte."""
    head: float = 10.0
    """From the first byte of a head to its last."""
    body: float = 20.0
    """For a body, beside what :attr:`body_rate` gives."""
    body_rate: float = 64 << 10
    """Bytes per second that a body must reach on the whole, once :attr:`body` is used up."""
    linger: float = 5.0
    """For what still comes of a body that was answered before it was whole."""
    keep_alive: float = 120.0
    """Between requests. Trainers keep connections over an update; a connection closed just when it is used again costs a retry."""
    stalled: float = 600.0
    """For a peer that has unread bytes waiting and takes none of them."""


class _Awaited(Enum):
    """What a connection is expected to send next."""

    FIRST_BYTE = "first_byte"
    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"
    """A whole request is there, and is being answered."""
    IDLE = "keep_alive"


class Connections:
    """All connections of one server."""

    def __init__(self, limit: int = 4096, reserve: int = 64, deadlines: Deadlines | None = None) -> None:
        """``limit``: connections with requests of any kind; ``reserve``: further ones, for health and commands."""
        self.limit = limit
        self.reserve = reserve
        self.deadlines = deadlines or Deadlines()
        self.closed: Counter[str] = Counter()
        """How many were ended by the server, by the reason."""
        self._all: set[BoundedProtocol] = set()
        self._strangers: dict[BoundedProtocol, None] = {}
        self._idle: dict[BoundedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: "BoundedProtocol") -> bool:
        """Take a new connection, which may end another; False: there is no room."""
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
        """It has a request now."""
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)

    def rests(self, connection: "BoundedProtocol") -> None:
        """Its requests have been answered."""
        self._idle[connection] = None

    def forget(self, connection: "BoundedProtocol") -> None:
        """It is closed, or about to be."""
        self._all.discard(connection)
        self.working(connection)

    def sweep(self, now: float) -> None:
        """End those whose time is up."""
        for connection in list(self._all):
            connection.check(now)

    def stop(self, now: float) -> None:
        """Requests that are whole are still answered; those that are not may take a second more."""
        for connection in list(self._all):
            connection.hurry(now + 1.0)

    def abort(self) -> None:
        """Drop whatever is left."""
        for connection in list(self._all):
            connection.end("shutdown", abort=True)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with deadlines, and with an end to request lines, headers and trailers that do not end."""

    def __init__(self, table: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.reserved = False
        self._table = table
        self._limits = table.deadlines
        self._held = 0  # bytes since the parser last handed something on
        self._awaited = _Awaited.FIRST_BYTE
        self._since = 0.0  # when that began
        self._received = 0  # bytes of the body
        self._until = float("inf")  # no longer, whatever the deadlines say
        self._unread, self._unread_since = 0, 0.0

    def connection_made(self, transport: Any) -> None:
        """A peer: there is room for it, or it is told so."""
        super().connection_made(transport)
        self._since = self.loop.time()
        if not self._table.admit(self):
            self._answer(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._table.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; 400 to what goes on for too long."""
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
        """The parser has a request.

        Raises:
            OverflowError: too many wait already; that ends the parsing, with 400.
        """
        if len(self.pipeline) >= MAX_PIPELINED:
            self._table.closed["pipelined"] += 1
            raise OverflowError
        self._held = self._received = 0
        self._until = float("inf")
        self._table.working(self)
        self._await(_Awaited.BODY)
        if self.reserved:
            self.scope["extensions"] = {RESERVED: {}}
        super().on_headers_complete()
        if self.reserved:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """The parser has a piece of a body, which ``limits.py`` counts."""
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next request begins."""
        self._held = 0
        super().on_message_complete()
        self._await(_Awaited.NOTHING)
        if self._answered:
            self._rest()

    def on_response_complete(self) -> None:
        """Answered; the next request may be there already."""
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        if not self._answered:  # one that came right behind it is
            return
        if self._awaited is _Awaited.BODY:
            self._until = min(self._until, self.loop.time() + self._limits.linger)
            self._table.rests(self)
        elif self._awaited is _Awaited.HEAD:
            self._since = self.loop.time()
        else:
            self._rest()

    def shutdown(self) -> None:
        """uvicorn's server ends: no further requests. One whose head is not whole is not one yet."""
        if self._awaited in (_Awaited.FIRST_BYTE, _Awaited.HEAD) and self._answered:
            self.end("shutdown")
        else:
            super().shutdown()

    def hurry(self, until: float) -> None:
        """A request that is not whole must be by then."""
        if self._awaited is not _Awaited.NOTHING:
            self._until = until

    def check(self, now: float) -> None:
        """End it, if its time is up."""
        if self._stalls(now):
            self.end("stalled", abort=True)
        elif not self.transport.is_closing() and now > self._deadline(now):
            started = self.cycle is not None and self.cycle.response_started
            unanswered = self._awaited is _Awaited.HEAD or (self._awaited is _Awaited.BODY and not started)
            self.end(self._awaited.value, 408 if unanswered else None)

    def end(self, reason: str, status: int | None = None, *, abort: bool = False) -> None:
        """Close it from this side; ``status``: with an answer, ``abort``: without what it has not read yet."""
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

    def _await(self, what: _Awaited) -> None:
        self._awaited, self._since = what, self.loop.time()

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
            if self.flow.read_paused:  # it waits for us
                self._since = now
            allowed = limits.body + self._received / limits.body_rate
        else:
            if self._unread:  # it is still reading
                self._since = now
            allowed = {
                _Awaited.FIRST_BYTE: limits.first_byte,
                _Awaited.HEAD: limits.head,
                _Awaited.IDLE: limits.keep_alive,
            }[awaited]
        return min(self._until, self._since + allowed)

    def _stalls(self, now: float) -> bool:
        """Whether the peer has taken nothing for too long of what waits for it."""
        unread, closing = self.transport.get_write_buffer_size(), self.transport.is_closing()
        if unread != self._unread or (unread == 0 and not closing):
            self._unread, self._unread_since = unread, now
            return False
        return now > self._unread_since + (self._limits.stalled if unread else self._limits.linger)

    def _answer(self, status: int, message: str) -> None:
        """An answer from below the application, and the end of the connection."""
        body = json.dumps({"object": "error", "message": message, "code": status, "retryable": True}).encode()
        phrase = {408: "Request Timeout", 503: "Service Unavailable"}[status]
        retry = f"retry-after: {RETRY_AFTER_S}\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{retry}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
