"""Writes tests/frames/wire-MAJOR.MINOR.json: every message of this wire, in both directions, as this release
encodes it.

Run ``python tests/support/record_frames.py`` when a message has changed before the release of its version;
the files of released versions stay as they are, since later versions are tested against them
(tests/unit/io_struct/test_recorded_frames.py).

Each message is there twice: ``full`` has every field set, ``least`` only the required ones, as a client in
another language may send it. Where a field takes structs of several types, there is a full one with each.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect as wire_types

from caesura import __version__
from caesura.io_struct import WIRE_VERSION, Message, ToClient, ToScheduler, encode

FOLDER = Path(__file__).parents[1] / "frames"
DIRECTIONS = {"to_scheduler": ToScheduler, "to_client": ToClient}


def values(kind: wire_types.Type, name: str) -> list[Any]:
    """Return values that a field of that type may hold: several where it takes several structs, else one."""
    match kind:
        case wire_types.StructType():
            return list(structs(kind))
        case wire_types.UnionType(types=types):
            return [value for each in types for value in values(each, name) if value is not None] or [None]
        case wire_types.ListType(item_type=item, min_length=length):
            return [[value] * max(1, length or 0) for value in values(item, name)]
        case wire_types.DictType(key_type=key, value_type=item):
            return [{values(key, name)[0]: value} for value in values(item, name)]
        case wire_types.LiteralType(values=choices):
            return [choices[0]]
        case wire_types.EnumType(cls=cls):
            return [next(iter(cls)).value]
        case wire_types.StrType():
            return [name]
        case wire_types.IntType(ge=at_least, gt=above):
            return [max(3, at_least or 0, (above or 0) + 1)]
        case wire_types.FloatType():
            return [0.5]
        case wire_types.BytesType(min_length=length):
            return [b"\x01\x00\x00\x00".ljust(length or 0, b"\x02")]
        case wire_types.BoolType():
            return [True]
        case wire_types.AnyType():
            return [[name, 3]]
        case wire_types.NoneType():
            return [None]
    raise TypeError(f"no value for {kind}")


def structs(kind: wire_types.StructType, *, required_only: bool = False) -> Iterator[dict[str, Any]]:
    """Yield maps of that struct: one, and one more for each further struct that one of its fields takes."""
    fields = [field for field in kind.fields if field.required or not required_only]
    choices = {field.encode_name: values(field.type, field.encode_name) for field in fields}
    first = {name: options[0] for name, options in choices.items()}
    if kind.tag is not None:
        first = {str(kind.tag_field): kind.tag} | first
    yield first
    if not required_only:
        for name, options in choices.items():
            yield from (first | {name: option} for option in options[1:])


def frames(kind: type[Message]) -> Iterator[tuple[str, bytes]]:
    info = wire_types.type_info(kind)
    assert isinstance(info, wire_types.StructType)
    for fields in structs(info):
        yield "full", encode(msgspec.convert(fields, kind))
    (least,) = structs(info, required_only=True)
    yield "least", msgspec.msgpack.encode(least)


def main() -> None:
    recorded = [
        {"direction": direction, "type": kind.__name__, "fields": what, "frame": frame.hex()}
        for direction, kinds in DIRECTIONS.items()
        for kind in get_args(kinds)
        for what, frame in frames(kind)
    ]
    version = ".".join(map(str, WIRE_VERSION))
    document = {"wire": version, "caesura": __version__, "frames": recorded}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"wire-{version}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
