"""Sessions of turns over HTTP: begun, read as training samples, ended, in the words of several clients."""

from typing import Annotated, Any

import msgspec
from litestar import Response, delete, get
from litestar.params import FromPath

from ..exceptions import EngineError, SessionGone
from .bodies import Strict
from .commands import Form, command
from .context import Front, FrontEnd
from .error_responses import json_response
from .openai.common import SessionId

_USER = {"access": "user"}
_ANSWER = Form(lambda _, found: found)


class SessionBody(Strict, kw_only=True):
    session_id: SessionId | None = None
    """Null: a random one."""
    lease_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds without a call after which it expires. Null: ``--session-lease-s``."""


@command("/sessions", _ANSWER, access="user")
async def begin_session(front: FrontEnd, body: SessionBody) -> dict[str, Any]:
    """Begin a session, which a call with a new id does as well."""
    return {"session_id": front.sessions.open(body.session_id, body.lease_s)}


class OpenBody(Strict, kw_only=True):
    session_id: SessionId | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Seconds without a call after which it expires."""
    # accepted and ignored
    capacity_of_str_len: int | None = None
    streaming: bool | None = None


@command("/open_session", _ANSWER, access="user")
async def open_session(front: FrontEnd, body: OpenBody) -> str:
    """Begin a session, as SGLang's clients do; the answer is its id."""
    return front.sessions.open(body.session_id, body.timeout)


class CloseBody(Strict, kw_only=True):
    session_id: SessionId


@command(["/close_session", "/finish_session"], _ANSWER, access="user")
async def close_session(front: FrontEnd, body: CloseBody) -> dict[str, Any]:
    """End a session, in the words of SGLang and SkyRL."""
    return await _finish(front, body.session_id)


@get(["/sessions/{session_id:str}", "/sessions/{session_id:str}/samples"], opt=_USER)
async def session_samples(front: Front, session_id: FromPath[str]) -> Response[bytes]:
    """Return the training samples of a session, one for each leaf of its tree."""
    return json_response(await front.workers.run(lambda: front.sessions.export(session_id)))


@delete("/sessions/{session_id:str}", opt=_USER, status_code=200)
async def end_session(front: Front, session_id: FromPath[str]) -> Response[bytes]:
    """End a session: its pages are evicted first."""
    return json_response(await _finish(front, session_id))


async def _finish(front: FrontEnd, session_id: str) -> dict[str, Any]:
    if not front.sessions.finish(session_id):
        front.sessions.export(session_id)  # says why
        raise SessionGone(f"the session {session_id!r} is gone", reason="unknown")
    try:
        await front.client.end_prefix_leases(front.sessions.take_ended(), timeout=1.0)
    except EngineError:  # the engine's leases end by time
        pass
    return {"session_id": session_id, "finished": True}
