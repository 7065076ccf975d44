"""Decodes large JSON bodies into structs without blocking the event loop and with bounded memory.

Invariants:
- The decoder lets no other thread run. So a large body is cut up first, which is fast and makes nothing, and then decoded prompt by
  prompt, by a worker thread.
- How many prompts there are is bounded before they are made, and so is what stands beside them: a body of empty lists would
  otherwise take dozens of times its size.
"""

import contextlib
from functools import cache
from typing import Any, TypeVar

import msgspec

from ...io_struct.field_errors import FieldError, field_error
from ...io_struct.generate import TokenId
from ..connection.request_limits import check_size
from ..exceptions import InvalidRequest, PromptTooLong

INLINE = 32 << 10
"""Bytes of a body that is decoded at once, on the event loop: some hundred microseconds."""
MAX_OPTIONS_BYTES = 4 << 20
"""Of everything in a body that is no prompt."""
MAX_OPTION_VALUES = 1 << 17
"""Lists and objects in that."""
MAX_PROMPT_TOKENS = 1 << 21
"""Ids of one prompt that are looked at, whatever the context is."""

StructT = TypeVar("StructT", bound=msgspec.Struct)
_TEXTS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[TokenId])
_ROWS = msgspec.json.Decoder(list[msgspec.Raw])
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoders raise of a body that is not what it should be."""


def unreadable(error: Exception, raw: bytes, kind: type[msgspec.Struct]) -> FieldError:
    """What is wrong with the body ``raw``, of which a decoder of ``kind`` has raised one of :data:`UNREADABLE`."""
    if isinstance(error, RecursionError):
        return FieldError("", "the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        what = (
            "is empty"
            if not raw.strip()
            else f"is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
        )
        if raw[8:9] == b"{" and int.from_bytes(raw[:8], "little") < len(raw):
            what += "; it looks like a safetensors file, whose Content-Type is application/octet-stream"
        return FieldError("", f"the body {what}")
    given: Any = msgspec.UNSET
    if len(raw) <= INLINE:
        with contextlib.suppress(*UNREADABLE):  # numbers that only a typed decoder reads
            given = msgspec.json.decode(raw)
    return field_error(error, kind, given, whole="the body")


def decode_large(
    raw: bytes, decoder: "msgspec.json.Decoder[StructT]", prompts: dict[str, bytes], max_prompts: int
) -> StructT:
    """``raw`` as ``decoder`` would give it.

    Args:
        prompts: fields that hold prompts (a text, texts, ids or lists of ids) → JSON that stands in for them meanwhile.
        max_prompts: how many there may be.

    Raises:
        InvalidRequest: more than is taken, or values of the wrong kind.
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: as ``decoder``.
    """
    kind: Any = decoder.type
    cut = _envelope(kind).decode(raw)
    given = {name: bytes(value) for name in kind.__struct_fields__ if len(value := getattr(cut, name))}
    options = {name: value for name, value in given.items() if name not in prompts}
    size = sum(map(len, options.values()))
    check_size("body", size, MAX_OPTIONS_BYTES, "bytes beside the prompts")
    values = sum(value.count(b"{") + value.count(b"[") for value in options.values())
    check_size("body", values, MAX_OPTION_VALUES, "lists and objects beside the prompts")
    long = {name: value for name, value in given.items() if name in prompts and value[:1] in b'["'}
    rest = {**given, **{name: prompts[name] for name in long}}
    body = decoder.decode(b"{" + b",".join(b'"%s":%s' % (n.encode(), v) for n, v in rest.items()) + b"}")
    for name, value in long.items():
        setattr(body, name, _prompts(name, value, max_prompts))
    return body


@cache
def _envelope(kind: type[msgspec.Struct]) -> "msgspec.json.Decoder[msgspec.Struct]":
    """Cuts a body into the values of ``kind``'s fields; what is no field is refused or passed over, as ``kind`` does."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in kind.__struct_fields__]
    strict = kind.__struct_config__.forbid_unknown_fields
    return msgspec.json.Decoder(
        msgspec.defstruct(f"{kind.__name__}Parts", fields, forbid_unknown_fields=strict)
    )


def _prompts(field: str, value: bytes, most: int) -> Any:
    if value[:1] == b'"':
        return msgspec.json.decode(value, type=str)
    first = value[1:1024].lstrip()[:1]
    try:
        if first == b"[":
            _check_count(field, value.count(b"[") - 1, most)
            return [_ids(f"{field}[{i}]", bytes(row)) for i, row in enumerate(_ROWS.decode(value))]
        if first == b'"':
            ends = value.count(b'"') - value.count(b'\\"')  # no fewer than a list of so many texts has
            _check_count(field, ends // 2, most)
            return _TEXTS.decode(value)
        return _ids(field, value)
    except msgspec.DecodeError as error:
        raise InvalidRequest(_said(error, list[str], field), field=field) from error


def _said(error: msgspec.DecodeError, kind: Any, field: str) -> str:
    if isinstance(error, msgspec.ValidationError):
        return field_error(error, kind, prefix=field).sentence
    return f"{field}: {error}"


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{count} prompts are over the limit of {most}", field=field)


def _ids(field: str, value: bytes) -> list[int]:
    count = value.count(b",") + 1
    if count > MAX_PROMPT_TOKENS:
        raise PromptTooLong(
            f"{field}: {count} ids are over the limit of {MAX_PROMPT_TOKENS}",
            field=field,
            limit=MAX_PROMPT_TOKENS,
        )
    try:
        return _IDS.decode(value)
    except msgspec.DecodeError as error:
        raise InvalidRequest(_said(error, list[TokenId], field), field=field) from error
