"""Pause and resume as vLLM 0.33 does, weights from a folder and liveness as prime-rl 0.8.0 asks for them.

Invariants: an error that a retry cannot mend is 4xx, which prime-rl does not repeat. A pause that clears the
cache leaves no KV of earlier weights, neither a request's nor the prefix cache's.
"""

from pathlib import PurePath
from typing import Literal

from litestar import Response, get, post

from ....io_struct import CaesuraError
from ...exceptions import Unsupported, WeightMismatch
from ..bodies import HTTPRequest, Strict, read_control
from ..commands import Form, answered, command
from ..context import Front, FrontEnd
from ..errors import json_response
from ..generations import ClientLeft, client_left, unless_left
from ..sglang.updates import DiskBody, from_disk, uncommitted


def _status(word: str) -> Form:
    return Form(lambda *_: {"status": word})


class PauseOptions(Strict, kw_only=True):
    """In the query or in the body."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True
    """With ``keep`` also the KV of the requests, which is computed again."""


@post("/pause", status_code=200, opt={"access": "admin"})
async def pause(request: HTTPRequest, front: Front) -> Response[bytes]:
    options = await read_control(request, PauseOptions, query=True)
    answer = answered(front, "pause_generation", _status("paused"), options, _pause(front, options))
    if options.mode != "wait":
        return await answer
    try:
        return await unless_left(request, answer)
    except ClientLeft:
        return client_left()


async def _pause(front: FrontEnd, options: PauseOptions) -> None:
    if options.mode == "keep":
        front.admission.open()
        await front.client.pause("retract" if options.clear_cache else "in_place")
    else:
        async with front.admission.refusing(drain=options.mode == "wait"):
            await front.client.pause("abort" if options.mode == "abort" else "retract")
    if options.clear_cache:
        await front.client.flush_cache()


@get("/is_paused", opt={"access": "user"})
async def is_paused(front: Front) -> Response[bytes]:
    """Return true also while the last requests are waited for."""
    paused = front.admission.pausing or (await front.health.status()).generation != "running"
    return json_response({"is_paused": paused})


@post("/resume", status_code=200, opt={"access": "admin"})
async def resume(front: Front) -> Response[bytes]:
    """Go on, after the device allocator's unused blocks have been returned."""
    front.admission.open()
    work = front.client.continue_generation()
    return await answered(front, "continue_generation", _status("resumed"), None, work)


class WeightsBody(Strict, kw_only=True):
    weight_dir: str | None = None


@command("/update_weights", _status("ok"), name="update_weights_from_disk")
async def update_weights(front: FrontEnd, body: WeightsBody) -> None:
    """Load a checkpoint folder under its name as label; requests keep their KV, the prefix cache goes."""
    if body.weight_dir is None:
        raise Unsupported(
            'weight_dir is missing: weights are taken from a folder (weight_broadcast.type = "filesystem")',
            field="weight_dir",
        )
    label = PurePath(body.weight_dir).name
    given = DiskBody(model_path=body.weight_dir, weight_version=label, flush_cache=False)
    reply = await from_disk(front, given)
    if not reply.committed:
        raise WeightMismatch(uncommitted(reply))


@get("/liveness", opt={"access": "open"})
async def liveness(front: Front) -> Response[bytes]:
    try:
        await front.health.check()
    except CaesuraError:
        return json_response({"status": "engine_unresponsive"}, 503)
    return json_response({"status": "ok"})
