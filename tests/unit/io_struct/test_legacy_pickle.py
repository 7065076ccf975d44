"""Foreign pickles become plain fields, whatever they would have done to an unpickler."""

import os
import pickle
import struct
import sys
import tracemalloc
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caesura.io_struct import CaesuraError
from caesura.transfer.legacy_pickle import MAX_BYTES, MAX_DEPTH, Call, Global, parse

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


class Recipe:
    """Pickles as a call of ``function``."""

    def __init__(self, function, *args: object) -> None:
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


def refused(data: bytes) -> str:
    with pytest.raises(CaesuraError) as caught:
        parse(data)
    assert caught.value.code == "malformed_message"
    return caught.value.message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_bucket_as_a_parameter_server_pickles_it(protocol):
    shape = torch.Size([2, 3])
    bucket = [
        {"name": "a", "dtype": torch.bfloat16, "shape": shape, "offset": 0},
        {"name": "b", "dtype": torch.float8_e4m3fn, "shape": shape, "offset": 1 << 40},
        {"name": "é", "dtype": torch.float32, "shape": [], "offset": 256},
    ]
    size = Call(Global("torch", "Size"), ((2, 3),))
    assert parse(pickle.dumps(bucket, protocol)) == [
        {"name": "a", "dtype": Global("torch", "bfloat16"), "shape": size, "offset": 0},
        {"name": "b", "dtype": Global("torch", "float8_e4m3fn"), "shape": size, "offset": 1 << 40},
        {"name": "é", "dtype": Global("torch", "float32"), "shape": [], "offset": 256},
    ]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_an_exception_becomes_its_name_and_arguments(protocol):
    error = RuntimeError("rank 3", 7)
    error.add_note("n")
    found = parse(pickle.dumps(error, protocol))
    assert found == Call(Global("builtins", "RuntimeError"), ("rank 3", 7), {"__notes__": ["n"]})


def test_new_objects_are_written_down():
    found = parse(pickle.dumps(Plain(3)))
    assert found == Call(Global(Plain.__module__, "Plain"), (), {"value": 3})


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70)
    | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)  # fmt: skip


@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_fields_equal_those_of_the_unpickler(value, protocol):
    data = pickle.dumps(value, protocol)
    found = parse(data)
    assert found == pickle.loads(data)
    assert repr(found) == repr(value), "1 and True, 0.0 and -0.0"


EVENTS: list[str] | None = None
"""Imports, calls of ``os.system``, compilations and files heard by the audit hook, or None."""


def _hear(event: str, _: object) -> None:
    if EVENTS is not None:
        EVENTS.append(event)


sys.addaudithook(_hear)


@contextmanager
def hearing():
    global EVENTS
    EVENTS = events = []
    try:
        yield events
    finally:
        EVENTS = None


ATTACKS = {
    "os.system": pickle.dumps(Recipe(os.system, "touch /tmp/caesura-owned")),
    "eval": pickle.dumps(Recipe(eval, "1/0")),
    "nested": pickle.dumps(Recipe(Recipe, Recipe(os.system, "x"))),
    "named": b"cos\nsystem\n(S'x'\ntR.",
    "attribute chain": b"\x80\x04\x8c\x02os\x8c\x0dpath.__class__\x93.",
    "unknown module": b"\x80\x04\x8c\x10caesura_no_such_\x8c\x01x\x93)R.",
    "call of a call": b"\x80\x02cos\nsystem\n)R)R.",
    "state on a global": b"\x80\x02cbuiltins\nobject\n}(X\x01\x00\x00\x00aK\x01ub.",
    "state twice": b"\x80\x02cos\nsystem\n)R}b}b.",
    "instance": b"(ios\nsystem\n.",
    "object": b"(cos\nsystem\no.",
    "persistent id": b"\x80\x02Pname\n.",
    "binary persistent id": b"\x80\x02K\x01Q.",
    "extension": b"\x80\x02\x82\x01.",
    "extension 4": b"\x80\x02\x84\x01\x00\x00\x00.",
    "out of band buffer": b"\x80\x05\x97.",
    "set of a global": b"\x80\x04\x8f(cos\nsystem\n\x90.",
    "append to a global": b"\x80\x02cos\nsystem\n(K\x01e.",
    "items of a call": b"\x80\x02cos\nsystem\n)R(K\x01K\x02u.",
    "no arguments": b"\x80\x02cos\nsystem\nK\x01R.",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_is_imported_called_or_set(name):
    found = None
    with hearing() as events:
        try:
            found = parse(ATTACKS[name])
        except CaesuraError as error:
            assert error.code == "malformed_message"
    assert events == []
    assert type(found) in (Call, Global, type(None))


def test_the_listener_hears_a_real_unpickler():
    with hearing() as events:
        pickle.loads(pickle.dumps(Recipe(os.system, "true")))
    assert {"pickle.find_class", "os.system"} <= set(events)


LIMITS = {
    "memo index": b"\x80\x02Nr\xff\xff\xff\xff0j\xfe\xff\xff\xff.",
    "bytes of 2**62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "bytearray of 2**62": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"x.",
    "text of 2**31": b"\x80\x04X\xff\xff\xff\x7fx.",
    "frame of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"X\x00.",
    "long of 2**31": b"\x80\x02\x8b\xff\xff\xff\x7fx.",
    "digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "nesting": b"\x80\x02N" + b"\x85" * (MAX_DEPTH + 1) + b".",
    "deep nesting": b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
    "nested lists": b"\x80\x02" + b"](" * 100_000 + b"e" * 100_000 + b".",
    "doubling": b"\x80\x02N" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(60)) + b".",
    "a list in itself": b"\x80\x02]q\x00h\x00a.",
    "a list in its tuple": b"\x80\x02]q\x00h\x00\x85a.",
    "a list grown later": b"\x80\x02]q\x00h\x00\x85h\x00NN\x86a.",
    "an object in its state": b"\x80\x02cos\nsystem\n)Rq\x00}X\x01\x00\x00\x00ah\x00sb.",
    "a tuple as key": b"\x80\x02})Ns.",
    "opcodes": b"\x80\x02" + b"N0" * 600_000 + b"N.",
    "half a pair": b"\x80\x02}(Nu.",
    "below the mark": b"\x80\x02]N(0N0ae.",
    "no mark": b"\x80\x02e.",
    "mark left over": b"\x80\x02N(.",
    "two results": b"\x80\x02NN.",
    "nothing": b"",
    "no stop": b"\x80\x02N",
    "more than a pickle": b"\x80\x02N.N.",
    "protocol 6": b"\x80\x06N.",
    "lone surrogate": b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.",
}


@pytest.mark.parametrize("name", LIMITS)
def test_bombs_and_broken_pickles_are_refused_cheaply(name):
    data = LIMITS[name]
    if len(data) > 1000:  # memory that is claimed by many opcodes is that of the message
        refused(data)
        return
    tracemalloc.start()
    try:
        refused(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 29
    finally:
        tracemalloc.stop()


def test_a_message_over_the_limit_is_not_looked_at():
    assert str(MAX_BYTES) in refused(b"N" * (MAX_BYTES + 1))


def test_every_truncation_is_refused():
    data = pickle.dumps([{"name": "a", "dtype": torch.float32, "shape": torch.Size([4]), "offset": 1 << 40}])
    for end in range(len(data)):
        refused(data[:end])
