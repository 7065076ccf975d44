"""Routes that are commands to the engine; :func:`timed` times and counts every one."""

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from litestar import HttpMethod, Response, route
from litestar.handlers import HTTPRouteHandler

from ...io_struct import CaesuraError
from ...io_struct.base import MAX_ID_LENGTH
from ..exceptions import RETRYABLE, InvalidRequest
from .bodies import HTTPRequest, Strict, read_control
from .context import Front, FrontEnd
from .error_responses import error_fields, json_response, native_error, status_of

SESSION_HEADER = "X-Caesura-Session"
T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class InSession(Strict, kw_only=True):
    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)] | None = None
    """Caesura's own, as ``X-Caesura-Session``. Null: the implicit session of HTTP clients."""


class Form(NamedTuple):
    answer: Callable[[Any, Any], Any]
    """Makes JSON or a response from the body and the engine's reply."""
    refusal: Callable[[CaesuraError], Response[bytes]] = native_error


def success(message: str | Callable[[Any, Any], str], **fields: Any) -> Form:
    """Return SGLang's form of an update's answer, with the engine's reply beside it."""

    def answer(body: Any, reply: object) -> dict[str, Any]:
        text = message if isinstance(message, str) else message(body, reply)
        return {**reply_fields(reply), "success": True, "message": text, **fields}

    return Form(answer, failure)


def acknowledgement(message: str) -> Form:
    return Form(lambda _, reply: {**reply_fields(reply), "message": message, "status": "ok"})


def reply_fields(reply: object) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(reply) if isinstance(reply, msgspec.Struct) else {}
    return {name: value for name, value in fields.items() if name not in ("type", "id")}


def failure(error: CaesuraError) -> Response[bytes]:
    body = {"success": False, "message": error.message, "code": error.code, "detail": error.detail}
    if error.code in RETRYABLE:
        body["error"] = error_fields(error.message, error.code)
    return json_response(body, status_of(error))


def command(
    path: str | list[str],
    form: Form,
    *methods: HttpMethod,
    name: str | None = None,
    size: str = "",
    access: str = "admin",
    query: bool = False,
    lists: Collection[str] = (),
) -> Callable[[Callable[[FrontEnd, BodyT], Awaitable[Any]]], HTTPRouteHandler]:
    """Make a function and a body a route (POST by default); ``name`` is for metrics, ``size`` its limit.

    ``query`` and ``lists`` are as of :func:`read_control`.
    """
    called = name or (path if isinstance(path, str) else path[0]).strip("/")

    def decorate(work: Callable[[FrontEnd, BodyT], Awaitable[Any]]) -> HTTPRouteHandler:
        kind: type[BodyT] = work.__annotations__["body"]

        async def handle(request: HTTPRequest, front: Front) -> Response[bytes]:
            body = in_session(request, await read_control(request, kind, query=query, lists=lists))
            return await answered(front, called, form, body, work(front, body))

        handle.__doc__ = work.__doc__
        opt = {"access": access, "body": size, "struct": kind}
        return route(path, http_method=methods or [HttpMethod.POST], status_code=200, opt=opt)(handle)

    return decorate


def in_session(request: HTTPRequest, body: BodyT) -> BodyT:
    """Return ``body`` with the session that the request's header names, if any."""
    name = request.headers.get(SESSION_HEADER)
    if isinstance(body, InSession) and name is not None:
        if body.session_id not in (None, name) or not 0 < len(name) <= MAX_ID_LENGTH:
            reason = f"{SESSION_HEADER} must be a session id, and equal to session_id if both are given"
            raise InvalidRequest(reason, field="session_id")
        body.session_id = name
    return body


async def answered(
    front: FrontEnd, name: str, form: Form, body: object, work: Awaitable[Any]
) -> Response[bytes]:
    try:
        found = form.answer(body, await timed(front, name, work))
    except CaesuraError as error:
        return form.refusal(error)
    return found if isinstance(found, Response) else json_response(found)


async def timed(front: FrontEnd, name: str, work: Awaitable[T]) -> T:
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
