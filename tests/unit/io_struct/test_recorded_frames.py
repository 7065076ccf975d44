"""Frames as released versions of this wire sent them, read by the code of today."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from generate_wire import PARTS
from generated_parts import generate
from support.record_frames import DIRECTIONS, FOLDER

from caesura.client import SamplingParams, launch_scheduler
from caesura.io_struct import (
    WIRE_VERSION,
    CaesuraError,
    ErrorCode,
    Message,
    decode_reply,
    decode_request,
    encode,
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
    assert READ[direction](memoryview(encode(message))) == message
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


DOCS = Path(__file__).parents[3] / "docs" / "reference"


@pytest.fixture(scope="module")
def document() -> str:
    return (DOCS / "wire.md").read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_structs(document):
    changed = document.replace("| `input_ids` | array of int", "| `input_ids` | array of str")
    assert changed != document
    assert generate(changed, PARTS) == document, "run: python docs/generate_wire.py"


def test_every_row_of_the_generated_tables_says_something(document):
    generated = [
        document.partition(f"<!-- generated: {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
        for name in PARTS
    ]
    # The first row of a table names its columns, of which the overview of the requests has one without a
    # name.
    rows = re.findall(r"(?<=\|\n)\| .*\|$", "\n".join(generated), re.MULTILINE)
    assert len(rows) > 300
    assert [row for row in rows if any(not cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])] == []


def test_a_document_without_marks_is_refused(document):
    with pytest.raises(ValueError, match="'limits'"):
        generate(document.replace("<!-- end of limits -->", ""), {"limits": PARTS["limits"]})


def test_the_client_in_plain_msgpack_gets_what_ours_gets(document, tiny_model, tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    assert "caesura" not in example
    script = tmp_path / "client.py"
    script.write_text(example)
    with launch_scheduler(tiny_model, num_threads=1, kv_pool_tokens=1024) as client:
        expected = client.generate(
            input_ids=[1, 2, 3], sampling_params=SamplingParams(max_new_tokens=8, temperature=0.0)
        )
        endpoint = client.endpoint
        done = subprocess.run([sys.executable, script, endpoint], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == f"{expected.output_ids} {expected.finish_reason.type}\nrunning\n"
