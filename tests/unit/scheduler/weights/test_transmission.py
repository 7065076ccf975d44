"""Sends and relays on a device that does everything as late as it may."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lagging_streams import LaggingDevice, Stream
from support.properties import examples
from support.waiting import PATIENCE_S, eventually
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.runtime.background import Worker
from caesura.scheduler.weights.transports import broadcasts as broadcasts_module
from caesura.scheduler.weights.transports.broadcasts import Relay, Transmission, broadcasts, plans_of
from caesura.scheduler.weights.upload import WriteStream

LIMIT = timedelta(seconds=PATIENCE_S)


class Outgoing:
    """Rank 0 of NCCL: its broadcasts run on a stream of its own, after the current one."""

    def __init__(self, device: LaggingDevice, sizes: Sequence[int], fails_at: int | None = None) -> None:
        self._device = device
        self._stream = Stream()
        self._fails_at = fails_at
        self.number = 0
        self.got = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def broadcast(self, views: list[Tensor], options: Any) -> Any:
        self._stream.wait_event(self._device.current_stream().record_event())
        with self._stream:
            self.got[self.number].copy_(views[0])
        self.number += 1
        return SimpleNamespace(wait=self._failing if self.number == self._fails_at else self._wait)

    def _wait(self) -> None:
        with _disable_current_modes():  # those of the streams that are current where it is waited
            self._stream.synchronize()

    def _failing(self) -> None:
        raise RuntimeError("the other end is gone\nwith a trace")


class Incoming:
    """Tensors from another rank, broadcast on the current stream."""

    def __init__(self, sent: Sequence[Tensor]) -> None:
        self._sent = list(sent)

    def broadcast(self, views: list[Tensor], options: Any) -> Any:
        views[0].copy_(self._sent.pop(0))
        return SimpleNamespace(wait=lambda: None)


def tensors(sizes: Sequence[int]) -> list[Tensor]:
    return [torch.randint(1, 255, (size,), dtype=torch.uint8) for size in sizes]


def equal(got: Sequence[Tensor], sent: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def transmission_of(
    backend: Any, device: LaggingDevice, nbytes: int, worker: Worker, timeout_s: float = PATIENCE_S
) -> Transmission:
    def broken(reason: str) -> CaesuraError:
        return CaesuraError(ErrorCode.GROUP_ERROR, reason)

    return Transmission(
        backend,
        [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)],
        WriteStream(device, device.on_stream),
        timeout_s=timeout_s,
        submit=worker.submit,
        wake=lambda: None,
        broken=broken,
    )


def send_all(sending: Transmission, device: LaggingDevice, sent: Sequence[Tensor]) -> None:
    for tensor in sent:
        buffer = eventually(lambda: [room] if (room := sending.room()) is not None else None)[0]
        with device.on_stream():
            buffer[: len(tensor)].copy_(tensor)
        sending.send(len(tensor))
    eventually(sending.is_over)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("sizes", [[5], [40] * 7, [70, 3, 900, 5, 1, 256] * 3])
def test_a_send_tears_nothing(worker, sizes, eager):
    device, sent = LaggingDevice(eager_side=eager), tensors(sizes)
    backend = Outgoing(device, sizes)
    with closing(transmission_of(backend, device, max(sizes), worker)) as sending:
        assert sending.is_open
        send_all(sending, device, sent)
    assert equal(backend.got, sent)
    assert not sending.is_open


def test_a_broadcast_that_fails_ends_the_send(worker):
    device, sent = LaggingDevice(), tensors([8] * 6)
    backend = Outgoing(device, [8] * 6, fails_at=2)
    with pytest.raises(CaesuraError, match=r"a broadcast failed: the other end is gone( |$)"):
        send_all(transmission_of(backend, device, 8, worker), device, sent)
    assert equal(backend.got[:1], sent[:1])
    assert backend.number < len(sent)


def test_a_broadcast_that_hangs_is_given_up(worker, monkeypatch):
    monkeypatch.setattr(broadcasts_module, "GRACE_S", 0.0)
    device = LaggingDevice()
    released: list[Callable[[], None]] = []
    never = SimpleNamespace(broadcast=lambda views, options: SimpleNamespace(wait=lambda: None))
    sending = transmission_of(never, device, 8, worker, timeout_s=0.05)
    sending.submit = released.append  # the thread never comes to it
    sending.send(8)
    sending.send(8)
    with pytest.raises(CaesuraError, match=r"a broadcast did not end within 0.05 s"):
        eventually(lambda: sending.room() is not None)
    assert len(released) == 2


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=12),
    eager=st.booleans(),
    fails_at=st.one_of(st.none(), st.integers(1, 12)),
    shared_bytes=st.sampled_from([0, 600]),
)
def test_a_relay_forwards_and_its_failure_spares_the_receiver(sizes, eager, fails_at, shared_bytes):
    device, sent = LaggingDevice(eager_side=eager), tensors(sizes)
    stream = WriteStream(device, device.on_stream)
    plans = list(plans_of(sizes, shared_bytes))
    buffers = [torch.zeros(max(plan.nbytes for plan in plans), dtype=torch.uint8) for _ in range(2)]
    backend = Outgoing(device, sizes, fails_at)
    relay = Relay(backend, 20.0)
    written = [stream.mark(), stream.mark()]
    got = [torch.zeros_like(tensor) for tensor in sent]
    targets = iter(got)
    for number, received in enumerate(
        broadcasts(Incoming(sent), plans, buffers, written, stream, LIMIT, relay)
    ):
        stream.write_after(received.arrived)
        with device.on_stream():
            for tensor in received.broadcasts:
                next(targets).copy_(tensor)
        written[number % 2] = stream.mark()
    device.writing.synchronize()
    assert equal(got, sent)
    if fails_at is None or fails_at > len(sizes):
        assert relay.failure is None
        assert equal(backend.got, sent)
    else:
        assert relay.failure == "a broadcast failed: the other end is gone"
