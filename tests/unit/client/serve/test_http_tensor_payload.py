"""Weights in bodies: what is read, where it lies, and everything that is refused before it is believed."""

import base64
import struct

import pytest
import torch
from safetensors.torch import save
from support.pickles import Made, written

from caesura.client.exceptions import InvalidRequest, Unsupported
from caesura.client.serve.sglang.tensor_payload import (
    DeviceTensors,
    Frames,
    dtype_of,
    read_ipc_handles,
    read_pickled,
    read_safetensors,
)
from caesura.io_struct import TensorSpec

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"


def by_name(frames: Frames) -> dict[str, tuple[str, list[int], bytes]]:
    def data(spec):
        return bytes(frames.buffers[spec.buffer])[spec.offset : spec.offset + spec.nbytes]

    return {spec.name: (spec.dtype, spec.shape, data(spec)) for spec in frames.specs}


def test_a_safetensors_file_is_its_tensors():
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.arange(5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
    }
    found = by_name(read_safetensors(save(tensors, metadata={"format": "pt"})))
    assert set(found) == set(tensors)
    assert found["a"] == ("F32", [2, 3], tensors["a"].numpy().tobytes())
    assert found["b"] == ("BF16", [5], tensors["b"].view(torch.int16).numpy().tobytes())
    assert found["empty"] == ("F32", [0, 4], b"")
    assert found["scalar"] == ("I64", [], struct.pack("<q", 3))


def test_names_of_dtypes():
    assert [dtype_of(name) for name in ("bfloat16", "torch.float32", "half", "float8_e4m3fn")] == [
        "BF16", "F32", "F16", "F8_E4M3",
    ]  # fmt: skip
    assert dtype_of("complex64") == "complex64"  # the engine refuses it, and ends the group for the trainer


def payload(value: object) -> list[str]:
    return [base64.b64encode(written(value)).decode()]


def cuda(size=(2, 3), stride=(3, 1), start=0, dtype=torch.bfloat16, device=UUID, **changes: object) -> Made:
    values: dict[str, object] = {
        "class": None, "size": Made("torch.Size", size), "stride": stride, "start": start,
        "storage_class": None, "dtype": dtype, "device": device, "handle": b"h" * 66, "nbytes": 64,
        "offset": 512, "requires_grad": False, "ref_counter_handle": b"c", "ref_counter_offset": 7,
        "event_handle": b"e", "event_sync_required": True, **changes,
    }  # fmt: skip
    return Made("sglang.srt.utils.patch_torch._rebuild_cuda_tensor_modified", *values.values())


def test_cuda_tensors_become_checked_handles():
    (part,) = read_pickled(payload([("w", cuda(start=4))]), flattened=False)
    assert isinstance(part, DeviceTensors)
    handle = part.handle
    assert (handle.device_uuid, handle.nbytes, handle.offset, handle.handle) == (UUID, 64, 512, b"h" * 66)
    assert (handle.ref_counter_offset, handle.event_sync_required) == (7, True)
    (spec,) = part.specs
    assert (spec.name, spec.dtype, spec.shape, spec.offset, spec.nbytes) == ("w", "BF16", [2, 3], 8, 12)


def metadata(name: str, shape: tuple, dtype: torch.dtype, start: int, end: int) -> Made:
    state = {"name": name, "shape": shape, "dtype": dtype, "start_idx": start, "end_idx": end, "numel": 1}
    return Made("sglang.FlattenedTensorMetadata", state=state)


def bucket(*items: Made) -> list[str]:
    flat = cuda(size=(64,), stride=(1,), dtype=torch.uint8)
    return payload({"flattened_tensor": flat, "metadata": list(items)})


def test_a_flattened_bucket_is_one_handle():
    items = [metadata("a", (2, 2), torch.float32, 0, 16), metadata("b", (3,), torch.bfloat16, 16, 22)]
    (part,) = read_pickled(bucket(*items), flattened=True)
    assert isinstance(part, DeviceTensors)
    assert [(s.name, s.offset, s.nbytes, s.dtype) for s in part.specs] == [
        ("a", 0, 16, "F32"),
        ("b", 16, 6, "BF16"),
    ]
    assert read_pickled(bucket(), flattened=True) == []


@pytest.mark.parametrize(
    "item",
    [
        metadata("a", (2, 2), torch.float32, 0, 15),
        metadata("a", (2, 2), torch.float32, 56, 72),
        metadata("a", (2, 2), torch.float32, -16, 0),
        metadata("a", (-1,), torch.float32, 0, 4),
        metadata("a", (1,), torch.complex64, 0, 8),
        metadata(3, (1,), torch.float32, 0, 4),
        Made("sglang.FlattenedTensorMetadata", state={"name": "a"}),
        Made("sglang.Other", state={}),
    ],
)
def test_metadata_that_lies_is_refused(item):
    with pytest.raises(InvalidRequest):
        read_pickled(bucket(item), flattened=True)


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (cuda(device=0), Unsupported),
        (cuda(stride=(1, 2)), Unsupported),
        (cuda(stride=(3,)), InvalidRequest),
        (cuda(size=(6,)), InvalidRequest),
        (cuda(size=(), stride=(1,)), InvalidRequest),
        (cuda(start=30), InvalidRequest),
        (cuda(start=-1), InvalidRequest),
        (cuda(size=(1 << 40, 1 << 40), stride=(1 << 40, 1)), InvalidRequest),
        (cuda(nbytes=-1), InvalidRequest),
        (cuda(handle="text"), InvalidRequest),
        (cuda(event_sync_required=3), InvalidRequest),
        (Made("torch._utils._rebuild_tensor_v2", 1), Unsupported),
        (Made("os.system", "true"), Unsupported),
        (3, InvalidRequest),
    ],
)
def test_tensors_that_cannot_be_are_refused(tensor, error):
    with pytest.raises(error):
        read_pickled(payload([("w", tensor)]), flattened=False)


def shared(handle: bytes, nbytes: int = 8) -> list[str]:
    storage = Made("torch.multiprocessing.reductions.rebuild_storage_filename", None, b"m", handle, nbytes)
    typed = Made("torch.multiprocessing.reductions.rebuild_typed_storage", storage, torch.float32)
    made = Made("torch.multiprocessing.reductions.rebuild_tensor", None, typed, (0, (2,), (1,), False))
    return payload([("w", made)])


@pytest.mark.parametrize(
    "handle", [b"/../../etc/passwd", b"/torch_1_2/../../etc/passwd", b"torch_1_2", b"/etc", b""]
)
def test_no_other_file_is_opened(handle):
    with pytest.raises(InvalidRequest, match="no shared memory"):
        read_pickled(shared(handle), flattened=False)


def test_shared_memory_that_is_gone_is_refused():
    with pytest.raises(InvalidRequest, match="cannot be opened"):
        read_pickled(shared(b"/torch_1_999999999_9"), flattened=False)


def handles(**changes: object) -> dict[str, tuple[object, ...]]:
    """A device's arguments as vLLM sends them: its index is the sender's, its uuid the key."""
    return {UUID: cuda(device=3, **changes).args}


SPECS = [TensorSpec(name="a", dtype="F32", shape=[2, 2]), TensorSpec(name="b", dtype="BF16", shape=[3])]


def test_vllms_handles_are_of_a_tensor_or_of_a_buffer():
    one, other = (
        read_ipc_handles(payload(given)[0], SPECS[:count], sizes)
        for given, count, sizes in (
            ([handles(), handles(handle=b"i" * 66)], 2, None),
            (handles(size=(64,), stride=(1,), dtype=torch.uint8), 2, [16, 6]),
        )
    )
    assert [(part.handle.device_uuid, part.handle.handle[:1]) for part in one] == [(UUID, b"h"), (UUID, b"i")]
    assert [(spec.name, spec.dtype, spec.shape) for part in one for spec in part.specs] == [
        ("a", "BF16", [2, 3]),
        ("b", "BF16", [2, 3]),
    ]
    (part,) = other
    assert [(spec.name, spec.dtype, spec.offset, spec.nbytes) for spec in part.specs] == [
        ("a", "F32", 0, 16),
        ("b", "BF16", 16, 6),
    ]


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ([handles()], None),
        (handles(), None),
        ([{}, {}], None),
        ([{UUID: (), "other": ()}, {}], None),
        ([{UUID: ()}, handles()], None),
        ([handles(), handles()], [16, 6]),
        (handles(size=(64,), stride=(1,), dtype=torch.uint8), [16]),
        (handles(size=(64,), stride=(1,), dtype=torch.uint8), [60, 6]),
        (handles(size=(64,), stride=(1,), dtype=torch.uint8), [-16, 6]),
        (handles(size=(64,), stride=(1,), dtype=torch.uint8), [2**63, 2**63]),
        (b"x", None),
    ],
)
def test_other_handles_of_vllm_are_refused(given, sizes):
    with pytest.raises((InvalidRequest, Unsupported)):
        read_ipc_handles(payload(given)[0], SPECS, sizes)
