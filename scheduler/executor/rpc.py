"""Remote calls: rank 0 sends (number, method, arguments) to all workers, and each sends one answer back.

Invariants:
- Workers execute calls in the order of their numbers. A step is answered when it has ended, other calls when
  they are done.
- Arguments and values are msgpack, decoded by their declared types. Nothing is unpickled.
- Both ends are the same version of Caesura: a worker of another version is refused when it joins.
- A call may be followed by frames of bytes: the arrays of a step, or tensors.
- A step's batch comes back as it was, field by field as its classes declare them. The header has the numbers,
  and of each array where it lies; each begins at a multiple of :data:`_ALIGNMENT` bytes.
"""

import inspect
from collections.abc import Callable
from types import GenericAlias
from typing import Any, NamedTuple, get_type_hints

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..execution.forward import ForwardBatch
from ..memory.device_memory import is_out_of_memory
from ..parallel.group import RankLostError
from ..runtime.engine_config import EngineConfig


class Call(msgspec.Struct, array_like=True):
    """One call. With the method ``refuse``, which has no number, rank 0 turns a worker away."""

    number: int
    method: str
    arguments: msgspec.Raw
    """An array of the method's positional arguments."""


class Join(msgspec.Struct, kw_only=True, tag=True):
    rank: int
    pid: int
    host: str
    """Host name and boot id, separated by a slash."""
    version: str


class Memory(msgspec.Struct, kw_only=True, array_like=True):
    reserved: int
    allocated: int
    available: int | None


class AbandonedError(CaesuraError):
    """Rank 0 has broken off an update."""


class Failure(msgspec.Struct, kw_only=True):
    message: str
    code: str = ErrorCode.INTERNAL
    detail: dict[str, Any] = {}
    out_of_memory: bool = False
    follows: bool = False
    """True if it only says that another rank has failed."""


class Answer(msgspec.Struct, kw_only=True, tag=True, omit_defaults=True):
    number: int
    failure: Failure | None = None
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    memory: Memory | None = None


class Start(msgspec.Struct, kw_only=True):
    config: EngineConfig
    devices: list[str]
    """Device of each rank, rank 0 included."""
    folder: str | None
    group: str
    """Address at which the ranks meet (``worker_rendezvous.py``)."""
    sharing: list[int]
    """Number of ranks on the host of each rank, itself included."""


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_said = msgspec.msgpack.Decoder(Join | Answer).decode


class Method(NamedTuple):
    call: Callable[..., Any]
    decode_arguments: Callable[[msgspec.Raw], tuple[Any, ...]]


def methods_of(target: object) -> dict[str, Method]:
    """Return the public methods of ``target`` by name. Frames of a call are its variable arguments."""
    found = {}
    for name, function in vars(type(target)).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            hints = get_type_hints(function)
            _, *parameters = inspect.signature(function).parameters.values()
            types = tuple(hints[each.name] for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
            decoder = msgspec.msgpack.Decoder(GenericAlias(tuple, types))
            found[name] = Method(getattr(target, name), decoder.decode)
    return found


def failure_of(error: BaseException) -> Failure:
    out_of_memory = is_out_of_memory(error)
    code: str = ErrorCode.INTERNAL
    message, detail = f"{type(error).__name__}: {error}", {}
    if isinstance(error, CaesuraError):
        code, message = error.code, error.message
        detail = msgspec.to_builtins(error.detail, str_keys=True)
        out_of_memory |= code == ErrorCode.OUT_OF_MEMORY
    elif out_of_memory:
        code = ErrorCode.OUT_OF_MEMORY
    return Failure(
        message=message,
        code=code,
        detail=detail,
        out_of_memory=out_of_memory,
        follows=isinstance(error, RankLostError | AbandonedError),
    )


def raise_failures(answers: dict[int, Answer], own: CaesuraError | None = None) -> None:
    """Raise the error of the first rank to fail by itself (``own``: rank 0's); ``ranks`` has each reason."""
    by_rank = ((rank, answer.failure) for rank, answer in sorted(answers.items()))
    failures = {rank: failure for rank, failure in by_rank if failure is not None}
    if not failures:
        if own is not None:
            raise own
        return
    failures = {rank: failure for rank, failure in failures.items() if not failure.follows} or failures
    reasons = {str(rank): failure.message for rank, failure in failures.items()}
    if own is not None:
        reasons = {"0": own.message, **reasons}
        code, detail = own.code, own.detail
    else:
        first = next(iter(failures.values()))
        code, detail = first.code, first.detail
    text = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
    raise CaesuraError(code, text, **{**detail, "ranks": reasons})


_ALIGNMENT = 8
"""Size of the widest element, in bytes."""
_PADDING = tuple(bytes(count) for count in range(_ALIGNMENT))


def encode_batch(batch: ForwardBatch) -> tuple[bytes, bytes]:
    """Return header and arrays of a step whose tensors are on the host."""
    parts: list[bytes | memoryview] = []
    end = 0

    def put(found: Any) -> tuple[str, int, tuple[int, ...]]:
        nonlocal end, parts
        array = np.ascontiguousarray(found.numpy() if isinstance(found, Tensor) else found)
        offset, padding = end, -array.nbytes % _ALIGNMENT
        parts += (array.data, _PADDING[padding])
        end += array.nbytes + padding
        return array.dtype.str, offset, array.shape

    header = msgspec.msgpack.Encoder(enc_hook=put).encode(batch)
    return header, b"".join(parts)


def decode_batch(header: bytes | msgspec.Raw, data: bytes | memoryview) -> ForwardBatch:
    arrays = bytearray(data)  # the runner writes into the input ids

    def take(kind: type, place: tuple[str, int, list[int]]) -> Tensor | np.ndarray:
        dtype, offset, shape = place
        array: np.ndarray = np.ndarray(shape, dtype, arrays, offset)
        return torch.from_numpy(array) if kind is Tensor else array

    return msgspec.msgpack.Decoder(ForwardBatch, dec_hook=take).decode(header)
