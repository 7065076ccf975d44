"""CUDA IPC without a device: what is refused before the driver sees it, and who opens and closes what."""

import gc
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest
import torch
from support.pickles import pickled
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor

from caesura.client.trainer import buckets
from caesura.client.trainer.shared import SharedBucket, common_cuda_device
from caesura.io_struct import (
    CaesuraError,
    CudaIPCHandle,
    UpdateWeightsFromIPCReqInput,
    decode_request,
    encode,
)
from caesura.scheduler.weights.source import BufferSource
from caesura.scheduler.weights.transports.checkpoint_engine import opening_of
from caesura.scheduler.weights.transports.ipc import SharedMemoryMaps
from caesura.transfer import cuda_ipc
from caesura.transfer.cuda_ipc import CudaMemories, check_handle
from caesura.transfer.legacy_pickle import parse

UUID = "01234567-89ab-cdef-0123-456789abcdef"
DEVICE_BYTES = 1 << 30
GOOD = CudaIPCHandle(
    device_uuid=UUID,
    handle=b"\x01c" + bytes(range(64)),
    nbytes=1 << 20,
    offset=512,
    ref_counter_handle=b"/torch_123_456_0",
    ref_counter_offset=7,
    event_handle=bytes(64),
    event_sync_required=True,
)


def refused(field_name: str, changes: dict[str, object]) -> CaesuraError:
    with pytest.raises(CaesuraError) as caught:
        check_handle(msgspec.structs.replace(GOOD, **changes), UUID, DEVICE_BYTES)
    assert (caught.value.code, caught.value.detail["field"]) == ("invalid_request", field_name)
    return caught.value


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"handle": bytes(64)},
        {"handle": b"\x02c" + bytes(64)},
        {"event_handle": b"", "event_sync_required": False},
        {"nbytes": DEVICE_BYTES - 512},
        {"ref_counter_offset": 9_999},
    ],
)
def test_torch_handles_are_accepted(changes):
    check_handle(msgspec.structs.replace(GOOD, **changes), UUID, DEVICE_BYTES)


@pytest.mark.parametrize(
    "field_name,changes",
    [
        ("device_uuid", {"device_uuid": "GPU-other"}),
        ("device_uuid", {"device_uuid": ""}),
        ("handle", {"handle": b"x"}),
        ("handle", {"handle": bytes(66)}),
        ("handle", {"handle": bytes(63)}),
        ("handle", {"handle": b"\x01e" + bytes(100)}),
        ("nbytes", {"nbytes": DEVICE_BYTES - 511}),
        ("nbytes", {"offset": DEVICE_BYTES}),
        ("nbytes", {"nbytes": (1 << 63) - 1, "offset": (1 << 63) - 1}),
        ("ref_counter_handle", {"ref_counter_handle": b""}),
        ("ref_counter_handle", {"ref_counter_handle": b"/../etc/passwd"}),
        ("ref_counter_handle", {"ref_counter_handle": b"/torch_1_2_3\n"}),
        ("ref_counter_handle", {"ref_counter_handle": b"/torch_1_2_3\0x"}),
        ("ref_counter_offset", {"ref_counter_offset": 10_000}),
        ("event_handle", {"event_handle": b""}),
        ("event_handle", {"event_handle": bytes(65)}),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_name(field_name, changes):
    assert msgspec.json.encode(refused(field_name, changes).to_reply("id"))


def test_another_device_and_expandable_segments_come_with_advice():
    assert UUID in refused("device_uuid", {"device_uuid": "other"}).message
    assert "expandable_segments:False" in refused("handle", {"handle": b"\x01e" + bytes(40)}).message


def test_an_engine_on_the_cpu_opens_no_device_memory():
    with pytest.raises(CaesuraError, match="runs on cpu"):
        SharedMemoryMaps("cpu").view(GOOD)


@dataclass
class Driver:
    """Stands in for CUDA's driver and torch's exports: host memory, handed over by handle."""

    exported: dict[bytes, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)
    counters: dict[tuple[bytes, int], int] = field(default_factory=dict)
    opened: list[tuple] = field(default_factory=list)
    collections: int = 0
    kind: bytes = b"c"

    def share(self, storage: torch.UntypedStorage) -> tuple:
        number = len(self.exported)
        handle = b"\x01" + self.kind + bytes([number]) * 64
        self.exported[handle] = (storage, storage.nbytes())
        counter = (b"/torch_1_2_3", number)
        self.counters[counter] = 1
        return 0, handle, storage.nbytes(), 512, *counter, bytes(64), True

    def release(self, name: bytes, offset: int) -> None:
        self.counters[name, offset] -= 1

    def open(self, device: int, handle: bytes, nbytes: int, *rest: object) -> torch.UntypedStorage:
        self.opened.append((device, handle, nbytes, *rest))
        if handle not in self.exported:
            raise RuntimeError("CUDA error: invalid argument\nand more")
        storage, _ = self.exported[handle]
        return torch.UntypedStorage(nbytes).copy_(storage)

    def collect(self) -> None:
        self.collections += 1


@pytest.fixture
def driver(monkeypatch) -> Driver:
    stand_in = Driver()
    stream = SimpleNamespace(synchronize=lambda: None)
    exports = {
        "_share_cuda_": lambda self: stand_in.share(self),
        "_release_ipc_counter_cuda": staticmethod(stand_in.release),
        "_new_shared_cuda": staticmethod(stand_in.open),
    }
    device = {
        "get_device_properties": lambda _: SimpleNamespace(uuid=UUID, total_memory=DEVICE_BYTES),
        "current_device": lambda: 3,
        "synchronize": lambda _: None,
        "current_stream": lambda _: stream,
        "ipc_collect": stand_in.collect,
    }
    for owner, functions in ((torch.UntypedStorage, exports), (torch.cuda, device)):
        for name, function in functions.items():
            monkeypatch.setattr(owner, name, function)
    return stand_in


TENSORS = {
    "a": torch.arange(100, dtype=torch.float32),
    "b": torch.arange(30, dtype=torch.bfloat16).view(6, 5),
    "c": torch.tensor(7.0),
}


def test_a_bucket_travels_by_its_handle(driver):
    memories = CudaMemories(torch.device("cuda"))
    (bucket,) = buckets(TENSORS.items(), 1 << 20)
    with SharedBucket(4096, torch.device("cpu")) as memory:
        for offset in (0, 2048):
            message = UpdateWeightsFromIPCReqInput(handle=memory.handle, specs=memory.fill(bucket, offset))
            request = decode_request(encode(message))
            view = memories.view(request.handle)
            view.untyped_storage().copy_(
                memory.view(0, 4096).untyped_storage()
            )  # where a device shares it really
            pieces = list(BufferSource("ipc", request.specs, [view]).pieces(16, lambda _: False))
            for name, tensor in TENSORS.items():
                rows = [piece.rows for piece in pieces if piece.name == name]
                assert torch.equal(torch.cat(rows) if tensor.dim() else rows[0], tensor)
        assert len(driver.exported) == len(driver.opened) == len(memories) == 1
        (arguments,) = driver.opened
        handle = memory.handle
        assert arguments == (
            3, handle.handle, 4096, 512, b"/torch_1_2_3", 0, bytes(64), True,
        )  # fmt: skip
        del pieces, rows, view
        memories.close()
    assert len(memories) == 0
    assert driver.collections == 2, "one by each side"
    assert set(driver.counters.values()) == {0}, "a bucket that nobody opens must not be kept for ever"


def test_closing_collects_what_a_cycle_still_holds(driver):
    memories = CudaMemories(torch.device("cuda:1"))
    with SharedBucket(64, torch.device("cpu")) as memory:
        view = memories.view(memory.handle)
        assert driver.opened[0][0] == 1
        storage = StorageWeakRef(view.untyped_storage())
        cycle: list[object] = [view]
        cycle.append(cycle)
        del view, cycle
        gc.disable()
        try:
            memories.close()
        finally:
            gc.enable()
        assert storage.expired()
        memories.close()
        assert driver.collections == 1


def test_memory_beyond_what_was_exported_is_not_read(driver, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_bytes_from", lambda _, offset: 4096 - offset)
    memories = CudaMemories(torch.device("cuda"))
    with SharedBucket(4096, torch.device("cpu")) as memory:
        with pytest.raises(CaesuraError, match="more than the 3584"):
            memories.view(memory.handle)
        assert len(memories) == 0


def test_driver_refusals_are_invalid_requests(driver):
    with pytest.raises(CaesuraError, match="invalid argument") as caught:
        CudaMemories(torch.device("cuda")).view(GOOD)
    assert caught.value.code == "invalid_request"
    assert "\n" not in caught.value.message


def test_a_trainer_with_expandable_segments_is_told_so(driver):
    driver.kind = b"e"
    with pytest.raises(CaesuraError, match="expandable_segments:False") as caught:
        SharedBucket(64, torch.device("cpu"))
    assert caught.value.code == "unsupported"


def test_one_cuda_device_for_all_or_none():
    on = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cuda:0", "cuda:1", "cpu")]
    assert common_cuda_device(on[:2]) == torch.device("cuda:0")
    assert common_cuda_device(on[:3]) is common_cuda_device(on[1::2]) is common_cuda_device([]) is None
    assert common_cuda_device(on[3:]) is None


def reduced(**changes: object) -> bytes:
    fields = {
        "class": torch.Tensor, "size": torch.Size([1000]), "stride": (1,), "start": 24,
        "storage": torch.storage.TypedStorage,
        "dtype": torch.uint8, "device": 5, "handle": GOOD.handle, "nbytes": 1024, "offset": 512,
        "requires_grad": False,
        "counter": GOOD.ref_counter_handle, "counter_offset": 7, "event": bytes(64), "sync": True,
    }  # fmt: skip
    return pickled((rebuild_cuda_tensor, tuple({**fields, **changes}.values())))


def test_a_parameter_servers_buffer_is_read_as_plain_fields():
    opening = opening_of(parse(reduced()), UUID)
    assert (opening.start, opening.nbytes) == (24, 1000)
    assert opening.handle == msgspec.structs.replace(GOOD, nbytes=1024)


@pytest.mark.parametrize(
    "changes",
    [
        {"start": 25}, {"start": -1}, {"size": torch.Size([1001])}, {"size": torch.Size([10, 100])},
        {"size": torch.Size([])},
        {"stride": (2,)}, {"dtype": torch.float32}, {"handle": None}, {"handle": b""},
        {"handle": bytes(300)}, {"nbytes": 0},
        {"nbytes": True}, {"offset": -1}, {"offset": "0"}, {"counter": "text"}, {"counter_offset": -1},
        {"event": bytes(257)},
        {"sync": 1}, {"size": 1000}, {"one": "more"},
    ],
)  # fmt: skip
def test_a_parameter_servers_buffer_is_checked(changes):
    with pytest.raises(CaesuraError) as caught:
        opening_of(parse(reduced(**changes)), UUID)
    assert caught.value.code == "malformed_message"


@pytest.mark.parametrize(
    "message", [None, 7, [], (), {}, (1, 2), (rebuild_cuda_tensor, ()), (torch.zeros, (1,) * 15)]
)
def test_other_first_messages_are_refused(message):
    with pytest.raises(CaesuraError) as caught:
        opening_of(parse(pickled(message)), UUID)
    assert caught.value.code == "malformed_message"
