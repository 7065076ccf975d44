"""Checks of every request before its handler: keys, size of the body, modality, routing key; request ids.

Invariants:
- Keys are checked here only, in constant time, and appear in no log, error or answer.
- ``opt={"access": "open" | "user" | "admin"}``; without it, ``admin``. ``admin`` (whatever changes the
  engine) needs the admin key, else the API key if set; ``user`` needs either key if the API key is set. A
  server without keys binds loopback only, or was started with ``--insecure-bind``.
- A web page of another origin cannot use a server without keys through a browser, not even by DNS rebinding:
  the request must name this machine, or the address that the server listens on.
- A body over the limit of ``opt["body"]`` is refused while it arrives, and never held whole.
"""

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from litestar import post
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.middleware import ASGIMiddleware
from litestar.types import AnyCallable, ASGIApp, Guard, HTTPReceiveMessage, Message, Receive, Scope, Send

from ...io_struct import new_id
from ...process import log
from ...process.contract import is_loopback
from ..exceptions import Unsupported
from ..group.router import current_routing_key, routed_by
from .bodies import HTTPRequest
from .context import FrontEnd
from .error_responses import BodyTooLarge, send_error
from .options import ServeOptions
from .server import ENCODED_SLASH, RESERVED

ACCESS_CLASSES = frozenset({"open", "user", "admin"})
MAX_COMMAND_BYTES = 1 << 20
MAX_SPECS_BYTES = 16 << 20
MAX_TEXT_BYTES = 4 << 20
"""Size of texts, which are decoded in one piece while nothing else runs."""
_GENERATING = ("prompts", "text")
_BINARY_TYPES = ("application/octet-stream", "application/x-safetensors")
_ROUTING_KEY = b"x-smg-routing-key"
_REQUEST_ID = "request_id"
_VISIBLE = re.compile(rb"[!-~]{1,128}")


class AuthMiddleware(ASGIMiddleware):
    def __init__(self, options: ServeOptions) -> None:
        api, admin = (key.encode() if key else b"" for key in (options.api_key, options.admin_key))
        self._user_keys = [key for key in (api, admin) if key] if api else []
        self._admin_keys = [key for key in (admin or api,) if key]
        self._host = None if options.insecure_bind else options.host.lower()

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await next_app(scope, receive, send)
        else:
            await send_error(scope, send, *refusal)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        access = scope["route_handler"].opt.get("access", "admin")
        if access == "open":
            return None
        keys = self._user_keys if access == "user" else self._admin_keys
        headers = dict(scope["headers"])
        if keys:
            given = _key(headers)
            if not any([hmac.compare_digest(given, key) for key in keys]):  # noqa: C419 (constant time)
                return 401, "Unauthorized"
        elif _from_other_site(headers):
            return 403, "Forbidden: this server has no key, so pages of other sites may not use it"
        elif not self._is_named(headers.get(b"host")):
            return 403, "Forbidden: this server has no key, so requests must name it as this machine (Host)"
        return None

    def _is_named(self, host: bytes | None) -> bool:
        if host is None or self._host is None:
            return True
        name = _hostname("//" + host.decode("latin-1"))
        return name is not None and (is_loopback(name) or name == self._host)


def _key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def owner_of(request: HTTPRequest) -> bytes:
    """Return a digest of the key that a request was sent with, whether or not the server asks for one."""
    return hashlib.blake2b(_key(dict(request.scope["headers"])), digest_size=16).digest()


def _from_other_site(headers: dict[bytes, bytes]) -> bool:
    """Return True if a browser sent the request for a page that is not this machine's own."""
    if headers.get(b"sec-fetch-site", b"none") == b"cross-site":
        return True
    origin = headers.get(b"origin")
    if origin is None:
        return False
    host = _hostname(origin.decode("latin-1"))
    return host is None or not is_loopback(host)


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class RequestId(ASGIMiddleware):
    """Names the request in the records that are logged while it is handled, and decodes ids in its path."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        if ENCODED_SLASH in scope["path"]:
            if b"%00" in scope["raw_path"]:
                await send_error(scope, send, 400, "a path has no zero byte")
                return
            given = scope["path_params"].items()
            scope["path_params"] = {name: value.replace(ENCODED_SLASH, "/") for name, value in given}
        before = log.request_id.set(request_id(scope))
        try:
            await next_app(scope, receive, send)
        finally:
            log.request_id.reset(before)


def request_id(scope: Scope) -> str:
    """Return the request's ``X-Request-Id``, or a new id if it has none that can be written back."""
    state = scope["state"]
    if _REQUEST_ID not in state:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        state[_REQUEST_ID] = given.decode() if _VISIBLE.fullmatch(given) else new_id()
    found: str = state[_REQUEST_ID]
    return found


async def name_request(message: Message, scope: Scope) -> None:
    """Add ``X-Request-Id`` to the start of every response, also to that of no route."""
    if message["type"] == "http.response.start":
        message["headers"] = [*message["headers"], (b"x-request-id", request_id(scope).encode())]


class BodyLimit(ASGIMiddleware):
    """Answers 413 to a body over the limit of its route, and 503 to generations on a surplus connection."""

    def __init__(self, options: ServeOptions) -> None:
        limit = options.max_body_bytes
        self._limits = {
            "prompts": limit,
            "weights": limit,
            "training": limit,
            "text": min(limit, MAX_TEXT_BYTES),
            "specs": min(limit, MAX_SPECS_BYTES),
        }
        self._command = min(limit, MAX_COMMAND_BYTES)
        self._binary = options.max_update_bytes

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        kind = scope["route_handler"].opt.get("body", "")
        if kind in _GENERATING and RESERVED in (scope.get("extensions") or ()):
            await send_error(scope, send, 503, "too many connections: only commands are answered")
            return
        limit = self._limits.get(kind, self._command)
        announced = b"0"
        for name, value in scope["headers"]:
            if name == b"content-length":
                announced = value
            elif kind == "weights" and name == b"content-type" and is_binary(value.decode("latin-1")):
                limit = self._binary
        if not announced.isdigit() or len(announced) > 18 or int(announced) > limit:
            length = announced[:32].decode("latin-1")
            await send_error(scope, send, 413, f"a body of {length} bytes is over the limit of {limit}")
            return
        received = 0

        async def counted() -> HTTPReceiveMessage:
            nonlocal received
            message: HTTPReceiveMessage = await receive()  # type: ignore[assignment]
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise BodyTooLarge(f"a body is over the limit of {limit} bytes")
            return message

        await next_app(scope, counted, send)


def is_binary(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() in _BINARY_TYPES


class RoutingKey(ASGIMiddleware):
    """Routes all generations of a request with the header ``X-SMG-Routing-Key`` to the engine of that key."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        key = next((value for name, value in scope["headers"] if name == _ROUTING_KEY), b"")
        with routed_by(key.decode("latin-1") or None):
            await next_app(scope, receive, send)


def routing_key(given: object) -> str | None:
    """Return the key of the header, else ``given`` if it is a text or a number."""
    own = str(given) if isinstance(given, str | int) else ""
    return current_routing_key() or own or None


async def makes_tokens(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Refuse a request for tokens of a pipeline. A coroutine, since other guards each take a thread."""
    if _front(connection).options.makes_images:
        raise Unsupported(
            f"{min(handler.paths)} needs a language model, and this engine makes images: "
            "call /v1/images/generations or /rollout/generate",
            field="model",
        )


async def makes_images(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    if not _front(connection).options.makes_images:
        raise Unsupported(
            f"{min(handler.paths)} needs a diffusion pipeline to make an image, and this engine serves a "
            "language model: call /generate, /v1/completions or /v1/chat/completions",
            field="model",
        )


def _front(connection: ASGIConnection[Any, Any, Any, Any]) -> FrontEnd:
    found: FrontEnd = connection.app.state.front
    return found


def generating(
    path: str | list[str], struct: type, *, body: str = "prompts", guard: Guard = makes_tokens, **more: Any
) -> Callable[[AnyCallable], HTTPRouteHandler]:
    """Make a handler the route of a user by POST, whose body is a ``struct`` of the size class ``body``."""
    opt = {"access": "user", "body": body, "struct": struct}
    return post(path, status_code=200, opt=opt, guards=[guard], **more)
