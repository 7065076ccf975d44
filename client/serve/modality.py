"""What the engine behind a server makes, tokens or images, and which routes go with which.

Invariant: a route of the other kind is refused before its body is read, with ``unsupported`` and what to call instead.
"""

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from ..exceptions import Unsupported
from .context import FrontEnd


def makes_tokens(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guard of routes for language models.

    Raises:
        Unsupported: the engine makes images.
    """
    if _front(connection).options.makes_images:
        raise Unsupported(
            f"{_path(handler)} needs a language model, and this engine makes images: "
            "call /v1/images/generations or /rollout/generate",
            field="model",
        )


def makes_images(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Guard of routes for diffusion pipelines.

    Raises:
        Unsupported: the engine makes tokens.
    """
    if not _front(connection).options.makes_images:
        raise Unsupported(
            f"{_path(handler)} needs a diffusion pipeline to make an image, and this engine serves a language model: "
            "call /generate, /v1/completions or /v1/chat/completions",
            field="model",
        )


def _front(connection: ASGIConnection[Any, Any, Any, Any]) -> FrontEnd:
    found: FrontEnd = connection.app.state.front
    return found


def _path(handler: BaseRouteHandler) -> str:
    return min(handler.paths)
