"""The HTTP server in a thread, without an engine or over one that the test brings."""

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.testing import TestClient

from caesura.client import AsyncSchedulerClient
from caesura.client.serve.app import ROUTES, FrontEnd, ServeOptions, create_app
from caesura.client.serve.pages.metrics import Metrics
from caesura.client.serve.server import Connections, Server
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import TokenizerManager

NO_ENGINE = "ipc:///tmp/caesura-there-is-nothing-here.sock"


def front_end(
    client: AsyncSchedulerClient | None = None,
    *,
    tokenizer: TextTokenizer | None = None,
    context_length: int | None = None,
    metrics: Metrics | None = None,
    **options: Any,
) -> FrontEnd:
    """Build the handlers' state over ``client``, or without an engine; ``options`` are ServeOptions'."""
    client = client or AsyncSchedulerClient(NO_ENGINE, connect_timeout=0.0)
    manager = TokenizerManager(client, tokenizer, context_length=context_length)
    return FrontEnd(
        manager=manager,
        options=ServeOptions(context_length=context_length or 0, **options),
        metrics=metrics or Metrics(),
    )


def client_of(
    front: FrontEnd, routes: Sequence[HTTPRouteHandler] = ROUTES, **options: Any
) -> TestClient[Litestar]:
    """Return a client that calls the application without a socket."""
    app = create_app(front, routes)
    app.on_shutdown.append(front.client.close)
    return TestClient(app, **{"base_url": "http://127.0.0.1", **options})


def routes_served() -> list[tuple[str, str, HTTPRouteHandler]]:
    """Return method, path and handler of every route; a parameter in a path is ``x``."""
    return [
        (method, re.sub(r"{.*?}", "x", path), handler)
        for handler in ROUTES
        for path in handler.paths
        for method in handler.http_methods
    ]


@dataclass
class Listening:
    address: tuple[str, int]
    server: Server
    thread: threading.Thread

    def connect(self, timeout: float | None = None) -> socket.socket:
        return socket.create_connection(self.address, timeout=timeout)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    def stop(self) -> None:
        """End it as a signal would."""
        self.server.should_exit = True
        self.thread.join()


@contextmanager
def listening(
    *,
    endpoint: str = NO_ENGINE,
    connect_timeout: float | None = 0.0,
    connections: Connections | None = None,
    tls: ssl.SSLContext | None = None,
    tokenizer: TextTokenizer | None = None,
    **options: Any,
) -> Iterator[Listening]:
    """Yield a server on loopback; ``options`` are those of :func:`front_end`."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    servers: list[Server] = []

    async def serve() -> None:
        async with AsyncSchedulerClient(endpoint, connect_timeout=connect_timeout) as client:
            front = front_end(client, tokenizer=tokenizer, **options)
            if connections is not None:
                front.metrics.connections = connections
            servers.append(
                Server(create_app(front), ready.set, connections=front.metrics.connections, tls=tls)
            )
            await servers[0].serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait()
    found = Listening(listener.getsockname(), servers[0], thread)
    try:
        yield found
    finally:
        found.stop()
        listener.close()
