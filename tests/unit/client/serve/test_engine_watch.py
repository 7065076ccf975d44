"""History that the server keeps of an engine: one look a second, with or without readers of the page."""

import asyncio
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_scheduler import status_reply

from caesura.client.serve.pages import engine_watch
from caesura.client.serve.pages.document import Tick
from caesura.client.serve.pages.engine_watch import GAP_S, TICK_S, TICKS, EngineWatch, Ticks, percentiles
from caesura.io_struct import EngineTotals, GetStatusReqInput, StageStatus, UpdateTotal
from caesura.io_struct.distribution import Histogram, one_two_five


@given(st.lists(st.tuples(st.floats(0, 20_000), st.integers(1, 5))))
def test_a_histogram_counts_values_up_to_each_bound(seen):
    bounds = one_two_five(-2, 3)
    histogram = Histogram(bounds)
    for value, times in seen:
        histogram.observe(value, times)
    buckets, total = histogram.cumulative()
    assert [float(bound) for bound, _ in buckets] == [*bounds, float("inf")]
    for bound, count in buckets:
        assert count == sum(times for value, times in seen if value <= float(bound))
    assert total == pytest.approx(sum(value * times for value, times in seen))


def test_bounds_are_round_and_ascend():
    assert one_two_five(-2, 0) == (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Scripted:
    """A client whose engine says what it is told to."""

    def __init__(self, *seen):
        self.seen = list(seen)

    async def status(self, *, owner, timeout):  # noqa: ASYNC109  (as the client's)
        uptime, tokens, incarnation = self.seen.pop(0)
        reply = status_reply(GetStatusReqInput())
        return msgspec.structs.replace(
            reply, uptime_s=uptime, generated_tokens=tokens, incarnation=str(incarnation)
        )


@pytest.mark.parametrize(
    ("seen", "throughput"),
    [
        pytest.param([(5.0, 100, 1)], 0.0, id="one look says nothing"),
        pytest.param([(5.0, 100, 1), (5.25, 125, 1)], 100.0, id="close looks"),
        pytest.param([(5.0, 0, 1), (6.0, 50, 1), (7.0, 250, 1), (8.0, 350, 1)], 100.0, id="the last second"),
        pytest.param([(5.0, 0, 1), (20.0, 3000, 1)], 0.0, id="nothing is known of a gap"),
        pytest.param([(500.0, 9000, 1), (1.0, 10, 2), (2.0, 30, 2)], 20.0, id="another engine"),
        pytest.param([(5.0, 0, 1)] + [(5 + t / 8, 100 * t, 1) for t in range(1, 33)], 800.0, id="many looks"),
    ],
)  # fmt: skip
def test_throughput_is_of_the_engines_last_second(seen, throughput, monkeypatch):
    monkeypatch.setattr(engine_watch, "FRESH_S", 0.0)

    async def ask():
        watch, client = EngineWatch(), Scripted(*seen)
        look = None
        for _ in seen:
            look = await watch.look(client)  # type: ignore[arg-type]
        return look, watch.ticks.since(0.0)

    look, ticks = asyncio.run(ask())
    assert look.throughput == pytest.approx(throughput)
    assert [tick.uptime_s for tick in ticks][-1] == seen[-1][0], "the newest is always among them"
    gaps = [after.uptime_s - before.uptime_s for before, after in pairwise(ticks[:-1])]
    assert all(gap >= TICK_S for gap in gaps)


def test_ticks_come_while_nobody_asks(monkeypatch):
    monkeypatch.setattr(engine_watch, "FRESH_S", 0.0)
    monkeypatch.setattr(engine_watch, "TICK_S", 0.0)

    async def ask():
        watch, client = EngineWatch(), Scripted(*((float(n), 100 * n, 1) for n in range(1, 6)))
        with pytest.raises(IndexError):  # the script is over
            await watch.sample(client)  # type: ignore[arg-type]
        return watch.ticks.since(0.0)

    assert [tick.generated_tokens for tick in asyncio.run(ask())] == [100, 200, 300, 400, 500]


def tick(uptime):
    return Tick(1000.0 + uptime, float(uptime), 0, 0, 0, 0, 0)


@given(st.integers(1, 30 * TICKS), st.sets(st.integers(1, 30 * TICKS), max_size=3))
def test_ticks_reach_back_to_the_start_and_stay_bounded(count, missing):
    missing = {at for at in missing if at < count}
    kept = Ticks()
    for number in range(count):
        gaps = sum(at <= number for at in missing)
        kept.add(tick(number * TICK_S + gaps * (GAP_S + 1)))
    found = kept.since(0.0)
    assert len(found) <= 2 * TICKS + 1
    assert found[-1].uptime_s == tick((count - 1) * TICK_S + len(missing) * (GAP_S + 1)).uptime_s
    assert found[0].uptime_s <= max(0.05 * found[-1].uptime_s, 0.0)
    assert all(before.uptime_s < after.uptime_s for before, after in pairwise(found))
    recent = found[-min(len(found), TICKS) :]
    assert all(after.gap == (after.uptime_s - before.uptime_s > GAP_S) for before, after in pairwise(recent))
    assert sum(each.gap for each in found) <= len(missing)


def test_a_gap_stays_where_its_tick_is_thinned(monkeypatch):
    monkeypatch.setattr(engine_watch, "TICKS", 4)
    for at in range(1, 60):
        kept = Ticks()
        for number in range(60):
            kept.add(tick(number + (GAP_S + 1 if number >= at else 0)))
        found = kept.since(0.0)
        (gap,) = (position for position, each in enumerate(found) if each.gap)
        assert gap
        assert found[gap - 1].uptime_s < at <= found[gap].uptime_s - GAP_S


def stages(**seconds):
    return [
        StageStatus(name=name.replace("_", "."), count=1, total_s=total, median_s=0.0, longest_s=0.0)
        for name, total in seconds.items()
    ]


def test_an_update_is_shown_by_stage_once_the_engine_runs_again(monkeypatch):
    monkeypatch.setattr(engine_watch, "FRESH_S", 0.0)
    status = msgspec.structs.replace(status_reply(GetStatusReqInput()), generation="running")

    def after(commits, generation, **seconds):
        totals = EngineTotals(updates=[UpdateTotal(source="disk", committed=commits, failed=0)])
        return msgspec.structs.replace(status, generation=generation, totals=totals, stages=stages(**seconds))

    seen = [
        after(3, "running", pause=9.0, update_copy=5.0),
        after(4, "paused", pause=9.5, update_copy=6.0),
        after(4, "running", pause=9.5, update_copy=6.0, **{"continue": 0.25}),
        after(6, "running", pause=10.5, update_copy=6.0, **{"continue": 0.25}),
    ]

    class Client:
        async def status(self, *, owner, timeout):  # noqa: ASYNC109  (as the client's)
            return seen.pop(0)

    async def look():
        watch, found = EngineWatch(), []
        while seen:
            await watch.look(Client())  # type: ignore[arg-type]
            found.append(watch.last_update)
        return found

    first, paused, one, two = asyncio.run(look())
    assert (first, paused) == (None, None), "nothing is known of updates before the first look"
    assert one.updates == 1
    assert {name: value for name, value in one.seconds.items() if value} == {
        "pause": 0.5, "update.copy": 1.0, "continue": 0.25
    }  # fmt: skip
    assert (two.updates, two.seconds["pause"], two.seconds["update.copy"]) == (2, 0.5, 0.0)


@given(st.lists(st.floats(0.001, 900), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_lies_in_the_bucket_of_the_exact_value(seen, share):
    bounds = one_two_five(-3, 3)
    histogram = Histogram(bounds)
    for value in seen:
        histogram.observe(value)
    exact = sorted(seen)[max(0, -(-int(share * 1000) * len(seen) // 1000) - 1)]
    upper = next(bound for bound in bounds if exact <= bound)
    lower = max((bound for bound in bounds if bound < exact), default=0.0)
    assert lower <= histogram.quantile(share) <= upper


def test_percentiles_need_observations():
    assert percentiles({"in the queue": Histogram((1.0, 2.0))}) == []
    assert Histogram((1.0, 2.0)).quantile(0.5) is None
