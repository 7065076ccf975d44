"""Frames as released versions of this wire sent them, read by the code of today."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from support.record_frames import DIRECTIONS, FOLDER

from caesura.io_struct import (
    WIRE_VERSION,
    CaesuraError,
    ErrorCode,
    Message,
    decode_reply,
    decode_request,
    salvage_reply,
)

READ = {"to_scheduler": decode_request, "to_client": decode_reply}
NEW = "field_of_a_later_version"
CURRENT = FOLDER / "wire-{}.{}.json".format(*WIRE_VERSION)


def recorded(path: Path) -> list[dict[str, str]]:
    return json.loads(path.read_text(encoding="utf-8"))["frames"]


SAME_MAJOR = sorted(FOLDER.glob(f"wire-{WIRE_VERSION[0]}.*.json"))
FRAMES = [
    pytest.param(
        each["direction"], bytes.fromhex(each["frame"]), id=f"{path.stem}-{each['type']}-{each['fields']}"
    )
    for path in SAME_MAJOR
    for each in recorded(path)
]
every_frame = pytest.mark.parametrize(("direction", "frame"), FRAMES)


def holds(now: Any, then: Any) -> bool:
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and holds(now[key], then[key]) for key in then)
    if isinstance(then, list):
        return len(now) == len(then) and all(map(holds, now, then))
    return type(now) is type(then) and now == then


def with_a_new_field(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        fields = {name: with_a_new_field(getattr(value, name)) for name in value.__struct_fields__}
        tag = {} if config.tag is None else {config.tag_field: config.tag}
        return tag | {NEW: {"nested": [1, None]}} | fields
    if isinstance(value, list):
        return [with_a_new_field(item) for item in value]
    return value


def test_every_message_of_this_version_is_recorded():
    now = {
        (direction, kind.__name__, field.encode_name)
        for direction, union in DIRECTIONS.items()
        for kind in get_args(union)
        for field in msgspec.structs.fields(kind)
    }
    then = {
        (each["direction"], each["type"], name)
        for each in recorded(CURRENT)
        for name in msgspec.msgpack.decode(bytes.fromhex(each["frame"]))
        if name != "type"
    }
    assert now == then, "run: python tests/support/record_frames.py"


@every_frame
def test_recorded_frames_decode_to_the_same(direction, frame):
    message = READ[direction](frame)
    assert isinstance(message, Message)
    said = msgspec.msgpack.decode(frame)
    assert holds(msgspec.to_builtins(message, builtin_types=(bytes,)), said)


@every_frame
def test_a_field_of_a_later_version(direction, frame):
    message = READ[direction](frame)
    later = msgspec.msgpack.encode(with_a_new_field(message))
    if direction == "to_client":
        assert decode_reply(later) == message
        return
    with pytest.raises(CaesuraError, match=NEW) as refused:
        decode_request(later)
    assert refused.value.code == ErrorCode.MALFORMED_MESSAGE
    assert refused.value.detail["id"] == message.id


def test_a_message_of_a_later_version():
    frame = msgspec.msgpack.encode({"type": "ThinkReqInput", "id": "i"})
    with pytest.raises(CaesuraError, match="ThinkReqInput") as refused:
        decode_request(frame)
    assert refused.value.detail["id"] == "i"
    with pytest.raises(msgspec.DecodeError):
        decode_reply(frame)
    assert (salvage_reply(frame).type, salvage_reply(frame).id) == ("ThinkReqInput", "i")


def test_a_code_of_a_later_version():
    reply = decode_reply(
        msgspec.msgpack.encode({"type": "ErrorReply", "id": "i", "code": "tired", "message": ""})
    )
    assert reply.code == "tired"
