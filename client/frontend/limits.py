"""Bounds on what one HTTP request may carry.

Invariant: a body over its limit is refused while it arrives, or before where its length is announced; it is never held whole.
"""

from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send

from .context import ServeOptions
from .errors import BodyTooLarge, send_error


class BodyLimit(ASGIMiddleware):
    """Answers 413 to a body over ``max_body_bytes``, or over ``max_update_bytes`` on routes with ``opt["body"] == "weights"``."""

    def __init__(self, options: ServeOptions) -> None:
        self._plain = options.max_body_bytes
        self._weights = options.max_update_bytes

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        limit = self._weights if scope["route_handler"].opt.get("body") == "weights" else self._plain
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > limit:
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
