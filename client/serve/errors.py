"""HTTP error responses: SGLang's bodies and status codes.

Invariants: a request that is wrong is 400, never 422; 401 and 403 are keys; 503 means that the engine is not there or
takes no more, and may be tried again; nothing answers with a traceback or a key. Under ``/v1`` errors have OpenAI's shape,
but for the native routes that live there.
"""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.types import ExceptionHandlersMap, Scope, Send

from ...io_struct import CaesuraError, ErrorCode
from ...io_struct.field_errors import nearest
from ..exceptions import RETRYABLE
from .connections import RETRY_AFTER_S
from .not_offered import why_not
from .printable import printable

logger = logging.getLogger(__name__)

_STATUS: dict[str, int] = {
    ErrorCode.ENGINE_DIED: 503,
    ErrorCode.ENGINE_RESTARTING: 503,
    ErrorCode.VERSION_MISMATCH: 503,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.QUEUE_FULL: 503,
    ErrorCode.PAUSED: 503,
    ErrorCode.WEIGHTS_POISONED: 503,
    ErrorCode.WEIGHTS_INVALID: 503,
    ErrorCode.OUT_OF_MEMORY: 503,
    ErrorCode.STATE_FILE_ERROR: 503,
    ErrorCode.TIMED_OUT: 504,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.INTERNAL: 500,
}

_STAYING = frozenset(code for code, status in _STATUS.items() if status == 503) - RETRYABLE
"""Conditions of the engine that the same request would meet again."""


class BodyTooLarge(HTTPException):
    """More bytes than this route takes."""

    status_code = 413


def status_of(error: CaesuraError) -> int:
    """The HTTP status of a typed error: 400 unless it is the engine's condition rather than the request's fault."""
    unknown = (
        400 if isinstance(error.code, ErrorCode) else 500
    )  # a code of a newer engine: not the request's fault
    return _STATUS.get(error.code, unknown)


def json_response(value: Any, status: int = 200) -> Response[bytes]:
    """``value`` as JSON, encoded once."""
    return json_bytes(msgspec.json.encode(value), status)


def json_bytes(encoded: bytes, status: int = 200) -> Response[bytes]:
    """What is JSON already."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(encoded, status_code=status, media_type="application/json", headers=headers)


def error_fields(message: str, code: str | None = None) -> dict[str, Any]:
    """``message``, the typed code where there is one, and ``retryable`` where the same request may succeed later."""
    fields: dict[str, Any] = {"message": message} if code is None else {"message": message, "code": code}
    return {**fields, "retryable": True} if code in RETRYABLE else fields


def native_error(message: str, status: int = 400, code: str | None = None) -> Response[bytes]:
    """``{"error": {"message"}}``, with the typed code beside it where there is one."""
    return json_response({"error": error_fields(message, code)}, status)


def engine_error(error: CaesuraError, status: int) -> Response[bytes]:
    """A failure of the engine's: SGLang's ``ErrorResponse``, and the typed error beside it."""
    body = {
        **error_object(error.message, status, error.code),
        "error": error_fields(error.message, error.code),
    }
    return json_response(body, status)


def error_object(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """SGLang's ``ErrorResponse``; what may be tried again says so. ``code``: the typed one, where there is one."""
    phrase = HTTPStatus(status).phrase
    error = {"object": "error", "message": message, "type": phrase, "param": None, "code": status}
    return {**error, "retryable": True} if status == 503 and code not in _STAYING else error


def openai_error(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}


_NATIVE_V1 = ("/v1/loads", "/v1/tokenize", "/v1/detokenize")


def _plain_error(scope: Scope, message: str, status: int) -> dict[str, Any]:
    """An error of whatever is asked for, routes that do not exist included."""
    path = scope["path"]
    if path.startswith("/v1/") and path.rstrip("/") not in _NATIVE_V1:
        return openai_error(message, status, code="invalid_api_key" if status == 401 else None)
    return error_object(message, status)


async def send_error(scope: Scope, send: Send, status: int, message: str) -> None:
    """Answer with an error from below the handlers."""
    found = _plain_error(scope, message, status)
    body = msgspec.json.encode({"error": message} if status == 401 and "object" in found else found)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _typed(_: Request[Any, Any, Any], error: CaesuraError) -> Response[bytes]:
    return native_error(error.message, status_of(error), error.code)


def _http(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    detail = _no_route(request) if isinstance(error, NotFoundException) else error.detail
    allowed = (error.headers or {}).get("allow") if isinstance(error, MethodNotAllowedException) else None
    if allowed is not None:
        detail = f"{request.method} is not allowed on {printable(request.scope['path'])}, only {allowed}"
    response = json_response(_plain_error(request.scope, detail, error.status_code), error.status_code)
    if allowed is not None:
        response.headers["allow"] = allowed
    return response


def _no_route(request: Request[Any, Any, Any]) -> str:
    path = request.scope["path"]
    if (reason := why_not(path)) is not None:
        return reason
    near = nearest(path, sorted({route.path for route in request.app.routes}))
    return f"there is no route {printable(path)}" + ("" if near is None else f" (did you mean {near}?)")


def _defect(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    logger.error("%s %s failed", request.method, printable(request.scope["path"]), exc_info=error)
    return json_response(_plain_error(request.scope, "internal error; the server's log says more", 500), 500)


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    CaesuraError: _typed,
    HTTPException: _http,
    Exception: _defect,
}
