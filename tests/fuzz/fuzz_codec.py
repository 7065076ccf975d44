"""Frames of the wire: whatever bytes come, a message or a typed refusal comes out."""

import msgspec

from caesura.io_struct import CaesuraError, ErrorReply, codec
from caesura.io_struct.codec import decode_reply, decode_request, encode, encode_reply


def target(data: bytes) -> None:
    assert isinstance(codec._readable_id(data), str)
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


WORDS = sorted(
    {
        word
        for union in (codec.ToScheduler, codec.ToClient)
        for struct in union.__args__
        for word in (struct.__name__, *struct.__struct_fields__)
    }
)
