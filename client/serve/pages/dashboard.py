"""``/dashboard``: a page with live figures of the engine, and the route of its data; ``/`` redirects to it.

Invariants: the page is the same for everybody; ``/dashboard/data`` needs a user's key, which the page keeps
in session storage and sends in a header. It answers in every state, with the last figures and their age.
"""

from time import time
from typing import Annotated

import msgspec
from litestar import MediaType, Response, get

from ....io_struct import GetMemoryHistoryReqOutput
from ...connection.async_control_client import AsyncControlClient
from ...exceptions import EngineError
from ...memory_view.record import model_label
from ..bodies import HTTPRequest, query_of
from ..context import NOBODY, Front
from .document import PageData, served
from .engine_watch import ANSWER_S


class _DataQuery(msgspec.Struct, kw_only=True):
    after: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] = 0
    """Number of the last memory event that the page has; bounded as numbers in scripts."""
    since: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    image: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


@get("/", opt={"access": "open"}, summary="To the page", status_code=307)
async def root() -> Response[bytes]:
    """Redirect to the page; relatively, so that it works behind a prefix, too."""
    return Response(b"", media_type=MediaType.TEXT, headers={"location": "dashboard"})


@get("/dashboard", opt={"access": "open"}, summary="The engine as a page")
async def page() -> Response[bytes]:
    content, policy = served()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return Response(content, media_type=MediaType.HTML, headers=headers)


@get("/dashboard/data", opt={"access": "user"}, summary="What the page shows")
async def data(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Return the next memory events after ``after``, ticks after ``since``, and the last image if new."""
    query = query_of(request, _DataQuery)
    engine = front.metrics.engine
    look = await engine.look(front.client)
    history = await _history(front.client, max(0, query.after)) if look.answered else None
    content = PageData(
        now=time(),
        answered=look.answered,
        age_s=look.age_s,
        throughput=look.throughput,
        model_name=front.options.served_model_name or model_label(front.options.model_path),
        status=look.status,
        history=history,
        ticks=engine.ticks.since(query.since),
        latencies=front.metrics.latencies(),
        update=engine.last_update,
        replicas=engine.replicas(),
        image=front.last_image.after(query.image),
    )
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(msgspec.json.encode(content), media_type="application/json", headers=headers)


async def _history(client: AsyncControlClient, after: int) -> GetMemoryHistoryReqOutput | None:
    try:
        return await client.memory_history(after=after, owner=NOBODY, timeout=ANSWER_S)
    except EngineError:
        return None
