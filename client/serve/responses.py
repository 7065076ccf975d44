"""Server-sent events, and clients that disconnect.

Invariant: when a client disconnects, its generations are aborted.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.response import Stream

from ...io_struct import CaesuraError
from .bodies import HTTPRequest
from .context import FrontEnd

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):  # noqa: N818  nothing went wrong here
    """The client closed its connection before it was answered."""


async def unless_left(request: HTTPRequest, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; if the client disconnects, cancel it and raise ClientLeft."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_departure(request))
    watcher.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if watcher.done() and not watcher.cancelled() and not (current and current.cancelling()):
            raise ClientLeft from None
        raise
    finally:
        watcher.cancel()


async def _departure(request: HTTPRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_left() -> Response[bytes]:
    """Return the answer that only the log sees."""
    return Response(b"", status_code=499, media_type="text/plain")


def frame(encoded: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: %b\n\n" % encoded


async def streamed(
    request: HTTPRequest,
    front: FrontEnd,
    frames: AsyncGenerator[bytes, None],
    refusal: Callable[[CaesuraError], Any],
) -> Stream:
    """Answer with events, the last of which is ``[DONE]``; a client that leaves closes ``frames``.

    The first frame is made before the answer begins: an immediate refusal is an answer of its own, a later
    failure the event ``refusal``.
    """
    try:
        first = await unless_left(request, anext(frames))
    except BaseException:
        await frames.aclose()
        raise

    async def guarded() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(frames):
            yield first
            try:
                async for each in frames:
                    yield each
            except CaesuraError as error:
                front.metrics.error(error.code)
                yield frame(msgspec.json.encode(refusal(error)))
            yield DONE

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return Stream(guarded(), media_type="text/event-stream", headers=headers, status_code=200)
