"""``/v1/models``: the served model, whose id never changes while the server runs."""

import contextlib
from pathlib import Path
from typing import Any

from litestar import Response, get
from litestar.params import FromPath

from ..context import Front, FrontEnd
from ..error_responses import json_response
from .common import EXCEPTION_HANDLERS, adapter_of, not_found


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


async def _cards(front: FrontEnd) -> list[dict[str, Any]]:
    card = _card(front)
    if not front.options.max_loras:
        return [card]
    adapters = (await front.health.status()).adapters
    loaded = {each.name: each.path for each in adapters if not each.replaced}
    return [
        card,
        *({**card, "id": name, "root": path, "parent": card["id"]} for name, path in loaded.items()),
    ]


@get("/v1/models", opt={"access": "user"}, exception_handlers=EXCEPTION_HANDLERS)
async def list_models(front: Front) -> Response[bytes]:
    return json_response({"object": "list", "data": await _cards(front)})


@get("/v1/models/{name:path}", opt={"access": "user"}, exception_handlers=EXCEPTION_HANDLERS)
async def get_model(front: Front, name: FromPath[str]) -> Response[bytes]:
    """Return the model or adapter of that name, which may contain slashes."""
    # A name that is a path begins with the slash that the route takes off.
    name = name if name == front.options.model_name else name.removeprefix("/")
    card, *adapters = await _cards(front)
    for each in adapters:
        if each["id"] == name:
            return json_response(each)
    if adapter_of(front, name) is not None:
        raise not_found(front, name)
    return json_response(card)
