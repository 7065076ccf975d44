"""Reading of requests: control bodies, queries, and large bodies of prompts.

Invariants: control bodies are read as in SGLang (numbers may be strings, nulls are left out), but unknown
keys are refused. The JSON decoder blocks all threads, so a large body of prompts is cut into pieces, which
makes no objects, and decoded prompt by prompt in a worker thread. The number of prompts and the size of
everything beside them are checked first: a body of empty lists would take dozens of times its size.
"""

import contextlib
import logging
from collections.abc import Collection, Mapping
from functools import cache
from threading import Lock
from typing import Annotated, Any, TypeVar

import msgspec
from litestar import Request
from litestar.exceptions import ClientException

from ...io_struct.field_errors import FieldError, advice, field_error, fields_of, nearest
from ...io_struct.generate import TokenId
from ..exceptions import InvalidRequest, PromptTooLong
from ..text.tokenizer_manager import check_size
from .error_responses import printable

logger = logging.getLogger(__name__)

INLINE = 32 << 10
"""Bytes of the largest body that is decoded on the event loop."""
MAX_OPTIONS_BYTES = 4 << 20
MAX_OPTION_VALUES = 1 << 17
MAX_PROMPT_TOKENS = 1 << 21
"""Maximum ids of one prompt, whatever the context length is."""
MAX_VALUES = 1 << 18
MAX_KEYS = 64

MAX_LABEL = 1024
VISIBLE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
"""Pattern of names that appear in logs and at terminals: no control characters."""
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL, pattern=VISIBLE)]

HTTPRequest = Request[Any, Any, Any]
StructT = TypeVar("StructT", bound=msgspec.Struct)
_TEXTS = msgspec.json.Decoder(list[str])
_IDS = msgspec.json.Decoder(list[TokenId])
_ROWS = msgspec.json.Decoder(list[msgspec.Raw])
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body or query whose keys must all be known: ``mod`` for ``mode`` would abort requests."""


class NothingBody(Strict, kw_only=True):
    pass


def present(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def nullable_fields(kind: type[msgspec.Struct], *left_out: str) -> list[tuple[str, Any, None]]:
    """Return the fields of ``kind`` for a body, in which each may be null or missing."""
    fields = msgspec.structs.fields(kind)
    return [(each.name, each.type | None, None) for each in fields if each.name not in left_out]


async def read_control(
    request: HTTPRequest,
    kind: type[StructT],
    *,
    text: bool = False,
    query: bool = False,
    lists: Collection[str] = (),
) -> StructT:
    """Read the body (empty: ``{}``) as ``kind``, or refuse it with 400; with ``query`` its options come
    second.

    ``text``: the body holds texts, which may have any number of brackets. Options of the query in ``lists``
    may be repeated.
    """
    if request.query_params and not query:
        names = ", ".join(printable(name) for name in request.query_params)
        raise ClientException(f"the query is not read here: give {names} in the body, a JSON object")
    raw = await request.body()
    if len(raw) > INLINE and not text and raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise ClientException(f"the body has more than {MAX_VALUES} lists and objects")
    try:
        fields = msgspec.json.decode(raw) if raw.strip() else None
        fields = {} if fields is None else fields
        if not isinstance(fields, dict):
            raise ClientException("the body must be a JSON object")
        options: dict[str, Any] = dict(request.query_params)
        options |= {name: request.query_params.getall(name) for name in lists if name in options}
        return msgspec.convert(options | present(fields), kind, strict=False)
    except UNREADABLE as error:
        raise _mistake(unreadable(error, raw, kind)) from error


def query_of(request: HTTPRequest, kind: type[StructT]) -> StructT:
    given = dict(request.query_params)
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _mistake(field_error(error, kind, given, whole="the query")) from error


def _mistake(wrong: FieldError) -> ClientException:
    return ClientException(wrong.sentence, extra={"param": wrong.field or None})


def unreadable(error: Exception, raw: bytes, kind: type[msgspec.Struct]) -> FieldError:
    """Explain why a decoder of ``kind`` raised ``error``, one of :data:`UNREADABLE`, for the body ``raw``."""
    if isinstance(error, RecursionError):
        return FieldError("", "the body is nested too deeply")
    if not isinstance(error, msgspec.ValidationError):
        problem = (
            "is empty"
            if not raw.strip()
            else f"is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}"
        )
        if raw[8:9] == b"{" and int.from_bytes(raw[:8], "little") < len(raw):
            problem += "; it looks like a safetensors file, whose Content-Type is application/octet-stream"
        return FieldError("", f"the body {problem}")
    given: Any = msgspec.UNSET
    if len(raw) <= INLINE:
        with contextlib.suppress(*UNREADABLE):  # numbers that only a typed decoder reads
            given = msgspec.json.decode(raw)
    return field_error(error, kind, given, whole="the body")


def decode_large(
    raw: bytes, decoder: "msgspec.json.Decoder[StructT]", prompts: dict[str, bytes], max_prompts: int
) -> StructT:
    """Decode ``raw`` prompt by prompt with ``decoder``'s errors; ``prompts`` are fields and stand-ins."""
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
    """Return a decoder that cuts a body into the values of ``kind``'s fields, as strict as ``kind`` is."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in kind.__struct_fields__]
    strict = kind.__struct_config__.forbid_unknown_fields
    return msgspec.json.Decoder(
        msgspec.defstruct(f"{kind.__name__}Parts", fields, forbid_unknown_fields=strict)
    )


def _prompts(field: str, value: bytes, limit: int) -> Any:
    if value[:1] == b'"':
        return msgspec.json.decode(value, type=str)
    first = value[1:1024].lstrip()[:1]
    try:
        if first == b"[":
            _check_count(field, value.count(b"[") - 1, limit)
            return [_ids(f"{field}[{i}]", bytes(row)) for i, row in enumerate(_ROWS.decode(value))]
        if first == b'"':
            quotes = value.count(b'"') - value.count(b'\\"')  # at least those of a list of so many texts
            _check_count(field, quotes // 2, limit)
            return _TEXTS.decode(value)
        return _ids(field, value)
    except msgspec.DecodeError as error:
        raise _invalid(error, list[str], field) from error


def _invalid(error: msgspec.DecodeError, kind: Any, field: str) -> InvalidRequest:
    if isinstance(error, msgspec.ValidationError):
        return InvalidRequest(field_error(error, kind, prefix=field).sentence, field=field)
    return InvalidRequest(f"{field}: {error}", field=field)


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{count} prompts are over the limit of {limit}", field=field)


def _ids(field: str, value: bytes) -> list[int]:
    count = value.count(b",") + 1
    if count > MAX_PROMPT_TOKENS:
        reason = f"{field}: {count} ids are over the limit of {MAX_PROMPT_TOKENS}"
        raise PromptTooLong(reason, field=field, limit=MAX_PROMPT_TOKENS)
    try:
        return _IDS.decode(value)
    except msgspec.DecodeError as error:
        raise _invalid(error, list[TokenId], field) from error


class UnknownKeys:
    """Log of keys that OpenAI's routes ignore, once each, at most :data:`MAX_KEYS`; for any thread.

    A body without unknown keys makes no objects that grow with it.
    """

    def __init__(self) -> None:
        self._named: set[tuple[str, str]] = set()
        self._lock = Lock()

    def note(self, route: str, body: bytes, kind: type[msgspec.Struct], ignored: frozenset[str]) -> None:
        """Log the keys of ``body`` that are neither fields of ``kind``, its decoded type, nor ``ignored``."""
        try:
            unknown = _unknown_in(body, kind, ignored)
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not valid JSON: {error}") from error
        for key in unknown:
            self._warn(route, key, kind)

    def _warn(self, route: str, key: str, kind: type[msgspec.Struct]) -> None:
        with self._lock:
            if (route, key) in self._named or len(self._named) >= MAX_KEYS:
                return
            self._named.add((route, key))
            last = len(self._named) == MAX_KEYS
        logger.warning(
            "%s: the key %s is not known and ignored%s; requests with it are not mentioned again%s",
            route,
            printable(key),
            _hint(key, kind),
            ", nor are further unknown keys" if last else "",
        )


def _hint(key: str, kind: type[msgspec.Struct]) -> str:
    names = fields_of(kind)
    if (instead := advice(key, names)) is not None:
        return f" ({instead})"
    near = nearest(key, names)
    return "" if near is None else f" (did you mean {near}?)"


def _unknown_in(body: bytes, kind: type[msgspec.Struct], ignored: frozenset[str]) -> list[str]:
    try:
        _key_decoder(kind, ignored).decode(body)
    except msgspec.ValidationError as error:
        if len(body) > INLINE:
            return [str(error).partition("`")[2].rpartition("`")[0]]
        known = ignored.union(kind.__struct_fields__)
        return [key for key in _KEYS.decode(body) if key not in known]
    return []


@cache
def _key_decoder(
    kind: type[msgspec.Struct], ignored: frozenset[str]
) -> "msgspec.json.Decoder[msgspec.Struct]":
    """Return a decoder that takes the keys of ``kind`` with any value and refuses others."""
    names = sorted(ignored.union(kind.__struct_fields__))
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Keys", fields, forbid_unknown_fields=True))
