"""Prefill chunks on a simulated machine: base + cost * tokens seconds per step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caesura.scheduler.runtime.engine_config import PAGE_SIZE
from caesura.scheduler.scheduling.chunking import ChunkSizer

LARGEST = 2048


def settle(sizer: ChunkSizer, base: float, cost: float, steps: int = 60) -> list[float]:
    times = []
    for _ in range(steps):
        tokens = sizer.budget()
        assert tokens % PAGE_SIZE == 0
        assert PAGE_SIZE <= tokens <= LARGEST
        times.append(base + cost * tokens)
        sizer.observe(tokens, times[-1])
        sizer.observe(0, base)
    return times


@given(base=st.floats(0.0, 0.1), cost=st.floats(1e-5, 1e-1))
def test_steps_take_the_target_within_their_bounds(base, cost):
    last = settle(ChunkSizer(LARGEST, 0.2), base, cost)[-1]
    shortest, longest = base + cost * PAGE_SIZE, base + cost * LARGEST
    assert min(shortest, 0.2) - 1e-9 <= last
    assert last <= max(0.2, shortest) * 1.05
    assert last >= min(0.2 - cost * PAGE_SIZE, longest) * 0.95


def test_prompts_advance_where_the_base_exceeds_the_target():
    sizer, taken = ChunkSizer(LARGEST, 0.2), []
    for _ in range(60):  # as prompts always wait, no step is without their tokens
        taken.append(sizer.budget())
        sizer.observe(taken[-1], 0.4 + 1e-3 * taken[-1])
    assert min(taken[-30:]) >= 64


def test_a_base_of_a_slow_moment_is_forgotten():
    sizer, times = ChunkSizer(LARGEST, 0.2), []
    sizer.observe(0, 20.0)
    for _ in range(60):
        tokens = sizer.budget()
        times.append(0.01 + 7e-3 * tokens)
        sizer.observe(tokens, times[-1])
    assert max(times[-30:]) <= 0.25


def test_one_slow_step_does_not_shrink_chunks_for_long():
    sizer = ChunkSizer(LARGEST, 0.2)
    usual = settle(sizer, 0.01, 1e-3)[-1]
    sizer.observe(sizer.budget(), 5.0)
    assert settle(sizer, 0.01, 1e-3, steps=30)[-1] == pytest.approx(usual, rel=0.1)


def test_a_machine_that_gets_busy_gets_smaller_chunks():
    sizer = ChunkSizer(LARGEST, 0.2)
    settle(sizer, 0.01, 5e-4)
    before = sizer.budget()
    settle(sizer, 0.01, 1e-3)
    assert sizer.budget() < 0.6 * before


def test_without_a_target_nothing_is_measured():
    sizer = ChunkSizer(LARGEST, float("inf"))
    sizer.observe(16, 100.0)
    assert sizer.budget() == LARGEST


def test_a_step_without_memory_halves_the_next_ones():
    sizer = ChunkSizer(LARGEST, float("inf"))
    assert sizer.budget(100) == LARGEST, "decoding rows come on top"
    sizer.halve(LARGEST + 100)
    assert (sizer.limit, sizer.budget(), sizer.budget(100)) == (1074, 1074, 974)
    sizer.halve(1074)
    assert (sizer.budget(100), sizer.budget(537), sizer.budget(1000)) == (437, 0, 0)
    for tokens in (537, 3, 1):
        sizer.halve(tokens)
    assert sizer.limit == 1


def fails_in(steps: int, memory: int) -> tuple[int, int | None]:
    sizer = ChunkSizer(LARGEST, float("inf"))
    failures = 0
    for _ in range(steps):
        tokens = sizer.budget()
        if tokens > memory:
            failures += 1
            sizer.halve(tokens)
        else:
            sizer.succeeded(tokens)
    return failures, sizer.limit


def test_a_shortage_that_lasts_costs_few_steps():
    failures, limit = fails_in(10_000, 300)
    assert limit in (256, 512)
    assert failures < 100


def test_a_shortage_that_has_passed_is_forgotten_soon():
    sizer = ChunkSizer(LARGEST, float("inf"))
    for _ in range(10):  # the longest patience
        while sizer.budget() > 1:
            sizer.halve(sizer.budget())
        while sizer.limit == 1:
            sizer.succeeded(1)
    steps = 0
    while sizer.limit is not None:
        sizer.succeeded(sizer.budget())
        steps += 1
    assert steps < 400


def test_small_steps_prove_nothing():
    sizer = ChunkSizer(LARGEST, float("inf"))
    sizer.halve(200)
    for _ in range(1000):
        sizer.succeeded(50)
    assert sizer.limit == 100
    for _ in range(100):
        sizer.succeeded(51)
    assert sizer.limit == 200
    for _ in range(100):
        sizer.succeeded(101)
    assert sizer.limit is None
