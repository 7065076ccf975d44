"""SGLang's routes for pause, continue, flush, memory and profiling, with its names and defaults.

Invariants: a refusal changes nothing; all HTTP clients are one owner, and another's pause needs ``force``. A
test compares the ignored and refused fields with ``docs/``.
"""

from typing import Annotated, Any, ClassVar

import msgspec
from litestar import HttpMethod, Response, route
from litestar.exceptions import ClientException

from ....io_struct import CaesuraError, ErrorCode, FlushCacheReqOutput, MemoryTag, PauseMode, TraceActivity
from ....io_struct.control import LeaseAction, PositiveDuration, TraceName, TraceStage, TraceSteps
from ...exceptions import Unsupported
from ..bodies import HTTPRequest, Strict, query_of
from ..commands import Form, acknowledgement, answered, command, success
from ..context import Front, FrontEnd
from ..error_responses import status_of

MAX_FLUSH_WAIT_S = 3600
EITHER = (HttpMethod.GET, HttpMethod.POST)
NULL = Form(lambda *_: None)


class PauseBody(Strict, kw_only=True):
    mode: PauseMode = "abort"
    lease_s: PositiveDuration | None = None
    """Caesura's own, as below: seconds without a command of any HTTP client."""
    on_lease_expiry: LeaseAction = "continue"


@command("/pause_generation", acknowledgement("Generation paused successfully."))
async def pause_generation(front: FrontEnd, body: PauseBody) -> object:
    """Answer when no step is in flight."""
    lease_s = front.options.pause_lease if body.lease_s is None else body.lease_s
    return await front.client.pause(body.mode, lease_s=lease_s, on_lease_expiry=body.on_lease_expiry)


class ContinueBody(Strict, kw_only=True):
    torch_empty_cache: bool = True
    force: bool = False


@command("/continue_generation", acknowledgement("Generation continued successfully."))
async def continue_generation(front: FrontEnd, body: ContinueBody) -> object:
    return await front.client.continue_generation(torch_empty_cache=body.torch_empty_cache, force=body.force)


class _FlushQuery(Strict, kw_only=True):
    timeout: Annotated[float, msgspec.Meta(ge=0, le=MAX_FLUSH_WAIT_S)] = 0.0
    torch_empty_cache: bool = True
    force: bool = False


_FLUSH_REFUSALS: dict[str, str] = {
    ErrorCode.NOT_IDLE: "Flush cache failed.",
    ErrorCode.BUSY: "Another flush_cache is already in progress.",
    ErrorCode.DEADLINE_EXCEEDED: "Timed out waiting for idle state.",
}


@route("/flush_cache", http_method=EITHER, status_code=200, opt={"access": "admin", "query": _FlushQuery})
async def flush_cache(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Clear the prefix cache of an idle engine; trainers poll this, so a refusal is 400, in plain text."""
    query = query_of(request, _FlushQuery)
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        raise ClientException("the options of /flush_cache stand in its query (?timeout=30), not in a body")

    def flushed(_: object, reply: FlushCacheReqOutput) -> Response[bytes]:
        return _text(f"Cache flushed. {reply.freed_tokens} cached tokens were dropped.", 200)

    def refused(error: CaesuraError) -> Response[bytes]:
        timed_out = error.code == ErrorCode.NOT_IDLE and query.timeout > 0
        code = ErrorCode.DEADLINE_EXCEEDED if timed_out else error.code
        status = 400 if code in _FLUSH_REFUSALS else status_of(error)
        return _text(f"{_FLUSH_REFUSALS.get(code, 'Flush cache failed.')} {error.message}", status)

    work = front.client.flush_cache(
        torch_empty_cache=query.torch_empty_cache, timeout_s=query.timeout, force=query.force
    )
    return await answered(front, "flush_cache", Form(flushed, refused), query, work)


def _text(line: str, status: int) -> Response[bytes]:
    return Response(f"{line}\n".encode(), status_code=status, media_type="text/plain")


class TagsBody(Strict, kw_only=True):
    tags: list[MemoryTag] | None = None


@command("/release_memory_occupation", NULL, *EITHER)
async def release_memory_occupation(front: FrontEnd, body: TagsBody) -> object:
    if not front.options.enable_memory_saver:
        raise Unsupported("releasing memory is off: start the server with --enable-memory-saver")
    return await front.client.release_memory(body.tags)


@command("/resume_memory_occupation", NULL, *EITHER)
async def resume_memory_occupation(front: FrontEnd, body: TagsBody) -> object:
    return await front.client.resume_memory(body.tags)


class StartProfileBody(Strict, kw_only=True):
    output_dir: str | None = None
    num_steps: TraceSteps | None = None
    activities: list[TraceActivity] | None = None
    with_stack: bool = False
    record_shapes: bool = False
    start_step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    profile_by_stage: bool = False
    profile_stages: list[TraceStage] | None = None
    """Stages with a file each; null: none, or both with ``profile_by_stage``."""
    profile_id: TraceName | None = None
    profile_prefix: TraceName | None = None
    # refused unless empty
    merge_profiles: Any = None

    REFUSED: ClassVar = ("merge_profiles",)


@command("/start_profile", success("Profiling has started."), *EITHER)
async def start_profile(front: FrontEnd, body: StartProfileBody) -> object:
    if body.merge_profiles:
        raise Unsupported("merge_profiles is not supported: rank 0 alone is recorded", field="merge_profiles")
    if body.profile_id is not None and front.fleet is not None:
        raise Unsupported(
            "profile_id would give the files of all replicas one name: leave it out", field="profile_id"
        )
    stages: list[TraceStage] | None = ["prefill", "decode"] if body.profile_by_stage else None
    return await front.client.start_profile(
        body.output_dir,
        num_steps=body.num_steps,
        activities=body.activities,
        with_stack=body.with_stack,
        record_shapes=body.record_shapes,
        start_step=body.start_step,
        stages=body.profile_stages or stages,
        profile_id=body.profile_id,
        prefix=body.profile_prefix,
    )


class StopProfileBody(Strict, kw_only=True):
    # accepted and ignored: SGLang's older benchmarks repeat what they gave /start_profile
    num_steps: Any = None
    start_step: Any = None


@command(["/stop_profile", "/end_profile"], success("The trace is written."), *EITHER, name="stop_profile")
async def stop_profile(front: FrontEnd, body: StopProfileBody) -> object:
    return await front.client.stop_profile()
