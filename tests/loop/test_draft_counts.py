"""How many tokens are drafted: as many as pay by the times of steps, and few where none is ever sampled."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.scripted import EngineDriver

from caesura.scheduler.execution.forward import ForwardBatch
from caesura.scheduler.execution.sampler import SamplerOutput
from caesura.scheduler.scheduling import speculation
from caesura.scheduler.scheduling.request import RequestTable
from caesura.scheduler.scheduling.speculation import Speculation, StepTimes


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
                driver.engine.batcher.speculation._seconds = lambda rows, drafted: np.ones(drafted.shape)
            for text in range(32):
                driver.generate([3 + (text >> place & 1) for place in range(8)], 200)
            driver.run_until_idle()
            rows.append(sum(sum(lengths) for _, lengths in driver.runner.launches))
            totals.append(driver.status().totals)
    assert (totals[1].accepted_tokens, rows[0] + totals[1].drafted_tokens) == (0, rows[1])
    assert rows[0] + 60 < rows[1] < 1.02 * rows[0]


class Repeating:
    """Drafts of a request whose text repeats itself; a search and a step take given seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, search_s: float) -> None:
        self.now, self.search_s = 0.0, search_s
        monkeypatch.setattr(speculation, "monotonic", lambda: self.now)
        table, self.slots = RequestTable(1, 512, 16, 97), np.zeros(1, np.int64)
        table.tokens[0] = np.arange(len(table.tokens[0])) % 8
        table.length[0], table.limit[0] = 64, 512
        self.drafts = Speculation(table)
        self._chosen = self.drafts._chosen
        self.drafts._chosen = self._search
        for rows in (1, 16):
            for _ in range(3):
                self.step(rows)

    def _search(self, slots: np.ndarray, room: int, pays: bool) -> list[speculation.Draft]:
        self.now += self.search_s
        return self._chosen(slots, room, pays)

    def propose(self) -> list[speculation.Draft]:
        return self.drafts.propose(self.slots, 15)

    def step(self, rows: int = 1, seconds: float = 1.0) -> None:
        self.now += seconds
        self.drafts.observe(np.zeros(rows, np.int64), None, seconds)


def test_the_time_of_searches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger steps cost nothing; a search that takes as long as forty steps is not worth it."""
    counts = []
    for search_s in (0.01, 40.0):
        repeating, drafts = Repeating(monkeypatch, search_s), []
        for _ in range(30):
            drafts.append(repeating.propose())
            repeating.step()
        counts.append(sum(map(bool, drafts)))
    assert counts[0] > 20
    assert counts[1] == 1


def test_steps_without_drafts_are_timed_where_drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    repeating, plain = Repeating(monkeypatch, 0.0), 0
    found = repeating.drafts
    for _ in range(96):
        if repeating.propose():
            found.times.observe(16, 1.0)
        else:
            plain += 1
            found.times.observe(1, 0.01)
    assert 3 <= plain < 20
    assert found.times.of(np.asarray([1]))[0] < 1.0


def test_a_step_that_was_disturbed_is_not_believed() -> None:
    times = StepTimes()
    for seconds in (9.0, 1.0, 9.0, 9.0):
        times.observe(4, seconds)
    assert times.of(np.asarray([4]))[0] < 2.0


def test_what_drafts_cost_beside_their_rows_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more rows take no longer, but to prepare one with drafts takes as long as thirty steps."""
    repeating = Repeating(monkeypatch, 0.0)
    found, counts = repeating.drafts, []
    for _ in range(400):
        drafts = repeating.propose()
        counts.append(len(drafts))
        if drafts:
            repeating.now += 30.0
            slots, rows = speculation.draft_rows(found._table, repeating.slots, drafts)
            rows.verify(rows.inputs[np.minimum(np.arange(1, len(slots) + 1), len(slots) - 1)])
            repeating.now += 1.0
            found.observe(slots, rows, 1.0)
        else:
            repeating.step()
    assert 0 < sum(counts) < 20


def test_the_expected_time_of_a_step_stays_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a size take a tenth of what they took, and the average follows."""
    repeating = Repeating(monkeypatch, 0.0)
    repeating.drafts._saved_s = -float("inf")  # no search
    for seconds in (10.0, 1.0):
        for _ in range(50):
            repeating.propose()
            repeating.step(seconds=seconds)
            assert (repeating.drafts._seconds(1, np.arange(2)) > 0).all()


def test_every_step_of_decode_rows_alone_asks_for_drafts(tiny_model: Path) -> None:
    """One where memory is short gets none, but is told when it began."""
    asked: list[int] = []
    options = {"max_running_requests": 4, "kv_pool_tokens": 1024, "pipeline_depth": 0}
    with EngineDriver(str(tiny_model), speculation="suffix", **options) as driver:
        batcher = driver.engine.batcher
        drafts = batcher.speculation
        propose, observe = drafts.propose, drafts.observe
        drafts.propose = lambda slots, room: asked.append(room) or propose(slots, room)
        drafts.observe = lambda slots, *rest: asked.append(-1) or observe(slots, *rest)
        driver.generate([3, 4, 5], 40)
        driver.tick(8)
        batcher._chunk_sizer.limit = 2
        driver.tick(8)
        assert 0 in asked
        driver.run_until_idle()
    assert [place < 0 for place in asked] == [False, True] * (len(asked) // 2)
