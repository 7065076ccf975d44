"""vLLM's weight transfer routes, Caesura's transports under them, and prime-rl's update from a folder.

Invariants: tensors are named as in the checkpoint and sent whole. ``packed`` has vLLM's chunks, which both
sides derive from the shapes alone (``packed_tensor.py`` of vLLM 0.33).
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from litestar import Response, get

from ....io_struct import (
    CaesuraError,
    CudaIPCHandle,
    DeltaBase,
    SharedMemoryHandle,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    WeightUpdateReqOutput,
)
from ....io_struct.field_errors import field_error
from ....transfer.safetensors import DTYPES
from ....transfer.weight_delta import nbytes_of
from ...connection.client_options import label
from ...exceptions import InvalidRequest, Unsupported, WeightMismatch
from ..bodies import NothingBody, Strict
from ..commands import Form, InSession, command
from ..context import Front, FrontEnd
from ..error_responses import json_response, status_of
from ..openai.common import error_body
from ..sglang.tensor_payload import dtype_of, read_ipc_handles
from ..sglang.weights import (
    DiskBody,
    NonNegative,
    Version,
    folder_of_copy,
    from_disk,
    sent,
    sent_part,
    uncommitted,
)
from .transfer import InitInfo

if TYPE_CHECKING:
    from ...trainer.published import Version as Published

InfoT = TypeVar("InfoT", bound=Strict)


def refused(error: CaesuraError) -> Response[bytes]:
    """Return vLLM's form of an error, which is OpenAI's; 409 while another trainer's update goes on."""
    return json_response(error_body(error), 409 if error.code == "session_open" else status_of(error))


def message(text: str) -> Form:
    return Form(lambda *_: {"message": text}, refused)


class InitBody(Strict, kw_only=True):
    init_info: InitInfo


@command("/init_weight_transfer_engine", message("Weight transfer initialized"))
async def init_weight_transfer_engine(front: FrontEnd, body: InitBody) -> None:
    """Answer when the engines have joined the trainer's group, if the backend has one."""
    await front.transfer.init(body.init_info)


class StartBody(Strict, kw_only=True):
    is_checkpoint_format: bool = True


def _started(_: StartBody, session_id: str) -> dict[str, str]:
    return {"message": "Weight update started", "session_id": session_id}


@command("/start_weight_update", Form(_started, refused))
async def start_weight_update(front: FrontEnd, body: StartBody) -> str:
    """Open a session; what comes until ``/finish_weight_update`` is committed there as a whole."""
    return await start(front, body)


async def start(front: FrontEnd, body: StartBody) -> str:
    if not body.is_checkpoint_format:
        raise Unsupported(
            "weights in the layout of kernels are not supported: names and shapes are the checkpoint's",
            field="is_checkpoint_format",
        )
    front.published.abandoned()
    return await front.transfer.start()


class BroadcastInfo(Strict, kw_only=True):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    """Sent by clients before vLLM 0.28; null: that of the init."""
    num_updates_list: list[Annotated[int, msgspec.Meta(ge=0)] | None] | None = None
    """vLLM's of ``sparse_nccl``, here over gloo: the number of elements of each tensor, whose positions and
    values are one broadcast. Caesura's own: null for a whole tensor. Null instead of the list: all are."""
    base: DeltaBase | None = None
    """Caesura's own: the weights that these change; null: not compared."""


class SharedMemoryInfo(Strict, kw_only=True):
    """Caesura's own: tensors in memory of a process of the same host, or of the engine's CUDA device."""

    handle: SharedMemoryHandle | CudaIPCHandle
    specs: list[TensorSpec]
    base: DeltaBase | None = None
    """The weights that sparse tensors change; null: not compared."""


class HandlesInfo(Strict, kw_only=True):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles_pickled: str
    tensor_sizes: list[int] | None = None
    """Bytes of each tensor in one buffer, of an init with ``packed``."""


class DiskInfo(Strict, kw_only=True):
    """Caesura's own: a checkpoint folder under the weights root."""

    path: str


class VersionInfo(Strict, kw_only=True):
    """SkyRL's: a version that ``/fetch_weights`` has brought to the copy."""

    target_version: int | None = None
    version: int | None = None
    # accepted and ignored
    sync_dir: str | None = None
    uri: str | None = None
    update_kind: str = "dense"
    receive_update_kind: str | None = None


class UpdateBody(InSession, kw_only=True):
    update_info: dict[str, Any] | list[dict[str, Any]] | None = None
    """Several: one for each rank of an engine, all alike, since tensors are whole."""
    weight_dir: str | None = None
    """prime-rl's, without a weight transfer: a folder to load, whose name is the label."""


def _updated(body: UpdateBody, _: object) -> dict[str, str]:
    return {"message": "Weights updated"} if body.update_info is not None else {"status": "ok"}


@command("/update_weights", Form(_updated, refused), size="specs")
async def update_weights(front: FrontEnd, body: UpdateBody) -> None:
    if body.update_info is not None:
        await update(front, body.update_info, body.session_id)
        return
    if body.weight_dir is None:
        raise Unsupported(
            'weight_dir is missing: weights are taken from a folder (weight_broadcast.type = "filesystem")',
            field="weight_dir",
        )
    await update_from_folder(front, body.weight_dir)


async def update_from_folder(front: FrontEnd, folder: str) -> None:
    """Load a checkpoint under its folder's name as label; requests keep their KV, the prefix cache goes."""
    given = DiskBody(model_path=folder, weight_version=PurePath(folder).name, flush_cache=False)
    reply = await from_disk(front, given)
    if not reply.committed:
        raise WeightMismatch(uncommitted(reply))


async def update(
    front: FrontEnd, given: dict[str, Any] | list[dict[str, Any]], session_id: str | None = None
) -> None:
    """Receive one part of the update that has been started."""
    infos = given if isinstance(given, list) else [given]
    if not infos or any(info != infos[0] for info in infos):
        raise Unsupported(
            "update_info differs from rank to rank: tensors are sent whole", field="update_info"
        )
    info, init = infos[0], front.transfer.info

    async def receive(session: str) -> WeightUpdateReqOutput:
        if init.backend == "disk":
            folder = _read(info, DiskInfo).path
            return await from_disk(front, DiskBody(model_path=folder, session_id=session, flush_cache=False))
        if init.backend == "shared_memory":
            shared = _read(info, SharedMemoryInfo)
            wire = UpdateWeightsFromIPCReqInput(
                handle=shared.handle,
                specs=shared.specs,
                delta=_base_of(shared.specs, shared.base),
                session_id=session,
                flush_cache=False,
            )
            return await sent(front, wire)
        if init.backend == "delta":
            return await _fetched(front, _read(info, VersionInfo), init, session)
        if init.backend == "ipc":
            return await _opened(front, _read(info, HandlesInfo), session)
        return await sent(front, _broadcast(_read(info, BroadcastInfo), init, session))

    await front.transfer.update(msgspec.json.encode(info), receive, session_id)


async def _fetched(front: FrontEnd, info: VersionInfo, init: InitInfo, session: str) -> WeightUpdateReqOutput:
    copy = await folder_of_copy(front, "local_checkpoint_dir", init.local_checkpoint_dir)
    wanted = info.version if info.target_version is None else info.target_version
    if wanted is None or front.published.version_of(copy) != wanted:
        raise InvalidRequest(
            f"version {wanted} is not there: call POST /fetch_weights first",
            field="update_info.target_version",
        )
    return await front.published.load(copy, {"session_id": session, "flush_cache": False})


def _base_of(specs: list[TensorSpec], base: DeltaBase | None) -> DeltaBase | None:
    is_sparse = base is not None or any(spec.count is not None for spec in specs)
    return (base or DeltaBase()) if is_sparse else None


def _read(given: dict[str, Any], kind: type[InfoT]) -> InfoT:
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        wrong = field_error(error, kind, given, prefix="update_info")
        raise InvalidRequest(wrong.sentence, field=wrong.field) from error


async def _opened(front: FrontEnd, info: HandlesInfo, session: str) -> WeightUpdateReqOutput:
    if not front.options.allow_pickled_tensors:
        raise Unsupported(
            "pickled handles are off: start with --allow-pickled-tensors", field="ipc_handles_pickled"
        )
    specs = _specs(info.names, info.dtype_names, info.shapes)
    parts = await asyncio.to_thread(read_ipc_handles, info.ipc_handles_pickled, specs, info.tensor_sizes)
    if not parts:
        raise InvalidRequest("names is empty", field="update_info.names")
    options: dict[str, Any] = {"session_id": session, "flush_cache": False}
    return [await sent_part(front, part, options) for part in parts][-1]


def _specs(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[TensorSpec]:
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest("names, dtype_names and shapes have different lengths", field="update_info")
    described = zip(names, dtypes, shapes, strict=True)
    return [TensorSpec(name=name, dtype=dtype_of(dtype), shape=shape) for name, dtype, shape in described]


def _broadcast(info: BroadcastInfo, init: InitInfo, session: str) -> UpdateWeightsFromDistributedReqInput:
    specs = _specs(info.names, info.dtype_names, info.shapes)
    if (counts := info.num_updates_list) is not None:
        if init.backend != "gloo" or len(counts) != len(specs):
            raise InvalidRequest(
                "num_updates_list must have a number for each name, and needs the backend gloo",
                field="update_info.num_updates_list",
            )
        pairs = zip(specs, counts, strict=True)
        specs = [msgspec.structs.replace(spec, count=number) for spec, number in pairs]
    packed = init.packed if info.packed is None else info.packed
    return UpdateWeightsFromDistributedReqInput(
        specs=specs,
        delta=_base_of(specs, info.base),
        load_format="flattened_bucket" if packed else None,
        tensors_per_broadcast=chunks(specs, init.packed_buffer_size_bytes) if packed else None,
        session_id=session,
        flush_cache=False,
    )


def chunks(specs: Sequence[TensorSpec], limit: int) -> list[int]:
    """Return the number of tensors in each of vLLM's chunks, which end when they exceed ``limit`` bytes."""
    counts: list[int] = []
    count = size = 0
    for spec in specs:
        if spec.dtype not in DTYPES:
            raise InvalidRequest(
                f"{spec.name}: unknown dtype {spec.dtype!r}", field="update_info.dtype_names"
            )
        count, size = count + 1, size + nbytes_of(spec.dtype, spec.shape, spec.count)
        if size > limit:
            counts.append(count)
            count = size = 0
    return [*counts, count] if count else counts


class FinishBody(InSession, kw_only=True):
    weight_version: Version | None = None


@command("/finish_weight_update", message("Weight update finished"))
async def finish_weight_update(front: FrontEnd, body: FinishBody) -> None:
    await finish(front, body.weight_version, body.session_id)


async def finish(
    front: FrontEnd, weight_version: Version | None = None, session_id: str | None = None
) -> None:
    front.published.committed(await front.transfer.finish(label(weight_version), session_id))


class FetchBody(Strict, kw_only=True):
    target_version: NonNegative
    sync_dir: str | None = None
    uri: str | None = None


def _fetched_form(body: FetchBody, _: object) -> dict[str, Any]:
    return {"status": "ok", "result": {"status": "ok", "target_version": body.target_version}}


@command("/fetch_weights", Form(_fetched_form, refused))
async def fetch_weights(front: FrontEnd, body: FetchBody) -> None:
    """Bring a copy of the checkpoint to a version that SkyRL has published, while the engine serves."""
    init = front.transfer.info
    copy = await folder_of_copy(front, "local_checkpoint_dir", init.local_checkpoint_dir)
    known = init.base_model_path
    base = front.options.model if known is None else await folder_of_copy(front, "base_model_path", known)
    own = None if body.uri is None else await folder_of_copy(front, "uri", body.uri)
    source = None if own and body.sync_dir is None else await folder_of_copy(front, "sync_dir", body.sync_dir)

    def reader() -> "Callable[[int], Published]":
        from ...trainer.published import skyrl_version

        def read(number: int) -> "Published":
            if own is not None and (number == body.target_version or source is None):
                return skyrl_version(Path(own), number)
            return skyrl_version(Path(source or "") / f"v{number:08d}", number)

        return read

    await front.published.pull(copy, base, body.target_version, reader)


@command("/shutdown_weight_transfer_engine", message("Weight transfer shut down"))
async def shutdown_weight_transfer_engine(front: FrontEnd, body: NothingBody) -> None:
    """Abort an update that is open, and leave the trainer's group."""
    await front.transfer.shutdown()


@get("/weight_info", opt={"access": "user"})
async def weight_info(front: Front) -> Response[bytes]:
    return json_response({"weight_version": (await front.health.status()).weight_version})
