"""Experts divided among groups of ranks: results, weights and adapters are those of one rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.lanes import quick
from torch import Tensor

from caesura.io_struct import CaesuraError
from caesura.scheduler.layers.experts import ExpertNames, Experts
from caesura.scheduler.layers.lora import AdapterRows, AdapterSlots, Factors
from caesura.scheduler.layers.parameters import Placement, ScaleBlocks
from caesura.scheduler.parallel.group import TensorParallel

CPU = torch.device("cpu")
STACKED = {"names": ExpertNames(stacked=True), "bias": True, "bend": "clamped"}
COUNT, TOP_K = 12, 3


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fill fresh memory with NaN, which rows that nobody computes keep."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def made(sizes: tuple[int, int], place: Placement, further: dict[str, Any]) -> Experts:
    layer = Experts("e", "m", COUNT, *sizes, **further, place=place)
    generator = torch.Generator().manual_seed(0)
    for slot in layer.slots():
        if not slot.name.endswith("scale_inv"):  # they come with the weight
            slot.write(torch.randn(slot.shape, generator=generator) / slot.shape[1] ** 0.5, 0)
    return layer


def choices(tokens: int) -> tuple[Tensor, Tensor]:
    """Return ids and weights; the first token's experts are neighbours, and one has no token."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, COUNT - 1, generator=generator).argsort(-1)[:, :TOP_K].contiguous()
    ids[0] = torch.arange(TOP_K)
    return ids, torch.rand(tokens, TOP_K, generator=generator)


@pytest.mark.parametrize(("tp", "ep"), quick([(4, 2), (3, 3), (2, 2), (6, 3)], 2))
@pytest.mark.parametrize(("sizes", "dtype", "blocks", "further"), [
    pytest.param((40, 24), torch.float32, None, {}, id="plain"),
    pytest.param((42, 24), torch.bfloat16, None, {}, id="two bytes"),
    pytest.param((41, 12), torch.float32, None, {}, id="odd"),
    pytest.param((20, 12), torch.float32, None, STACKED, id="stacked"),
    pytest.param((64, 48), torch.float32, ScaleBlocks(8, 8), {}, id="fp8"),
    pytest.param((64, 48), torch.float32, ScaleBlocks(3, 3), {}, id="small blocks"),
])  # fmt: skip
@pytest.mark.usefixtures("served", "nan_memory")
def test_ranks_add_up_to_the_whole(
    sizes: tuple[int, int],
    dtype: torch.dtype,
    blocks: ScaleBlocks | None,
    further: dict[str, Any],
    tp: int,
    ep: int,
) -> None:
    whole = made(sizes, Placement(dtype, CPU, blocks), further)
    ranks = [
        made(sizes, Placement(dtype, CPU, blocks, parallel=TensorParallel(rank, tp), ep=ep), further)
        for rank in range(tp)
    ]
    assert [expert for rank in ranks[:: tp // ep] for expert in rank.held] == list(range(COUNT))
    for tokens in (1, 2, 37):
        ids, weights = choices(tokens)
        x = torch.randn(tokens, sizes[0], generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = whole.forward(x, ids, weights)
        found = torch.stack([rank.forward(x, ids, weights) for rank in ranks])
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(found.float().sum(0), expected.float(), rtol=tolerance, atol=tolerance)
        chosen = (ids[0] // (COUNT // ep) == torch.arange(ep)[:, None]).any(1).repeat_interleave(tp // ep)
        assert (found[~chosen, 0] == 0).all(), "ranks without an expert of the token add nothing"


def test_wide_experts_need_no_borders_of_blocks() -> None:
    sizes, blocks = (64, 48), ScaleBlocks(32, 16)
    with pytest.raises(CaesuraError, match="moe_intermediate_size"):
        made(sizes, Placement(torch.float32, CPU, blocks, parallel=TensorParallel(1, 2)), {})
    made(sizes, Placement(torch.float32, CPU, blocks, parallel=TensorParallel(1, 2), ep=2), {})


def test_experts_that_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(CaesuraError, match="num_experts = 12 is not a multiple of 5"):
        made((40, 24), Placement(torch.float32, CPU, parallel=TensorParallel(0, 5), ep=5), {})


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2)])
@pytest.mark.usefixtures("served", "nan_memory")
def test_adapters_of_experts_add_up_to_the_whole(tp: int, ep: int) -> None:
    sizes, found = (40, 24), []
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    ids, weights = choices(9)
    for rank, size in [(0, 1), *((rank, tp) for rank in range(tp))]:
        slots = AdapterSlots(2, 16, experts=True)
        parallel = TensorParallel(rank, size)
        place = Placement(torch.float32, CPU, parallel=parallel, ep=min(ep, size), adapters=slots)
        layer = made(sizes, place, {})
        generator = torch.Generator().manual_seed(2)
        factors = {
            module: Factors(
                torch.randn(8, inputs, generator=generator), torch.randn(outputs, 8, generator=generator), 0.2
            )
            for module, (outputs, inputs) in slots.shapes().items()
        }
        list(slots.write(1, factors))
        base = layer.forward(x, ids, weights)
        slots.rows = AdapterRows(torch.tensor([1, -1, 1, 1, -1, 1, 1, 1, -1]))
        found.append(layer.forward(x, ids, weights))
        unchanged = (found[-1] == base).all(1)
        assert unchanged[[1, 4, 8]].all()
    assert not unchanged.all()
    torch.testing.assert_close(torch.stack(found[1:]).sum(0), found[0], rtol=1e-4, atol=1e-4)
