"""MXFP4 against the formula of its specification in float64."""

import random

import pytest
import torch
from support.mxfp4 import dequantize_mxfp4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from caesura.scheduler.layers.experts import ExpertNames, Experts
from caesura.scheduler.layers.parameters import Placement
from caesura.scheduler.layers.stacked_experts import dequantize
from caesura.scheduler.parallel.group import TensorParallel

EXPERTS, HIDDEN, WIDTH = 3, 96, 64
WHOLE = {"mlp.experts.gate_up_proj": (2 * WIDTH, HIDDEN), "mlp.experts.down_proj": (HIDDEN, WIDTH)}


def same(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_element_with_every_scale(dtype):
    """[256 scales, 8 groups of 16 bytes]: each byte once, so each element in either half."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 16)
    expected = dequantize_mxfp4(blocks, scales)
    found = dequantize(blocks, scales, dtype)
    assert torch.equal(found[255].isnan(), torch.ones(512, dtype=torch.bool))
    assert same(found[:255], expected[:255].to(dtype))
    assert torch.equal(found[:255].signbit(), expected[:255].signbit())  # of zeros, too
    if dtype != torch.float16:
        finite = expected[:254].abs() <= torch.finfo(dtype).max
        assert torch.equal(found[:254].double()[finite], expected[:254][finite]), "exact"


def test_transformers_agrees():
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = [dequantize(*of_expert, torch.bfloat16).t() for of_expert in zip(blocks, scales)]
    assert same(torch.stack(ours), theirs)


def layer(dtype, rank=0, size=1, ep=1):
    place = Placement(dtype, torch.device("cpu"), parallel=TensorParallel(rank, size), ep=ep)
    names = ExpertNames(stacked=True)
    return Experts(
        "e", "mlp.experts", EXPERTS, HIDDEN, WIDTH, names=names, bias=True, bend="clamped", place=place
    )


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    packed, wide = {}, {}
    for name, (outputs, inputs) in WHOLE.items():
        shape = EXPERTS, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 132, shape, generator=generator, dtype=torch.uint8)
        scales[0, 0] = torch.tensor([0, 252, 255][: inputs // 32])
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = dequantize_mxfp4(blocks, scales).transpose(1, 2)
    return packed, wide


def slots_of(experts):
    held = {slot.name: slot for slot in experts.slots()}
    halves = {half.name: half for slot in held.values() for half in slot.halves}
    return held, halves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_storage_depends_on_neither_order_nor_pieces(served, dtype, cut):
    held, halves = slots_of(layer(dtype))
    assert set(halves) == set(drawn(1)[0])
    for seed in range(4):
        packed, wide = drawn(seed)
        names = sorted(packed)
        random.Random(seed + cut).shuffle(names)
        for name in names:
            for start in range(0, EXPERTS, cut):
                halves[name].update(packed[name][start : start + cut], start)
            if seed % 2:
                halves[name].make_room()
        for name, value in wide.items():
            assert same(held[name].read(), value.to(dtype)), (name, names)


def test_a_change_counts_with_the_one_that_completes_it(served):
    held, halves = slots_of(layer(torch.bfloat16))
    packed, _ = drawn(1)
    first, second = "mlp.experts.down_proj_blocks", "mlp.experts.down_proj_scales"
    for order in ((first, second), (second, first)):
        for changed in (order[0] == first, False):
            assert not halves[order[0]].update(packed[order[0]], 0)
            assert halves[order[1]].update(packed[order[1]], 0) is changed
        other = packed[second].clone()
        other[-1, -1, -1] += 1
        halves[first].update(packed[first], 0)
        assert halves[second].update(other, 0)
        halves[first].update(packed[first], 0)
        assert halves[second].update(packed[second], 0)
    halves[first].update(packed[first], 0)
    halves[first].make_room()  # what was there is gone: it counts as changed
    assert halves[second].update(packed[second], 0)
    assert halves[second].update(packed[second], 0, compare=False)
    assert held["mlp.experts.down_proj"].shape == (EXPERTS, WIDTH, HIDDEN)


def test_ranks_keep_their_part_of_the_width(served):
    packed, wide = drawn(3)
    parts = {name: [] for name in wide}
    for rank in range(2):
        held, halves = slots_of(layer(torch.float32, rank, 2))
        for early in (True, False):
            order = sorted(packed, reverse=early)
            for name in order:
                assert halves[name].shape == packed[name].shape
                halves[name].update(packed[name], 0)
                halves[name].make_room()
            for name in wide:
                parts[name].append(held[name].read())
    for name, columns in {"mlp.experts.gate_up_proj": 2, "mlp.experts.down_proj": 1}.items():
        first, again, second, once_more = parts[name]
        assert same(first, again)
        assert same(second, once_more)
        assert same(torch.cat([first, second], dim=columns), wide[name].float())


def test_ranks_keep_their_experts(served):
    packed, wide = drawn(4)
    parts = {name: [] for name in wide}
    for rank in range(EXPERTS):
        held, halves = slots_of(layer(torch.float32, rank, EXPERTS, ep=EXPERTS))
        for early in (True, False):
            for name in sorted(packed, reverse=early):
                assert halves[name].shape == packed[name].shape
                assert halves[name].owned == (range(rank, rank + 1),)
                for start in range(EXPERTS):
                    halves[name].update(packed[name][start : start + 1], start)
                halves[name].make_room()
        for name in wide:
            parts[name].append(held[name].read())
    for name, value in wide.items():
        assert same(torch.cat(parts[name]), value.float())


def test_experts_that_groups_do_not_divide_come_wide():
    place = Placement(torch.float32, torch.device("cpu"))
    experts = Experts(
        "e", "x", 2, 40, 32, names=ExpertNames(stacked=True), bias=True, bend="clamped", place=place
    )
    assert [(slot.name, len(slot.halves)) for slot in experts.slots()] == [
        ("x.gate_up_proj", 0),
        ("x.gate_up_proj_bias", 0),
        ("x.down_proj", 2),
        ("x.down_proj_bias", 0),
    ]
