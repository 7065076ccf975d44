"""SGLang's routes for weight updates and update groups.

Invariants: sessions are optional; a call belongs to a session only if it names it, in the header ``X-Caesura-Session`` or in the
body, since the front end stores none. An update is answered when its bytes are no longer needed. Paths must be under the
weights root after resolving symbolic links, also those of the files. Pickles are read only if enabled at start.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from litestar import Response, post
from litestar.handlers import HTTPRouteHandler

from ....io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    ControlRequest,
    EndWeightUpdateReqInput,
    TensorSpec,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromCheckpointEngineReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateReqOutput,
)
from ....io_struct.base import MAX_ID_LENGTH
from ....io_struct.field_errors import shown
from ...connection.options import label
from ...exceptions import InvalidRequest, Unsupported
from ..context import Front, FrontEnd, ServeOptions
from ..exchange import HTTPRequest, Outcome, query_of, read_control, succeed
from ..limits import is_binary
from ..printable import printable
from .control_schema import (
    BeginBody,
    DestroyGroupBody,
    DiskBody,
    DistributedBody,
    EndBody,
    InitGroupBody,
    ParameterServerBody,
    SafetensorsQuery,
    TensorBody,
    UpdateBody,
    VersionBody,
)
from .tensor_payload import Frames, Part, dtype_of, read_pickled, read_safetensors

_READ = ("config.json", "generation_config.json", "model.safetensors.index.json")
"""Of a checkpoint, beside its safetensors files; an index can name no others."""
_ONLINE = "Succeeded to update parameter online."
_FLATTENED: Literal["flattened_bucket"] = "flattened_bucket"
SESSION_HEADER = "X-Caesura-Session"
Named = TypeVar(
    "Named",
    UpdateBody,
    DiskBody,
    DistributedBody,
    TensorBody,
    SafetensorsQuery,
    ParameterServerBody,
    EndBody,
    VersionBody,
)


def bound(request: HTTPRequest, body: Named) -> Named:
    """``body``, which belongs to the session that the request's header names, if it names one.

    Raises:
        InvalidRequest: the body names another.
    """
    name = request.headers.get(SESSION_HEADER)
    if name is None:
        return body
    if body.session_id not in (None, name) or not 0 < len(name) <= MAX_ID_LENGTH:
        raise InvalidRequest(
            f"{SESSION_HEADER} must be a session id, and equal to session_id if both are given",
            field="session_id",
        )
    body.session_id = name
    return body


@post("/update_weights_from_disk", status_code=200, opt={"access": "admin"})
async def update_weights_from_disk(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Load a checkpoint folder in place."""
    body = bound(request, await read_control(request, DiskBody))
    message = "Succeeded to update model weights."
    return await succeed(
        front, "update_weights_from_disk", outcome(message), from_disk(front, body), num_paused_requests=0
    )


async def from_disk(front: FrontEnd, body: DiskBody) -> WeightUpdateReqOutput:
    """The engine's answer to an update from a folder.

    Raises:
        CaesuraError: the folder is none that may be read, an option is not supported, or the engine refuses.
    """
    if body.manifest:
        raise Unsupported("manifest is not supported")
    _check_load_format(body.load_format, "auto", "safetensors")
    path = await asyncio.to_thread(allowed_path, body.model_path, front.options)
    wire = UpdateWeightFromDiskReqInput(model_path=path, load_format=body.load_format, **body.options())
    return await _sent(front, wire)


def _check_load_format(name: str | None, *known: str) -> str | None:
    """``name``, if it is one of ``known`` or none at all.

    Raises:
        Unsupported: another, such as the import path of a loader of the trainer's.
    """
    if name is None or name in known:
        return name
    raise Unsupported(
        f"load_format {printable(name)} is not supported: null, {' or '.join(known)}; loaders that a trainer names (an import "
        "path) are not run",
        field="load_format",
        value=name,
    )


def allowed_path(path: str, options: ServeOptions) -> str:
    """``path`` with its links resolved.

    The scheduler opens the files later, and follows links then: who may write under the root can still put a link there in
    between. What cannot pass is a link that lies there already.

    Raises:
        InvalidRequest: it does not lie under the weights root with every file that a checkpoint is read from, or is no path at all.
    """
    root = options.update_root
    if not root:
        raise InvalidRequest(
            "this server loads no weights from disk (--weights-root)", field="model_path", value=path
        )
    try:
        real, real_root = os.path.realpath(path), os.path.realpath(root)
    except ValueError as error:  # a null byte
        raise InvalidRequest(f"model_path is not a valid path: {error}", field="model_path") from error
    if not _lies_under(real, real_root):
        raise InvalidRequest(
            f"model_path = {shown(path)} is outside {printable(real_root)}, the folder that this server loads weights from "
            "(--weights-root)",
            field="model_path",
            value=path,
        )
    for name in _read_files(real):
        if not _lies_under(os.path.realpath(os.path.join(real, name)), real_root):
            raise InvalidRequest(
                f"{printable(name)} in model_path is a link out of {printable(real_root)}, the folder that this server loads weights "
                "from (--weights-root)",
                field="model_path",
                value=path,
            )
    return real


def _lies_under(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


def _read_files(folder: str) -> list[str]:
    """What is read of a checkpoint; nothing in folders further down."""
    try:
        with os.scandir(folder) as entries:
            return [e.name for e in entries if e.name in _READ or e.name.endswith(".safetensors")]
    except OSError:  # the scheduler says what is wrong with it
        return []


@post("/update_weights_from_distributed", status_code=200, opt={"access": "admin", "body": "specs"})
async def update_weights_from_distributed(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Take what rank 0 of a group broadcasts meanwhile: only names, dtypes and shapes pass here."""
    body = bound(request, await read_control(request, DistributedBody))

    async def update() -> WeightUpdateReqOutput:
        flattened = _check_load_format(body.load_format, _FLATTENED) is not None
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            raise InvalidRequest("names, dtypes and shapes have different lengths", field="names")
        described = zip(body.names, body.dtypes, body.shapes, strict=True)
        wire = UpdateWeightsFromDistributedReqInput(
            specs=[TensorSpec(name=n, dtype=dtype_of(dtype), shape=shape) for n, dtype, shape in described],
            group_name=body.group_name,
            load_format=_FLATTENED if flattened else None,
            **body.options(),
        )
        return await _sent(front, wire)

    return await succeed(front, "update_weights_from_distributed", _online(body), update())


@post("/update_weights_from_tensor", status_code=200, opt={"access": "admin", "body": "weights"})
async def update_weights_from_tensor(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Weights in the request: a safetensors file as body, or (if allowed at start) SGLang's pickles in JSON."""
    if is_binary(request.content_type[0]):
        options = bound(request, query_of(request, SafetensorsQuery))
        work = _binary(front, request, options)
        return await succeed(front, "update_weights_from_tensor", _online(options), work)
    body = bound(request, await read_control(request, TensorBody))
    return await succeed(front, "update_weights_from_tensor", _online(body), _pickled(front, body))


async def _binary(front: FrontEnd, request: HTTPRequest, options: UpdateBody) -> WeightUpdateReqOutput:
    return await _part(front, read_safetensors(await request.body()), options.options())


async def _pickled(front: FrontEnd, body: TensorBody) -> WeightUpdateReqOutput | None:
    if not front.options.allow_pickled_tensors:
        raise Unsupported(
            "pickled tensors are off: start with --allow-pickled-tensors, or send a safetensors file as application/octet-stream"
        )
    flattened = _check_load_format(body.load_format, "direct", _FLATTENED) == _FLATTENED
    parts = await asyncio.to_thread(read_pickled, body.serialized_named_tensors, flattened=flattened)
    if not parts:
        return None  # a bucket without tensors, which slime sends as padding
    if len(parts) == 1 or body.session_id is not None or not await _commits_by_itself(front):
        return await _joined(front, parts, body.options())
    async with front.client.weight_update(weight_version=body.weight_version) as session:
        await _joined(front, parts, {**body.options(), "session_id": session.opened.session_id})
    return session.result


async def _joined(front: FrontEnd, parts: Sequence[Part], options: dict[str, Any]) -> WeightUpdateReqOutput:
    """All parts in one session: that of the options, or the one that the first of them joins or opens."""
    named = dict(options)
    for part in parts:
        reply = await _part(front, part, named)
        named["session_id"] = reply.session_id
    return reply


async def _commits_by_itself(front: FrontEnd) -> bool:
    """Whether each call would be a commit of its own: then several need a session to be one."""
    status = await front.client.status()
    return status.session is None and status.generation == "running" and status.weights == "valid"


async def _part(front: FrontEnd, part: Part, options: dict[str, Any]) -> WeightUpdateReqOutput:
    if isinstance(part, Frames):
        return await _sent(front, UpdateWeightsFromTensorReqInput(specs=part.specs, **options), part.buffers)
    return await _sent(front, UpdateWeightsFromIPCReqInput(handle=part.handle, specs=part.specs, **options))


async def _sent(
    front: FrontEnd, request: ControlRequest, buffers: Sequence[memoryview] = ()
) -> WeightUpdateReqOutput:
    """The reply; the engine goes on where the client of this request leaves."""
    reply: WeightUpdateReqOutput = await asyncio.shield(
        front.client.start(request, WeightUpdateReqOutput, buffers)
    )
    return reply


def _online(body: UpdateBody) -> Outcome:
    version = body.weight_version
    return outcome(_ONLINE if version is None else f"{_ONLINE} Weight version updated to {version}.")


def outcome(done: str) -> Outcome:
    """The message of an update: ``done`` only after a commit (I14)."""
    return lambda reply: done if reply is not None and reply.committed else uncommitted(reply)


def uncommitted(reply: WeightUpdateReqOutput | None) -> str:
    """The message of an update that has not failed and is not committed; None: it had no tensors."""
    if reply is None:
        return "The call has no tensors: nothing was written."
    if reply.session_id is None:
        return (
            f"Written, not committed: the weights are {reply.weights} until every parameter of the model "
            "has been written."
        )
    return (
        f"Written, not committed yet: session {reply.session_id} is open. /end_weight_update commits it; "
        "if it was not begun, /continue_generation, /flush_cache and the last parameter do, too."
    )


@post("/update_weights_from_ipc", status_code=200, opt={"access": "admin"})
async def update_weights_from_ipc(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Let a checkpoint-engine parameter server drive an update."""
    body = bound(request, await read_control(request, ParameterServerBody))
    wire = UpdateWeightsFromCheckpointEngineReqInput(
        zmq_handles=body.zmq_handles, timeout_s=body.timeout_s, **body.options()
    )
    return await succeed(front, "update_weights_from_ipc", _online(body), _sent(front, wire))


@post("/init_weights_update_group", status_code=200, opt={"access": "admin"})
async def init_weights_update_group(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Join a trainer's process group; answered when every rank has joined."""
    body = await read_control(request, InitGroupBody)
    work = front.client.init_weights_update_group(**body.arguments())
    message = "Succeeded to initialize custom process group."
    return await succeed(front, "init_weights_update_group", message, work)


@post("/destroy_weights_update_group", status_code=200, opt={"access": "admin"})
async def destroy_weights_update_group(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Leave a group; one that does not exist is 400."""
    body = await read_control(request, DestroyGroupBody)
    work = front.client.destroy_weights_update_group(body.group_name)
    message = "Succeeded to destroy custom process group."
    return await succeed(front, "destroy_weights_update_group", message, work)


@post("/begin_weight_update", status_code=200, opt={"access": "admin"})
async def begin_weight_update(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Open a session: what names it from now on is committed together by end."""
    body = await read_control(request, BeginBody)

    async def begin() -> BeginWeightUpdateReqOutput:
        wire = BeginWeightUpdateReqInput(deadline_s=body.deadline_s)
        opened: BeginWeightUpdateReqOutput = await asyncio.shield(
            front.client.start(wire, BeginWeightUpdateReqOutput)
        )
        return opened

    return await succeed(front, "begin_weight_update", "Success", begin())


@post("/end_weight_update", status_code=200, opt={"access": "admin"})
async def end_weight_update(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Commit the session, or abort it."""
    body = bound(request, await read_control(request, EndBody))
    wire = EndWeightUpdateReqInput(
        commit=body.commit,
        session_id=body.session_id,
        force=body.force,
        weight_version=label(body.weight_version),
    )
    return await succeed(front, "end_weight_update", _ended, _sent(front, wire))


def _ended(reply: WeightUpdateReqOutput) -> str:
    return (
        "Success" if reply.committed else f"Aborted, nothing is committed: the weights are {reply.weights}."
    )


ROUTES: list[HTTPRouteHandler] = [
    update_weights_from_disk,
    update_weights_from_distributed,
    update_weights_from_tensor,
    update_weights_from_ipc,
    init_weights_update_group,
    destroy_weights_update_group,
    begin_weight_update,
    end_weight_update,
]
