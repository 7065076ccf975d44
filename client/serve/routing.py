"""Which of several engines a request of HTTP goes to: that of the session that its header names.

Invariant: a key chooses among the engines and does nothing else; with one engine it is not read.
"""

from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from ..group.router import current_routing_key, routed_by

HEADER = "X-SMG-Routing-Key"
"""That of sglang-router and its successor smg."""
_NAME = HEADER.lower().encode()


class RoutingKey(ASGIMiddleware):
    """Generations of a request with the header go to the engine of its key."""

    async def handle(self, scope: Scope, receive: Receive, send: Send, next_app: ASGIApp) -> None:
        key = next((value for name, value in scope["headers"] if name == _NAME), b"")
        with routed_by(key.decode("latin-1") or None):
            await next_app(scope, receive, send)


def key_of(*given: object) -> str | None:
    """The header's key, else the first of ``given`` that is a text or a number."""
    own = (str(each) for each in given if isinstance(each, str | int) and str(each))
    return current_routing_key() or next(own, None)
