"""``client.metrics()``: a status as numbers for a trainer's log."""

import asyncio

import msgspec
from support.fake_scheduler import FakeScheduler, answer, status_reply

from caesura.client import AsyncSchedulerClient, SchedulerClient
from caesura.client.connection.status import PREFIX, figures
from caesura.io_struct import (
    Distribution,
    EngineTotals,
    GetStatusReqInput,
    KVUsage,
    PauseTotal,
    StageStatus,
    UpdateTotal,
)


def test_both_clients_give_a_flat_dict_of_numbers_and_renew_no_lease(tmp_path):
    with FakeScheduler(f"ipc://{tmp_path}/s.sock", answer) as engine:
        with SchedulerClient(engine.endpoint, owner="trainer") as client:
            blocking = client.metrics()

        async def ask():
            async with AsyncSchedulerClient(engine.endpoint, owner="trainer") as client:
                return await client.metrics()

        awaited = asyncio.run(ask())
        asked = [engine.requests.get() for _ in range(engine.requests.qsize())]
    assert blocking == awaited
    assert all(name.startswith(PREFIX) and type(value) is float for name, value in blocking.items())
    assert (blocking["caesura/paused"], blocking["caesura/pause_age_s"]) == (1.0, 1.5)
    assert [each.owner for each in asked if isinstance(each, GetStatusReqInput)] == ["", ""]


def test_counters_are_summed_and_histograms_become_percentiles():
    totals = EngineTotals(
        prompt_tokens=200,
        cached_tokens=50,
        finished_requests={"stop": 5},
        pauses=[PauseTotal(mode=mode, count=2, seconds=1.5) for mode in ("abort", "in_place")],
        updates=[UpdateTotal(source="disk", committed=3, failed=1)],
        staleness=Distribution(counts=[3, 1, *[0] * 8], sum=1.0),
    )
    stage = StageStatus(name="update.copy", count=1, total_s=0.5, median_s=0.5, longest_s=0.5)
    status = msgspec.structs.replace(status_reply(GetStatusReqInput()), totals=totals, stages=[stage])
    found = {name.removeprefix(PREFIX): value for name, value in figures(status).items()}
    expected = {
        "pauses": 4, "pause_s": 3.0, "updates": 3, "failed_updates": 1, "prefix_hit_share": 0.25,
        "samples/stop": 5,
        "stage_s/update.copy": 0.5, "staleness_epochs/mean": 0.25, "staleness_epochs/p50": 0.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert not any(name.startswith("queue_time") for name in found), "an older engine does not count it"


def test_inapplicable_series_are_absent():
    kv = KVUsage(free=0, cached=0, held=0, total=0, page_size=16, bytes_per_token=0)
    found = figures(msgspec.structs.replace(status_reply(GetStatusReqInput()), kv=kv))
    assert not {"caesura/kv_held_share", "caesura/prefix_hit_share"} & set(found)
