"""Writes the generated parts of docs/reference/wire.md from the structs that are the wire, so that the two
cannot drift.

Invariants: a field's meaning is the docstring below it; without one, it is that of the fields of the same
name and type if they agree, or what the struct says that is its type. Its type and default are what the
decoder checks. Run ``python docs/generate_wire.py`` after a change of ``io_struct/`` (``--check``: see
:mod:`generated_parts`).
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
from generated_parts import update
from msgspec import inspect as wire_types

from caesura import io_struct
from caesura.io_struct import ErrorCode, ToClient, ToScheduler
from caesura.io_struct.base import Message, Record, ReplyRecord

DOCUMENT = Path(__file__).parent / "reference" / "wire.md"
LINE = 120
ANSWERS = {
    "GenerateReqInput": "BatchTokenOutput",
    "AbortReq": "AbortReqOutput",
    "EndWeightUpdateReqInput": "WeightUpdateReqOutput",
    "RollbackWeightsReqInput": "WeightUpdateReqOutput",
    "UpdateWeightFromDiskReqInput": "WeightUpdateReqOutput",
    "UpdateWeightsFromTensorReqInput": "WeightUpdateReqOutput",
    "UpdateWeightsFromIPCReqInput": "WeightUpdateReqOutput",
    "UpdateWeightsFromCheckpointEngineReqInput": "WeightUpdateReqOutput",
    "UpdateWeightsFromDistributedReqInput": "WeightUpdateReqOutput",
}
"""Answers whose name is not that of their request: ``XReqOutput`` to ``XReqInput``."""
LIMITS = (
    ("io_struct.base", "MAX_HEADER_BYTES", "bytes", "a header; more is `malformed_message`"),
    ("io_struct.base", "MAX_FRAME_BYTES", "bytes", "a frame (`ZMQ_MAXMSGSIZE`); ZeroMQ drops the connection"),
    ("io_struct.base", "MAX_MESSAGE_BYTES", "bytes", "all frames of a message; more is `malformed_message`"),
    ("io_struct.base", "MAX_FRAMES", "frames", "of a message, header included; more is `malformed_message`"),
    (
        "scheduler.messaging.router_socket", "OVERLONG_MESSAGES", "messages",
        "over these limits, from one client; then it counts as gone",
    ),
    ("io_struct.base", "MAX_ID_LENGTH", "characters", "a message id or request id"),
    ("io_struct.generate", "MAX_SAMPLES", "samples", "`n` of one request"),
    ("process.contract", "MAX_IPC_PATH", "bytes", "the path of an `ipc://` endpoint"),
    (
        "scheduler.messaging.router_socket", "HIGH_WATER_MARK", "messages",
        "unsent to one client inside ZeroMQ (`ZMQ_SNDHWM`)",
    ),
    (
        "scheduler.messaging.router_socket", "RECEIVE_HIGH_WATER_MARK", "messages",
        "unread from one client (`ZMQ_RCVHWM`)",
    ),
    (
        "scheduler.messaging.send_queues", "MAX_PENDING_DELTA_TOKENS", "tokens",
        "streamed and not taken by one client; more are dropped",
    ),
    (
        "scheduler.messaging.send_queues", "MAX_PENDING_MESSAGES", "replies and results",
        "not taken by one client; then it is gone",
    ),
    (
        "scheduler.messaging.send_queues", "MAX_PENDING_BYTES", "bytes",
        "of them; then the client counts as gone",
    ),
    (
        "scheduler.messaging.send_queues", "MAX_ALL_PENDING_BYTES", "bytes",
        "not taken by all clients; who has the most counts as gone",
    ),
    (
        "scheduler.messaging.router_socket", "MESSAGES_PER_DRAIN", "messages",
        "taken from the socket between two steps",
    ),
    (
        "scheduler.messaging.router_socket", "FRAMES_PER_DRAIN", "frames",
        "behind headers, taken from the socket between two steps",
    ),
    (
        "scheduler.messaging.command_queue", "MAX_PENDING_COMMANDS", "commands",
        "under way, queued or waiting; more are `queue_full`",
    ),
    (
        "scheduler.messaging.stored_answers", "STORED_ANSWERS", "message ids",
        "of commands whose answers are stored for retries at least, if each takes no more than a kilobyte",
    ),
    (
        "scheduler.runtime.engine_config", "RESULT_BYTES", "bytes",
        ("of results stored for retries and for clients that could not be reached, "
         "unless `--result-bytes` says another number; the oldest go first. Images: 64 MiB"),
    ),
    (
        "scheduler.messaging.stored_answers", "REMEMBERED_IDS", "message ids",
        "answered before those, whose retries are `answer_forgotten`",
    ),
)  # fmt: skip


def field_docs(owner: Any) -> dict[str, str]:
    """Return the docstring below each field or member in the class body of ``owner`` alone, by name."""
    module = ast.parse(inspect.getsource(sys.modules[owner.__module__]))
    body = next(
        node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == owner.__name__
    )
    texts = {}
    for statement, below in pairwise(body):
        target: ast.AST | None = None
        if isinstance(statement, ast.AnnAssign):
            target = statement.target
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
        if isinstance(target, ast.Name) and isinstance(below, ast.Expr):
            texts[target.id] = markdown(str(ast.literal_eval(below.value)))
    return texts


def meanings(cls: Any) -> dict[str, str]:
    """Return the meaning of each field of ``cls`` and its bases, by name."""
    info = wire_types.type_info(cls)
    assert isinstance(info, wire_types.StructType)
    own: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        own |= field_docs(base) if base.__module__.startswith("caesura.") else {}
    return {each.name: own.get(each.name) or meaning_elsewhere(each) for each in info.fields}


def meaning_elsewhere(field: wire_types.Field) -> str:
    """Return what such fields, by name and type, agree on elsewhere, or the summary of its struct."""
    if text := documented_fields().get((field.name, type_text(field.type))):
        return text
    kind = field.type.item_type if isinstance(field.type, wire_types.ListType) else field.type
    return (
        markdown(inspect.getdoc(kind.cls)).partition("\n\n")[0]
        if isinstance(kind, wire_types.StructType)
        else ""
    )


@cache
def documented_fields() -> dict[tuple[str, str], str]:
    """Name and type of documented fields to their docstring; those with several are left out."""
    found: dict[tuple[str, str], set[str]] = {}
    for cls in (value for value in vars(io_struct).values() if isinstance(value, type)):
        if issubclass(cls, Message | Record):
            docs = field_docs(cls)
            for field in wire_types.type_info(cls).fields:  # type: ignore[attr-defined]
                if field.name in docs:
                    found.setdefault((field.name, type_text(field.type)), set()).add(docs[field.name])
    return {field: texts.pop() for field, texts in found.items() if len(texts) == 1}


def markdown(docstring: str | None) -> str:
    """Return a docstring's paragraphs on one line each, its reStructuredText marks as code spans."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda role: f"`{role[1].rpartition('.')[2]}`", docstring or "")
    text = text.replace("``", "`").replace("|", "\\|")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")).strip()


def wrapped(text: str) -> str:
    """Return paragraphs in lines of at most :data:`LINE` characters."""
    fill = partial(textwrap.fill, width=LINE, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(map(fill, text.split("\n\n")))


def type_text(kind: wire_types.Type) -> str:
    """Return a type in terms of msgpack, with the limits that the decoder checks."""
    match kind:
        case wire_types.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case wire_types.EnumType(cls=cls):
            return f"str, see [{cls.__name__}](#error-codes)"
        case wire_types.LiteralType(values=values):
            return " or ".join(f'`"{value}"`' for value in values)
        case wire_types.UnionType(types=types):
            return " or ".join(type_text(each) for each in types)
        case wire_types.ListType(item_type=item):
            return f"array of {type_text(item)}"
        case wire_types.DictType(value_type=value):
            return f"map of str to {type_text(value)}"
        case wire_types.NoneType():
            return "nil"
        case wire_types.IntType() | wire_types.FloatType() | wire_types.StrType():
            return scalar_text(kind)
        case wire_types.BytesType():
            return "bin"
        case wire_types.BoolType():
            return "bool"
        case wire_types.AnyType():
            return "anything"
    raise TypeError(f"no words for {kind}")


def scalar_text(kind: wire_types.IntType | wire_types.FloatType | wire_types.StrType) -> str:
    """Return a number or string with its range."""
    if isinstance(kind, wire_types.StrType):
        bounds = "at most" if kind.min_length is None else f"{kind.min_length} to"
        limits = f", {bounds} {kind.max_length} characters" if kind.max_length else ""
        return "str" + limits
    signs = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
    limits = "".join(f" {sign} {bound}" for sign, bound in signs if bound is not None)
    return ("int" if isinstance(kind, wire_types.IntType) else "float") + limits


def default_text(field: wire_types.Field) -> str:
    """Return the meaning of an absent field."""
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        made = field.default_factory()
        return "a fresh one" if isinstance(made, str) else f"`{msgspec.json.encode(made).decode()}`"
    if isinstance(field.default, msgspec.Struct):
        return "all defaults"
    return "nil" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`"


def section(cls: Any) -> Iterator[str]:
    """Yield the heading, docstring and field table of one struct."""
    yield f"### {cls.__name__}"
    yield wrapped(markdown(inspect.getdoc(cls)))
    base = next(each for each in cls.__mro__[1:] if each.__module__.startswith("caesura."))
    known = () if base in (Message, Record, ReplyRecord) else base.__struct_fields__
    info = wire_types.type_info(cls)
    assert isinstance(info, wire_types.StructType)
    docs = meanings(cls)
    rows = [
        f"| `{field.encode_name}` | {type_text(field.type)} | {default_text(field)} | {docs[field.name]} |"
        for field in info.fields
        if field.encode_name not in known
    ]
    if known:
        yield f"Has the fields of [{base.__name__}](#{base.__name__.lower()})" + (", and:" if rows else ".")
    if rows:
        yield "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])


def with_bases(messages: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the structs that several messages build on, in the order of first use, then the messages."""
    bases: dict[Any, None] = {}
    for cls in messages:
        for base in reversed(cls.__mro__):
            if issubclass(base, Message) and base not in (Message, *messages):
                bases[base] = None
    return (*bases, *messages)


def sections(classes: Iterator[Any] | tuple[Any, ...]) -> str:
    """Return the sections of several structs."""
    return "\n\n".join(part for cls in classes for part in section(cls) if part)


def requests() -> str:
    """Return the messages of clients: an overview, then each message."""
    messages, replies = get_args(ToScheduler), {cls.__name__ for cls in get_args(ToClient)}
    rows = ["| message | answered by | |", "|---|---|---|"]
    for cls in messages:
        answer = ANSWERS.get(cls.__name__, cls.__name__.replace("Input", "Output"))
        assert answer in replies, f"{cls.__name__} is answered by {answer}, which no client accepts"
        first = markdown(inspect.getdoc(cls)).partition("\n\n")[0]
        rows.append(f"| {link(cls.__name__)} | {link(answer)} | {first} |")
    return "\n".join(rows) + "\n\n" + sections(with_bases(messages))


def replies() -> str:
    """Return the messages of the scheduler."""
    return sections(with_bases(get_args(ToClient)))


def records() -> str:
    """Return the plain values inside messages."""
    found = vars(io_struct).values()
    return sections(
        cls
        for cls in found
        if isinstance(cls, type) and issubclass(cls, Record) and cls not in (Record, ReplyRecord)
    )


def errors() -> str:
    """Return the table of codes and their meanings."""
    docs = field_docs(ErrorCode)
    rows = [f"| `{code.value}` | {docs[code.name]} |" for code in ErrorCode]
    return "\n".join(["| code | meaning |", "|---|---|", *rows])


def limits() -> str:
    """Return the constants that bound what a peer can cost."""
    rows = ["| limit | of | name |", "|---|---|---|"]
    for module, name, unit, meaning in LIMITS:
        value = getattr(importlib.import_module(f"caesura.{module}"), name)
        amount = f"{value >> 20} MiB" if unit == "bytes" and value >= 1 << 20 else f"{value:,} {unit}"
        rows.append(f"| {amount} | {meaning} | `{module.replace('.', '/')}.py`: `{name}` |")
    return "\n".join(rows)


def link(name: str) -> str:
    """Return a reference to a struct's section."""
    return f"[{name}](#{name.lower()})"


PARTS = {"requests": requests, "replies": replies, "records": records, "errors": errors, "limits": limits}


if __name__ == "__main__":
    sys.exit(update(DOCUMENT, PARTS))
