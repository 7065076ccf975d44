"""The routes of the training half of Tinker's API, which are the trainer's.

Invariants: without a trainer all are refused by name, with 404, since the SDK repeats for minutes what was
answered with a 5xx. Two are more than passed on: this server must know which session a model is of, and loads
weights that were saved for sampling as an adapter, from the folder that the trainer names.
"""

from typing import Any, Literal

import msgspec
from litestar import HttpMethod, Response, post, route
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from ....io_struct import new_id
from ....io_struct.field_errors import shown
from ...exceptions import InvalidRequest
from ..bodies import HTTPRequest, read_control
from ..context import Front, FrontEnd
from ..error_responses import json_response
from ..lora_routes import load
from .promises import Sampler, Session, TinkerError
from .samplers import SCHEME, session_of
from .upstream_trainer import UpstreamTrainer

_METHODS = [HttpMethod.GET, HttpMethod.POST, HttpMethod.PUT, HttpMethod.DELETE]


def _trainer(request: HTTPRequest, front: FrontEnd) -> UpstreamTrainer:
    if front.trainer is None:
        path = request.scope["path"]
        raise NotFoundException(f"{path} is not served: without --tinker-trainer only sampling is")
    return front.trainer


@route(
    "/api/v1/{training:path}",
    http_method=_METHODS,
    opt={"access": "admin", "body": "training"},
    status_code=200,
)
async def pass_on(request: HTTPRequest, front: Front, training: FromPath[str]) -> Response[bytes]:
    """Pass a request of Tinker's training half on to the trainer."""
    return await _trainer(request, front).pass_on(request)


class ModelBody(msgspec.Struct, kw_only=True):
    session_id: str
    model_seq_id: int


@post("/api/v1/create_model", opt={"access": "admin", "struct": ModelBody}, status_code=200)
async def create_model(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Have the trainer make a model, and note its session."""
    trainer = _trainer(request, front)
    body = await read_control(request, ModelBody)
    session = session_of(front, body.session_id)
    given = await request.body()

    async def made() -> dict[str, Any]:
        found = await trainer.result(request.scope["path"], given)
        if not isinstance(model := found.get("model_id"), str):
            raise TinkerError("the trainer's answer has no model_id")
        trainer.sessions[model] = session.id
        return found

    return _promised(front, f"{session.id}:model:{body.model_seq_id}", session, made)


class SaveBody(msgspec.Struct, kw_only=True):
    model_id: str
    path: str | None = None
    """Name of the weights. Null: only the sampler of ``sampling_session_seq_id`` has them."""
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """``inflight``: all samplers of this kind go on with the new weights, also in the middle of a sample."""
    seq_id: int | None = None


@post("/api/v1/save_weights_for_sampler", opt={"access": "admin", "struct": SaveBody}, status_code=200)
async def save_weights_for_sampler(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Have the trainer save weights, and load them from the folder that it names in ``path``."""
    trainer = _trainer(request, front)
    body = await read_control(request, SaveBody)
    if body.model_id not in trainer.sessions:
        raise InvalidRequest(f"model {shown(body.model_id)} was not made here", field="model_id")
    if body.path is None and body.sampling_session_seq_id is None:
        raise InvalidRequest("a path or a sampling_session_seq_id is needed", field="path")
    session = session_of(front, trainer.sessions[body.model_id])
    given = await request.body()

    async def saved() -> dict[str, Any]:
        folder = (await trainer.result(request.scope["path"], given)).get("path")
        if not isinstance(folder, str):
            raise TinkerError("the trainer's answer has no path, the folder of the adapter")
        return await _load(front, session, body, folder)

    number = new_id() if body.seq_id is None else body.seq_id
    return _promised(front, f"{body.model_id}:save:{number}", session, saved)


async def _load(front: FrontEnd, session: Session, body: SaveBody, folder: str) -> dict[str, Any]:
    follows = body.path is None and body.kind == "inflight"
    name = body.path or str(body.sampling_session_seq_id)
    adapter = body.model_id if follows else f"{body.model_id}/sampler_weights/{name}"
    loaded = await load(front, adapter, folder, on_running="keep" if follows else "finish_old")
    found: dict[str, Any] = {"type": "save_weights_for_sampler"}
    if body.path is not None:
        return {**found, "path": SCHEME + adapter}
    sampler = Sampler(
        id=f"{session.id}:{body.sampling_session_seq_id}",
        session=session,
        path=SCHEME + adapter,
        adapter=adapter,
        version=None if follows else (loaded.adapter_epoch, loaded.digest),
    )
    return {**found, "sampling_session_id": front.tinker.add(sampler).id}


async def _answered(found: dict[str, Any], protobuf: bool) -> Response[bytes]:
    return json_response(found)  # results of training have no other form


def _promised(front: FrontEnd, name: str, session: Session, work: Any) -> Response[bytes]:
    promise = front.tinker.promises.get(name)
    if promise is None:  # else the answer to the first one was lost
        promise = front.tinker.promise(name, session, work(), _answered)
    return json_response({"request_id": promise.id})
