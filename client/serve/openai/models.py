"""``/v1/models``: the served model, whose id never changes while the server runs."""

import contextlib
from pathlib import Path
from typing import Any

from litestar import Response, get
from litestar.params import FromPath

from ..context import Front, FrontEnd
from ..error_responses import json_response
from .common import EXCEPTION_HANDLERS, check_model


def _card(front: FrontEnd) -> dict[str, Any]:
    options = front.options
    return {
        "id": options.model_name,
        "object": "model",
        "created": _modified(options.model_path),
        "owned_by": "caesura",
        "root": options.model_path or options.model_name,
        "parent": None,
        "max_model_len": None if options.makes_images else options.context_length,
    }


def _modified(model_path: str) -> int:
    """Return the checkpoint's time in seconds since 1970; 0 if this machine cannot see it."""
    for name in ("config.json", "model_index.json"):
        with contextlib.suppress(OSError):
            return int((Path(model_path) / name).stat().st_mtime)
    return 0


@get("/v1/models", opt={"access": "user"}, exception_handlers=EXCEPTION_HANDLERS, sync_to_thread=False)
def list_models(front: Front) -> Response[bytes]:
    return json_response({"object": "list", "data": [_card(front)]})


@get(
    "/v1/models/{name:path}",
    opt={"access": "user"},
    exception_handlers=EXCEPTION_HANDLERS,
    sync_to_thread=False,
)
def get_model(front: Front, name: FromPath[str]) -> Response[bytes]:
    """Return the model of that name, which may contain slashes."""
    # A name that is a path begins with the slash that the route takes off.
    check_model(front, name if name == front.options.model_name else name.removeprefix("/"))
    return json_response(_card(front))
