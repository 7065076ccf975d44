"""An engine whose weights lie on a device with streams."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from support.lagging_streams import LaggingDevice
from support.scripted import EngineDriver

from caesura.client.trainer import SharedTensors, as_frames, buckets
from caesura.io_struct import UpdateWeightsFromIPCReqInput, UpdateWeightsFromTensorReqInput
from caesura.scheduler.execution import build
from caesura.scheduler.runtime import engine
from caesura.scheduler.weights.transports.disk import open_checkpoint
from caesura.scheduler.weights.upload import WriteStream


class Counting(WriteStream):
    """Streams of a device whose copies are done at once."""

    loads = 0

    def __init__(self, device, on_stream=nullcontext) -> None:
        super().__init__(LaggingDevice(eager_side=True), device=device)

    def upload(self, *arguments):
        Counting.loads += 1
        return super().upload(*arguments)


@pytest.fixture
def expected(other_model) -> str:
    with EngineDriver(str(other_model), scripted=False) as plain:
        return plain.checksum()


@pytest.fixture
def driver(expected, tiny_model, monkeypatch) -> Iterator[EngineDriver]:
    Counting.loads = 0
    monkeypatch.setattr(build, "write_stream_of", Counting)
    monkeypatch.setattr(engine, "write_stream_of", Counting)
    with EngineDriver(str(tiny_model), scripted=False) as driver:
        yield driver


def tensors_of(path) -> list[tuple[str, torch.Tensor]]:
    return [(piece.name, piece.rows.clone()) for piece in open_checkpoint(path).pieces(1 << 20)]


@pytest.mark.parametrize("transport", ["disk", "tensor", "ipc"])
def test_every_transport_uploads_the_weights(driver, expected, tiny_model, other_model, transport):
    before = driver.checksum()
    assert (before != expected, Counting.loads) == (True, 1), "the start is a load as well"
    if transport == "disk":
        reply = driver.update(other_model)
    elif transport == "tensor":
        (part,) = buckets(tensors_of(other_model), 1 << 26)
        specs, frames = as_frames(part)
        reply = driver.call(UpdateWeightsFromTensorReqInput(specs=specs), buffers=frames)
    else:
        with SharedTensors(tensors_of(other_model)) as shared:
            reply = driver.call(UpdateWeightsFromIPCReqInput(handle=shared.memory.handle, specs=shared.specs))
    assert reply.committed
    assert reply.changed_tensors == reply.written_tensors > 0
    assert (driver.checksum(), Counting.loads) == (expected, 2)
    driver.update(tiny_model)
    assert driver.checksum() == before
