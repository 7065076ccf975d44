"""HTTP error responses: SGLang's bodies and status codes, OpenAI's under ``/v1`` and on vLLM's
routes.

Invariants: a wrong request is 400, never 422; 401 and 403 are about keys; 503 means that the engine is away
or takes no more, and that the request may be tried again. No response has a traceback or a key.
"""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException, NotFoundException
from litestar.types import ExceptionHandlersMap, Scope, Send

from ...io_struct import CaesuraError, ErrorCode, field_errors
from ...io_struct.field_errors import nearest
from ..exceptions import RETRYABLE

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
MAX_PRINTED_CHARACTERS = 200

_STATUS: dict[str, int] = {
    ErrorCode.ENGINE_DIED: 503,
    ErrorCode.ENGINE_RESTARTING: 503,
    ErrorCode.VERSION_MISMATCH: 503,
    ErrorCode.SHUTTING_DOWN: 503,
    ErrorCode.QUEUE_FULL: 503,
    ErrorCode.NO_ADAPTER_SLOT: 503,
    ErrorCode.PAUSED: 503,
    ErrorCode.WEIGHTS_POISONED: 503,
    ErrorCode.WEIGHTS_INVALID: 503,
    ErrorCode.OUT_OF_MEMORY: 503,
    ErrorCode.STATE_FILE_ERROR: 503,
    ErrorCode.SESSION_GONE: 404,
    ErrorCode.TIMED_OUT: 504,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.INTERNAL: 500,
    ErrorCode.UNKNOWN_ADAPTER: 404,
}
_PERMANENT = frozenset(code for code, status in _STATUS.items() if status == 503) - RETRYABLE
_NATIVE_V1 = ("/v1/loads", "/v1/tokenize", "/v1/detokenize")

_PEERS = (
    "engines give each other weights in their checkpoint's layout, over their own sockets: call "
    "clone_weights of caesura.client.trainer"
)
_NOT_OFFERED = {
    "/get_weights_by_name": "weights are not read out: compare them with POST /weights_checker",
    "/init_weights_send_group_for_remote_instance": _PEERS,
    "/send_weights_to_remote_instance": _PEERS,
    "/set_internal_state": "options are fixed at start",
    "/v1/images/edits": "images as input are not supported: /v1/images/generations makes them from text",
    "/v1/images/variations": "images as input are not supported: /v1/images/generations makes them from text",
    # vLLM's
    "/start_draft_weight_update": "there is no draft model",
    "/init_broadcaster": "weights are taken from a folder: POST /update_weights (weight_broadcast.type = "
    '"filesystem")',
}
"""Routes of SGLang and vLLM that are not served, with the sentence of the 404."""


class BodyTooLarge(HTTPException):
    status_code = 413


def printable(given: str, limit: int = MAX_PRINTED_CHARACTERS) -> str:
    """Return ``given`` with escapes for what is not visible, cut off after ``limit`` characters."""
    shown = field_errors.printable(given[:limit])
    return shown if len(given) <= limit else f"{shown}… ({len(given)} characters)"


def status_of(error: CaesuraError) -> int:
    """Return a typed error's HTTP status: 400 unless the engine's condition is the reason."""
    # A code that is not known comes from a newer engine, and is not the request's fault.
    unknown = 400 if isinstance(error.code, ErrorCode) else 500
    return _STATUS.get(error.code, unknown)


def json_response(value: Any, status: int = 200) -> Response[bytes]:
    return json_bytes(msgspec.json.encode(value), status)


def json_bytes(encoded: bytes, status: int = 200) -> Response[bytes]:
    headers = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else None
    return Response(encoded, status_code=status, media_type="application/json", headers=headers)


def error_fields(message: str, code: str | None = None) -> dict[str, Any]:
    """Return ``message``, ``code`` if given, and ``retryable`` if the same request may succeed later."""
    fields: dict[str, Any] = {"message": message} if code is None else {"message": message, "code": code}
    return {**fields, "retryable": True} if code in RETRYABLE else fields


def native_error(error: CaesuraError) -> Response[bytes]:
    """Return ``{"error": {"message", "code"}}`` with the status of the error."""
    return json_response({"error": error_fields(error.message, error.code)}, status_of(error))


def engine_error(error: CaesuraError, status: int) -> Response[bytes]:
    fields = {"error": error_fields(error.message, error.code)}
    return json_response(error_object(error.message, status, error.code) | fields, status)


def error_object(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """Return SGLang's ``ErrorResponse``; ``code`` is that of the typed error, if there is one."""
    phrase = HTTPStatus(status).phrase
    error = {"object": "error", "message": message, "type": phrase, "param": None, "code": status}
    return {**error, "retryable": True} if status == 503 and code not in _PERMANENT else error


def openai_error(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or str(status)}}


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def anthropic_error(message: str, status: int, **more: Any) -> dict[str, Any]:
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, **more}}


async def send_error(scope: Scope, send: Send, status: int, message: str) -> None:
    found = _plain_error(scope, message, status)
    body = msgspec.json.encode({"error": message} if status == 401 and "object" in found else found)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _plain_error(scope: Scope, message: str, status: int) -> dict[str, Any]:
    path = scope["path"]
    if path.startswith("/v1/messages"):
        return anthropic_error(message, status)
    own = getattr(scope.get("route_handler"), "exception_handlers", None)  # OpenAI's: no others have any
    if own or (path.startswith("/v1/") and path.rstrip("/") not in _NATIVE_V1):
        return openai_error(message, status, code="invalid_api_key" if status == 401 else None)
    return error_object(message, status)


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
    if (reason := _NOT_OFFERED.get(path.rstrip("/"))) is not None:
        return f"{path.rstrip('/')} is not served: {reason}"
    near = nearest(path, sorted({route.path for route in request.app.routes}))
    return f"there is no route {printable(path)}" + ("" if near is None else f" (did you mean {near}?)")


def _defect(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    logger.error("%s %s failed", request.method, printable(request.scope["path"]), exc_info=error)
    return json_response(_plain_error(request.scope, "internal error; the server's log says more", 500), 500)


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    CaesuraError: lambda _, error: native_error(error),
    HTTPException: _http,
    Exception: _defect,
}
