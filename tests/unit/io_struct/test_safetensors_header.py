"""The reader of safetensors headers."""

import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from caesura.scheduler.runtime import dtypes
from caesura.transfer.safetensors import (
    DTYPES,
    LENGTH_BYTES,
    NAMES_BY_TORCH,
    SafetensorsError,
    file_of_one,
    header_length,
    parse_header,
)

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
def test_files_of_the_library_are_read(described):
    tensors = {
        name: torch.zeros(shape, dtype=dtypes.DTYPES[dtype]) for name, (dtype, shape) in described.items()
    }
    file = save(tensors, metadata={"by": "us"})
    start = LENGTH_BYTES + header_length(file[:LENGTH_BYTES], len(file))
    entries = parse_header(memoryview(file)[LENGTH_BYTES:start], len(file) - start)
    assert {entry.name: (entry.dtype, entry.shape) for entry in entries} == described
    assert all(entry.nbytes == tensors[entry.name].nbytes for entry in entries)


@pytest.mark.parametrize(
    ("entries", "data_bytes", "says"),
    [
        ({"a": {**ENTRY, "dtype": "Q7"}}, 8, "unknown dtype 'Q7'"),
        ({"a": {**ENTRY, "shape": [3]}}, 8, "8 bytes for F32"),
        ({"a": ENTRY, "b": ENTRY}, 8, "a gap or an overlap"),
        ({"a": {**ENTRY, "data_offsets": [8, 16]}}, 16, "a gap or an overlap"),
        ({"a": {**ENTRY, "data_offsets": [8, 0]}}, 8, "-8 bytes"),
        ({"a": ENTRY}, 7, "is truncated"),
        ({"a": ENTRY}, 9, "trailing data"),
        ({}, 1, "trailing data"),
        ({"a": {**ENTRY, "more": 1}}, 8, "not valid"),
        ({"a": {**ENTRY, "data_offsets": [-8, 0]}}, 8, "not valid"),
        ({"a": {**ENTRY, "data_offsets": [0]}}, 8, "not valid"),
        ({"a": {**ENTRY, "shape": ["x"]}}, 8, "not valid"),
        ({"a": 3}, 8, "not valid"),
        ([], 8, "not valid"),
    ],
)
def test_headers_that_lie_are_refused(entries, data_bytes, says):
    with pytest.raises(SafetensorsError, match=says):
        parse_header(json.dumps(entries).encode(), data_bytes)


def test_a_shape_of_millions_of_lengths_costs_no_time():
    header = json.dumps({"a": {**ENTRY, "shape": [(1 << 63) - 1] * 40_000}}).encode()
    started = time.thread_time()
    with pytest.raises(SafetensorsError, match="not valid"):
        parse_header(header, 8)
    assert time.thread_time() - started < 2, "their product alone takes longer"


@pytest.mark.parametrize(
    ("prefix", "size", "says"),
    [
        (b"1234567", 7, "less than a header's length field"),
        ((100).to_bytes(8, "little"), 107, "within its header"),
        ((1001).to_bytes(8, "little"), 5000, "1001 bytes long, of at most 1000"),
        (b"PK\x03\x04\0\0\0\1", 100, "pickle or zip file"),
    ],
)
def test_a_length_is_compared_before_it_is_believed(prefix, size, says):
    with pytest.raises(SafetensorsError, match=says):
        header_length(prefix, size, 1000)
    assert header_length((92).to_bytes(8, "little"), 100, 1000) == 92


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_names_and_sizes_are_those_of_torch(name):
    dtype = dtypes.DTYPES[name]
    assert str(dtype) == f"torch.{DTYPES[name].torch}"
    assert dtype.itemsize == DTYPES[name].nbytes
    assert dtypes.NAMES[dtype] == NAMES_BY_TORCH[dtypes.torch_name(dtype)] == name
    assert dtypes.by_torch_name(DTYPES[name].torch) is dtype


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8", "BOOL"])
def test_written_headers_are_read_by_safetensors(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtypes.DTYPES[dtype])
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert torch.equal(load(file_of_one("t", dtype, shape, data))["t"], tensor)
