"""Rules for every struct of the wire, checked on the structs themselves and on their sources."""

import ast
import inspect
import re
import types
import typing
from itertools import chain
from typing import get_args

import msgspec
import pytest
from generate_wire import meanings
from msgspec import inspect as wire_types

from caesura.io_struct import (
    BatchTokenOutput,
    FramedMessage,
    GenerateImagesReqOutput,
    Keepalive,
    Message,
    Record,
    Reply,
    ReplyRecord,
    Request,
    ToClient,
    ToScheduler,
    errors,
)

SHARED_REPLY = re.compile(
    "UpdateWeights?From[A-Za-z]+ReqInput|EndWeightUpdateReqInput|RollbackWeightsReqInput"
)
"""Every update call and ``end`` are answered by one WeightUpdateReqOutput."""


def reply_name(kind: type) -> str:
    if SHARED_REPLY.fullmatch(kind.__name__):
        return "WeightUpdateReqOutput"
    return re.sub("Req(Input)?$", "ReqOutput", kind.__name__)


def subclasses(kind: type) -> set[type]:
    return {cls for each in kind.__subclasses__() for cls in {each, *subclasses(each)}}


STRUCTS = sorted(
    (subclasses(Message) | subclasses(Record)) - {Request, Reply, ReplyRecord, FramedMessage},
    key=lambda kind: kind.__name__,
)


def is_optional(annotation: object) -> bool:
    if typing.get_origin(annotation) is typing.Annotated:
        return is_optional(get_args(annotation)[0])
    return typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in get_args(
        annotation
    )


def test_the_tables_hold_every_message():
    assert set(get_args(ToScheduler)) == subclasses(Request) - {
        kind for kind in subclasses(Request) if kind.__subclasses__()
    }
    replies = {kind for kind in subclasses(Message) if not issubclass(kind, Request)} - {Reply}
    assert set(get_args(ToClient)) == {kind for kind in replies if not kind.__subclasses__()}


def test_each_request_has_a_reply_and_each_reply_a_request():
    assert [kind for kind in get_args(ToScheduler) if not kind.__name__.endswith(("ReqInput", "Req"))] == []
    answers = {reply_name(kind) for kind in get_args(ToScheduler)}
    told = {kind.__name__: kind for kind in get_args(ToClient)}
    assert answers <= told.keys() | {"GenerateReqOutput"}
    assert told.keys() - answers <= {"BatchTokenOutput", "Keepalive", "ErrorReply"}


def test_every_answer_carries_the_id_it_answers():
    for kind in set(get_args(ToClient)) - {BatchTokenOutput, GenerateImagesReqOutput, Keepalive}:
        assert issubclass(kind, Reply), kind
        assert "id" in kind.__struct_fields__


def structs_in(root: object) -> set[type]:
    """Return all structs that a message of ``root`` can contain, itself included."""
    found: set[type] = set()
    waiting = [wire_types.type_info(root)]
    while waiting:
        match waiting.pop():
            case wire_types.StructType(cls=cls, fields=fields) if cls not in found:
                found.add(cls)
                waiting += [field.type for field in fields]
            case wire_types.UnionType(types=types):
                waiting += types
            case wire_types.ListType(item_type=item):
                waiting.append(item)
            case wire_types.DictType(key_type=key, value_type=value):
                waiting += [key, value]
    return found


def test_unknown_fields_are_refused_or_skipped():
    asked, told = structs_in(ToScheduler), structs_in(ToClient)
    assert all(kind.__struct_config__.forbid_unknown_fields for kind in asked)
    assert [kind for kind in told if kind.__struct_config__.forbid_unknown_fields] == []
    assert asked | told == set(STRUCTS) - {kind for kind in asked | set(STRUCTS) if kind.__subclasses__()}


def test_no_struct_depends_on_the_order_of_its_fields():
    for kind in STRUCTS:
        config = kind.__struct_config__
        assert not config.array_like, f"{kind}: arrays swap values when fields are reordered"
        assert not config.omit_defaults, kind
        if issubclass(kind, Message):
            assert config.tag == kind.__name__
        else:
            assert config.frozen, f"{kind}: plain values do not change"
        with pytest.raises(TypeError):
            kind(*range(len(kind.__struct_fields__)))


def test_structs_say_what_they_are_and_what_none_means():
    for kind in STRUCTS:
        assert kind.__dict__.get("__doc__"), kind
        texts, hints = meanings(kind), typing.get_type_hints(kind, include_extras=True)
        optional = [field for field in kind.__struct_fields__ if is_optional(hints[field])]
        undefined = [field for field in optional if not says_what_none_means(texts[field])]
        assert undefined == [] or "None" in kind.__doc__, kind


def says_what_none_means(text: str) -> bool:
    """Return True for a sentence about None, or for the case in which a field is set (``stop: …``)."""
    return "None" in text or re.match(r"`\w+`( and `\w+`)*:", text) is not None


def test_defaults_are_harmless():
    """Every default encodes and decodes to itself: no time, no object shared between messages."""
    for field in chain.from_iterable(map(msgspec.structs.fields, STRUCTS)):
        if field.default_factory is not msgspec.NODEFAULT and field.name != "id":
            assert field.default_factory() == field.default_factory()
        if field.default is not msgspec.NODEFAULT:
            encoded = msgspec.msgpack.encode(field.default)
            assert msgspec.msgpack.decode(encoded, type=field.type) == field.default


def test_every_error_code_says_what_it_means():
    source = ast.parse(inspect.getsource(errors.ErrorCode)).body[0]
    assert isinstance(source, ast.ClassDef)
    named = [node for node in source.body if isinstance(node, ast.Assign)]
    documented = [
        first
        for first, second in zip(source.body, source.body[1:])
        if isinstance(first, ast.Assign) and isinstance(second, ast.Expr)
    ]
    assert len(named) == len(errors.ErrorCode)
    assert documented == named
