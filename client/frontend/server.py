"""uvicorn, without its signal handlers and its logging: ``serve.py`` decides when it ends."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from litestar import Litestar

KEEP_ALIVE_S = 120
"""Trainers keep connections over an update; a connection closed just when it is used again costs them a retry."""
SHUTDOWN_S = 10
"""How long answers in flight may take once the server ends."""


class Server(uvicorn.Server):
    """Serves ``app``; ``announce`` is called once it listens."""

    def __init__(self, app: Litestar, announce: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
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
