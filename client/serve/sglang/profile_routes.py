"""SGLang's routes that record a trace of steps with torch's profiler.

Invariant: the engine decides where files may lie and when a trace ends; nothing of a trace passes through here.
"""

from litestar import Response, route
from litestar.handlers import HTTPRouteHandler

from ....io_struct import StartProfileReqOutput, StopProfileReqOutput
from ...exceptions import Unsupported
from ..context import Front
from ..exchange import HTTPRequest, read_control, succeed
from .control_schema import StartProfileBody, StopProfileBody


@route("/start_profile", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def start_profile(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Record the next steps; the answer names the file that will be written."""
    body = await read_control(request, StartProfileBody)

    async def start() -> StartProfileReqOutput:
        if asked := [name for name in body.REFUSED if getattr(body, name)]:
            raise Unsupported(f"{asked[0]} is not supported", field=asked[0])
        return await front.client.start_profile(
            body.output_dir,
            num_steps=body.num_steps,
            activities=body.activities,
            with_stack=body.with_stack,
            record_shapes=body.record_shapes,
        )

    return await succeed(front, "start_profile", "Profiling has started.", start())


@route("/stop_profile", http_method=["GET", "POST"], status_code=200, opt={"access": "admin"})
async def stop_profile(request: HTTPRequest, front: Front) -> Response[bytes]:
    """End the trace; answered when its file is written."""
    await read_control(request, StopProfileBody)

    async def stop() -> StopProfileReqOutput:
        return await front.client.stop_profile()

    return await succeed(front, "stop_profile", "The trace is written.", stop())


ROUTES: list[HTTPRouteHandler] = [start_profile, stop_profile]
