"""SGLang's routes for pause, continue, flush, memory and profiling, with its names and defaults.

Invariants: a refusal changes nothing; all HTTP clients are one owner, so any of them can continue another's
pause, and that of another owner needs ``force``. A test compares the ignored and refused fields with
``docs/``.
"""

from typing import Annotated, Any, ClassVar

import msgspec
from litestar import Response, post, route
from litestar.exceptions import ClientException
from litestar.handlers import HTTPRouteHandler

from ....io_struct import CaesuraError, ErrorCode, MemoryTag, PauseMode, StartProfileReqOutput, TraceActivity
from ....io_struct.control import LeaseAction, PositiveDuration, TraceSteps
from ...exceptions import Unsupported
from ..bodies import HTTPRequest, Strict, query_of, read_control
from ..context import Front
from ..errors import json_response, status_of
from ..responses import acknowledge, command, succeed

MAX_FLUSH_WAIT_S = 3600


class PauseBody(Strict, kw_only=True):
    mode: PauseMode = "abort"
    lease_s: PositiveDuration | None = None
    """Caesura's own, as the two fields below: seconds without a command of any HTTP client."""
    on_lease_expiry: LeaseAction = "continue"


@post("/pause_generation", status_code=200, opt={"access": "admin"})
async def pause_generation(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Answer when no step is in flight."""
    body = await read_control(request, PauseBody)
    work = front.client.pause(body.mode, lease_s=body.lease_s, on_lease_expiry=body.on_lease_expiry)
    return await acknowledge(front, "pause_generation", "Generation paused successfully.", work)


class ContinueBody(Strict, kw_only=True):
    torch_empty_cache: bool = True
    force: bool = False


@post("/continue_generation", status_code=200, opt={"access": "admin"})
async def continue_generation(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, ContinueBody)
    work = front.client.continue_generation(torch_empty_cache=body.torch_empty_cache, force=body.force)
    return await acknowledge(front, "continue_generation", "Generation continued successfully.", work)


class _FlushQuery(Strict, kw_only=True):
    timeout: Annotated[float, msgspec.Meta(ge=0, le=MAX_FLUSH_WAIT_S)] = 0.0
    torch_empty_cache: bool = True
    force: bool = False


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


class TagsBody(Strict, kw_only=True):
    tags: list[MemoryTag] | None = None


@route("/release_memory_occupation", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def release_memory_occupation(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, TagsBody)
    if not front.options.enable_memory_saver:
        raise Unsupported("releasing memory is off: start the server with --enable-memory-saver")
    await command(front, "release_memory_occupation", front.client.release_memory(body.tags))
    return json_response(None)


@route("/resume_memory_occupation", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def resume_memory_occupation(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, TagsBody)
    await command(front, "resume_memory_occupation", front.client.resume_memory(body.tags))
    return json_response(None)


class StartProfileBody(Strict, kw_only=True):
    output_dir: str | None = None
    num_steps: TraceSteps | None = None
    activities: list[TraceActivity] | None = None
    with_stack: bool = False
    record_shapes: bool = False
    # accepted and ignored
    profile_prefix: Any = None
    # refused unless empty
    start_step: Any = None
    profile_by_stage: Any = None
    profile_stages: Any = None
    merge_profiles: Any = None

    REFUSED: ClassVar = ("start_step", "profile_by_stage", "profile_stages", "merge_profiles")


@route("/start_profile", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def start_profile(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, StartProfileBody)

    async def start() -> StartProfileReqOutput:
        if refused := [name for name in body.REFUSED if getattr(body, name)]:
            raise Unsupported(f"{refused[0]} is not supported", field=refused[0])
        return await front.client.start_profile(
            body.output_dir,
            num_steps=body.num_steps,
            activities=body.activities,
            with_stack=body.with_stack,
            record_shapes=body.record_shapes,
        )

    return await succeed(front, "start_profile", "Profiling has started.", start())


class StopProfileBody(Strict, kw_only=True):
    # accepted and ignored
    num_steps: Any = None
    """SGLang's older benchmarks repeat what they gave ``/start_profile``."""
    start_step: Any = None


@route("/stop_profile", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def stop_profile(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Answer when the file is written."""
    await read_control(request, StopProfileBody)
    return await succeed(front, "stop_profile", "The trace is written.", front.client.stop_profile())


ROUTES: list[HTTPRouteHandler] = [
    pause_generation,
    continue_generation,
    flush_cache,
    release_memory_occupation,
    resume_memory_occupation,
    start_profile,
    stop_profile,
]
