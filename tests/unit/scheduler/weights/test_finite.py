"""The search for values that are not finite: every form of storage, slice by slice."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.forward_batches import load_model

from caesura.client.trainer.update_group import whole
from caesura.io_struct import (
    CaesuraError,
    SendWeightsReqInput,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
)
from caesura.scheduler.models.causal_lm import CausalLM
from caesura.scheduler.runtime.dtypes import NAMES
from caesura.scheduler.weights import reading
from caesura.scheduler.weights.reading import NonFinite, count_non_finite, find_non_finite, read_into
from caesura.scheduler.weights.transports.broadcasts import batches_of, nbytes_of

NAN, INF = float("nan"), float("inf")
KV_UP = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "gpt-oss", "deepseek-v3", "deepseek-v3 fp8"])
def model(request, tmp_path_factory) -> CausalLM:
    family, _, form = request.param.partition(" ")
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(folder / "plain", family, dtype=torch.bfloat16)
    if form:
        make_fp8_checkpoint(folder / "plain", folder / form, (16, 32))
    return load_model(folder / (form or "plain"), torch.bfloat16)


def found_in(model: CausalLM, names) -> list[NonFinite]:
    search = find_non_finite(model, names)
    while True:
        try:
            next(search)
        except StopIteration as end:
            return end.value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_both_infinities_count(dtype):
    values = torch.linspace(-3, 3, 5000).to(dtype)
    assert count_non_finite(values) == 0
    assert count_non_finite(torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)) == 0
    for bad in (NAN, INF, -INF):
        spoilt = values.clone()
        spoilt[4321] = bad
        assert count_non_finite(spoilt) == 1
    assert count_non_finite(torch.tensor([[NAN, 1.0], [INF, -INF]], dtype=dtype)) == 3
    assert count_non_finite(torch.empty(0, dtype=dtype)) == 0
    assert count_non_finite(torch.tensor(NAN, dtype=dtype)) == 1


def test_every_fp8_pattern_is_judged_as_torch_does():
    patterns = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert count_non_finite(patterns) == int((~torch.isfinite(patterns.float())).sum()) == 2
    assert count_non_finite(torch.arange(9)) == 0, "integers are finite"


def test_slices_of_a_slot_are_its_rows(model):
    for name, slot in model.weight_slots().items():
        whole, rows = slot.read(), slot.shape[0]
        for start, stop in ((0, 1), (rows // 3, rows), (1, rows // 2 + 1), (0, rows)):
            part = slot.read(start, stop)
            assert part.view(torch.uint8).equal(whole[start:stop].contiguous().view(torch.uint8)), name


def test_each_tensor_is_found_wherever_the_value_lies(model, monkeypatch):
    monkeypatch.setattr(reading, "_SLICE_ELEMENTS", 100)
    slots = model.weight_slots()
    assert found_in(model, slots) == []
    for name, slot in slots.items():
        before = slot.read().clone()
        spoilt = before.float().clone()
        spoilt.view(-1)[-1] = NAN
        slot.write(spoilt.to(before.dtype), 0)
        assert found_in(model, slots) == [NonFinite(name, 1, before.numel())], name
        assert found_in(model, slots.keys() - {name}) == [], "what was not written is not looked at"
        slot.write(before, 0)
    assert found_in(model, slots) == []


@pytest.mark.parametrize("model", ["deepseek-v3 fp8"], indirect=True)
def test_a_derived_tensor_that_overflows_is_found(model):
    derived = dict(model.derived())
    scales = model.weight_slots()[f"{KV_UP}_scale_inv"]
    before = scales.read().clone()
    scales.write(torch.full_like(before, 3e38), 0)
    model.finalize_weights()
    assert count_non_finite(scales.read()) == 0
    found = found_in(model, [KV_UP, f"{KV_UP}_scale_inv"])
    assert found
    assert {each.name for each in found} <= derived.keys()
    scales.write(before, 0)
    model.finalize_weights()
    assert found_in(model, model.weight_slots()) == []


SIZES = st.lists(st.integers(0, 40), max_size=30)


def specs_of(sizes: list[int]) -> list[TensorSpec]:
    return [
        TensorSpec(name=f"t{number}", dtype="BF16", shape=[size], nbytes=2 * size)
        for number, size in enumerate(sizes)
    ]


@given(sizes=SIZES.filter(bool), cut=st.integers(1, 100))
def test_broadcasts_are_few_and_have_every_tensor_once(sizes, cut):
    specs = specs_of(sizes)
    counts = [len(part) for part in whole(specs, cut, lambda spec: spec.nbytes)]
    fields = {"specs": specs, "load_format": "flattened_bucket", "tensors_per_broadcast": counts}
    sent, received = (
        batches_of(kind(**fields)) for kind in (SendWeightsReqInput, UpdateWeightsFromDistributedReqInput)
    )
    assert sent == received
    assert [spec.name for batch in sent for spec in batch] == [spec.name for spec in specs]
    for number, batch in enumerate(sent, start=1):
        end = 0
        for spec in batch:
            assert spec.offset == end
            end += spec.nbytes
        assert nbytes_of(batch) == end
        assert end <= cut or len(batch) == 1
        assert number == len(sent) or end + sent[number][0].nbytes > cut, "the next would have fitted"


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@given(sizes=SIZES)
def test_without_counts_it_is_one_broadcast_or_one_for_each(load_format, sizes):
    batches = batches_of(SendWeightsReqInput(specs=specs_of(sizes), load_format=load_format))
    assert [len(batch) for batch in batches] == ([1] * len(sizes) if load_format is None else [len(sizes)])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tensors_per_broadcast": [2]}, "needs load_format"),
        ({"tensors_per_broadcast": [1], "load_format": "flattened_bucket"}, "counts 1 tensors"),
        ({"tensors_per_broadcast": [2, 1], "load_format": "flattened_bucket"}, "specs has 2"),
    ],
)
def test_counts_that_do_not_add_up_are_refused(fields, said):
    with pytest.raises(CaesuraError, match=said) as caught:
        batches_of(UpdateWeightsFromDistributedReqInput(specs=specs_of([1, 2]), **fields))
    assert caught.value.code == "invalid_request"


KINDS = ["qwen2", "qwen3", "qwen3-moe", "deepseek-v2", "fp8"]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    make_checkpoint(path, "qwen3" if request.param == "fp8" else request.param, seed=1)
    if request.param != "fp8":
        return path
    make_fp8_checkpoint(path, path.with_name("in-fp8"), blocks=(16, 32))
    return path.with_name("in-fp8")


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("read_bytes", [1, 700, 1 << 20])
def test_every_tensor_is_read_as_it_was_written(folder, held, read_bytes, monkeypatch):
    monkeypatch.setattr(reading, "READ_BYTES", read_bytes)
    monkeypatch.setattr(reading, "WRITE_S", 0.0)
    slots = load_model(str(folder), held).weight_slots()
    files = load_file(folder / "model.safetensors")
    specs, end = [], 0
    for name, slot in slots.items():
        nbytes = torch.Size(slot.shape).numel() * slot.dtype.itemsize
        shape, dtype = list(slot.shape), NAMES[slot.dtype]
        specs.append(TensorSpec(name=name, dtype=dtype, shape=shape, offset=end + 3, nbytes=nbytes))
        end += nbytes + 3
    buffer = torch.zeros(end, dtype=torch.uint8)
    slices = sum(1 for _ in read_into(buffer, specs, slots, nullcontext))
    assert slices >= len(specs)
    for spec in specs:
        found = buffer[spec.offset : spec.offset + spec.nbytes]
        expected = files[spec.name].to(slots[spec.name].dtype).contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(found, expected), spec.name
