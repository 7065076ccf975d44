"""Encodes and decodes headers; the type of a frame is checked before its content."""

from collections.abc import Iterator
from typing import Any, TypeVar, Union

import msgspec

from . import control, images, memory, weights  # noqa: F401 (their messages)
from .base import MAX_HEADER_BYTES, Message, Reply, Request
from .errors import CaesuraError, ErrorCode
from .field_errors import field_error, nearest
from .generate import BatchTokenOutput, GenerateReqOutput, Keepalive


def _messages(base: type[Message]) -> Iterator[type[Message]]:
    for kind in base.__subclasses__():
        yield from _messages(kind) if kind.__subclasses__() else (kind,)


REQUESTS = {kind.__name__: kind for kind in _messages(Request)}
ToScheduler: Any = Union[tuple(REQUESTS.values())]  # noqa: UP007
"""Messages that a scheduler accepts: every request."""
ToClient: Any = Union[  # noqa: UP007
    tuple(kind for kind in _messages(Message) if not issubclass(kind, Request))
]
"""Messages that a client accepts: every other one."""

Answer = Reply | BatchTokenOutput | images.GenerateImagesReqOutput | Keepalive
T = TypeVar("T")

_MAX_QUOTED = 500
_MAX_EXPLAINED = 64 << 10
"""Bytes of the longest refused header that is decoded once more, to say what it gave."""

_encoder = msgspec.msgpack.Encoder()
_to_scheduler = msgspec.msgpack.Decoder(ToScheduler)
_to_client = msgspec.msgpack.Decoder(ToClient)


class _IdOnly(msgspec.Struct):
    """Skips every other field without building it: 64 MiB of empty lists would be gigabytes of objects."""

    id: str = ""


class _TypeOnly(msgspec.Struct):
    type: str = ""


_id_only = msgspec.msgpack.Decoder(_IdOnly)
_type_only = msgspec.msgpack.Decoder(_TypeOnly)


def encode(message: Message) -> bytes:
    """Return the header frame; raise OverflowError or UnicodeEncodeError for what no wire can hold."""
    return _encoder.encode(message)


def encode_reply(message: Message) -> bytes:
    """Return the header of an answer, which must not fail: bad UTF-8 is escaped, big integers are text."""
    try:
        return _encoder.encode(message)
    except (UnicodeEncodeError, OverflowError):
        return _encoder.encode(_holdable(msgspec.to_builtins(message, builtin_types=(bytes,))))


def too_large(message: Message) -> str | None:
    """Return the path of the first integer in ``message`` that no wire can hold, or None."""
    return next(_beyond_64_bits(msgspec.to_builtins(message, builtin_types=(bytes,)), ""), None)


def _beyond_64_bits(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _beyond_64_bits(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _beyond_64_bits(item, f"{path}[{index}]")
    elif type(value) is int and not -(1 << 63) <= value < 1 << 64:
        yield path


_INT64 = range(-(1 << 63), 1 << 63)


def _holdable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_holdable(key): _holdable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_holdable(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return str(value) if type(value) is int and value not in _INT64 else value


def decode_request(frame: bytes | memoryview) -> Request:
    """Decode a client's header; raises ``malformed_message`` or ``out_of_memory``, with a readable id."""
    if len(frame) > MAX_HEADER_BYTES:
        reason = f"header of {len(frame)} bytes is over the limit of {MAX_HEADER_BYTES}"
        raise CaesuraError(ErrorCode.MALFORMED_MESSAGE, reason, id="")
    try:
        request: Request = _to_scheduler.decode(frame)
    except _UNREADABLE as error:
        raise _malformed(frame, error) from error
    except MemoryError as error:
        reason = f"no memory for a message of {len(frame)} bytes"
        raise CaesuraError(ErrorCode.OUT_OF_MEMORY, reason, id=readable_id(frame)) from error
    return request


def _malformed(frame: bytes | memoryview, error: Exception) -> CaesuraError:
    """Say what ``error`` means for ``frame``: the field and what is valid there, if the type is known."""
    name = _readable(_type_only, frame, _TypeOnly()).type
    kind = REQUESTS.get(name)
    if kind is None or not isinstance(error, msgspec.ValidationError):
        near = nearest(name, list(REQUESTS)) if name else None
        hint = "" if near is None else f" (did you mean {near}?)"
        said = f"not a Caesura message: {_shortened(error)}{hint}"
        return CaesuraError(ErrorCode.MALFORMED_MESSAGE, said, id=readable_id(frame))
    given = _readable(_anything, frame, msgspec.UNSET) if len(frame) <= _MAX_EXPLAINED else msgspec.UNSET
    field, sentence = field_error(error, kind, given, whole=name)
    return CaesuraError(
        ErrorCode.MALFORMED_MESSAGE, sentence, id=readable_id(frame), **({"field": field} if field else {})
    )


def _shortened(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}… ({len(text)} characters)"


def decode_reply(frame: bytes | memoryview) -> Answer:
    """Decode a header that the scheduler sent; raises ``msgspec.DecodeError`` on anything else."""
    try:
        reply: Answer = _to_client.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from error
    return reply


class UnreadReply(msgspec.Struct):
    """The addressee of a reply that cannot be decoded; nothing else of it is built."""

    type: str = ""
    id: str = ""
    finished: list[msgspec.Raw] = []
    """:class:`BatchTokenOutput`: the terminal results, each to be read by itself."""

    def results(self) -> Iterator[GenerateReqOutput | str]:
        """Yield the terminal results, or the rid of one that cannot be read (empty: nor can that)."""
        for raw in self.finished:
            try:
                yield _result.decode(raw)
            except _UNREADABLE:
                yield _readable(_rid_only, raw, _RidOnly()).rid


class _RidOnly(msgspec.Struct):
    rid: str = ""


_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_unread = msgspec.msgpack.Decoder(UnreadReply)
_anything: "msgspec.msgpack.Decoder[Any]" = msgspec.msgpack.Decoder()
_rid_only = msgspec.msgpack.Decoder(_RidOnly)
_result = msgspec.msgpack.Decoder(GenerateReqOutput)


def salvage_reply(frame: bytes | memoryview) -> UnreadReply:
    """Return what is readable of a frame that :func:`decode_reply` refuses; empty fields if nothing is."""
    return _readable(_unread, frame, UnreadReply())


def readable_id(frame: bytes | memoryview) -> str:
    """Return the id of a msgpack frame that is no valid message, to find its caller; else ""."""
    return "" if len(frame) > MAX_HEADER_BYTES else _readable(_id_only, frame, _IdOnly()).id


def _readable(
    decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview | msgspec.Raw, otherwise: T
) -> T:
    try:
        return decoder.decode(frame)
    except (*_UNREADABLE, MemoryError):
        return otherwise
