"""Uploads through pinned buckets, on a device that does everything as late as it may."""

import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.checkpoints import make_checkpoint
from support.lagging_streams import LaggingDevice
from support.stored_weights import specs
from torch import Tensor

from caesura.io_struct import CaesuraError
from caesura.scheduler.weights import upload
from caesura.scheduler.weights.source import BufferSource, WeightPiece, WeightSource
from caesura.scheduler.weights.transports.disk import open_checkpoint
from caesura.scheduler.weights.upload import BUCKETS, WriteStream


def never(name: str) -> bool:
    return False


class Target:
    """Weights, written as a loader writes them."""

    def __init__(self, device: LaggingDevice, *, waits: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._device = device
        self._waits = waits

    def write(self, piece: WeightPiece) -> None:
        whole = self.tensors.setdefault(piece.name, torch.empty(piece.shape, dtype=piece.dtype))
        part = whole.narrow(0, piece.start_row, piece.rows.shape[0]) if piece.shape else whole
        with self._device.on_stream():
            part.copy_(piece.rows)
        if self._waits:
            self._device.writing.synchronize()


def uploaded(
    source: WeightSource,
    bucket_bytes: int,
    skip: Callable[[str], bool] = never,
    *,
    waits: bool = False,
    eager: bool = False,
) -> dict[str, Tensor]:
    device = LaggingDevice(eager_side=eager)
    target = Target(device, waits=waits)
    stream = WriteStream(device, device.on_stream)
    for piece in stream.upload(source, bucket_bytes, skip):
        if piece is not None:
            target.write(piece)
    device.writing.synchronize()
    return target.tensors


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def memory_of_a_message(tensors: dict[str, Tensor]) -> BufferSource:
    sent = [replace(spec, buffer=number) for number, spec in enumerate(specs(tensors))]
    frames = [memoryview(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors.values()]
    return BufferSource("tensor", sent, frames)


@pytest.mark.parametrize("of_a_message", [False, True], ids=["files", "a message"])
@pytest.mark.parametrize(("waits", "eager"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("bucket_bytes", [1, 700, 4096, 1 << 20])
def test_tensors_arrive_whole(folder, tensors, bucket_bytes, waits, eager, of_a_message) -> None:
    source = memory_of_a_message(tensors) if of_a_message else open_checkpoint(folder)
    assert equal(uploaded(source, bucket_bytes, waits=waits, eager=eager), tensors)


def test_skipped_tensors_are_neither_read_nor_sent(folder: Path, tensors: dict[str, Tensor]) -> None:
    source = open_checkpoint(folder)
    found = uploaded(source, 4096, lambda name: "mlp" in name)
    assert found.keys() == {name for name in tensors if "mlp" not in name}


class Scripted:
    """Pieces of one buffer that is used again for each, as a transport's is; None where nothing has come."""

    name, total_bytes, complete, specs = "scripted", 0, False, ()

    def __init__(self, script: list[int | None]) -> None:
        self.script = script

    def pieces(
        self, bucket_bytes: int, skip: Callable[[str], bool]
    ) -> Generator[WeightPiece | None, None, None]:
        buffer = torch.empty(16, dtype=torch.int32)
        for value in self.script:
            if value is None:
                yield None
                continue
            buffer.fill_(value)
            yield WeightPiece(f"t{value}", (16,), torch.int32, 0, buffer)
            buffer.fill_(-1)  # valid until the next is asked for


def test_memory_is_free_when_the_next_piece_is_asked_for() -> None:
    found = uploaded(Scripted([*range(40)]), 200)
    assert equal(found, {f"t{n}": torch.full((16,), n, dtype=torch.int32) for n in range(40)})


def test_received_tensors_are_written_before_waiting() -> None:
    device = LaggingDevice()
    stream = WriteStream(device, device.on_stream)
    came = [
        None if piece is None else piece.name
        for piece in stream.upload(Scripted([1, 2, None, None, 3]), 1 << 20, never)
    ]
    assert came == ["t1", "t2", None, None, "t3"]


def test_one_bucket_is_on_its_way_while_another_is_written(folder: Path) -> None:
    device = LaggingDevice()
    stream = WriteStream(device, device.on_stream)
    pieces = stream.upload(open_checkpoint(folder), 4096, never)
    next(pieces)
    copies = [work for work in stream.side.pending if getattr(work, "__name__", "") == "<lambda>"]
    assert len(copies) == 2
    pieces.close()
    assert not stream.side.pending, "a load that is given up leaves nothing that copies into its memory"


def test_files_are_read_ahead_as_far_as_there_are_buckets(folder: Path) -> None:
    device = LaggingDevice()
    stream = WriteStream(device, device.on_stream)
    reads, all_read = [], threading.Event()
    source = open_checkpoint(folder)

    class Counted:
        name, specs, total_bytes, complete = "disk", source.specs, source.total_bytes, True

        def fills(self, bucket_bytes: int, skip: Callable[[str], bool]) -> Iterator[upload.Fill]:
            for fill in source.fills(bucket_bytes, skip):
                read = fill.read

                def counted(part: Tensor, read: Callable[[Tensor], None] = read) -> None:
                    read(part)
                    reads.append(None)
                    if len(reads) == BUCKETS:
                        all_read.set()

                yield upload.Fill(fill.nbytes, counted, fill.places)

    pieces = stream.upload(Counted(), 2048, never)
    next(pieces)
    assert all_read.wait()
    pieces.close()
    assert len(reads) == BUCKETS


def test_a_file_that_ends_early_leaves_no_thread(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", seed=2)
    source = open_checkpoint(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    with pytest.raises(CaesuraError, match="changed while it was being read"):
        uploaded(source, 4096)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("caesura-read")]
