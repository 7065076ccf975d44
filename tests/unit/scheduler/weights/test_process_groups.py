"""Process groups of NCCL, with a stand-in for it."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support.lagging_streams import LaggingDevice
from support.pickles import pickled
from support.waiting import PATIENCE_S, eventually
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from caesura.io_struct import (
    CaesuraError,
    InitWeightsUpdateGroupReqInput,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
)
from caesura.io_struct.weights import PRESENT
from caesura.scheduler.weights.transports import distributed
from caesura.scheduler.weights.transports.distributed import DistributedSource, Group, WeightsUpdateGroups
from caesura.scheduler.weights.upload import WriteStream
from caesura.transfer import process_group
from caesura.transfer.process_group import Membership
from caesura.transfer.raw_nccl import read_id

CPU = torch.device("cpu")
NAME = "g"


class Nccl:
    """Stand-in for ``ProcessGroupNCCL``."""

    class Options:
        _timeout: timedelta | None = None

    made: ClassVar["list[Nccl]"] = []

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.timeout, self.environment = options._timeout, dict(os.environ)
        self.aborted = threading.Event()
        self.ended = threading.Event()
        self.coming: list[Tensor] = []
        """Tensors that the trainer broadcasts; then a broadcast waits until the test ends."""
        self.unwaited, self.most_unwaited = 0, 0
        self.made.append(self)

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborted.set()

    def broadcast(self, views: list[Tensor], options: Any) -> Any:
        if not self.coming:
            self.ended.wait()
            raise RuntimeError("the test has ended")
        views[0].copy_(self.coming.pop(0))
        self.unwaited += 1
        self.most_unwaited = max(self.most_unwaited, self.unwaited)
        return SimpleNamespace(wait=self._wait)

    def _wait(self) -> None:
        self.unwaited -= 1


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Nccl]]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    Nccl.made.clear()
    for name in process_group._NCCL_IN_TORCH:
        monkeypatch.delenv(name, raising=False)
    yield Nccl
    for each in Nccl.made:
        each.ended.set()


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore(
        "127.0.0.1", 0, 3, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S)
    )


def group(
    store: TCPStore,
    rank: int = 1,
    *,
    timeout_s: float = PATIENCE_S,
    broadcast_timeout_s: float = PATIENCE_S,
    write_stream: WriteStream | None = None,
    wake: Callable[[], None] = lambda: None,
) -> Group:
    member = Membership(NAME, f"127.0.0.1:{store.port}", 3, rank, "nccl")
    groups = WeightsUpdateGroups(CPU, wake, write_stream=write_stream)
    return Group(groups, member, timeout_s, broadcast_timeout_s)


def say_present(store: TCPStore) -> None:
    PrefixStore(NAME, store).set(f"{PRESENT}0", "")


def test_engines_of_our_own_trainer_wait_for_one_another(store: TCPStore) -> None:
    say_present(store)
    first = group(store, 1)
    eventually(lambda: PrefixStore(NAME, store).check([f"{PRESENT}1"]))
    assert not first.joined()
    second = group(store, 2)
    assert eventually(first.joined)
    assert eventually(second.joined)


def test_an_absent_engine_fails_the_join_at_its_deadline(store: TCPStore) -> None:
    say_present(store)
    alone = group(store, 1, timeout_s=0.5)
    with pytest.raises(CaesuraError, match=r"only ranks \[0, 1\] have joined") as caught:
        eventually(alone.joined)
    assert caught.value.detail["ranks_seen"] == [0, 1]
    assert Nccl.made[0].aborted.is_set()


def test_a_group_has_its_timeout_and_is_aborted_when_left(store: TCPStore) -> None:
    """Failures raise in the thread that waits, and no watchdog of torch's ends the process."""
    left = group(store, broadcast_timeout_s=77.0)
    eventually(left.joined)
    (made,) = Nccl.made
    assert made.timeout == timedelta(seconds=77)
    assert made.environment["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        assert made.environment[name] == "0"
    left.kill("the group was destroyed")
    assert made.aborted.wait()


def test_a_trainer_that_died_before_its_first_broadcast(store, monkeypatch) -> None:
    monkeypatch.setattr(distributed, "GRACE_S", 0.0)
    woken = threading.Event()
    device = LaggingDevice()
    stream = WriteStream(device, device.on_stream)
    dead = group(store, broadcast_timeout_s=0.1, write_stream=stream, wake=woken.set)
    eventually(dead.joined)
    woken.clear()
    specs = [TensorSpec(name="a", dtype="U8", shape=[4], nbytes=4)]
    request = UpdateWeightsFromDistributedReqInput(specs=specs)
    pieces = DistributedSource(dead, [specs], request).pieces(1 << 20, lambda name: False)

    def given_up() -> bool:
        assert next(pieces) is None
        assert woken.wait(), "nobody would look again"
        woken.clear()
        return False

    with pytest.raises(CaesuraError, match=r"a broadcast did not come within 0.1 s; the group is dead"):
        eventually(given_up)
    assert Nccl.made[0].aborted.wait()


@pytest.mark.parametrize(
    "sizes", [[5], [1000] * 40, [70, 3, 9000, 5, 1, 256, 4096, 20_000, 8] * 5, [0, 12, 0]]
)
@pytest.mark.parametrize("shared_bytes", [0, 10_000])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_two_buffers_in_turn_tear_nothing(store, monkeypatch, sizes, shared_bytes, waits, eager) -> None:
    monkeypatch.setattr(distributed, "SHARED_BYTES", shared_bytes)
    device = LaggingDevice(eager_side=eager)
    one = group(store, write_stream=WriteStream(device, device.on_stream))
    eventually(one.joined)
    for _ in range(2):  # the buffers stay, and the second update comes before the first one's copies are done
        sent = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
        Nccl.made[0].coming += [tensor.clone() for tensor in sent]
        got = [torch.empty_like(tensor) for tensor in sent]
        with closing(one.receive(sizes)) as receiving:
            for target in got:
                came: Tensor | None = None
                while came is None:
                    came = next(receiving)
                with device.on_stream():
                    target.copy_(came)
                if waits:
                    device.writing.synchronize()
    device.writing.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))
    together = Nccl.made[0].most_unwaited
    assert together == 1 if shared_bytes == 0 else together <= 10_000 // 256 + 1


def test_small_broadcasts_are_waited_for_together(store: TCPStore) -> None:
    """torch looks once in a millisecond whether one has ended: a thousand of them would take a second."""
    device = LaggingDevice()
    one = group(store, write_stream=WriteStream(device, device.on_stream))
    eventually(one.joined)
    Nccl.made[0].coming += [torch.zeros(8, dtype=torch.uint8) for _ in range(1000)]
    with closing(one.receive([8] * 1000)) as receiving:
        eventually(lambda: next(receiving) is not None)
    assert Nccl.made[0].most_unwaited == 1000


class NcclUniqueId(ctypes.Structure):
    """Structure as vLLM's, which its pickle names."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_id_of_vllms_communicator_is_read_and_not_unpickled(protocol):
    identity = bytes(range(128))
    assert read_id(pickled(NcclUniqueId.from_buffer_copy(identity), protocol)) == identity


@pytest.mark.parametrize(
    "value",
    [b"x" * 128, NcclUniqueId, [1], (b"x" * 128,), ctypes.c_int(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_id_is_refused(value):
    with pytest.raises((CaesuraError, RuntimeError)):
        read_id(pickled(value))


def test_a_communicator_given_by_its_id_needs_no_store(monkeypatch):
    """The id makes the membership, so that an equal init is answered at once and another id is refused."""
    made = []
    monkeypatch.setattr(distributed, "RawNccl", lambda *given: made.append(given) or SimpleNamespace())
    monkeypatch.setattr(distributed, "_require_possible", lambda *_: None)
    groups = WeightsUpdateGroups(CPU, lambda: None)
    fields = {"master_address": "unused", "master_port": 1, "rank_offset": 1, "world_size": 2}
    one, other = (
        InitWeightsUpdateGroupReqInput(**fields, backend="vllm_nccl", nccl_unique_id=bytes([n]) * 128)
        for n in range(2)
    )
    group = groups.join(one)
    assert eventually(group.joined)
    assert made == [(bytes(128), 1, 2, CPU)]
    assert groups.join(one) is group
    with pytest.raises(CaesuraError, match="destroy it first"):
        groups.join(other)
    with pytest.raises(CaesuraError, match="nccl_unique_id is for vllm_nccl"):
        groups.join(InitWeightsUpdateGroupReqInput(**fields, backend="gloo", nccl_unique_id=bytes(128)))


def test_vllms_communicator_needs_a_device():
    groups = WeightsUpdateGroups(CPU, lambda: None)
    with pytest.raises(CaesuraError, match="vllm_nccl") as refused:
        groups.join(
            InitWeightsUpdateGroupReqInput(
                master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, backend="vllm_nccl"
            )
        )
    assert refused.value.code == "unsupported"
