"""Reading requests and sending responses: the common part of all routes.

Invariants: when a client disconnects its generations are aborted; commands are timed and counted in one place,
:func:`command`; control bodies are read as in SGLang, numbers may be strings and nulls are left out; unlike there, unknown keys are refused.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.exceptions import ClientException
from litestar.response import Stream

from ...io_struct import CaesuraError, Message
from ...io_struct.field_errors import field_error
from ..exceptions import RETRYABLE
from .bodies import INLINE, UNREADABLE, unreadable
from .context import FrontEnd
from .errors import error_fields, json_response, native_error, status_of
from .printable import printable

MAX_VALUES = 1 << 18
"""Lists and objects of a command: as many tensors."""

HTTPRequest = Request[Any, Any, Any]
T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)
MessageT = TypeVar("MessageT", bound=Message)


class ClientLeft(Exception):  # noqa: N818  nothing went wrong here
    """The client closed its connection before the answer was there."""


async def read_control(
    request: HTTPRequest, kind: type[StructT], *, text: bool = False, query: bool = False
) -> StructT:
    """Read the body as ``kind``; no body at all is ``{}``.

    Args:
        text: the body holds texts, with as many brackets as they like.
        query: options may stand in the query as well; those of the body go first.

    Raises:
        ClientException: 400, the body is not JSON, a key is unknown or a value is of no use, or options stand in the query,
            where nothing would read them.
    """
    if request.query_params and not query:
        names = ", ".join(printable(name) for name in request.query_params)
        raise ClientException(f"the query is not read here: give {names} in the body, a JSON object")
    raw = await request.body()
    if len(raw) > INLINE and not text:
        check_values(raw)
    try:
        fields = msgspec.json.decode(raw) if raw.strip() else None
        fields = {} if fields is None else fields
        if not isinstance(fields, dict):
            raise ClientException("the body must be a JSON object")
        given = dict(request.query_params) | {
            name: value for name, value in fields.items() if value is not None
        }
        return msgspec.convert(given, kind, strict=False)
    except UNREADABLE as error:
        raise ClientException(unreadable(error, raw, kind).sentence) from error


def check_values(raw: bytes) -> None:
    """Refuse a body of more lists and objects than any command has.

    Raises:
        ClientException: 400.
    """
    if raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise ClientException(f"the body has more than {MAX_VALUES} lists and objects")


def query_of(request: HTTPRequest, kind: type[StructT]) -> StructT:
    """The query string as ``kind``, read like a control body.

    Raises:
        ClientException: 400, a value is of no use.
    """
    given = dict(request.query_params)
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ClientException(field_error(error, kind, given, whole="the query").sentence) from error


async def unless_left(request: HTTPRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        ClientLeft: it did.
    """
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


def nobody() -> Response[bytes]:
    """The answer to a client that has left."""
    return Response(b"", status_code=499, media_type="text/plain")


def events(frames: AsyncGenerator[bytes, None]) -> Stream:
    """A response of server-sent events; ``frames`` is closed when the client leaves."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return Stream(_closing(frames), media_type="text/event-stream", headers=headers, status_code=200)


async def _closing(frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(frames):
        async for frame in frames:
            yield frame


async def command(front: FrontEnd, name: str, work: Coroutine[Any, Any, T]) -> T:
    """The result of a command to the engine, timed and counted."""
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


def extras(reply: msgspec.Struct) -> dict[str, Any]:
    """The engine's reply, as additional keys beside SGLang's."""
    fields: dict[str, Any] = msgspec.to_builtins(reply)
    return {name: value for name, value in fields.items() if name not in ("type", "id")}


Outcome = Callable[[Any], str]
"""Makes the message of an answer from the engine's reply."""


async def succeed(
    front: FrontEnd, name: str, message: str | Outcome, work: Coroutine[Any, Any, Any], **fields: Any
) -> Response[bytes]:
    """``{"success", "message"}``, the shape of updates and groups: 200, or the status of the error."""
    try:
        reply = await command(front, name, work)
    except CaesuraError as error:
        return failure(error)
    more = extras(reply) if isinstance(reply, msgspec.Struct) else {}
    said = message if isinstance(message, str) else message(reply)
    return json_response({**more, "success": True, "message": said, **fields})


def failure(error: CaesuraError) -> Response[bytes]:
    """A refused or failed update."""
    body = {"success": False, "message": error.message, "code": error.code, "detail": error.detail}
    if error.code in RETRYABLE:
        body["error"] = error_fields(error.message, error.code)
    return json_response(body, status_of(error))


async def acknowledge(
    front: FrontEnd, name: str, message: str, work: Coroutine[Any, Any, Any]
) -> Response[bytes]:
    """``{"status": "ok", "message"}``, the shape of pause and continue."""
    try:
        reply = await command(front, name, work)
    except CaesuraError as error:
        return native_error(error.message, status_of(error), error.code)
    return json_response({**extras(reply), "message": message, "status": "ok"})
