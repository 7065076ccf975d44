"""Quantised rows against the definition in torch's operations, with every instruction set of the machine."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernels import instruction_sets, threads
from torch import Tensor

from caesura.scheduler.kernels import linear as kernel
from caesura.scheduler.kernels import native
from caesura.scheduler.kernels.quantize import quantize_rows
from caesura.scheduler.layers.parameters import ScaleBlocks
from caesura.scheduler.layers.scaled_blocks import quantize
from caesura.scheduler.memory.workspace import Workspace

pytestmark = pytest.mark.usefixtures("built")
BLOCKS = {
    "int8": ScaleBlocks(1, 128, dtype=torch.int8),
    "int4": ScaleBlocks(1, 32, dtype=torch.int8, codes=kernel.INT4),
    "mxfp4": ScaleBlocks(1, 32, dtype=torch.int8, codes=kernel.E2M1),
}
SPECIAL = [0.0, -0.0, 1e-38, -1e-36, math.inf, -math.inf, math.nan, 6.0, -7.0, 2.5, 448.0]


def check(rows: Tensor, kind: str) -> None:
    blocks = BLOCKS[kind]
    numbers, scales = quantize_rows(rows, blocks.codes, Workspace())
    expected, steps = quantize(rows.float(), blocks)
    if blocks.codes is not None:
        expected = blocks.codes.encode(expected)
    assert numbers.dtype == expected.dtype
    assert torch.equal(numbers, expected)
    assert torch.equal(scales.nan_to_num(-1.0), steps.nan_to_num(-1.0))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", native.FLOATS)
def test_rows_become_what_the_definition_says(dtype, kind):
    @given(
        count=st.integers(1, 40),
        width=st.integers(1, 60),
        seed=st.integers(0, 1 << 16),
        special=st.lists(st.tuples(st.integers(0, 1 << 16), st.sampled_from(SPECIAL)), max_size=6),
        strided=st.booleans(),
    )
    def each(count, width, seed, special, strided):
        generator = torch.Generator().manual_seed(seed)
        sizes = 10 ** (10 * torch.rand(count, 1, generator=generator) - 6)
        rows = (torch.randn(count, 8 * width + 8, generator=generator) * sizes).to(dtype)
        rows = rows[:, 8:] if strided else rows[:, 8:].contiguous()
        for place, value in special:
            rows[place % count, place % (8 * width)] = value
        check(rows, kind)

    for _ in instruction_sets():
        each()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("most", [1.0, 1.9921875, 7.0, 12.0, 127.0, 3.3e-30, 2e30])
def test_every_number_rounds_as_the_definition_says(most, kind):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() <= most]
    width = BLOCKS[kind].columns - 8
    rows = values[: len(values) // width * width].view(-1, width)
    rows = torch.cat([rows, torch.full((len(rows), 8), most, dtype=rows.dtype)], dim=1)
    for _ in instruction_sets():
        check(rows, kind)


def test_many_rows_by_several_threads_are_the_same():
    rows = torch.randn(700, 264, generator=torch.Generator().manual_seed(0)).bfloat16()
    for number in (1, 3):
        with threads(number):
            for kind in BLOCKS:
                check(rows, kind)
