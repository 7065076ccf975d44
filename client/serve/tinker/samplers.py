"""Tinker's routes of sessions and samplers, and those by which its SDK begins."""

from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.exceptions import ServiceUnavailableException
from litestar.params import FromPath

from ....io_struct import new_id
from ....io_struct.field_errors import shown
from ...exceptions import InvalidRequest, UnknownAdapter
from ..bodies import HTTPRequest, read_control
from ..context import Front, FrontEnd
from ..error_responses import json_response
from ..openai.common import adapter_of, not_found
from .promises import Sampler, Session, version_of

SCHEME = "tinker://"
USER = {"access": "user"}
_CONFIG = {"sample_join_sampling_session": True}
_DYNAMIC_CONFIG = {"sample_cancel_enabled": True}


@get("/api/v1/healthz", opt=USER)
async def healthz(front: Front) -> Response[bytes]:
    await front.health.status()
    return json_response({"status": "ok"})


@get("/api/v1/get_server_capabilities", opt=USER)
async def get_server_capabilities(front: Front) -> Response[bytes]:
    options = front.options
    model = {"model_name": options.model_name, "max_context_length": options.context_length}
    uses = {"sampleable": True, "trainable": front.trainer is not None}
    return json_response({"supported_models": [{**model, **uses}]})


@post("/api/v1/client/config", opt=USER, status_code=200)
async def client_config() -> Response[bytes]:
    """Return how the SDK should work: clones of a client ask for a number of their own."""
    return json_response(_CONFIG)


@post("/api/v1/client/dynamic_config", opt=USER, status_code=200)
async def client_dynamic_config() -> Response[bytes]:
    """Return that the SDK should say which samples nobody waits for any more."""
    return json_response(_DYNAMIC_CONFIG)


@post("/api/v1/telemetry", opt=USER, status_code=200)
async def telemetry() -> Response[bytes]:
    """Drop what the SDK tells of its user."""
    return json_response({"status": "accepted"})


class SessionBody(msgspec.Struct, kw_only=True):
    session_id: str


@post("/api/v1/create_session", opt=USER, status_code=200)
async def create_session(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Begin a session, under the trainer's name for it if there is one."""
    name = new_id()
    if front.trainer is not None:
        answer = await front.trainer.pass_on(request)
        if answer.status_code not in (200, 404):
            return answer
        if answer.status_code == 200:  # else the trainer knows no sessions
            try:
                name = msgspec.json.decode(answer.content, type=SessionBody).session_id or name
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                reason = f"the trainer's answer to create_session has no session_id: {error}"
                raise ServiceUnavailableException(reason) from error
    front.tinker.begin(name)
    return json_response({"type": "create_session", "session_id": name})


@post("/api/v1/session_heartbeat", opt={**USER, "struct": SessionBody}, status_code=200)
async def session_heartbeat(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Keep a session; 410 tells the SDK that there is none."""
    body = await read_control(request, SessionBody)
    if body.session_id not in front.tinker.sessions:
        return json_response({"error": f"session {shown(body.session_id)} has ended"}, 410)
    front.tinker.begin(body.session_id)
    if front.trainer is not None:
        await front.trainer.pass_on(request)
    return json_response({"type": "session_heartbeat"})


@post("/api/v1/sessions/{session_id:str}/finish", opt=USER, status_code=200)
async def finish_session(request: HTTPRequest, front: Front, session_id: FromPath[str]) -> Response[bytes]:
    """End a session, and abort what is generated for it."""
    front.tinker.end(session_id)
    if front.trainer is not None:
        await front.trainer.pass_on(request)
    return json_response({})


class SamplingSessionBody(SessionBody, kw_only=True):
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None
    """``tinker://`` and the name of a loaded adapter, whose version of now the client gets."""


@post("/api/v1/create_sampling_session", opt={**USER, "struct": SamplingSessionBody}, status_code=200)
async def create_sampling_session(request: HTTPRequest, front: Front) -> Response[bytes]:
    body = await read_control(request, SamplingSessionBody)
    session = session_of(front, body.session_id)
    name = f"{session.id}:{body.sampling_session_seq_id}"
    sampler = front.tinker.samplers.get(name)
    if sampler is None:  # else the answer to the first one was lost
        model = await _chosen(front, body)
        sampler = front.tinker.add(Sampler(id=name, session=session, **model))
    return json_response({"type": "create_sampling_session", "sampling_session_id": sampler.id})


async def _chosen(front: FrontEnd, body: SamplingSessionBody) -> dict[str, Any]:
    """Return which weights a body means, as fields of a Sampler."""
    if body.model_path is None:
        if body.base_model is None or adapter_of(front, body.base_model) is not None:
            raise not_found(front, body.base_model or "")
        return {}
    if not body.model_path.startswith(SCHEME):
        raise InvalidRequest(f"model_path must begin with {SCHEME}", field="model_path")
    adapter = body.model_path.removeprefix(SCHEME)
    version = version_of(await front.tinker.status(), adapter)
    if version is None:
        reason = f"no adapter {adapter!r} is loaded, which {body.model_path} names"
        raise UnknownAdapter(reason, adapter=adapter)
    return {"path": body.model_path, "adapter": adapter, "version": version}


class SamplerBody(msgspec.Struct, kw_only=True):
    sampling_session_id: str


@post("/api/v1/join_sampling_session", opt={**USER, "struct": SamplerBody}, status_code=200)
async def join_sampling_session(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Give a number to a client that has a sampler of another process, so that their requests differ."""
    body = await read_control(request, SamplerBody)
    number = next(sampler_of(front, body.sampling_session_id).clones)
    return json_response({"type": "join_sampling_session", "client_counter": number})


@get("/api/v1/samplers/{sampler_id:str}", opt=USER)
async def get_sampler(front: Front, sampler_id: FromPath[str]) -> Response[bytes]:
    sampler = sampler_of(front, sampler_id)
    found = {"sampler_id": sampler.id, "base_model": front.options.model_name, "model_path": sampler.path}
    return json_response(found)


class PathBody(msgspec.Struct, kw_only=True):
    tinker_path: str


@post("/api/v1/weights_info", opt={**USER, "struct": PathBody}, status_code=200)
async def weights_info(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Describe a loaded adapter; other weights are the trainer's to describe."""
    path = (await read_control(request, PathBody)).tinker_path
    adapter = path.removeprefix(SCHEME)
    ranks = [each.rank for each in (await front.tinker.status()).adapters if each.name == adapter]
    if ranks:
        found = {"base_model": front.options.model_name, "is_lora": True, "lora_rank": ranks[-1]}
        return json_response(found)
    if front.trainer is not None:
        return await front.trainer.pass_on(request)
    raise UnknownAdapter(f"no adapter {adapter!r} is loaded, which {path} names", adapter=adapter)


def session_of(front: FrontEnd, name: str) -> Session:
    session = front.tinker.sessions.get(name)
    if session is None:
        raise InvalidRequest(f"session {shown(name)} has ended", field="session_id")
    return session


def sampler_of(front: FrontEnd, name: str) -> Sampler:
    sampler = front.tinker.samplers.get(name)
    if sampler is None:
        raise InvalidRequest(
            f"sampler {shown(name)} is not known: its session has ended, or this server was restarted",
            field="sampling_session_id",
        )
    return sampler
