"""Routes that load and unload LoRA adapters, in the words of SGLang, miles, vLLM, SkyRL and prime-rl.

Invariants: all do the same, each in its own form. A loaded name is replaced, but not by vLLM's route
without ``load_inplace``, nor by SGLang's with ``upsert: false``. Folders lie under the weights root.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Response

from ...io_struct import CaesuraError, LoadAdapterReqInput, LoadAdapterReqOutput, TensorSpec
from ...io_struct.field_errors import shown
from ...io_struct.weights import DEFAULT_GROUP_NAME
from ..connection.client_options import id_of
from ..exceptions import InvalidRequest, Unsupported
from .bodies import Label, Strict
from .commands import Form, command, reply_fields
from .context import FrontEnd
from .error_responses import json_response, status_of
from .openai.common import adapter_of
from .sglang.tensor_payload import Frames, Part, read_pickled
from .sglang.weights import FLATTENED, allowed_path, broadcast_specs, check_load_format
from .vllm.weights import refused


def _failed(error: CaesuraError) -> Response[bytes]:
    body = {"success": False, "error_message": error.message, "code": error.code, "detail": error.detail}
    return json_response(body, status_of(error))


_SGLANG = Form(lambda _, found: found, _failed)


def _told(word: str) -> Form:
    def answer(body: Any, _: object) -> Response[bytes]:
        text = f"Success: LoRA adapter '{body.lora_name}' {word} successfully."
        return Response(text.encode(), media_type="text/plain")

    return Form(answer, refused)


def _check_name(front: FrontEnd, name: str) -> None:
    """Refuse a name that ``model`` of a request cannot choose."""
    if adapter_of(front, name) != name:
        reason = f"lora_name = {shown(name)} is the model's own name, or begins with it: choose another"
        raise InvalidRequest(reason, field="lora_name", value=name)


async def load(front: FrontEnd, name: str, path: str, **options: Any) -> LoadAdapterReqOutput:
    """Load the adapter in a folder under the weights root."""
    _check_name(front, name)
    folder = await asyncio.to_thread(allowed_path, path, front.options, "lora_path")
    return await front.client.load_adapter(name, folder, **options)


async def _sglang(front: FrontEnd, reply: object) -> dict[str, Any]:
    status = await front.health.status()
    loaded = {each.name: each.path for each in status.adapters if not each.replaced}
    return {"success": True, "status": "ok", **reply_fields(reply), "loaded_adapters": loaded}


class NamedBody(Strict, kw_only=True):
    lora_name: Label
    # accepted and ignored
    lora_id: str | None = None


class LoadBody(NamedBody, kw_only=True):
    lora_path: str
    pinned: bool = False
    upsert: bool = True
    """miles' field; false: a name that is loaded is refused."""


@command("/load_lora_adapter", _SGLANG)
async def load_lora_adapter(front: FrontEnd, body: LoadBody) -> dict[str, Any]:
    """Load or replace an adapter while generation goes on."""
    loading = load(front, body.lora_name, body.lora_path, pinned=body.pinned, replace=body.upsert)
    return await _sglang(front, await loading)


class SentBody(NamedBody, kw_only=True):
    config_dict: dict[str, Any]
    pinned: bool = False
    upsert: bool = True
    expected_checksums: dict[str, str] | None = None
    """SHA-256 of each tensor's bytes, in hex; Caesura's own where tensors are broadcast."""
    added_tokens_config: dict[str, Any] | None = None

    def request(self, specs: list[TensorSpec], group_name: str | None = None) -> LoadAdapterReqInput:
        return LoadAdapterReqInput(
            id=id_of(None),
            name=self.lora_name,
            config=self.config_dict,
            specs=specs,
            group_name=group_name,
            expected_checksums=self.expected_checksums,
            pinned=self.pinned,
            replace=self.upsert,
        )


def _check_sent(front: FrontEnd, body: SentBody) -> None:
    if body.added_tokens_config:
        raise Unsupported("added_tokens_config is not supported", field="added_tokens_config")
    _check_name(front, body.lora_name)


class TensorsBody(SentBody, kw_only=True):
    serialized_named_tensors: list[str]
    """One base64 pickle of ``[(name, tensor), …]``, parsed and never unpickled."""
    load_format: str | None = None
    """Null or ``flattened_bucket``."""


@command("/load_lora_adapter_from_tensors", _SGLANG, size="weights")
async def load_lora_adapter_from_tensors(front: FrontEnd, body: TensorsBody) -> dict[str, Any]:
    """Load or replace an adapter whose tensors are in the body."""
    if not front.options.allow_pickled_tensors:
        raise Unsupported("pickled tensors are off: start the server with --allow-pickled-tensors")
    flattened = check_load_format(body.load_format, FLATTENED) is not None
    _check_sent(front, body)
    parts = await asyncio.to_thread(read_pickled, body.serialized_named_tensors, flattened=flattened)
    frames = _joined(parts)
    request = body.request(frames.specs)
    reply = await asyncio.shield(front.client.start(request, LoadAdapterReqOutput, frames.buffers))
    return await _sglang(front, reply)


class DistributedBody(SentBody, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: Label = DEFAULT_GROUP_NAME


@command("/load_lora_adapter_from_distributed", _SGLANG, size="specs")
async def load_lora_adapter_from_distributed(front: FrontEnd, body: DistributedBody) -> dict[str, Any]:
    """Load or replace an adapter that rank 0 of a group broadcasts meanwhile, one tensor after the other."""
    _check_sent(front, body)
    request = body.request(broadcast_specs(body.names, body.dtypes, body.shapes), body.group_name)
    return await _sglang(front, await asyncio.shield(front.client.start(request, LoadAdapterReqOutput)))


def _joined(parts: Sequence[Part]) -> Frames:
    """Return all parts as one; raises Unsupported for memory of a device."""
    specs: list[TensorSpec] = []
    buffers: list[memoryview] = []
    for part in parts:
        if not isinstance(part, Frames):
            raise Unsupported("adapters are taken from host memory: send the tensors, or save a folder")
        specs += [msgspec.structs.replace(spec, buffer=spec.buffer + len(buffers)) for spec in part.specs]
        buffers += part.buffers
    return Frames(specs, buffers)


class UnloadBody(NamedBody, kw_only=True):
    # accepted and ignored
    lora_int_id: int | None = None


@command("/unload_lora_adapter", _SGLANG)
async def unload_lora_adapter(front: FrontEnd, body: UnloadBody) -> dict[str, Any]:
    """Unload an adapter; requests that have it end with it."""
    return await _sglang(front, await front.client.unload_adapter(body.lora_name))


class InplaceBody(Strict, kw_only=True):
    lora_name: Label
    lora_path: str
    load_inplace: bool = False
    """False: a name that is loaded is refused."""
    is_3d_lora_weight: bool = False


@command("/v1/load_lora_adapter", _told("added"))
async def load_vllm_adapter(front: FrontEnd, body: InplaceBody) -> LoadAdapterReqOutput:
    """Load an adapter, or replace it with ``load_inplace``."""
    if body.is_3d_lora_weight:
        reason = "is_3d_lora_weight is not supported: experts have no adapters"
        raise Unsupported(reason, field="is_3d_lora_weight")
    return await load(front, body.lora_name, body.lora_path, replace=body.load_inplace)


@command("/v1/unload_lora_adapter", _told("removed"))
async def unload_vllm_adapter(front: FrontEnd, body: UnloadBody) -> object:
    """Unload an adapter; requests that have it end with it."""
    return await front.client.unload_adapter(body.lora_name)


class SkyRLBody(Strict, kw_only=True):
    lora_name: Label
    lora_path: str


@command("/skyrl/v1/load_lora_adapter", _told("added"))
async def load_skyrl_adapter(front: FrontEnd, body: SkyRLBody) -> LoadAdapterReqOutput:
    """Load or replace an adapter."""
    return await load(front, body.lora_name, body.lora_path)
