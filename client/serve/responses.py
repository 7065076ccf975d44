"""Responses of routes: results of commands, server-sent events, and clients that disconnect.

Invariant: when a client disconnects, its generations are aborted.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from litestar import Response
from litestar.response import Stream

from ...io_struct import CaesuraError
from ..exceptions import RETRYABLE
from .bodies import HTTPRequest
from .context import FrontEnd
from .errors import error_fields, json_response, native_error, status_of

T = TypeVar("T")
Outcome = Callable[[Any], str]
"""Message of an answer, from the engine's reply."""


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


def events(frames: AsyncGenerator[bytes, None]) -> Stream:
    """Return server-sent events; ``frames`` is closed when the client disconnects."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return Stream(_closing(frames), media_type="text/event-stream", headers=headers, status_code=200)


async def _closing(frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(frames):
        async for frame in frames:
            yield frame


async def command(front: FrontEnd, name: str, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a command to the engine, timed and counted under ``name``."""
    began = time.monotonic()
    ok = False
    try:
        result = await work
        ok = True
    except CaesuraError as error:
        front.metrics.error(error.code)
        raise
    else:
        return result
    finally:
        front.metrics.control(name, time.monotonic() - began, ok)


async def succeed(
    front: FrontEnd, name: str, message: str | Outcome, work: Coroutine[Any, Any, Any], **fields: Any
) -> Response[bytes]:
    """Answer an update with ``{"success", "message"}`` and the engine's reply, or with its error."""
    try:
        reply = await command(front, name, work)
    except CaesuraError as error:
        return failure(error)
    text = message if isinstance(message, str) else message(reply)
    return json_response({**_reply_fields(reply), "success": True, "message": text, **fields})


def failure(error: CaesuraError) -> Response[bytes]:
    """Answer that an update was refused or has failed."""
    body = {"success": False, "message": error.message, "code": error.code, "detail": error.detail}
    if error.code in RETRYABLE:
        body["error"] = error_fields(error.message, error.code)
    return json_response(body, status_of(error))


async def acknowledge(
    front: FrontEnd, name: str, message: str, work: Coroutine[Any, Any, Any]
) -> Response[bytes]:
    """Answer a pause with ``{"status": "ok", "message"}`` and the engine's reply, or with its error."""
    try:
        reply = await command(front, name, work)
    except CaesuraError as error:
        return native_error(error)
    return json_response({**_reply_fields(reply), "message": message, "status": "ok"})


def _reply_fields(reply: object) -> dict[str, Any]:
    """Return the fields of an engine's reply; they stand beside SGLang's."""
    if not isinstance(reply, msgspec.Struct):
        return {}
    fields: dict[str, Any] = msgspec.to_builtins(reply)
    return {name: value for name, value in fields.items() if name not in ("type", "id")}
