"""SGLang's routes for pause, continue, flush, memory, version labels and the weights checker.

Invariants: all state is in the engine; a refusal changes nothing; all HTTP clients count as one owner, so any of them can
continue the pause of another, and the pause of another owner needs ``force``.
"""

from typing import Annotated

import msgspec
from litestar import Response, post, route
from litestar.exceptions import ClientException
from litestar.handlers import HTTPRouteHandler

from ....io_struct import CaesuraError, ErrorCode, WeightsCheckerReqOutput, WeightUpdateReqOutput
from ...exceptions import NoSession, Unsupported
from ..context import Front, FrontEnd
from ..errors import json_response, native_error, status_of
from ..exchange import HTTPRequest, acknowledge, command, failure, query_of, read_control, succeed
from .control_schema import (
    CheckerBody,
    ContinueBody,
    PauseBody,
    PostProcessBody,
    Strict,
    TagsBody,
    VersionBody,
)
from .update_routes import bound

MAX_FLUSH_WAIT_S = 3600
"""Longest that a flush may be asked to wait for idleness."""


class _FlushQuery(Strict, kw_only=True):
    timeout: Annotated[float, msgspec.Meta(ge=0, le=MAX_FLUSH_WAIT_S)] = 0.0
    torch_empty_cache: bool = True
    force: bool = False


@post("/pause_generation", status_code=200, opt={"access": "admin"})
async def pause_generation(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Stop at the next step; answered when no step is in flight."""
    body = await read_control(request, PauseBody)
    work = front.client.pause(body.mode, lease_s=body.lease_s, on_lease_expiry=body.on_lease_expiry)
    return await acknowledge(front, "pause_generation", "Generation paused successfully.", work)


@post("/continue_generation", status_code=200, opt={"access": "admin"})
async def continue_generation(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Go on, after the device allocator's unused blocks have been returned."""
    body = await read_control(request, ContinueBody)
    work = front.client.continue_generation(torch_empty_cache=body.torch_empty_cache, force=body.force)
    return await acknowledge(front, "continue_generation", "Generation continued successfully.", work)


_FLUSH_REFUSALS: dict[str, str] = {
    ErrorCode.NOT_IDLE: "Flush cache failed.",
    ErrorCode.BUSY: "Another flush_cache is already in progress.",
    ErrorCode.DEADLINE_EXCEEDED: "Timed out waiting for idle state.",
}


@route("/flush_cache", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def flush_cache(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Clear the prefix cache of an idle engine; trainers poll this, so a refusal is 400, in plain text."""
    query = query_of(request, _FlushQuery)
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        raise ClientException("the options of /flush_cache stand in its query (?timeout=30), not in a body")
    work = front.client.flush_cache(
        torch_empty_cache=query.torch_empty_cache, timeout_s=query.timeout, force=query.force
    )
    try:
        reply = await command(front, "flush_cache", work)
    except CaesuraError as error:
        timed_out = error.code == ErrorCode.NOT_IDLE and query.timeout > 0
        code = ErrorCode.DEADLINE_EXCEEDED if timed_out else error.code
        text = f"{_FLUSH_REFUSALS.get(code, 'Flush cache failed.')} {error.message}\n"
        status = 400 if code in _FLUSH_REFUSALS else status_of(error)
        return Response(text.encode(), status_code=status, media_type="text/plain")
    text = f"Cache flushed. {reply.freed_tokens} cached tokens were dropped.\n"
    return Response(text.encode(), media_type="text/plain")


@route("/release_memory_occupation", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def release_memory_occupation(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Give device memory back; harmless where it is released already."""
    body = await read_control(request, TagsBody)
    try:
        if not front.options.enable_memory_saver:
            raise Unsupported("releasing memory is off: start the server with --enable-memory-saver")
        await command(front, "release_memory_occupation", front.client.release_memory(body.tags))
    except CaesuraError as error:
        return native_error(error.message, status_of(error), error.code)
    return json_response(None)


@route("/resume_memory_occupation", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def resume_memory_occupation(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Take released memory back; harmless where it is resident."""
    body = await read_control(request, TagsBody)
    try:
        await command(front, "resume_memory_occupation", front.client.resume_memory(body.tags))
    except CaesuraError as error:
        return native_error(error.message, status_of(error), error.code)
    return json_response(None)


@post("/update_weight_version", status_code=200, opt={"access": "admin"})
async def update_weight_version(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Give the present weights another label: a commit of its own, in which nothing is written."""
    body = bound(request, await read_control(request, VersionBody))
    try:
        await command(front, "update_weight_version", _relabel(front, body))
    except CaesuraError as error:
        return failure(error)
    message = f"Weight version updated to {body.new_version}"
    return json_response({"success": True, "message": message, "new_version": str(body.new_version)})


async def _relabel(front: FrontEnd, body: VersionBody) -> WeightUpdateReqOutput:
    if body.session_id is not None:  # of one that is open, the begin below is refused
        session = (await front.client.status()).session
        if session is None or session.session_id != body.session_id:
            raise NoSession(f"the weight session {body.session_id} is not open")
    async with front.client.weight_update(weight_version=body.new_version) as update:
        if body.abort_all_requests:
            status = await front.client.status()
            if status.weights != "valid":  # the commit would be refused, with the requests gone
                raise CaesuraError(
                    ErrorCode.WEIGHT_MISMATCH, f"the weights are {status.weights}: update all of them first"
                )
            await front.client.abort(abort_all=True)
    if update.result is None:
        raise CaesuraError(ErrorCode.INTERNAL, "the engine has not committed")
    return update.result


@route("/weights_checker", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def weights_checker(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Checksums of the weights, or a comparison with those of an earlier snapshot."""
    body = await read_control(request, CheckerBody)
    if body.skip_tensor_list:
        raise ClientException("skip_tensor_list is not supported")
    try:
        reply = await command(front, "weights_checker", front.client.check_weights(body.action))
    except CaesuraError as error:
        return failure(error)
    return _proof(body, reply)


def _proof(body: CheckerBody, reply: WeightsCheckerReqOutput) -> Response[bytes]:
    if body.action == "compare" and reply.changed:
        message = f"{len(reply.changed)} tensors differ from the snapshot"
        return json_response({"success": False, "message": message, "changed": reply.changed}, 400)
    answer: dict[str, object] = {"success": True, "message": "Success."}
    if body.action == "checksum":
        place = [{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1}]
        rank = {
            "checksums": reply.checksums,
            "per_gpu_checksum": reply.total,
            "parallelism_info": place,
        }
        answer |= {"ranks": [rank], "per_engine_checksum": reply.total}
    return json_response(answer)


@post("/post_process_weights", status_code=200, opt={"access": "admin"})
async def post_process_weights(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Nothing: weights are laid out while they are written, and derived from once, at commit."""
    await read_control(request, PostProcessBody)

    async def nothing() -> None:
        """What is to be done."""

    message = "Nothing to do: layouts and derived tensors are made when an update commits."
    return await succeed(front, "post_process_weights", message, nothing())


ROUTES: list[HTTPRouteHandler] = [
    pause_generation,
    continue_generation,
    flush_cache,
    release_memory_occupation,
    resume_memory_occupation,
    update_weight_version,
    weights_checker,
    post_process_weights,
]
