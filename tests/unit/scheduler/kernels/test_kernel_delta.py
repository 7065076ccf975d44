"""The compiled gated delta rule: against the layer by torch, and bit by bit by token."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.forward_batches import Row, forward_batch
from support.kernels import instruction_sets, threads
from support.properties import examples
from torch import Tensor

from caesura.scheduler.attention.delta_rule import HybridBackend
from caesura.scheduler.cache.pool import StatePool, StateShape
from caesura.scheduler.execution.forward import AttentionBackend, StateSegment, StateStep
from caesura.scheduler.kernels.delta import LARGEST_HEAD, delta_for
from caesura.scheduler.kernels.linear import packable
from caesura.scheduler.layers.gated_delta import DeltaShape, GatedDelta, places_of
from caesura.scheduler.layers.parameters import Placement

CPU = torch.device("cpu")
STATES = 9
HIDDEN = 24
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Layer:
    """A layer of random parameters, its states, and one step of some of them."""

    def __init__(self, shape: StateShape, dtype: torch.dtype, by_key_head: bool, seed: int = 0) -> None:
        self.shape, self.dtype = shape, dtype
        self.random = torch.Generator().manual_seed(seed)
        sizes = DeltaShape(hidden_size=HIDDEN, state=shape, eps=1e-6, by_key_head=by_key_head)
        self.block = GatedDelta("l", "l", 0, sizes, place=Placement(dtype, CPU))
        for slot in self.block.slots():
            values = 0.4 * self.draw(*slot.shape) + (1.0 if "norm" in slot.name else 0.0)
            slot.write(values.to(dtype), 0)
        self.block.finalize()
        self.pool = StatePool(num_layers=1, num_rows=STATES, shape=shape, dtype=dtype)
        past, recurrent = self.pool.layer(0)
        past.copy_(self.draw(*past.shape))
        recurrent.copy_(self.draw(*recurrent.shape))

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def step(
        self, x: Tensor, rows: list[int], *, compiled: bool, kept: tuple[list[int], list[int]] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        where = None if kept is None else (torch.tensor(kept[0]), torch.tensor(kept[1]))
        step = StateStep(rows=torch.tensor(rows), sources=None, segments=(), kept=where)
        return self.run(x, step, len(rows), compiled=compiled)

    def run(
        self, x: Tensor, step: StateStep, num_decode: int, *, compiled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        pool = StatePool(num_layers=1, num_rows=STATES, shape=self.shape, dtype=self.dtype)
        for target, source in zip(pool.layer(0), self.pool.layer(0), strict=True):
            target.copy_(source)
        attention = SimpleNamespace(fused=None, paged=None, reads_page_table=False, plan=lambda batch: None)
        backend = HybridBackend(cast("AttentionBackend", attention), pool)
        batch = forward_batch([Row([1], 0, [1]) for _ in range(len(x))], num_decode)
        batch.states = step
        backend.plan(batch)
        kernel = self.block.kernel
        assert kernel is not None
        self.block.kernel = kernel if compiled else None
        try:
            return self.block.forward(x, x, x, backend), *pool.layer(0)
        finally:
            self.block.kernel = kernel


shapes = st.builds(
    lambda group, **sizes: StateShape(value_heads=sizes["key_heads"] * group, **sizes),
    group=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    key_size=st.sampled_from([1, 5, 16, 40]),
    value_size=st.sampled_from([1, 7, 16, 33, 64, 100]),
    kernel=st.integers(1, 5),
)
dtypes = st.sampled_from(list(TOLERANCES))
layers = st.fixed_dictionaries(
    {"shape": shapes, "dtype": dtypes, "by_key_head": st.booleans(), "seed": st.integers(0, 99)}
)
"""Arguments of :class:`Layer`, which is built anew for each instruction set."""


@settings(max_examples=examples(40))
@given(made=layers, rows=st.lists(st.integers(1, STATES - 3), unique=True, min_size=1))
def test_a_step_is_that_of_torch(made, rows) -> None:
    for _ in instruction_sets():
        layer = Layer(**made)
        x = layer.draw(len(rows), HIDDEN).to(layer.dtype)
        kept = ([len(rows) - 1], [STATES - 1])
        for got, want in zip(
            layer.step(x, rows, compiled=True, kept=kept),
            layer.step(x, rows, compiled=False, kept=kept),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=TOLERANCES[layer.dtype], atol=TOLERANCES[layer.dtype])


@settings(max_examples=examples(30))
@given(data=st.data(), made=layers)
def test_prompts_beside_decoding_rows_are_those_of_torch(data, made) -> None:
    lengths = [data.draw(st.integers(1, 80)), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))]
    first, second, third = (2 + sum(lengths[:number]) for number in range(3))
    step = StateStep(
        rows=torch.tensor([1, 2, 4, 5]),
        sources=torch.tensor([1, 3]),
        segments=[
            StateSegment(first, second, None, 4, 6),
            StateSegment(second, third, 4, 4, None),
            StateSegment(third, third + lengths[2], 7, 5, 8),
        ],
        kept=None,
    )
    for _ in instruction_sets():
        layer = Layer(**made)
        x = layer.draw(third + lengths[2], HIDDEN).to(layer.dtype)
        compiled, by_torch = (layer.run(x, step, 2, compiled=each) for each in (True, False))
        loose = (50 if layer.dtype is torch.float32 else 5) * TOLERANCES[layer.dtype]
        # Other sums, of which the norm makes more where they vanish.
        for got, want in zip(compiled, by_torch, strict=True):
            torch.testing.assert_close(got, want, rtol=loose, atol=loose)


@settings(max_examples=examples(15))
@given(data=st.data(), made=layers)
def test_how_a_sequence_is_cut_changes_no_bit(data, made) -> None:
    assume(packable(made["shape"].value_heads * made["shape"].value_size, made["dtype"]))
    length = data.draw(st.integers(2, 40))
    borders = [0, *sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4))), length]
    for _ in instruction_sets():
        layer = Layer(**made)
        x = layer.draw(length, HIDDEN).to(layer.dtype)

        def prefill(x: Tensor, segments: list[StateSegment], layer=layer) -> tuple[Tensor, Tensor, Tensor]:
            step = StateStep(rows=torch.tensor([1]), sources=None, segments=segments, kept=None)
            return layer.run(x, step, 0, compiled=True)

        whole = prefill(x, [StateSegment(0, length, None, 1, None)])
        with threads(3):
            cut = [
                StateSegment(start, end, 1 if start else None, 1, None) for start, end in pairwise(borders)
            ]
            pieces = prefill(x, cut)
        assert all(torch.equal(ours, others) for ours, others in zip(whole, pieces, strict=True))
        found, past, recurrent = prefill(x[:1], [StateSegment(0, 1, None, 1, None)])
        rows = [found]
        for position in range(1, length):
            for target, source in zip(layer.pool.layer(0), (past, recurrent), strict=True):
                target.copy_(source)
            before, after = 1 + (position - 1) % 2, 1 + position % 2
            step = StateStep(
                rows=torch.tensor([after]), sources=torch.tensor([before]), segments=(), kept=None
            )
            found, past, recurrent = layer.run(x[position : position + 1], step, 1, compiled=True)
            rows.append(found)
        assert torch.equal(torch.cat(rows), whole[0])
        assert torch.equal(past[after], whole[1][1])
        assert torch.equal(recurrent[after], whole[2][1])


@settings(max_examples=examples(15))
@given(made=layers)
def test_bits_of_a_row_are_its_own(made) -> None:
    assume(packable(made["shape"].value_heads * made["shape"].value_size, made["dtype"]))
    layer, rows = None, [4, 2, 6, 1]
    for _ in instruction_sets():
        layer = Layer(**made)
        x = layer.draw(len(rows), HIDDEN).to(layer.dtype)
        with threads(3):
            together = layer.step(x, rows, compiled=True)
        for index, row in enumerate(rows):
            with threads(1):
                alone = layer.step(x[index : index + 1], [row], compiled=True)
            assert torch.equal(alone[0][0], together[0][index])
            assert torch.equal(alone[1][row], together[1][row])
            assert torch.equal(alone[2][row], together[2][row])


def test_steep_decays_and_gates() -> None:
    shape = StateShape(key_heads=1, value_heads=2, key_size=16, value_size=16, kernel=4)
    for _ in instruction_sets():
        layer = Layer(shape, torch.float32, by_key_head=False)
        x = layer.draw(3, HIDDEN)
        for size in (1e-30, 40.0, 1e4, 1e18):
            got, want = (layer.step(size * x, [1, 2, 3], compiled=each) for each in (True, False))
            for ours, torchs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, torchs, rtol=1e-3, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("built")
def test_large_heads_are_torchs() -> None:
    for size in (LARGEST_HEAD, LARGEST_HEAD + 1):
        shape = StateShape(key_heads=1, value_heads=1, key_size=8, value_size=size, kernel=2)
        kernel = delta_for(CPU, torch.float32, shape, places_of(shape, by_key_head=True))
        assert (kernel is not None) == (size == LARGEST_HEAD)


def test_states_that_the_kernel_would_misread_are_refused() -> None:
    shape = StateShape(key_heads=1, value_heads=2, key_size=8, value_size=8, kernel=3)
    for _ in instruction_sets():
        layer = Layer(shape, torch.float32, by_key_head=True)
        layer.shape = replace(shape, value_size=9)
        layer.pool = StatePool(num_layers=1, num_rows=STATES, shape=layer.shape, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"no step of the delta rule: torch.float32 \(2, 52\)"):
            layer.step(layer.draw(2, HIDDEN), [1, 2], compiled=True)
