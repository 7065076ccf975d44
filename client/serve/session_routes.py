"""Sessions of turns over HTTP: begun, read as training samples, ended, in the words of several clients."""

import asyncio
from contextlib import suppress
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

EXPIRY_S = 1.0
"""Seconds between two looks for sessions that have expired."""
TOLD_S = 1.0
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
    streaming: bool | None = None
    """A request with ``session_params`` goes on from the newest one unless it names another."""
    # accepted and ignored
    capacity_of_str_len: int | None = None


@command("/open_session", _ANSWER, access="user")
async def open_session(front: FrontEnd, body: OpenBody) -> str:
    """Begin a session, as SGLang's clients do; the answer is its id."""
    return front.sessions.open(body.session_id, body.timeout, streaming=bool(body.streaming))


class CloseBody(Strict, kw_only=True):
    session_id: SessionId


@command(["/close_session", "/finish_session"], _ANSWER, access="user")
async def close_session(front: FrontEnd, body: CloseBody) -> dict[str, Any]:
    """End a session, in the words of SGLang and SkyRL."""
    return await _finish(front, body.session_id)


@get(["/sessions/{session_id:str}", "/sessions/{session_id:str}/samples"], opt=_USER)
async def session_samples(front: Front, session_id: FromPath[str]) -> Response[bytes]:
    """Return the training samples of a session, one for each leaf of its tree."""
    return json_response(await front.workers.run(lambda: front.store_of(session_id).export(session_id)))


@delete("/sessions/{session_id:str}", opt=_USER, status_code=200)
async def end_session(front: Front, session_id: FromPath[str]) -> Response[bytes]:
    """End a session: its pages are evicted first."""
    return json_response(await _finish(front, session_id))


async def _finish(front: FrontEnd, session_id: str) -> dict[str, Any]:
    store = front.store_of(session_id)
    if not store.finish(session_id):
        store.export(session_id)  # says why
        raise SessionGone(f"the session {session_id!r} is gone", reason="unknown")
    await _end_leases(front)
    return {"session_id": session_id, "finished": True}


async def tell_ended(front: FrontEnd) -> None:
    """End the engine's leases of sessions as they go, and let sessions expire; never return."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    for store in (front.sessions, front.responses):
        store.subscribe(lambda: loop.call_soon_threadsafe(changed.set))
    while True:
        await _end_leases(front)
        with suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), EXPIRY_S)
        changed.clear()


async def _end_leases(front: FrontEnd) -> None:
    for store in (front.sessions, front.responses):
        if names := store.take_ended():
            with suppress(EngineError):  # its leases end by time
                await front.client.end_prefix_leases(names, timeout=TOLD_S)
