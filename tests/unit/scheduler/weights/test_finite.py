"""The search for values that are not finite: every form of storage, slice by slice."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint, make_fp8_checkpoint
from support.forward_batches import load_model

from caesura.scheduler.models.base import CausalLM
from caesura.scheduler.weights import reading
from caesura.scheduler.weights.reading import NonFinite, count_non_finite, find_non_finite

NAN, INF = float("nan"), float("inf")
KV_UP = "model.layers.0.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe", "deepseek-v3", "deepseek-v3 fp8"])
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
