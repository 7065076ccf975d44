"""Frames of the wire: whatever bytes come, a message or a typed refusal comes out.

The decoder is compiled, so coverage leads nowhere near a valid message: :func:`mutate` changes values of
decoded frames instead.
"""

import random
from typing import Any

import msgspec

from caesura.io_struct import CaesuraError, ErrorReply, codec
from caesura.io_struct.codec import decode_reply, decode_request, encode, encode_reply


def target(data: bytes) -> None:
    assert isinstance(codec.readable_id(data), str)
    _request(data)
    _reply(data)


def _request(data: bytes) -> None:
    try:
        message = decode_request(data)
    except CaesuraError as error:
        assert error.code == "malformed_message", error
        answer = ErrorReply(id=error.detail["id"], code=error.code, message=error.message)
        assert decode_reply(encode_reply(answer)) == answer
        return
    again = encode(message)
    assert encode(decode_request(again)) == again


def _reply(data: bytes) -> None:
    try:
        message = decode_reply(data)
    except msgspec.DecodeError:
        return
    again = encode(message)
    assert encode(decode_reply(again)) == again


STRANGE: list[Any] = [
    None, True, -1, 0, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), float("nan"), float("inf"), 1e-320,
    "", "\0", "é", b"", b"\xff" * 7, [], {}, [[]], {"": None}, [None] * 40,
]  # fmt: skip
STRUCTS = [*codec.ToScheduler.__args__, *codec.ToClient.__args__]


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    rng = random.Random(seed)
    found = changed(data, rng)
    if rng.random() < 0.2:
        found = atheris_mutate(found, max_size)
    return found[:max_size]


def changed(data: bytes, rng: random.Random) -> bytes:
    """Change one to three values, fields or types of a frame."""
    if rng.random() < 0.5:  # every kind, since coverage keeps only few
        data = msgspec.msgpack.encode({"type": rng.choice(STRUCTS).__struct_config__.tag, "id": "m"})
    try:
        frame = msgspec.msgpack.decode(data, strict=False)
        for _ in range(rng.randrange(1, 4)):
            frame = _changed(frame, rng)
        return msgspec.msgpack.encode(frame)
    except (ValueError, TypeError, RecursionError, OverflowError):
        return data


def atheris_mutate(data: bytes, max_size: int) -> bytes:
    import atheris

    mutated: bytes = atheris.Mutate(data, max_size)
    return mutated


def _changed(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        return _changed_map(dict(value), rng)
    if isinstance(value, list) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        return [*value[:place], _changed(value[place], rng), *value[place + 1 :]]
    return rng.choice(STRANGE)


def _changed_map(value: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    key = rng.choice(list(value))
    choice = rng.random()
    if choice < 0.5:
        value[key] = _changed(value[key], rng)
    elif choice < 0.6:
        del value[key]
    else:
        struct = rng.choice(STRUCTS)
        if choice < 0.7:
            value["type"] = struct.__struct_config__.tag
        value[rng.choice(struct.__struct_fields__ or ("x",))] = rng.choice(STRANGE)
    return value


WORDS = sorted(
    {
        word
        for union in (codec.ToScheduler, codec.ToClient)
        for struct in union.__args__
        for word in (struct.__name__, *struct.__struct_fields__)
    }
)
