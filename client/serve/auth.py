"""Authorization: the only place where API keys are checked.

Invariants:
- Every route says ``opt={"access": "open" | "user" | "admin"}``; what says nothing is treated as ``admin``.
- ``admin`` (whatever changes the engine) needs the admin key; where none is set, the API key; where neither is set, nothing
  (a server without keys binds loopback only, or was told to let everybody in). ``user`` needs the API key where one is set; the admin key opens it too.
- Keys are compared in constant time and appear in no log, error or answer.
- A page of another origin cannot use a server without keys through its reader's browser, also where its name has been made to
  point at this machine (DNS rebinding): a request must then name this machine, or the address that the server was given.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from litestar.middleware import ASGIMiddleware
from litestar.types import ASGIApp, Receive, Scope, Send

from .context import ServeOptions
from .errors import send_error

ACCESS_CLASSES = frozenset({"open", "user", "admin"})


class AuthMiddleware(ASGIMiddleware):
    """Answers 401 or 403 if the caller may not use the route."""

    def __init__(self, options: ServeOptions) -> None:
        api, admin = _key(options.api_key), _key(options.admin_key)
        self._user_keys = [key for key in (api, admin) if key] if api else []
        self._admin_keys = [key for key in (admin or api,) if key]
        self._host = None if options.any_host else options.host.lower()

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
            given = _bearer(headers.get(b"authorization", b""))
            if not any([hmac.compare_digest(given, key) for key in keys]):  # noqa: C419 (all of them: constant time)
                return 401, "Unauthorized"
        elif _from_other_site(headers):
            return 403, "Forbidden: this server has no key, so pages of other sites may not use it"
        elif not self._is_named(headers.get(b"host")):
            return 403, "Forbidden: this server has no key, so requests must name it as this machine (Host)"
        return None

    def _is_named(self, host: bytes | None) -> bool:
        """Whether ``Host`` names this machine or the address listened on; every browser sends one."""
        if host is None or self._host is None:
            return True
        name = _hostname("//" + host.decode("latin-1"))
        return name is not None and (is_loopback(name) or name == self._host)


def _key(value: str | None) -> bytes:
    return value.encode() if value else b""


def _bearer(header: bytes) -> bytes:
    scheme, _, token = header.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _from_other_site(headers: dict[bytes, bytes]) -> bool:
    """Whether a browser sent this for a page that is not this machine's own."""
    if headers.get(b"sec-fetch-site", b"none") == b"cross-site":
        return True
    origin = headers.get(b"origin")
    if origin is None:
        return False
    host = _hostname(origin.decode("latin-1"))
    return host is None or not is_loopback(host)


def _hostname(url: str) -> str | None:
    """In lower case, without brackets and port; None where there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
