"""``decode_request`` on bytes that no honest client sends: a message, or one kind of error."""

import tracemalloc
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

from caesura.io_struct import (
    AbortReq,
    AbortReqOutput,
    CaesuraError,
    EndWeightUpdateReqInput,
    ErrorCode,
    ErrorReply,
    GetStatusReqInput,
    Message,
    PauseGenerationReqInput,
    ToClient,
    ToScheduler,
    codec,
    decode_reply,
    decode_request,
    encode,
    encode_reply,
)

VALUES_OF_REQUIRED: dict[str, object] = {
    "wire_major": 1,
    "wire_minor": 0,
    "input_ids": [1, 2, 3],
    "model_path": "/é",
    "rid": "r",
    "specs": [{"name": "w", "dtype": "F32", "shape": [2, 3], "nbytes": 24}],
    "handle": {"type": "SharedMemoryHandle", "pid": 1, "fd": 3, "inode": 5, "nbytes": 24},
    "zmq_handles": {"cpu": "ipc://@server"},
    "master_address": "127.0.0.1",
    "master_port": 29500,
    "rank_offset": 1,
    "world_size": 2,
    "rank": 1,
    "released_tags": ["weights"],
    "freed_bytes": {"weights": 7},
    "resumed_bytes": {},
    "reserved_before": 2,
    "reserved_after": 1,
    "events": [],
    "more": False,
    "start": [1],
    "logprobs": [b"0123"],
}
OF_KIND: dict[str, dict[str, object]] = {"ScoreReqInput": {"input_ids": [[1, 2, 3]]}}


def sample(kind: type[Message]) -> Message:
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    values = VALUES_OF_REQUIRED | OF_KIND.get(kind.__name__, {})
    return msgspec.convert(
        {"type": kind.__name__, "id": "i"} | {name: values[name] for name in required}, kind
    )


REQUESTS = [sample(kind) for kind in get_args(ToScheduler)]


def packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def refused(frame: bytes) -> CaesuraError:
    with pytest.raises(CaesuraError) as caught:
        decode_request(frame)
    assert caught.value.code == ErrorCode.MALFORMED_MESSAGE
    return caught.value


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_every_request_survives_the_wire(request_):
    assert decode_request(encode(request_)) == request_
    assert decode_request(memoryview(encode(request_))) == request_


def test_a_reply_is_no_request_and_a_request_no_reply():
    assert not set(get_args(ToScheduler)) & set(get_args(ToClient))
    refused(encode(AbortReqOutput(id="a", aborted=1)))
    refused(encode(ErrorReply(id="a", code=ErrorCode.BUSY, message="")))
    with pytest.raises(msgspec.DecodeError):
        decode_reply(encode(AbortReq()))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04K\x01.",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x82\xa4type\xb0GenerateReqInput\xa9input_ids\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\x81\xa4type" * 50_000,
        b"\x81\xa2id\xa2\xed\xa0",
        b"\x81\xa2id\xc7\x0c\xff" + b"\xff" * 12,
        b"\xd7\xff" + b"\xff" * 8,
        b"\x81\x80\x01",
        packed(type="NoSuchThing", id="x"),
        packed(type=5),
        packed(id="x"),
        encode(GetStatusReqInput()) + b"\x00",
        encode(REQUESTS[0])[:-1],
    ],
    ids=range(21),
)
def test_garbage_is_one_kind_of_error(frame):
    refused(frame)


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "GetStatusReqInput", "surprise": 1},
        {"type": "AbortReq", "abort_all": "yes"},
        {"type": "PauseGenerationReqInput", "mode": "sideways"},
        {"type": "GenerateReqInput"},
        {"type": "GenerateReqInput", "input_ids": [1.5]},
        {"type": "GenerateReqInput", "input_ids": [True]},
        {"type": "GenerateReqInput", "input_ids": [-1]},
        {"type": "GenerateReqInput", "input_ids": [2**31]},
        {"type": "GenerateReqInput", "input_ids": ["1"]},
        {"type": "GenerateReqInput", "input_ids": None},
        {"type": "GenerateReqInput", "input_ids": [1], "rid": ""},
        {"type": "GenerateReqInput", "input_ids": [1], "rid": "r" * 129},
        {"type": "GenerateReqInput", "input_ids": [1], "sampling_params": {"n": 0}},
        {"type": "GenerateReqInput", "input_ids": [1], "sampling_params": {"n": 1025}},
        {"type": "GenerateReqInput", "input_ids": [1], "sampling_params": {"seed": -1}},
        {"type": "GenerateReqInput", "input_ids": [1], "sampling_params": {"temperature": "hot"}},
        {"type": "GenerateReqInput", "input_ids": [1], "sampling_params": {"heat": 1.0}},
        {"type": "BeginWeightUpdateReqInput", "deadline_s": float("nan")},
        {"type": "BeginWeightUpdateReqInput", "deadline_s": 0.0},
        {"type": "FlushCacheReqInput", "timeout_s": float("nan")},
        {"type": "FlushCacheReqInput", "timeout_s": -1.0},
        {"type": "PauseGenerationReqInput", "lease_s": -1.0},
        {"type": "WeightsCheckerReqInput", "action": "eat"},
        {"type": "UpdateWeightFromDiskReqInput", "model_path": b"/bytes"},
    ],
    ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items() if k != "type")[:40],
)
def test_a_wrong_field_is_refused_and_its_caller_found(fields):
    assert refused(packed(id="the caller", **fields)).detail["id"] == "the caller"


@pytest.mark.parametrize("value", [5, None, b"x", ["a"], {"a": 1}])
def test_an_id_that_is_no_string_is_not_echoed(value):
    assert refused(packed(type="GetStatusReqInput", id=value)).detail["id"] == ""


def test_the_refusal_of_a_long_id_echoes_it():
    long = "x" * 129
    assert refused(packed(type="GetStatusReqInput", id=long)).detail["id"] == long


def test_a_header_beyond_the_limit_is_refused_unread(monkeypatch):
    frame = encode(REQUESTS[0])
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", len(frame))
    decode_request(frame)
    assert "over the limit" in refused(frame + b"\x00").message


@pytest.mark.parametrize("type_", ["GetStatusReqInput", "no such type"])
def test_refusing_takes_no_more_memory_than_the_frame(type_):
    """A million empty lists in an unknown field would be sixty times the frame, as objects."""
    frame = b"\x82\xa4type" + msgspec.msgpack.encode(type_) + b"\xa1x\xdd\x00\x10\x00\x00" + b"\x90" * 2**20
    tracemalloc.start()
    try:
        refused(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(frame)


def message_or_error(frame: bytes) -> None:
    try:
        assert isinstance(decode_request(frame), Message)
    except CaesuraError as error:
        decode_reply(encode(error.to_reply(str(error.detail["id"]))))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.datetimes()
)
NAMES = st.sampled_from(
    sorted({name for kind in get_args(ToScheduler) for name in kind.__struct_fields__} | {"type", "what"})
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(NAMES | st.text(max_size=3) | st.integers(-(2**63), 2**64 - 1), inner, max_size=4)
    ),
    max_leaves=12,
)
TAGS = st.sampled_from([kind.__name__ for kind in get_args(ToScheduler) + get_args(ToClient)])


@settings(max_examples=examples(120))
@given(st.binary(max_size=200))
def test_any_bytes(frame):
    message_or_error(frame)


@settings(max_examples=examples(120))
@given(TAGS, st.dictionaries(NAMES, VALUES, max_size=6))
def test_any_msgpack_that_looks_like_ours(tag, fields):
    message_or_error(packed(**{**fields, "type": tag}))


@settings(max_examples=examples(120))
@given(
    st.sampled_from(REQUESTS),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
)
def test_any_damage_to_a_real_message(request_, flips, cut):
    frame = bytearray(encode(request_))
    for position, value in flips:
        frame[position % len(frame)] = value
    message_or_error(bytes(frame))
    message_or_error(bytes(frame[: cut % (len(frame) + 1)]))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "\1" * 1_000_000},
        {"type": "GetStatusReqInput", "\1" * 1_000_000: 1},
        {"type": "PauseGenerationReqInput", "mode": "\1" * 1_000_000},
    ],
)
def test_a_refusal_does_not_repeat_what_it_refuses(fields):
    with pytest.raises(CaesuraError) as caught:
        decode_request(msgspec.msgpack.encode(fields))
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "PauseGenerationReqInput", "owner": "o"},
        {"type": "GenerateReqInput", "input_ids": [1], "cache_salt": "s"},
        {"type": "UpdateWeightFromDiskReqInput", "model_path": "/x", "weight_version": "v"},
        {"type": "EndWeightUpdateReqInput", "weight_version": "v"},
    ],
)
def test_stored_error_texts_are_short(fields):
    *_, name = fields
    decode_request(msgspec.msgpack.encode({**fields, name: "é" * 1024}))
    with pytest.raises(CaesuraError) as caught:
        decode_request(msgspec.msgpack.encode({**fields, name: "é" * 1025}))
    assert caught.value.code == ErrorCode.MALFORMED_MESSAGE


def test_the_order_of_fields_does_not_matter():
    frame = packed(commit=False, weight_version="2", id="i", type="EndWeightUpdateReqInput")
    assert decode_request(frame) == EndWeightUpdateReqInput(id="i", commit=False, weight_version="2")
    assert decode_request(packed(type="PauseGenerationReqInput", id="p")) == PauseGenerationReqInput(id="p")


def test_an_error_about_an_absurd_number_can_be_sent():
    error = CaesuraError(
        ErrorCode.OUT_OF_MEMORY, "no room", needed_bytes=1 << 80, shapes=[[1 << 64], {"n": -1}]
    )
    reply = decode_reply(encode_reply(error.to_reply("i")))
    assert reply.detail == {"needed_bytes": str(1 << 80), "shapes": [[str(1 << 64)], {"n": -1}]}
