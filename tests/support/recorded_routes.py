"""A record of the routes that a client calls: method, path and query, and the statuses of the answers.

Invariants: a proxy passes the bytes on unchanged, in both directions, and reads them only besides. The calls
of a test are compared with ``tests/integrations/routes.json``; ``CAESURA_RECORD_ROUTES=1`` writes them
there instead, with the version of the client that is installed. What depends on time is left out, and so are
ids of Caesura's in paths.
"""

import asyncio
import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools

RECORD = Path(__file__).parents[1] / "integrations" / "routes.json"
VARIABLE = "CAESURA_RECORD_ROUTES"
IN_TIME = re.compile("/api/v1/(session_heartbeat|telemetry)")
"""Routes that a client calls every so many seconds."""
Recorded = Callable[[str, str, str], str]
"""From a client's name, its package and a server's address to that of a recording proxy."""


class Exchange:
    """The requests and answers of one connection, whose bytes ``requests`` and ``answers`` are fed with."""

    def __init__(self, routes: set[str]) -> None:
        self._routes = routes
        self._asked: deque[str] = deque()
        self.requests = httptools.HttpRequestParser(self)
        self.answers = httptools.HttpResponseParser(_Answers(self))

    def on_url(self, url: bytes) -> None:
        target = re.sub(r"[0-9a-f]{32}(:\d+)?", "{id}", url.decode())
        self._asked.append(f"{self.requests.get_method().decode()} {target}")

    def answered(self) -> None:
        asked, status = self._asked.popleft(), self.answers.get_status_code()
        # 503 says "later", which depends on how busy the machine is
        if status != 503 and not IN_TIME.search(asked):
            self._routes.add(f"{asked} {status}")


class _Answers:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def on_headers_complete(self) -> None:
        self._exchange.answered()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[bytes], Any]
) -> None:
    try:
        while data := await reader.read(1 << 16):
            note(data)
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@contextmanager
def recording(url: str, routes: set[str]) -> Iterator[str]:
    """Yield the address of a proxy of the server at ``url`` that adds to ``routes`` what passes."""
    server = urlsplit(url)
    loop = asyncio.new_event_loop()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(server.hostname, server.port)
        exchange = Exchange(routes)
        await asyncio.gather(
            _pass_on(reader, server_writer, exchange.requests.feed_data),
            _pass_on(server_reader, writer, exchange.answers.feed_data),
        )

    proxy = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_stop(proxy), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(proxy: asyncio.Server) -> None:
    proxy.close()
    connections = asyncio.all_tasks() - {asyncio.current_task()}
    for connection in connections:
        connection.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


def compare(client: str, package: str, test: str, routes: set[str]) -> None:
    """Compare what ``test`` has seen with the record of ``client``, or write it there if asked to."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    known = record.setdefault(client, {"version": "", "tests": {}})
    if os.environ.get(VARIABLE):
        known["version"] = f"{package} {version(package)}"
        known["tests"][test] = sorted(routes)
        text = json.dumps(record, indent=1, sort_keys=True)
        RECORD.write_text(text + "\n", encoding="utf-8")
    assert sorted(routes) == known["tests"].get(test), (
        f"{package} {version(package)} calls other routes than {known['version']} did: run the test with "
        f"{VARIABLE}=1, then docs/generate_routes.py"
    )
