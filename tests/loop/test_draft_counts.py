"""How many tokens are drafted: as many as pay by the times of steps, and few where none is ever sampled."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.scripted import EngineDriver

from caesura.scheduler.execution.forward import ForwardBatch
from caesura.scheduler.execution.sampler import SamplerOutput
from caesura.scheduler.scheduling import speculation
from caesura.scheduler.scheduling.request import RequestTable
from caesura.scheduler.scheduling.speculation import DraftRows, Speculation, StepTimes


def test_drafts_pay_where_larger_steps_take_little_longer() -> None:
    speculation, sure = Speculation(RequestTable(64, 16, 16, 97)), np.full(15, 0.9)
    for rows in (1, 4, 16):
        for _ in range(3):
            speculation.times.observe(rows, 1.0 + 0.01 * rows)
    assert speculation._best_count(1, np.cumprod(sure)) == 15
    assert speculation._best_count(1, np.cumprod(sure - 0.88)) == 0
    for rows in (17, 33):
        for _ in range(3):
            speculation.times.observe(rows, 0.1 * rows)
    assert speculation._best_count(32, np.cumprod(sure)) == 0


def test_drafts_that_all_fail_add_few_rows(tiny_model: Path) -> None:
    """Every step takes as long as any other, so drafts seem to pay, and no draft is ever sampled."""
    random = np.random.default_rng(0)

    def sample(batch: ForwardBatch, _: np.ndarray) -> SamplerOutput:
        tokens = random.integers(3, 5, len(batch.sample_slots))
        slots, inputs = batch.sample_slots.numpy(), batch.input_ids.numpy()[batch.sample_tokens.numpy()]
        followed = np.flatnonzero(slots[1:] == slots[:-1])
        tokens[followed] = 7 - inputs[followed + 1]
        return SamplerOutput(
            token_ids=torch.from_numpy(tokens),
            logprobs=torch.zeros(len(tokens)),
            raw_logprobs=None,
            sampled_logprobs=None,
        )

    rows, totals = [], []
    for way in ("none", "suffix"):
        options = {"max_running_requests": 64, "kv_pool_tokens": 32 * 256, "pipeline_depth": 0}
        with EngineDriver(str(tiny_model), speculation=way, **options) as driver:
            assert driver.runner is not None
            driver.runner.sample = sample
            if way == "suffix":
                times = driver.engine.batcher.speculation.times
                times.observe = lambda rows, _, observe=times.observe: observe(rows, 1.0)
            for text in range(32):
                driver.generate([3 + (text >> place & 1) for place in range(8)], 200)
            driver.run_until_idle()
            rows.append(sum(sum(lengths) for _, lengths in driver.runner.launches))
            totals.append(driver.status().totals)
    assert (totals[1].accepted_tokens, rows[0] + totals[1].drafted_tokens) == (0, rows[1])
    assert rows[0] + 60 < rows[1] < 1.02 * rows[0]


def test_looking_for_drafts_counts_as_time_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "monotonic", itertools.count().__next__)
    found, slots = Speculation(RequestTable(4, 16, 16, 97)), np.zeros(2, np.int64)
    rows = DraftRows(depth=np.arange(2), match=np.arange(2), inputs=np.zeros(2, np.int64))
    for _ in range(3):
        found.propose(slots[:1], 0)
        found.observe(slots[:1], None, 0.5)
        found.observe(slots, rows, 0.5)
    assert found.times.of(np.asarray([1, 2])).tolist() == [0.5, 1.5]


def test_a_step_that_was_disturbed_is_not_believed() -> None:
    times = StepTimes()
    for seconds in (9.0, 1.0, 9.0, 9.0):
        times.observe(4, seconds)
    assert times.of(np.asarray([4]))[0] < 2.0
