"""Foreign pickles: plain fields of bounded size, or a typed refusal; nothing is imported or called."""

import sys

from caesura.io_struct import CaesuraError
from caesura.transfer.legacy_pickle import MAX_DEPTH, MAX_VALUES, Call, Global, parse

PLAIN = (bool, int, float, str, bytes, type(None), Global)


def target(data: bytes) -> None:
    modules = set(sys.modules)
    try:
        found = parse(data)
    except CaesuraError as error:
        assert error.code == "malformed_message", error
        error.message.encode()
        return
    assert _count(found, MAX_DEPTH) <= MAX_VALUES
    assert repr(found)
    assert set(sys.modules) == modules


def _count(value: object, depth: int) -> int:
    assert depth >= 0, "nested too deeply"
    if isinstance(value, Call):
        assert isinstance(value.function, Global)
        return (
            1 + _count(value.args, depth - 1) + (0 if value.state is None else _count(value.state, depth - 1))
        )
    if isinstance(value, (list, tuple)):
        return 1 + sum(_count(item, depth - 1) for item in value)
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        return 1 + sum(1 + _count(item, depth - 1) for item in value.values())
    assert type(value) in PLAIN, type(value)
    return 1


WORDS = ["\x80\x04", "torch", "Size", *"\x95\x94\x93\x8cRb(tue}]."]
