"""``/openapi.json``: every route with the schema of its body or query, made from the structs that read them.

Invariants: a route's struct stands in its ``opt``: ``struct`` for a body, ``query`` for a query alone. A body
that may also stand in the query is described as a body.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from .... import __version__
from ..bodies import HTTPRequest
from ..error_responses import json_bytes

_REFERENCE = "#/components/schemas/{name}"


@get("/openapi.json", opt={"access": "open"})
async def openapi(request: HTTPRequest) -> Response[bytes]:
    """Return the description of this server's routes, in OpenAPI 3.1."""
    handlers = {
        id(handler): handler
        for route in request.app.routes
        for handler in getattr(route, "route_handlers", ())
        if isinstance(handler, HTTPRouteHandler)
    }
    return json_bytes(_encoded(tuple(handlers.values())))


@cache
def _encoded(handlers: tuple[HTTPRouteHandler, ...]) -> bytes:
    return msgspec.json.encode(document(handlers))


def document(handlers: Iterable[HTTPRouteHandler]) -> dict[str, Any]:
    handlers = list(handlers)
    with_bodies = [handler for handler in handlers if not handler.http_methods <= {"GET", "HEAD", "OPTIONS"}]
    structs = [handler.opt["struct"] for handler in with_bodies if "struct" in handler.opt]
    schemas, components = msgspec.json.schema_components(structs, ref_template=_REFERENCE)
    by_struct = dict(zip(structs, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for handler in handlers:
        for path in sorted(handler.paths):
            template = re.sub(r"{(\w+):\w+}", r"{\1}", path)
            for method in sorted(handler.http_methods - {"HEAD", "OPTIONS"}):
                operation = _operation(handler, template, method, by_struct)
                paths.setdefault(template, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Caesura", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    handler: HTTPRouteHandler,
    path: str,
    method: str,
    by_struct: dict[type, dict[str, Any]],
) -> dict[str, Any]:
    summary = (handler.fn.__doc__ or "").strip().partition("\n")[0]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if (query := handler.opt.get("query")) is not None:
        fields = msgspec.json.schema_components([query])[1][query.__name__]["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^0-9a-zA-Z]+', '_', path)}",
        "responses": {"200": {"description": "OK"}, "default": {"description": "An error"}},
    }
    if summary:
        operation["summary"] = summary
    if parameters:
        operation["parameters"] = parameters
    struct = handler.opt.get("struct")
    if struct is not None and method != "GET":
        operation["requestBody"] = {"content": {"application/json": {"schema": by_struct[struct]}}}
    if handler.opt.get("access") != "open":
        operation["security"] = [{}, {"key": []}]
    return operation
