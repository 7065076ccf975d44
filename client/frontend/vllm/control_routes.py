"""Pause, resume, weights from a folder and liveness as prime-rl asks its vLLM servers for them.

The routes and their answers are those of prime-rl 0.8.0 (src/prime_rl/utils/client.py, src/prime_rl/inference/vllm/server.py).

Invariants: each does what one of SGLang's routes does; what another try cannot mend is 4xx, which prime-rl does not repeat.
"""

from collections.abc import Coroutine
from pathlib import PurePath
from typing import Any, Literal

from litestar import Response, get, post
from litestar.handlers import HTTPRouteHandler

from ....io_struct import CaesuraError, PauseMode
from ...exceptions import Unsupported, WeightMismatch
from ..context import Front, FrontEnd
from ..errors import json_response, native_error, status_of
from ..exchange import HTTPRequest, command, query_of, read_control
from ..sglang.control_schema import DiskBody, Strict
from ..sglang.update_routes import from_disk, uncommitted

_MODES: dict[str, PauseMode] = {"abort": "abort", "keep": "in_place"}


class PauseQuery(Strict, kw_only=True):
    """``/pause``."""

    mode: Literal["abort", "keep"] = "abort"
    clear_cache: bool = True
    """With ``abort``. What ``keep`` leaves in place keeps its KV."""


class WeightsBody(Strict, kw_only=True):
    """``/update_weights``."""

    weight_dir: str | None = None


@post("/pause", status_code=200, opt={"access": "admin"})
async def pause(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Stop at the next step; ``keep`` freezes requests as they are."""
    query = query_of(request, PauseQuery)

    async def work() -> None:
        await front.client.pause(_MODES[query.mode])
        if query.mode == "abort" and query.clear_cache:
            await front.client.flush_cache()

    return await _answer(front, "pause_generation", work(), "paused")


@post("/resume", status_code=200, opt={"access": "admin"})
async def resume(front: Front) -> Response[bytes]:
    """Go on, after the device allocator's unused blocks have been returned."""
    return await _answer(front, "continue_generation", front.client.continue_generation(), "resumed")


@post("/update_weights", status_code=200, opt={"access": "admin"})
async def update_weights(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Load a checkpoint folder in place, under the folder's name as label. Requests keep their KV; the prefix cache of the
    weights before is not used any more."""
    body = await read_control(request, WeightsBody)

    async def work() -> None:
        if body.weight_dir is None:
            raise Unsupported(
                'weight_dir is missing: weights are taken from a folder (weight_broadcast.type = "filesystem")',
                field="weight_dir",
            )
        label = PurePath(body.weight_dir).name
        wire = DiskBody(model_path=body.weight_dir, weight_version=label, flush_cache=False)
        reply = await from_disk(front, wire)
        if not reply.committed:
            raise WeightMismatch(uncommitted(reply))

    return await _answer(front, "update_weights_from_disk", work(), "ok")


@get("/liveness", opt={"access": "open"})
async def liveness(front: Front) -> Response[bytes]:
    """200 while the engine answers, paused or not."""
    try:
        await front.health.check()
    except CaesuraError:
        return json_response({"status": "engine_unresponsive"}, 503)
    return json_response({"status": "ok"})


async def _answer(front: FrontEnd, name: str, work: Coroutine[Any, Any, Any], status: str) -> Response[bytes]:
    try:
        await command(front, name, work)
    except CaesuraError as error:
        return native_error(error.message, status_of(error), error.code)
    return json_response({"status": status})


ROUTES: list[HTTPRouteHandler] = [pause, resume, update_weights, liveness]
