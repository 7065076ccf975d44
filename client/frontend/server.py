"""uvicorn, without its signal handlers and its logging: ``serve.py`` decides when it ends.

Invariant: what a connection has sent and nobody has been handed yet is bounded, before any key is checked.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and headers, or its trailers; the read that goes beyond is still held."""
KEEP_ALIVE_S = 120
"""Trainers keep connections over an update; a connection closed just when it is used again costs them a retry."""
SHUTDOWN_S = 10
"""How long answers in flight may take once the server ends."""


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose request line, headers or trailers do not end: the parser holds them until they do."""

    _held = 0
    """Bytes since the parser last handed something on."""

    def data_received(self, data: bytes) -> None:
        """Parse; 400 to what goes on for too long."""
        self._held += len(data)
        super().data_received(data)
        if self._held > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"A request's head is over the limit of {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """The parser has a request."""
        self._held = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """The parser has a piece of a body, which ``limits.py`` counts."""
        self._held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The next request begins."""
        self._held = 0
        super().on_message_complete()


class Server(uvicorn.Server):
    """Serves ``app``; ``announce`` is called once it listens."""

    def __init__(self, app: Litestar, announce: Callable[[], None]) -> None:
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
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started:
            self._announce()

    def stop_accepting(self) -> None:
        """No new connections; those that are open go on."""
        for server in self.servers:
            server.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not this server's."""
        yield
