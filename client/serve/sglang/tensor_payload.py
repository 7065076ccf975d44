"""Weights in HTTP bodies: safetensors files, and SGLang's pickles parsed into plain fields.

Invariants: nothing is unpickled: ``transfer/legacy_pickle.py`` records what would have been called, and only
the calls named here have a meaning. Only byte ranges inside the received data are sent on. Shared memory must
have a name that torch gives (``/torch_…``) and belong to this user, and is copied out.
"""

import base64
import io
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import msgspec

from ....io_struct import CudaIPCHandle, DeltaBase, TensorSpec
from ....transfer.legacy_pickle import Call, Global, parse
from ....transfer.safetensors import (
    DTYPES,
    LENGTH_BYTES,
    NAMES_BY_TORCH,
    SafetensorsError,
    header_length,
    parse_header,
)
from ....transfer.weight_delta import read_delta
from ...exceptions import InvalidRequest, Unsupported

MAX_FRAME_BYTES = 1 << 30
"""Limit of the wire: a tensor goes in a frame of its own."""
_ALIASES = {"float": "float32", "half": "float16", "double": "float64"}

_SHARED_NAME = re.compile(rb"/torch_[0-9]+_[0-9]+(_[0-9]+)?")
_SHARED_HEADER = 64
"""Bytes before the data, in which torch counts references."""


@dataclass(frozen=True, slots=True)
class Frames:
    specs: list[TensorSpec]
    buffers: list[memoryview]


@dataclass(frozen=True, slots=True)
class DeviceTensors:
    handle: CudaIPCHandle
    specs: list[TensorSpec]


Part = Frames | DeviceTensors


def dtype_of(name: str) -> str:
    """Return safetensors' name of a torch dtype (``torch.`` is optional), or ``name`` if it is unknown."""
    name = name.removeprefix("torch.")
    return NAMES_BY_TORCH.get(_ALIASES.get(name, name), name)


def read_safetensors(body: bytes) -> Frames:
    """Read a safetensors file, each tensor as a frame, without a copy."""
    try:
        start = LENGTH_BYTES + header_length(body[:LENGTH_BYTES], len(body))
        data = memoryview(body)[start:]
        entries = parse_header(memoryview(body)[LENGTH_BYTES:start], len(data))
    except SafetensorsError as error:
        raise InvalidRequest(f"the body {error}", field="body") from error
    return frames_of((e.name, e.dtype, e.shape, data[e.offset : e.offset + e.nbytes]) for e in entries)


class Delta(NamedTuple):
    frames: Frames
    base: DeltaBase


def read_delta_body(body: bytes, base_epoch: int | None) -> Delta | None:
    """Read a delta.safetensors, all in one frame, or return None if the body is another safetensors file."""
    if body.find(b"caesura_delta", 0, LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "little")) < 0:
        return None
    try:
        metadata, specs, buffer = read_delta(io.BytesIO(body), len(body))
    except SafetensorsError as error:
        raise InvalidRequest(f"the body {error}", field="body") from error
    base = DeltaBase(base_epoch=base_epoch, base_digest=metadata.base_digest, digest=metadata.digest)
    return Delta(Frames(specs, [memoryview(buffer)]), base)


def frames_of(pieces: Iterable[tuple[str, str, list[int], memoryview]]) -> Frames:
    """Make a frame of each ``(name, dtype, shape, bytes)``, also without bytes."""
    specs: list[TensorSpec] = []
    buffers: list[memoryview] = []
    for name, dtype, shape, data in pieces:
        if len(data) > MAX_FRAME_BYTES:
            raise Unsupported(
                f"tensor {name!r} of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES} here"
            )
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape, nbytes=len(data), buffer=len(buffers)))
        buffers.append(data)
    return Frames(specs, buffers)


def read_pickled(payloads: list[str], *, flattened: bool) -> list[Part]:
    """Read ``serialized_named_tensors``, one part per storage; InvalidRequest, Unsupported or malformed."""
    if len(payloads) != 1:
        raise InvalidRequest(
            f"{len(payloads)} serialized_named_tensors for an engine of one rank",
            field="serialized_named_tensors",
        )
    try:
        pickled = base64.b64decode(payloads[0], validate=True)
    except ValueError as error:  # also of text that is not ASCII
        raise InvalidRequest(
            f"serialized_named_tensors: {error}", field="serialized_named_tensors"
        ) from error
    message = parse(pickled)
    tensors = _flattened(message) if flattened else _named(message)
    return list(_parts(tensors))


def read_ipc_handles(pickled: str, specs: list[TensorSpec], sizes: list[int] | None) -> list[Part]:
    """Read vLLM's ``ipc_handles_pickled``, handles by device for each tensor, or for all with ``sizes``."""
    try:
        handles = parse(base64.b64decode(pickled, validate=True))
    except ValueError as error:
        raise InvalidRequest(f"ipc_handles_pickled: {error}", field="ipc_handles_pickled") from error
    if sizes is None:
        if not isinstance(handles, list) or len(handles) != len(specs):
            _refuse(f"{len(specs)} tensors need a list of as many handles")
        return list(_parts([_of_device(spec.name, each) for spec, each in zip(specs, handles, strict=True)]))
    whole = _of_device("the buffer", handles)
    ends = list(itertools.accumulate(map(_natural, sizes), initial=0))[1:]
    if len(sizes) != len(specs) or sum(sizes) > whole.nbytes:
        _refuse(f"tensor_sizes does not fit {len(specs)} tensors in {whole.nbytes} bytes")
    starts = [whole.offset + end - size for end, size in zip(ends, sizes, strict=True)]
    tensors = [
        _Tensor(spec.name, spec.dtype, spec.shape, start, size, whole.storage)
        for spec, start, size in zip(specs, starts, sizes, strict=True)
    ]
    return list(_parts(tensors))


def _of_device(name: str, handles: object) -> "_Tensor":
    """Read ``{uuid: arguments of rebuild_cuda_tensor}``, in which a device has an index of the sender's."""
    if not isinstance(handles, dict) or not all(isinstance(args, tuple) for args in handles.values()):
        _refuse(f"{name!r} has no handles by device")
    if len(handles) != 1:
        raise Unsupported(f"{name!r} has handles of {len(handles)} devices: an engine of one rank takes one")
    ((uuid, args),) = handles.items()
    at = _CUDA_ARGUMENTS.index("device")
    return _cuda_tensor(name, (*args[:at], uuid, *args[at + 1 :]))


@dataclass(frozen=True, slots=True)
class _Storage:
    nbytes: int
    place: bytes | CudaIPCHandle


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: list[int]
    offset: int
    nbytes: int
    storage: _Storage


def _parts(tensors: list[_Tensor]) -> Iterator[Part]:
    for storage, group in itertools.groupby(tensors, key=lambda tensor: tensor.storage):
        found = list(group)
        if isinstance(storage.place, CudaIPCHandle):
            specs = [
                TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, nbytes=t.nbytes)
                for t in found
            ]
            yield DeviceTensors(storage.place, specs)
        else:
            data = memoryview(_read_shared(storage.place, storage.nbytes))
            yield frames_of((t.name, t.dtype, t.shape, data[t.offset : t.offset + t.nbytes]) for t in found)


def _flattened(message: object) -> list[_Tensor]:
    """Read many tensors in one of bytes; an empty bucket, which slime sends as padding, has none."""
    if not isinstance(message, dict) or message.keys() != {"flattened_tensor", "metadata"}:
        _refuse("a flattened bucket must have the keys flattened_tensor and metadata")
    whole, metadata = message["flattened_tensor"], message["metadata"]
    if not isinstance(metadata, (list, tuple)):
        _refuse("the metadata of a flattened bucket must be a list")
    if not metadata:
        return []
    base = _tensor("flattened_tensor", whole)
    tensors = []
    for item in metadata:
        state = _state(item, "FlattenedTensorMetadata")
        try:
            name, start, end = state["name"], state["start_idx"], state["end_idx"]
            shape, (dtype, itemsize) = _ints(state["shape"]), _dtype(state["dtype"])
        except KeyError as error:
            _refuse(f"a tensor's metadata lacks {error}")
        if not isinstance(name, str) or type(start) is not int or type(end) is not int:
            _refuse("a tensor's metadata must have a text as name and integers as indices")
        if not 0 <= start <= end <= base.nbytes or end - start != math.prod(shape) * itemsize:
            _refuse(f"tensor {name!r} does not fit between bytes {start} and {end} of {base.nbytes}")
        tensors.append(_Tensor(name, dtype, shape, base.offset + start, end - start, base.storage))
    return tensors


def _named(message: object) -> list[_Tensor]:
    """Read ``[(name, tensor)]``, where a tensor may be a pickle of its own, one for each rank."""
    if not isinstance(message, (list, tuple)):
        _refuse("named tensors must be a list")
    tensors = []
    for item in message:
        if not isinstance(item, (list, tuple)) or len(item) != 2 or not isinstance(item[0], str):
            _refuse("a named tensor must be a pair of name and tensor")
        name, value = item
        if isinstance(value, Call) and value.function.name == "LocalSerializedTensor":
            values = _state(value, "LocalSerializedTensor").get("values")
            if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], bytes):
                _refuse(f"tensor {name!r} must be given for exactly one rank")
            value = parse(values[0])
        tensors.append(_tensor(name, value))
    return tensors


def _tensor(name: str, value: object) -> _Tensor:
    if not isinstance(value, Call):
        _refuse(f"{name!r} is not a tensor")
    made_by, args = value.function.name, value.args
    if made_by in ("rebuild_cuda_tensor", "_rebuild_cuda_tensor_modified"):
        return _cuda_tensor(name, args)
    if made_by == "rebuild_tensor" and len(args) == 3:
        return _cpu_tensor(name, args[1], args[2])
    raise Unsupported(
        f"tensor {name!r} is made by {value.function.module}.{made_by}, which is not supported: "
        "send a safetensors body"
    )


def _cpu_tensor(name: str, typed: object, metadata: object) -> _Tensor:
    """Read ``rebuild_tensor(class, rebuild_typed_storage(storage, dtype), (offset, size, stride, ...))``."""
    if not (
        isinstance(typed, Call) and typed.function.name == "rebuild_typed_storage" and len(typed.args) == 2
    ):
        _refuse(f"tensor {name!r} has no storage of torch")
    storage, (dtype, itemsize) = typed.args[0], _dtype(typed.args[1])
    if not isinstance(storage, Call) or storage.function.name != "rebuild_storage_filename":
        kind = storage.function.name if isinstance(storage, Call) else type(storage).__name__
        raise Unsupported(
            f"tensor {name!r} is shared by {kind}, which only child processes of the sender can open: send a "
            'safetensors body, or use torch.multiprocessing.set_sharing_strategy("file_system")'
        )
    if len(storage.args) != 4 or not isinstance(metadata, tuple) or len(metadata) != 4:
        _refuse(f"tensor {name!r} is not described in torch's format")
    _, _, handle, size = storage.args
    if not isinstance(handle, bytes) or not _SHARED_NAME.fullmatch(handle):
        _refuse(f"tensor {name!r} names no shared memory of torch")
    place = _Storage(_natural(size), handle)
    return _inside(name, place, dtype, itemsize, *metadata[:3])


_CUDA_ARGUMENTS = (
    "class", "size", "stride", "start", "storage_class", "dtype", "device", "handle", "nbytes", "offset",
    "requires_grad", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required",
)  # fmt: skip
"""Arguments of torch's rebuild_cuda_tensor, named as in ``CudaIPCHandle`` if they are there."""


def _cuda_tensor(name: str, args: tuple[object, ...]) -> _Tensor:
    if len(args) != len(_CUDA_ARGUMENTS):
        _refuse(f"tensor {name!r} is described by {len(args)} arguments")
    found = dict(zip(_CUDA_ARGUMENTS, args, strict=True))
    if not isinstance(found["device"], str):
        raise Unsupported(
            f"tensor {name!r} identifies its device by an index, which is valid in its process only: "
            "SGLang's clients send the device's uuid (monkey_patch_torch_reductions)"
        )
    fields = {key: found[key] for key in CudaIPCHandle.__struct_fields__ if key in found}
    try:
        handle = msgspec.convert(
            {**fields, "device_uuid": found["device"]}, CudaIPCHandle, builtin_types=(bytes,)
        )
    except msgspec.ValidationError as error:
        _refuse(f"tensor {name!r}: {error}")
    dtype, itemsize = _dtype(found["dtype"])
    place = _Storage(handle.nbytes, handle)
    return _inside(name, place, dtype, itemsize, found["start"], found["size"], found["stride"])


def _inside(
    name: str, place: _Storage, dtype: str, itemsize: int, start: object, size: object, stride: object
) -> _Tensor:
    """Return the tensor of a view of a storage, in elements; it must be contiguous and lie inside."""
    shape, strides = _ints(size), _ints(stride)
    if len(shape) != len(strides):
        _refuse(f"tensor {name!r} has {len(shape)} lengths and {len(strides)} strides")
    expected = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(length > 1 and s != e for length, s, e in zip(shape, strides, expected, strict=True)):
        raise Unsupported(f"tensor {name!r} is not contiguous")
    offset, nbytes = _natural(start) * itemsize, math.prod(shape) * itemsize
    if offset + nbytes > place.nbytes:
        _refuse(f"tensor {name!r} ends beyond its storage of {place.nbytes} bytes")
    return _Tensor(name, dtype, shape, offset, nbytes, place)


def _state(item: object, kind: str) -> dict[str, Any]:
    if not isinstance(item, Call) or item.function.name != kind or not isinstance(item.state, dict):
        _refuse(f"a {kind} was expected")
    return item.state


def _dtype(value: object) -> tuple[str, int]:
    torch_name = value.name if isinstance(value, Global) and value.module == "torch" else ""
    name = NAMES_BY_TORCH.get(_ALIASES.get(torch_name, torch_name))
    if name is None:
        _refuse("a tensor has a dtype that weights cannot have")
    return name, DTYPES[name].nbytes


def _ints(value: object) -> list[int]:
    if isinstance(value, Call) and value.function == Global("torch", "Size") and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, (list, tuple)) or len(value) > 64:
        _refuse("a shape must be a list of at most 64 lengths")
    return [_natural(length) for length in value]


def _natural(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        _refuse("a length or offset must be an integer in [0, 2^63)")
    return value


def _read_shared(name: bytes, nbytes: int) -> bytes:
    if nbytes == 0:
        return b""
    try:
        fd = os.open(b"/dev/shm" + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"shared memory {name.decode()} cannot be opened: {error.strerror}") from error
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_size < _SHARED_HEADER + nbytes:
            raise InvalidRequest(
                f"shared memory {name.decode()} is another user's, or smaller than its tensors"
            )
        file.seek(_SHARED_HEADER)
        data = file.read(nbytes)
    if len(data) != nbytes:
        raise InvalidRequest(f"shared memory {name.decode()} has become smaller")
    return data


def _refuse(problem: str) -> NoReturn:
    raise InvalidRequest(f"serialized_named_tensors: {problem}", field="serialized_named_tensors")
