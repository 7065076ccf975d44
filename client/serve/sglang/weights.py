"""SGLang's routes for weights: updates, update groups, sessions, version labels, checks.

Invariants: a call belongs to a session only if it names it (``X-Caesura-Session`` or the body). An update is
answered when its bytes are no longer needed, with success only after a commit (I14), and outlives its client.
Paths and files, resolved, are under the weights root. Pickles need an option at start.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from litestar import Response, post
from litestar.exceptions import ClientException

from ....io_struct import (
    BeginWeightUpdateReqInput,
    BeginWeightUpdateReqOutput,
    CaesuraError,
    CheckerAction,
    ControlRequest,
    EndWeightUpdateReqInput,
    ErrorCode,
    RollbackWeightsReqInput,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightsCheckerReqOutput,
    WeightUpdateReqOutput,
)
from ....io_struct.control import PositiveDuration
from ....io_struct.field_errors import shown
from ....io_struct.weights import DEFAULT_BROADCAST_TIMEOUT_S, DEFAULT_GROUP_NAME, ReportKind
from ...connection.client_options import label, update_fields
from ...exceptions import InvalidRequest, NoSession, Unsupported
from ..bodies import HTTPRequest, Label, Strict, query_of, read_control
from ..commands import Form, InSession, answered, command, failure, in_session, success
from ..context import Front, FrontEnd
from ..error_responses import json_response, printable
from ..middleware import is_binary
from ..options import ServeOptions
from ..weight_copies import require_folder
from .control import EITHER
from .tensor_payload import Frames, Part, dtype_of, read_delta_body, read_pickled, read_safetensors

if TYPE_CHECKING:
    from ...trainer.published import Version as Published

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Selector = Literal["target", "all"]
Version = Label | int
"""A number, such as a step counter, becomes text."""
_CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "adapter_config.json",
)
"""Files that are read beside the safetensors files."""
FLATTENED: Literal["flattened_bucket"] = "flattened_bucket"


VERL_FLUSH = "verl.workers.rollout.sglang_rollout.delta_loader.apply_delta"
"""Name by which verl says that the tensors are a flush; nothing is imported by it."""


class UpdateBody(InSession, kw_only=True):
    flush_cache: bool = True
    torch_empty_cache: bool = False
    weight_version: Version | None = None
    abort_all_requests: bool = False
    component: Label | None = None
    """Caesura's own, as all below: the component of a diffusion pipeline; null: its transformer."""
    report: ReportKind | None = None
    min_changed: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    max_rel_norm: Annotated[float, msgspec.Meta(ge=0)] | None = None
    refuse_beyond: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the keywords of every update; a missing session is None, never one of the client."""
        return {name: getattr(self, name) for name in UpdateBody.__struct_fields__}

    def options(self) -> dict[str, Any]:
        return update_fields(self.given())


async def sent(
    front: FrontEnd, request: ControlRequest, buffers: Sequence[memoryview] = ()
) -> WeightUpdateReqOutput:
    """Return the reply; the engine goes on if the HTTP client leaves."""
    reply: WeightUpdateReqOutput = await asyncio.shield(
        front.client.start(request, WeightUpdateReqOutput, buffers)
    )
    return reply


def _on_disk(_: UpdateBody, reply: WeightUpdateReqOutput) -> str:
    return "Succeeded to update model weights." if reply.committed else uncommitted(reply)


def _online(body: UpdateBody, reply: WeightUpdateReqOutput | None) -> str:
    if reply is None or not reply.committed:
        return uncommitted(reply)
    done = "Succeeded to update parameter online."
    version = body.weight_version
    return done if version is None else f"{done} Weight version updated to {version}."


def uncommitted(reply: WeightUpdateReqOutput | None) -> str:
    """Return the message of an update that has neither failed nor committed (I14); None had no tensors."""
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


def check_load_format(name: str | None, *known: str) -> str | None:
    """Return ``name`` if it is None or known; other loaders, such as import paths, are Unsupported."""
    if name is None or name in known:
        return name
    raise Unsupported(
        f"load_format {printable(name)} is not supported: null, {' or '.join(known)}; loaders that a trainer "
        "names (an import path) are not run",
        field="load_format",
        value=name,
    )


class DiskBody(UpdateBody, kw_only=True):
    model_path: str
    load_format: str | None = None
    # accepted and ignored
    is_async: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    # refused unless empty
    manifest: Any = None


@command("/update_weights_from_disk", success(_on_disk, num_paused_requests=0))
async def update_weights_from_disk(front: FrontEnd, body: DiskBody) -> object:
    return await from_disk(front, body)


async def from_disk(front: FrontEnd, body: DiskBody) -> WeightUpdateReqOutput:
    if body.manifest:
        raise Unsupported("manifest is not supported")
    check_load_format(body.load_format, "auto", "safetensors")
    path = await asyncio.to_thread(allowed_path, body.model_path, front.options)
    if front.published.version_of(path) is not None:
        return await front.published.load(path, body.options())
    return await front.client.update_weights_from_disk(path, load_format=body.load_format, **body.given())


def allowed_path(path: str, options: ServeOptions, field: str = "model_path") -> str:
    """Return ``path``, resolved, with its files under the weights root; links made later are followed."""
    root = options.update_root
    if not root:
        raise InvalidRequest(
            "this server loads no weights from disk (--weights-root)", field=field, value=path
        )
    try:
        real, real_root = os.path.realpath(path), os.path.realpath(root)
    except ValueError as error:  # a null byte
        raise InvalidRequest(f"{field} is not a valid path: {error}", field=field) from error
    root_text = f"{printable(real_root)}, the folder that this server loads weights from (--weights-root)"
    if not _lies_under(real, real_root):
        raise InvalidRequest(f"{field} = {shown(path)} is outside {root_text}", field=field, value=path)
    for name in _checkpoint_files(real):
        if not _lies_under(os.path.realpath(os.path.join(real, name)), real_root):
            raise InvalidRequest(
                f"{printable(name)} in {field} is a link out of {root_text}",
                field=field,
                value=path,
            )
    return real


def _lies_under(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


def _checkpoint_files(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [e.name for e in entries if e.name in _CHECKPOINT_FILES or e.name.endswith(".safetensors")]
    except OSError:  # the scheduler says what is wrong with it
        return []


class PullBody(Strict, kw_only=True):
    target_version: NonNegative
    local_checkpoint_dir: str | None = None
    source_dir: str | None = None


@command("/pull_weights", success("Pulled: /update_weights_from_disk of local_checkpoint_dir loads it."))
async def pull_weights(front: FrontEnd, body: PullBody) -> None:
    """Bring a copy of the checkpoint to a version that slime has published, while the engine serves."""
    copy = await folder_of_copy(front, "local_checkpoint_dir", body.local_checkpoint_dir)
    source = await folder_of_copy(front, "source_dir", body.source_dir)

    def reader() -> "Callable[[int], Published]":
        from ...trainer.published import slime_version

        return partial(slime_version, Path(source))

    await front.published.pull(copy, front.options.model, body.target_version, reader)


async def folder_of_copy(front: FrontEnd, field: str, path: str | None) -> str:
    return await asyncio.to_thread(allowed_path, require_folder(field, path), front.options, field)


class RollbackBody(Strict, kw_only=True):
    """Caesura's own."""

    to_digest: Label | None = None
    flush_cache: bool = True
    torch_empty_cache: bool = False


@command("/rollback_weights", success("Succeeded to return to the weights before the last delta."))
async def rollback_weights(front: FrontEnd, body: RollbackBody) -> WeightUpdateReqOutput:
    """Return to the weights before the last commit, which must have been a delta's."""
    request = RollbackWeightsReqInput(**msgspec.structs.asdict(body))
    return await sent(front, request)


class DistributedBody(UpdateBody, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: Label = DEFAULT_GROUP_NAME
    load_format: str | None = None
    selector: Selector = "all"


@command("/update_weights_from_distributed", success(_online), size="specs")
async def update_weights_from_distributed(front: FrontEnd, body: DistributedBody) -> object:
    """Receive what rank 0 of a group broadcasts meanwhile: the body has names, dtypes and shapes only."""
    flattened = check_load_format(body.load_format, FLATTENED) is not None
    wire = UpdateWeightsFromDistributedReqInput(
        specs=broadcast_specs(body.names, body.dtypes, body.shapes),
        group_name=body.group_name,
        load_format=FLATTENED if flattened else None,
        **body.options(),
    )
    return await sent(front, wire)


def broadcast_specs(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[TensorSpec]:
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest("names, dtypes and shapes have different lengths", field="names")
    described = zip(names, dtypes, shapes, strict=True)
    return [TensorSpec(name=n, dtype=dtype_of(dtype), shape=shape) for n, dtype, shape in described]


class TensorBody(UpdateBody, kw_only=True):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    selector: Selector = "all"
    # accepted and ignored
    disable_draft_model: bool = False
    """SGLang's before ``selector``."""


class TensorQuery(UpdateBody, kw_only=True):
    base_epoch: int | None = None
    """Epoch of the weights that a delta changes; null: not compared."""


_TENSORS = {"access": "admin", "body": "weights", "struct": TensorBody}


@post("/update_weights_from_tensor", status_code=200, opt=_TENSORS)
async def update_weights_from_tensor(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Take a safetensors file as body, whole tensors or a delta, or SGLang's pickles in JSON."""
    body: UpdateBody
    if is_binary(request.content_type[0]):
        query = body = in_session(request, query_of(request, TensorQuery))
        work = _binary(front, request, query)
    else:
        body = in_session(request, await read_control(request, TensorBody))
        work = _pickled(front, body)
    return await answered(front, "update_weights_from_tensor", success(_online), body, work)


async def _binary(front: FrontEnd, request: HTTPRequest, body: TensorQuery) -> WeightUpdateReqOutput | None:
    content = await request.body()
    if (delta := read_delta_body(content, body.base_epoch)) is not None:
        return await sent_part(front, delta.frames, {**body.options(), "delta": delta.base})
    if body.base_epoch is not None:
        raise InvalidRequest("base_epoch is of a delta, which the body is not", field="base_epoch")
    return await sent_part(front, read_safetensors(content), body.options())


async def _pickled(front: FrontEnd, body: TensorBody) -> WeightUpdateReqOutput | None:
    if not front.options.allow_pickled_tensors:
        raise Unsupported(
            "pickled tensors are off: start with --allow-pickled-tensors, or send a safetensors file as "
            "application/octet-stream"
        )
    is_flush = body.load_format == VERL_FLUSH
    flattened = not is_flush and check_load_format(body.load_format, "direct", FLATTENED) == FLATTENED
    parts = await asyncio.to_thread(read_pickled, body.serialized_named_tensors, flattened=flattened)
    if not parts:
        return None  # a bucket without tensors, which slime sends as padding
    if is_flush:
        return await _flush(front, body, parts)
    if len(parts) == 1 or body.session_id is not None or not await _commits_by_itself(front):
        return await _joined(front, parts, body.options())
    async with front.client.weight_update(weight_version=body.weight_version) as session:
        await _joined(front, parts, {**body.options(), "session_id": session.opened.session_id})
    return session.result


async def _flush(front: FrontEnd, body: TensorBody, parts: Sequence[Part]) -> WeightUpdateReqOutput:
    """Send what a flush of verl's changes."""
    from ...trainer.verl_flushes import read_frames

    frames = [(part.specs, part.buffers) for part in parts if isinstance(part, Frames)]
    if len(frames) < len(parts):
        reason = "a flush in device memory is read by caesura.client.trainer.read_flush, in its own process"
        raise Unsupported(reason, field="serialized_named_tensors")
    tensors = await asyncio.to_thread(read_frames, frames)
    return await asyncio.shield(front.client.update_weights_from_tensor(tensors, **body.given()))


async def _joined(front: FrontEnd, parts: Sequence[Part], options: dict[str, Any]) -> WeightUpdateReqOutput:
    """Send all parts in one session: that of ``options``, or that of the first reply."""
    named = dict(options)
    for part in parts:
        reply = await sent_part(front, part, named)
        named["session_id"] = reply.session_id
    return reply


async def _commits_by_itself(front: FrontEnd) -> bool:
    """Return True if each call would be a commit of its own, so that several need a session."""
    status = await front.client.status()
    return status.session is None and status.generation == "running" and status.weights == "valid"


async def sent_part(front: FrontEnd, part: Part, options: dict[str, Any]) -> WeightUpdateReqOutput:
    if isinstance(part, Frames):
        return await sent(front, UpdateWeightsFromTensorReqInput(specs=part.specs, **options), part.buffers)
    return await sent(front, UpdateWeightsFromIPCReqInput(handle=part.handle, specs=part.specs, **options))


class ParameterServerBody(UpdateBody, kw_only=True):
    zmq_handles: dict[str, str]
    timeout_s: PositiveDuration = 300.0
    """Caesura's own: maximum seconds of silence of the server."""


@command("/update_weights_from_ipc", success(_online))
async def update_weights_from_ipc(front: FrontEnd, body: ParameterServerBody) -> object:
    """Let a checkpoint-engine parameter server drive an update."""
    return await front.client.update_weights_from_checkpoint_engine(
        body.zmq_handles, timeout_s=body.timeout_s, **body.given()
    )


class InitGroupBody(Strict, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: Label = DEFAULT_GROUP_NAME
    backend: Literal["nccl", "gloo"] | None = None
    timeout_s: PositiveDuration = 60.0
    broadcast_timeout_s: PositiveDuration = DEFAULT_BROADCAST_TIMEOUT_S

    # accepted and ignored
    pp_rank: int | None = None


@command("/init_weights_update_group", success("Succeeded to initialize custom process group."))
async def init_weights_update_group(front: FrontEnd, body: InitGroupBody) -> object:
    """Answer when every rank has joined."""
    given = msgspec.structs.asdict(body)
    del given["pp_rank"]
    return await front.client.init_weights_update_group(**given)


class DestroyGroupBody(Strict, kw_only=True):
    group_name: Label = DEFAULT_GROUP_NAME


@command("/destroy_weights_update_group", success("Succeeded to destroy custom process group."))
async def destroy_weights_update_group(front: FrontEnd, body: DestroyGroupBody) -> object:
    return await front.client.destroy_weights_update_group(body.group_name)


class BeginBody(Strict, kw_only=True):
    selector: Selector = "all"
    deadline_s: PositiveDuration | None = None
    """Caesura's own: abort the session after so many seconds."""


@command("/begin_weight_update", success("Success"))
async def begin_weight_update(front: FrontEnd, body: BeginBody) -> object:
    """Open a session: the calls that name it are committed together at its end."""
    # Not the client's method: the client would take the session for its own, and HTTP clients share it.
    wire = BeginWeightUpdateReqInput(deadline_s=body.deadline_s)
    return await asyncio.shield(front.client.start(wire, BeginWeightUpdateReqOutput))


class EndBody(InSession, kw_only=True):
    commit: bool = True
    """Caesura's own, as all below: false aborts the session."""
    weight_version: Version | None = None
    force: bool = False
    """Abort whatever session is open, with ``commit`` false."""


def _ended(_: EndBody, reply: WeightUpdateReqOutput) -> str:
    aborted = f"Aborted, nothing is committed: the weights are {reply.weights}."
    return "Success" if reply.committed else aborted


@command("/end_weight_update", success(_ended))
async def end_weight_update(front: FrontEnd, body: EndBody) -> object:
    wire = EndWeightUpdateReqInput(
        commit=body.commit,
        session_id=body.session_id,
        force=body.force,
        weight_version=label(body.weight_version),
    )
    return await sent(front, wire)


class VersionBody(InSession, kw_only=True):
    new_version: Version
    abort_all_requests: bool = True


def _relabelled(body: VersionBody, _: object) -> dict[str, Any]:
    message = f"Weight version updated to {body.new_version}"
    return {"success": True, "message": message, "new_version": str(body.new_version)}


@command("/update_weight_version", Form(_relabelled, failure))
async def update_weight_version(front: FrontEnd, body: VersionBody) -> None:
    """Give the present weights another label: a commit of its own, in which nothing is written."""
    if body.session_id is not None:  # if it is open, the session below is refused
        session = (await front.client.status()).session
        if session is None or session.session_id != body.session_id:
            raise NoSession(f"the weight session {body.session_id} is not open")
    async with front.client.weight_update(weight_version=body.new_version):
        if body.abort_all_requests:
            status = await front.client.status()
            if status.weights != "valid":  # the commit would be refused, with the requests gone
                raise CaesuraError(
                    ErrorCode.WEIGHT_MISMATCH, f"the weights are {status.weights}: update all of them first"
                )
            await front.client.abort(abort_all=True)


class CheckerBody(Strict, kw_only=True):
    action: CheckerAction = "checksum"
    selector: Selector = "all"
    # accepted and ignored
    allow_quant_error: bool = False
    # refused unless empty
    skip_tensor_list: list[str] | None = None


def _checked(body: CheckerBody, reply: WeightsCheckerReqOutput) -> object:
    if body.action == "compare" and reply.changed:
        message = f"{len(reply.changed)} tensors differ from the snapshot"
        return json_response({"success": False, "message": message, "changed": reply.changed}, 400)
    answer: dict[str, object] = {"success": True, "message": "Success."}
    if body.action == "checksum":
        place = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1}
        sums = {"checksums": reply.checksums, "per_gpu_checksum": reply.total, "parallelism_info": [place]}
        answer |= {"ranks": [sums], "per_engine_checksum": reply.total}
    return answer


@command("/weights_checker", Form(_checked, failure), *EITHER)
async def weights_checker(front: FrontEnd, body: CheckerBody) -> object:
    if body.skip_tensor_list:
        raise ClientException("skip_tensor_list is not supported")
    return await front.client.check_weights(body.action)


class PostProcessBody(Strict, kw_only=True):
    """The body that slime's patches send."""

    # accepted and ignored
    restore_weights_before_load: bool = False
    post_process_quantization: bool = False


@command(
    "/post_process_weights",
    success("Nothing to do: layouts and derived tensors are made when an update commits."),
)
async def post_process_weights(front: FrontEnd, body: PostProcessBody) -> None:
    pass
