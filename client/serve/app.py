"""The Litestar application. A route without an access class needs the admin key, so a forgotten one opens
nothing.
"""

from collections.abc import Sequence
from types import ModuleType

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.handlers import HTTPRouteHandler

from .context import Front, FrontEnd
from .errors import EXCEPTION_HANDLERS
from .middleware import AuthMiddleware, BodyLimit, RoutingKey
from .openai import chat, completions, images, models
from .options import ServeOptions
from .pages import dashboard, metrics
from .sglang import control, generate, info, rollout, tokenize, updates
from .vllm import control as vllm_control
from .vllm import tokens

__all__ = ["ROUTES", "Front", "FrontEnd", "ServeOptions", "create_app", "routes_of"]


def routes_of(*modules: ModuleType) -> list[HTTPRouteHandler]:
    """Return the routes that the modules define."""
    return [
        value for module in modules for value in vars(module).values() if isinstance(value, HTTPRouteHandler)
    ]


ROUTES = [
    *routes_of(generate, rollout, control, updates, info, tokenize, completions, chat, images, models),
    *routes_of(tokens, vllm_control, metrics, dashboard),
]


def create_app(front: FrontEnd, routes: Sequence[HTTPRouteHandler] = ROUTES) -> Litestar:
    async def provide() -> FrontEnd:
        return front

    replicas = [] if front.fleet is None else [RoutingKey()]
    return Litestar(
        route_handlers=routes,
        dependencies={"front": Provide(provide)},
        middleware=[AuthMiddleware(front.options), BodyLimit(front.options), *replicas],
        exception_handlers=EXCEPTION_HANDLERS,
        state=State({"front": front}, deep_copy=False),
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,  # BodyLimit does it, by route
    )
