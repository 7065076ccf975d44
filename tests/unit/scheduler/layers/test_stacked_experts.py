"""Experts of one checkpoint tensor."""

import pytest
import torch
from torch.nn import functional

from caesura.scheduler.kernels import native
from caesura.scheduler.layers.experts import ExpertNames, Experts
from caesura.scheduler.layers.parameters import Placement

EXPERTS, HIDDEN, WIDTH = 5, 20, 12


@pytest.fixture(params=["compiled", "torch"])
def experts(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr("caesura.scheduler.layers.experts.best", lambda *of: "torch")
    elif native.why_not():
        pytest.skip(native.why_not())
    place = Placement(torch.float32, torch.device("cpu"))
    names = ExpertNames(stacked=True)
    return Experts(
        "e", "mlp.experts", EXPERTS, HIDDEN, WIDTH, names=names, bias=True, bend="clamped", place=place
    )


def drawn(slots, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(slot.shape, generator=generator) for name, slot in slots.items()}


def test_slots_are_the_checkpoint_s(experts):
    slots = {slot.name: slot.shape for slot in experts.slots()}
    assert slots == {
        "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * WIDTH),
        "mlp.experts.down_proj": (EXPERTS, WIDTH, HIDDEN),
        "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN),
    }


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_written_rows_read_back_and_count_as_changed_once(experts, cut):
    slots = {slot.name: slot for slot in experts.slots()}
    for seed in (1, 2):
        for name, values in drawn(slots, seed).items():
            starts = range(0, EXPERTS, cut)
            assert all(slots[name].update(values[start : start + cut], start) for start in starts)
            assert not any(slots[name].update(values[start : start + cut], start) for start in starts)
            assert not slots[name].differs(values[1:3], 1)
            assert torch.equal(slots[name].read(), values)
            assert torch.equal(slots[name].read(1, 3), values[1:3])
            changed = values.clone()
            changed.view(EXPERTS, -1)[3, -1] += 1
            assert slots[name].differs(changed[2:], 2)
            assert not slots[name].differs(changed[:3], 0)
            slots[name].write(values[cut:], cut)
            assert torch.equal(slots[name].read(), values)


def test_their_sum_is_that_of_the_checkpoint_s_tensors(experts):
    slots = {slot.name: slot for slot in experts.slots()}
    values = drawn(slots, 3)
    for name, value in values.items():
        slots[name].write(value, 0)
    gate_up, gate_up_bias, down, down_bias = (value.double() for value in values.values())
    x, weights = torch.randn(7, HIDDEN), torch.rand(7, 2)
    ids = torch.randint(0, EXPERTS, (7, 2))
    expected = torch.zeros(7, HIDDEN, dtype=torch.float64)
    for token in range(7):
        for expert, weight in zip(ids[token].tolist(), weights[token].double()):
            both = x[token].double() @ gate_up[expert] + gate_up_bias[expert]
            gate, up = both[::2].clamp(max=7), both[1::2].clamp(-7, 7)
            inner = gate * functional.sigmoid(1.702 * gate) * (up + 1)
            expected[token] += weight * (inner @ down[expert] + down_bias[expert])
    torch.testing.assert_close(experts.forward(x, ids, weights).double(), expected, atol=2e-5, rtol=1e-5)
