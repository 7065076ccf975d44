"""The HTTP server in a thread, without an engine or over one that the test brings."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from caesura.client import AsyncSchedulerClient
from caesura.client.serve.app import FrontEnd, ServeOptions, create_app
from caesura.client.serve.pages.metrics import Metrics
from caesura.client.serve.server import Connections, Server
from caesura.client.text.tokenizer import TextTokenizer
from caesura.client.text.tokenizer_manager import TokenizerManager

NO_ENGINE = "ipc:///tmp/caesura-there-is-nothing-here.sock"


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
    context_length: int | None = None,
    **options: Any,
) -> Iterator[Listening]:
    listener = socket.create_server(("127.0.0.1", 0))
    ready = threading.Event()
    servers: list[Server] = []

    async def serve() -> None:
        async with AsyncSchedulerClient(endpoint, connect_timeout=connect_timeout) as client:
            front = FrontEnd(
                manager=TokenizerManager(client, tokenizer, context_length=context_length),
                options=ServeOptions(**options),
                metrics=Metrics(),
            )
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
