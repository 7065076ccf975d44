"""Experts against their definition, routing against transformers, weights written in place."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint
from support.properties import examples
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from caesura.scheduler.kernels import native
from caesura.scheduler.layers import experts as experts_module
from caesura.scheduler.layers.experts import ExpertNames, Experts, SharedExperts
from caesura.scheduler.layers.mlp import GatedMLP
from caesura.scheduler.layers.moe import MoeBlock, RoutedExperts, Router
from caesura.scheduler.layers.parameters import Placement

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def random_experts(
    count: int, hidden: int, width: int, dtype: torch.dtype, seed: int = 0, *, stacked: bool = False
) -> Experts:
    """``stacked``: as gpt-oss has them, with biases and another gate."""
    further = {"names": ExpertNames(stacked=True), "bias": True, "bend": "clamped"} if stacked else {}
    layer = Experts("e", "p", count, hidden, width, **further, place=Placement(dtype, CPU))
    generator = torch.Generator().manual_seed(seed)
    for slot in layer.slots():
        slot.write(torch.randn(slot.shape, generator=generator) / slot.shape[1] ** 0.5, 0)
    return layer


def by_definition(layer: Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    read = {slot.name.removeprefix("p."): slot.read().double() for slot in layer.slots()}

    def of_expert(expert: int, row: Tensor) -> Tensor:
        if "gate_up_proj" in read:
            both, bias = row @ read["gate_up_proj"][expert], read["gate_up_proj_bias"][expert]
            gate, up = (both + bias).view(-1, 2).unbind(1)
            inner = gate.clamp(max=7) * functional.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
            return inner @ read["down_proj"][expert] + read["down_proj_bias"][expert]
        gate, up, down = (read[f"{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (functional.silu(gate @ row) * (up @ row))

    return torch.stack(
        [
            sum(weight * of_expert(expert, row) for expert, weight in zip(experts, factors))
            for row, experts, factors in zip(x.double(), ids.tolist(), weights.double())
        ]
    )


@pytest.mark.parametrize("count", [1, 3])
def test_shared_experts_among_the_others_are_their_block(count: int) -> None:
    place = Placement(torch.float32, CPU)
    with native.limited_to("torch"):
        layer = Experts("e", "p", 4, 8, 6, shared=SharedExperts("s", count), place=place)
        block = GatedMLP("b", "s", 8, 6 * count, place=place)
    written = {slot.name: torch.randn(slot.shape) for slot in layer.slots()}
    for slot in (*layer.slots(), *block.slots()):
        slot.write(written[slot.name], 0)
    x, ids, weights = torch.randn(7, 8), torch.rand(7, 4).argsort(1)[:, :2], torch.rand(7, 2)
    expected = layer.forward(x, ids, weights) + block.forward(x)
    everyone = torch.arange(4, 4 + count).expand(7, count)
    found = layer.forward(x, torch.cat((ids, everyone), 1), torch.cat((weights, torch.ones(7, count)), 1))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("count", [1, 3])
def test_slots_of_shared_experts_take_rows_and_elements(count: int) -> None:
    with native.limited_to("torch"):
        place = Placement(torch.float32, CPU)
        layer = Experts("e", "p", 4, 8, 6, shared=SharedExperts("s", count), place=place)
    slots = {slot.name: slot for slot in layer.slots()}
    own = {name: slot.shape for name, slot in slots.items() if name.startswith("s.")}
    width = 6 * count
    assert own == {
        "s.gate_proj.weight": (width, 8), "s.up_proj.weight": (width, 8), "s.down_proj.weight": (8, width)
    }  # fmt: skip
    for name in own:
        slot, expected = slots[name], torch.randn(own[name])
        slot.write(expected, 0)
        expected[2:5] = torch.randn(3, expected.shape[1])
        assert slot.update(expected[2:5], 2)
        assert not slot.update(expected[2:5], 2), "they are there"
        positions = torch.tensor([0, 9, expected.numel() // 2, expected.numel() - 1])
        for storage, places, which, _ in slot.places(positions):
            storage[places] = positions.float() if which is None else positions[which].float()
        expected.view(-1)[positions] = positions.float()
        assert torch.equal(slot.read(), expected)
        assert torch.equal(slot.read(1, 4), expected[1:4])


@pytest.mark.parametrize(("hidden", "width", "dtype", "stacked"), [
    (40, 24, torch.float32, False),
    (41, 7, torch.float32, False),  # no grouped product of torch's takes it
    (40, 24, torch.bfloat16, False),
    (50, 31, torch.bfloat16, False),  # nor can it be packed
    (32, 48, torch.float16, False),
    (20, 12, torch.float32, True),
])  # fmt: skip
@pytest.mark.usefixtures("served")
def test_forward_is_the_definition(hidden: int, width: int, dtype: torch.dtype, stacked: bool) -> None:
    layer = random_experts(5, hidden, width, dtype, stacked=stacked)
    generator = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 37):
        x = torch.randn(tokens, hidden, generator=generator).to(dtype)
        ids = torch.rand(tokens, 4, generator=generator).argsort(-1)[:, :3]  # nothing goes to the last expert
        weights = torch.rand(tokens, 3, generator=generator)
        for factors in (weights, weights.to(dtype)):
            with torch.inference_mode():
                got = layer.forward(x, ids, factors)
            assert got.dtype == dtype
            expected = by_definition(layer, x, ids, factors)
            tolerance = 1e-5 if dtype == torch.float32 else 0.02 if dtype == torch.float16 else 0.05
            torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_torch_weighs_many_tokens_in_parts() -> None:
    tokens, hidden = 40, experts_module.COMBINED_ELEMENTS // (3 * 25)
    generator = torch.Generator().manual_seed(2)
    y = torch.randn(3 * tokens, hidden, generator=generator)
    places = torch.randperm(3 * tokens, generator=generator).view(tokens, 3)
    weights = torch.rand(tokens, 3, generator=generator)
    parts = [experts_module.combine(y, places[part], weights[part]) for part in (slice(20), slice(20, None))]
    whole = experts_module.combine(y, places, weights)
    assert torch.equal(whole, torch.cat(parts))
    torch.testing.assert_close(whole, (y[places] * weights.unsqueeze(-1)).sum(1))


def test_torch_sorts_as_the_kernel_does() -> None:
    if native.why_not():
        pytest.skip(f"no compiled kernels: {native.why_not()}")
    ids = torch.randint(0, 9, (50, 3), generator=torch.Generator().manual_seed(3))
    tokens, places, ends = experts_module.sort_by_expert(ids, 9)
    groups = experts_module.kernel.group(ids, 9)
    assert torch.equal(tokens, groups.tokens)
    assert torch.equal(places, groups.places)
    assert ends.tolist() == ids.flatten().bincount(minlength=9).cumsum(0).tolist()


def test_a_result_outlives_the_next_forward() -> None:
    layer = random_experts(4, 16, 8, torch.float32)
    x, ids, weights = torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [1, 2]]), torch.ones(3, 2)
    y = layer.forward(x, ids, weights)
    before = y.clone()
    layer.forward(-x, ids, weights)
    assert torch.equal(y, before)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.usefixtures("served")
def test_routing_is_that_of_transformers(normalize: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3-moe", num_experts=60, num_experts_per_tok=7, norm_topk_prob=normalize)
    config = json.loads((tmp_path / "config.json").read_text())
    theirs = Qwen3MoeTopKRouter(_Attributes({**config, "num_experts": config["num_local_experts"]}))
    ours = Router("r", "gate", 40, 60, 7, normalize=normalize, place=Placement(torch.float32, CPU))
    (slot,) = ours.slots()
    weight, x = torch.randn(60, 40), torch.randn(200, 40)
    slot.write(weight, 0)
    with torch.inference_mode():
        theirs.weight.copy_(weight)
        _, expected_weights, expected_ids = theirs(x)
        ids, weights = ours.forward(x, torch.empty(200, 7, dtype=torch.int64))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


class _Attributes:
    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


@pytest.mark.usefixtures("served")
def test_weights_of_the_chosen_round_as_transformers_does() -> None:
    router = Router("r", "gate", 40, 9, 4, normalize=True, place=Placement(torch.bfloat16, CPU))
    next(router.slots()).write(torch.randn(9, 40), 0)
    _, weights = router.forward(torch.randn(20, 40).bfloat16(), torch.empty(20, 4, dtype=torch.uint8))
    assert weights.dtype == torch.float32
    assert torch.equal(weights, weights.bfloat16().float())
    assert (weights.sum(-1) - 1).abs().max() < 0.02


def test_a_block_adds_what_everything_goes_through() -> None:
    place = Placement(torch.float32, CPU)
    router = Router("r", "gate", 16, 4, 2, normalize=True, place=place)
    layer = random_experts(4, 16, 8, torch.float32)
    shared = GatedMLP("s", "shared_experts", 16, 24, place=place)
    for slot in (*router.slots(), *shared.slots()):
        slot.write(torch.randn(slot.shape) / 4, 0)
    routing = RoutedExperts(1, 2, 4, place=place)
    block = MoeBlock(0, router, layer, routing, shared=shared, place=place)
    x = torch.randn(5, 16)
    ids, weights = router.forward(x, torch.empty(5, 2, dtype=torch.int64))
    expected = layer.forward(x, ids, weights) + shared.forward(x)
    torch.testing.assert_close(block.forward(x), expected)
    assert torch.equal(routing.rows(5)[:, 0].long(), ids)
    names = [slot.name for slot in block.slots()]
    assert len(names) == len(set(names)) == 1 + 4 * 3 + 3
    assert [p.name for p in block.parameters()] == [
        "r.weight", "e.gate_up", "e.down", "s.gate_up.weight", "s.down.weight"
    ]  # fmt: skip


# Weights


@pytest.mark.parametrize(("hidden", "width", "dtype", "stacked"), [
    (40, 24, torch.float32, False), (44, 23, torch.bfloat16, False), (48, 40, torch.bfloat16, False),
    (20, 12, torch.float32, True),
])  # fmt: skip
@given(data=st.data())
@settings(max_examples=examples(20))
@pytest.mark.usefixtures("served")
def test_tensors_are_written_in_place_in_any_pieces(
    hidden: int, width: int, dtype: torch.dtype, stacked: bool, data: st.DataObject
) -> None:
    layer = random_experts(3, hidden, width, dtype, stacked=stacked)
    addresses = [p.data.data_ptr() for p in layer.parameters()]
    slots = list(layer.slots())
    parts = [f"p.1.{part}_proj.weight" for part in ("gate", "up", "down")]
    assert stacked or [slot.name for slot in slots[3:6]] == parts
    before = [slot.read().clone() for slot in slots]
    written = data.draw(st.integers(0, len(slots) - 1))
    new = torch.randn(slots[written].shape)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(new) - 1), max_size=3)) | {0, len(new)})
    for start, end in pairwise(cuts):
        assert slots[written].differs(new[start:end], start)
        slots[written].write(new[start:end], start)
        assert not slots[written].differs(new[start:end], start)
    for index, slot in enumerate(slots):
        assert torch.equal(slot.read(), new.to(dtype) if index == written else before[index])
    assert [p.data.data_ptr() for p in layer.parameters()] == addresses
