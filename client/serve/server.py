"""uvicorn, without its signal handlers and its logging: ``command.py`` decides when it ends.

Invariants: every connection is one of :class:`.connections.Connections`, which bounds how many there are and how long each may
take; what is left when the time for answers is over is dropped, so an end is bounded, too.
"""

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from litestar import Litestar

from .connections import BoundedProtocol, Connections

SHUTDOWN_S = 10
"""How long answers in flight may take once the server ends."""
HANDSHAKE_S = 10.0
"""How long a peer may take over TLS, before it counts as a connection."""
OTHER_DESCRIPTORS = 256
"""Left for everything that is no connection: the engine's socket, files, libraries."""
_SWEEP_TICKS = 5
"""Of uvicorn's, which are 0.1 s."""


class Server(uvicorn.Server):
    """Serves ``app``; ``announce`` is called once it listens."""

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
        """Listen, and say so."""
        loop, config = asyncio.get_running_loop(), self.config
        self.connections.limit = min(self.connections.limit, _descriptors(self.connections))

        def protocol() -> BoundedProtocol:
            state = self.server_state
            return BoundedProtocol(
                self.connections, config=config, server_state=state, app_state=self.lifespan.state, _loop=loop
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
        """Ten times a second."""
        if counter % _SWEEP_TICKS == 0:
            self.connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is whole; :data:`SHUTDOWN_S` and a little later nothing is left."""
        loop = asyncio.get_running_loop()
        self.connections.stop(loop.time())
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
        """No new connections; those that are open go on."""
        for server in self.servers:
            server.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not this server's."""
        yield


def _descriptors(connections: Connections) -> int:
    """How many connections the process may have, once it may have as many descriptors as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections.limit + connections.reserve + OTHER_DESCRIPTORS
    if soft not in (-1, resource.RLIM_INFINITY) and soft < wanted:
        soft = wanted if hard in (-1, resource.RLIM_INFINITY) else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, soft - connections.reserve - OTHER_DESCRIPTORS)
    return connections.limit
