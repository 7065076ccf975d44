"""Limits on the size of an HTTP request, by route.

Invariants: a body over its limit is refused while it arrives, or before where its length is announced; it is never held whole.
A route that says nothing takes the least. Over the limit of connections only commands and questions are answered.
"""

from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send

from .connections import RESERVED
from .context import ServeOptions
from .errors import BodyTooLarge, send_error

MAX_COMMAND_BYTES = 1 << 20
MAX_SPECS_BYTES = 16 << 20
"""Of names and shapes of a hundred thousand tensors."""
MAX_TEXT_BYTES = 4 << 20
"""Of conversations and of text that is not generated from: decoded in one piece, so that nothing else runs meanwhile."""
BINARY_TYPES = ("application/octet-stream", "application/x-safetensors")
_GENERATING = ("prompts", "text")


class BodyLimit(ASGIMiddleware):
    """Answers 413 to a body over the limit of ``opt["body"]``: ``prompts``, ``text``, ``specs``, ``weights``, or none of these."""

    def __init__(self, options: ServeOptions) -> None:
        most = options.max_body_bytes
        self._limits = {
            "prompts": most,
            "weights": most,
            "text": min(most, MAX_TEXT_BYTES),
            "specs": min(most, MAX_SPECS_BYTES),
        }
        self._command = min(most, MAX_COMMAND_BYTES)
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
        seen = 0

        async def counted() -> HTTPReceiveMessage:
            nonlocal seen
            message: HTTPReceiveMessage = await receive()  # type: ignore[assignment]
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise BodyTooLarge(f"a body is over the limit of {limit} bytes")
            return message

        await next_app(scope, counted, send)


def is_binary(content_type: str) -> bool:
    """Whether a body is a safetensors file rather than JSON."""
    return content_type.partition(";")[0].strip().lower() in BINARY_TYPES
