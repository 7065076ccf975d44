"""Inputs and results of steps in reused blocks."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

from caesura.scheduler.execution.forward import ForwardBatch, SamplingBatch, StepLimits
from caesura.scheduler.execution.sampler import SamplerOutput
from caesura.scheduler.execution.staging import InputStaging, OutputStaging

CPU = torch.device("cpu")
LIMITS = StepLimits(tokens=40, rows=9, context_len=100)
SAMPLING = {"temperature": 1, "greedy": True, "top_k": 1, "top_p": 1, "uniforms": 0}
"""And what added rows have."""


class Event:
    """Not complete before somebody has waited for it; what it is told to do then shows what it guards."""

    def __init__(self) -> None:
        self.recorded = 0
        self.waits = 0
        self.at_wait = lambda: None

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waits += 1
        self.at_wait()


class Device:
    """A device module that remembers its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def Event(self) -> Event:  # noqa: N802 (torch's name)
        self.events.append(Event())
        return self.events[-1]


def batch_of(q_lens: list[int], num_decode: int, width: int, seed: int = 0) -> ForwardBatch:
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = len(q_lens), sum(q_lens)
    samples = min(rows, num_decode + 1)

    def draw(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, 90, (count,), generator=generator).to(dtype)

    return ForwardBatch(
        num_decode=num_decode,
        input_ids=draw(tokens),
        positions=draw(tokens),
        kv_slots=draw(tokens),
        page_table=draw(rows * width, torch.int32).view(rows, width),
        kv_lens=draw(rows, torch.int32),
        q_lens_host=q_lens,
        kv_lens_host=[length + 1 for length in q_lens],
        slots=draw(rows),
        sample_tokens=draw(samples),
        sample_slots=draw(samples),
        sampling=SamplingBatch(
            temperature=torch.rand(samples, generator=generator),
            greedy=torch.rand(samples, generator=generator) < 0.5,
            top_k=draw(samples),
            top_p=torch.rand(samples, generator=generator),
            uniforms=torch.rand(samples, generator=generator, dtype=torch.float64),
            any_sampled=seed % 2 == 0,
            any_filtered=seed % 3 == 0,
            want_raw=seed % 5 == 0,
            want_sampled=seed % 7 == 0,
        ),
    )


def inputs(device: Device | None = None) -> InputStaging:
    return InputStaging(LIMITS, device=CPU, device_module=device or Device())


def assert_equal(found: object, expected: object) -> None:
    for field in fields(expected):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, SamplingBatch):
            assert_equal(mine, theirs)
        elif isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype, field.name
            assert torch.equal(mine, theirs), field.name
        elif field.name == "page_table_host":
            assert np.array_equal(mine, expected.page_table.numpy())
        else:
            assert mine == theirs, field.name


@settings(max_examples=examples(60))
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(1, 8), max_size=4), st.integers(1, 7)).filter(
            lambda step: step[0] + len(step[1]) > 0
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_lists_on_the_device_equal_those_on_the_host(steps, seed):
    staging = inputs()
    for number, (decode, prefill, width) in enumerate(steps):
        batch = batch_of([1] * decode + prefill, decode, width, seed + number)
        with staging.staged(batch) as staged:
            assert_equal(staged, batch)


@pytest.mark.parametrize("decode,rows", [(1, 1), (1, 4), (3, 4), (0, 8), (8, 9)])
def test_added_rows_are_harmless_ones(decode, rows):
    staging = inputs()
    with staging.staged(batch_of([7, 8], 0, 5)):
        pass  # leaves other values behind
    batch = batch_of([1] * decode, decode, 3)
    with staging.staged(batch, rows) as staged:
        assert staged.num_decode == staged.num_rows == rows
        assert staged.q_lens_host == [1] * rows
        assert staged.kv_lens_host == [2] * decode + [1] * (rows - decode)
        assert staged.page_table.shape == (rows, 3)
        assert np.array_equal(staged.page_table_host, staged.page_table.numpy())
        for name, padding in {
            "input_ids": 0, "positions": 0, "kv_slots": 0, "slots": 0, "kv_lens": 1, "page_table": 0,
        }.items():  # fmt: skip
            found = getattr(staged, name)
            assert torch.equal(found[:decode], getattr(batch, name)), name
            assert bool((found[decode:] == padding).all()), name
        assert_equal(staged.sampling, batch.sampling)
        assert torch.equal(staged.sample_slots, batch.sample_slots)
    # Behind them lies what a graph of this size samples besides: greedy, for nobody.
    with staging.staged(batch_of([1] * rows, rows, 3), table=False) as same_size:
        whole = {name: getattr(same_size.sampling, name) for name in SAMPLING}
        whole["sample_slots"] = same_size.sample_slots
        with staging.staged(batch, rows):
            pass
        for name, padding in SAMPLING.items():
            assert torch.equal(whole[name][:decode], getattr(batch.sampling, name)), name
            assert bool((whole[name][decode:] == padding).all()), name
        assert whole["sample_slots"][decode:].tolist() == [LIMITS.spare_slot] * (rows - decode)


@pytest.mark.parametrize("rows", [None, 6])
def test_a_page_table_that_nothing_reads_stays_on_the_host(rows):
    staging, batch = inputs(), batch_of([1] * 5, 5, 4)
    with staging.staged(batch, rows) as staged:
        start = staged.page_table.storage_offset() * staged.page_table.itemsize
    staging.device_block[start:] = 77
    with staging.staged(batch, rows, table=False) as staged:
        assert staged.page_table.shape == (rows or 5, 0)
        assert np.array_equal(staged.page_table_host[:5], batch.page_table.numpy())
        assert_equal(staged.sampling, batch.sampling)
    assert bool((staging.device_block[start:] == 77).all())


def test_steps_of_one_size_lie_at_the_same_addresses():
    staging, found = inputs(), []
    for decode, width in ((8, 1), (3, 7), (0, 2), (5, 4)):
        with staging.staged(batch_of([1] * decode, decode, width, decode), 8) as staged:
            names = ("input_ids", "positions", "kv_slots", "slots", "kv_lens", "sample_slots")
            arrays = [getattr(staged, name) for name in names]
            arrays += [getattr(staged.sampling, name) for name in SAMPLING]
            found.append([array.storage_offset() * array.itemsize for array in arrays])
        with staging.staged(batch_of([8, 8], 0, 7)):
            pass
    assert all(addresses == found[0] for addresses in found)


def test_the_largest_step_fits_and_a_larger_one_is_refused():
    staging = inputs()
    assert LIMITS.pages == 7
    largest = batch_of([1] * 8 + [32], 8, LIMITS.pages)
    with staging.staged(largest) as staged:
        assert_equal(staged, largest)
    with (
        pytest.raises(AssertionError, match="more than was announced"),
        staging.staged(batch_of([1] * 8 + [200], 8, LIMITS.pages)),
    ):
        pass


def test_the_host_block_is_written_after_its_copy():
    device = Device()
    staging = inputs(device)
    (taken,) = device.events
    before = None
    taken.at_wait = lambda: seen.append(staging.host_block.clone())
    seen: list[torch.Tensor] = []
    for number in range(3):
        with staging.staged(batch_of([1] * 4, 4, 2, number)):
            assert taken.recorded == number, "recorded before the step's last copy from the host"
            assert taken.waits == number + 1
            if before is not None:
                assert torch.equal(seen[-1], before), "written before the wait"
                assert not torch.equal(staging.host_block, before)
        before = staging.host_block.clone()
        assert taken.recorded == number + 1


def test_a_plan_that_fails_still_frees_the_block():
    device = Device()
    staging = inputs(device)
    with pytest.raises(RuntimeError, match="no plan"), staging.staged(batch_of([1], 1, 1)):
        raise RuntimeError("no plan")
    assert device.events[0].recorded == 1


@pytest.mark.parametrize(
    "max_rows,chunk,context,tokens,pages", [(256, 512, 4096, 768, 256), (2, 512, 17, 34, 2), (1, 1, 1, 1, 1)]
)
def test_limits_follow_from_the_configuration(max_rows, chunk, context, tokens, pages):
    limits = StepLimits.of(max_rows=max_rows, chunk_tokens=chunk, context_len=context)
    assert (limits.tokens, limits.rows, limits.pages) == (tokens, max_rows, pages)


def sampled(rows: int, start: int, raw: bool = False) -> SamplerOutput:
    values = torch.arange(start, start + rows)
    return SamplerOutput(
        token_ids=values,
        logprobs=-values.float(),
        raw_logprobs=-2 * values.float() if raw else None,
        sampled_logprobs=-3 * values.float() if raw else None,
    )


def test_results_arrive_and_a_step_in_flight_keeps_its_own():
    device = Device()
    outputs = OutputStaging(LIMITS, device=CPU, device_module=device)
    first = outputs.send(sampled(3, 10))
    second = outputs.send(sampled(9, 50, raw=True))
    found = first.fetch()
    third = outputs.send(sampled(2, 90))  # takes the block that the first gave back
    assert len(device.events) == 2, "as many blocks as steps were in flight at once"
    assert found.token_ids.dtype == np.int32
    assert found.token_ids.tolist() == [10, 11, 12]
    assert found.logprobs.tolist() == [-10, -11, -12]
    assert (found.raw_logprobs, found.sampled_logprobs) == (None, None)
    late = second.fetch()
    assert late.token_ids.tolist() == list(range(50, 59))
    assert late.raw_logprobs.tolist() == [-2 * n for n in range(50, 59)]
    assert late.sampled_logprobs.tolist() == [-3 * n for n in range(50, 59)]
    assert third.fetch().token_ids.tolist() == [90, 91]
    with pytest.raises(AssertionError, match="fetched already"):
        third.fetch()


def test_results_are_waited_for_and_empty_steps_have_none():
    device = Device()
    outputs = OutputStaging(LIMITS, device=CPU, device_module=device)
    pending = outputs.send(sampled(0, 0))
    assert (device.events[0].recorded, device.events[0].waits) == (1, 0)
    assert len(pending.fetch().token_ids) == 0
    assert device.events[0].waits == 1


def test_layers_with_a_window_have_a_table_of_their_own() -> None:
    staging = InputStaging(replace(LIMITS, windows=True), device=CPU, device_module=Device())
    addresses = set()
    for seed, width in ((1, 3), (2, 5), (3, 3)):
        batch = batch_of([1, 1, 4], 2, width, seed)
        other = batch_of([1, 1, 4], 2, width, seed + 9)
        given = replace(batch, window_slots=other.kv_slots, window_table=other.page_table)
        with staging.staged(given) as staged:
            assert torch.equal(staged.window_slots, other.kv_slots)
            assert torch.equal(staged.window_table, other.page_table)
            assert torch.equal(staged.kv_slots, batch.kv_slots)
            assert torch.equal(staged.page_table, batch.page_table)
            addresses.add(staged.window_slots.data_ptr())
    with staging.staged(batch, 9) as staged:  # as of a warm-up: on the scratch page
        assert not staged.window_slots.any()
        assert staged.window_table.shape == (9, 3)
        assert not staged.window_table.any()
    with inputs().staged(batch) as staged:
        assert staged.window_slots is None
        assert staged.window_table is None
    assert len(addresses) == 1
