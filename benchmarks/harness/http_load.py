"""Many HTTP requests at once from one process that uses next to no CPU: keep-alive connections, bodies made
beforehand.

An HTTP library's client would take as much of two cores as the server that is measured. This one writes bytes
and counts them: it understands ``Content-Length`` and chunked bodies, and nothing else of the protocol (RFC
9112).
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit


class HttpError(RuntimeError):
    """An answer that is not 200, with its body."""


@dataclass(slots=True)
class Connection:
    """One keep-alive connection: one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str

    @classmethod
    async def open(cls, url: str) -> "Connection":
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 22)
        return cls(reader, writer, where.netloc)

    async def post(self, path: str, body: bytes) -> bytes:
        """Send ``body`` and return the whole answer's body, a stream's too.

        Raises:
            HttpError: another status than 200.
        """
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)
        lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        fields = {
            name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        if b"content-length" in fields:
            answer = await self.reader.readexactly(int(fields[b"content-length"]))
        else:
            answer = await self._chunks()
        if lines[0].split()[1] != b"200":
            raise HttpError(f"{lines[0].decode()}: {answer.decode(errors='replace')}")
        return answer

    async def _chunks(self) -> bytes:
        parts = []
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return b"".join(parts)

    def close(self) -> None:
        self.writer.close()


async def flood(url: str, path: str, bodies: Sequence[Sequence[bytes]]) -> tuple[float, list[bytes]]:
    """Send each of ``bodies`` over a connection of its own, all at once, a connection's one after the other.

    Returns:
        Seconds from the first byte sent to the last answer, and all answers' bodies.
    """
    connections = await asyncio.gather(*(Connection.open(url) for _ in bodies))

    async def work(connection: Connection, mine: Sequence[bytes]) -> list[bytes]:
        return [await connection.post(path, body) for body in mine]

    try:
        start = time.perf_counter()
        answers = await asyncio.gather(*map(work, connections, bodies))
        seconds = time.perf_counter() - start
    finally:
        for connection in connections:
            connection.close()
    return seconds, [answer for mine in answers for answer in mine]
