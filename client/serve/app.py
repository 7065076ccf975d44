"""The Litestar application: all routes of a :class:`FrontEnd`, with one key check and one limit on bodies.

Invariant: a route without an access class is refused to everybody, so a forgotten one cannot open anything.
"""

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.handlers import HTTPRouteHandler

from .auth import AuthMiddleware
from .context import Front, FrontEnd, ServeOptions
from .errors import EXCEPTION_HANDLERS
from .limits import BodyLimit
from .openai import chat, completions, images, models
from .pages import dashboard, metrics
from .routing import RoutingKey
from .sglang import (
    control_routes,
    generate_routes,
    info_routes,
    profile_routes,
    rollout_routes,
    update_routes,
)
from .vllm import control_routes as vllm_control_routes
from .vllm import token_routes

__all__ = ["Front", "FrontEnd", "ServeOptions", "create_app"]

_MODULES = (
    generate_routes,
    rollout_routes,
    control_routes,
    update_routes,
    profile_routes,
    info_routes,
    completions,
    chat,
    images,
    models,
    token_routes,
    vllm_control_routes,
    metrics,
    dashboard,
)


def create_app(front: FrontEnd) -> Litestar:
    """The ASGI application; closing ``front.client`` is its caller's."""

    async def provide() -> FrontEnd:
        return front

    several = [] if front.fleet is None else [RoutingKey()]
    return Litestar(
        route_handlers=_routes(),
        dependencies={"front": Provide(provide)},
        middleware=[AuthMiddleware(front.options), BodyLimit(front.options), *several],
        exception_handlers=EXCEPTION_HANDLERS,
        state=State({"front": front}, deep_copy=False),
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,  # limits.py does it, by route
    )


def _routes() -> list[HTTPRouteHandler]:
    return [route for module in _MODULES for route in module.ROUTES]
