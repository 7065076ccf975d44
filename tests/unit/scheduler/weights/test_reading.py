"""What an engine reads of its weights is what was written, whatever layout it keeps them in."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.forward_batches import load_model

from caesura.io_struct import TensorSpec
from caesura.scheduler.runtime.dtypes import NAMES
from caesura.scheduler.weights import reading
from caesura.scheduler.weights.reading import read_into

KINDS = ["qwen2", "qwen3", "qwen3-moe", "deepseek-v2", "fp8"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    make_checkpoint(path, "qwen3" if request.param == "fp8" else request.param, seed=1)
    if request.param != "fp8":
        return path
    make_fp8_checkpoint(path, path.with_name("in-fp8"), blocks=(16, 32))
    return path.with_name("in-fp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("read_bytes", [1, 700, 1 << 20])
def test_every_tensor_is_read_as_it_was_written(folder, dtype, read_bytes, monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", read_bytes)
    monkeypatch.setattr(reading, "WRITE_S", 0.0)
    slots = load_model(str(folder), dtype).weight_slots()
    files = load_file(folder / "model.safetensors")
    specs, end = [], 0
    for name, slot in slots.items():
        nbytes = torch.Size(slot.shape).numel() * slot.dtype.itemsize
        specs.append(
            TensorSpec(
                name=name, dtype=NAMES[slot.dtype], shape=list(slot.shape), offset=end + 3, nbytes=nbytes
            )
        )
        end += nbytes + 3
    buffer = torch.zeros(end, dtype=torch.uint8)
    slices = sum(1 for _ in read_into(buffer, specs, slots, nullcontext))
    assert slices >= len(specs)
    for spec in specs:
        found = buffer[spec.offset : spec.offset + spec.nbytes]
        expected = files[spec.name].to(slots[spec.name].dtype).contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found, expected), spec.name
