"""Figures that a client reads out of a status, and the reason it gives when a generation times out."""

import re

import msgspec
import pytest
from support.fake_scheduler import FakeScheduler, answer, status_reply

from caesura.client import SchedulerClient, TimedOut
from caesura.client.connection.status import PREFIX, figures
from caesura.io_struct import (
    Distribution,
    EngineTotals,
    GenerateReqInput,
    GetStatusReqInput,
    KVUsage,
    PauseTotal,
    StageStatus,
    UpdateTotal,
)

TIMEOUT = 0.4
"""Long enough for the status of a fake engine; what cannot come never comes, so the tests do not depend on
it.
"""


def engine_in(**state):
    def handle(request):
        if isinstance(request, GenerateReqInput):
            return []
        if not isinstance(request, GetStatusReqInput):
            return answer(request)
        reply = status_reply(request)
        for name, value in state.items():
            setattr(reply, name, value)
        return [reply]

    return handle


def errors_of(endpoint):
    with SchedulerClient(endpoint, owner="mine") as client:
        streaming, whole = client.submit([1], stream=True), client.submit([1])
        for wait in (
            lambda: client.generate([1], timeout=TIMEOUT),
            lambda: client.generate([[1], [2]], timeout=TIMEOUT),
            lambda: whole.result(TIMEOUT),
            lambda: list(streaming.deltas(TIMEOUT)),
        ):
            with pytest.raises(TimedOut) as caught:
                wait()
            yield caught.value


PAUSED = "the engine was paused (in_place) by 'trainer', 1.5 s ago, and waits for continue_generation"


def test_a_pause_is_told_with_its_owner_and_its_age(endpoint):
    with FakeScheduler(endpoint, engine_in(pause_owner="trainer")) as fake:
        for error in errors_of(endpoint):
            assert re.fullmatch(
                rf"no answer within {TIMEOUT} s to message \w+: {re.escape(PAUSED)}", error.message
            )
            assert error.detail["paused"] == {"mode": "in_place", "owner": "trainer", "age_s": 1.5}
            assert error.message_id
        heard = [fake.requests.get() for _ in range(fake.requests.qsize())]
        asked = [request for request in heard if isinstance(request, GetStatusReqInput)]
        assert asked
        assert {request.owner for request in asked} == {""}, "no lease is renewed by it"


@pytest.mark.parametrize(
    "state,sentence",
    [
        ({}, "the engine was paused (in_place) by a client that gave no owner, 1.5 s ago"),
        (
            {"generation": "running", "pause_mode": None, "weights": "updating"},
            "its weights are being updated",
        ),
        (
            {"weights": "poisoned"},
            "continue_generation; its weights are poisoned, and it waits for a complete update",
        ),
        (
            {"generation": "running", "pause_mode": None, "released_tags": ["kv_cache"]},
            "its memory is released, and it waits for resume_memory(['kv_cache'])",
        ),
    ],
)
def test_other_reasons_for_waiting_are_told(endpoint, state, sentence):
    with FakeScheduler(endpoint, engine_in(**state)):
        assert all(sentence in error.message for error in errors_of(endpoint))


def test_an_engine_that_runs_is_not_blamed(endpoint):
    with FakeScheduler(endpoint, engine_in(generation="running", pause_mode=None)):
        for error in errors_of(endpoint):
            assert re.fullmatch(rf"no answer within {TIMEOUT} s to message \w+", error.message)
            assert "paused" not in error.detail


def test_a_timeout_error_does_not_wait_for_a_silent_engine(endpoint):
    with FakeScheduler(endpoint, lambda _: []):
        for error in errors_of(endpoint):
            assert re.fullmatch(rf"no answer within {TIMEOUT} s to message \w+", error.message)


def test_status_commands_change_nothing(endpoint):
    with FakeScheduler(endpoint, engine_in()) as fake, SchedulerClient(endpoint) as client:
        handle = client.submit([1])
        for timeout in (0, -1, 0.0):
            with pytest.raises(TimedOut):
                handle.result(timeout)
        client.pause()
        heard = [fake.next_request(), fake.next_request()]
        assert [type(request).__name__ for request in heard] == [
            "GenerateReqInput",
            "PauseGenerationReqInput",
        ]


def test_metrics_are_a_flat_dict_of_numbers_and_renew_no_lease(tmp_path):
    with FakeScheduler(f"ipc://{tmp_path}/s.sock", answer) as engine:
        with SchedulerClient(engine.endpoint, owner="trainer") as client:
            blocking = client.metrics()
        asked = [engine.requests.get() for _ in range(engine.requests.qsize())]
    assert all(name.startswith(PREFIX) and type(value) is float for name, value in blocking.items())
    assert (blocking["caesura/paused"], blocking["caesura/pause_age_s"]) == (1.0, 1.5)
    assert [each.owner for each in asked if isinstance(each, GetStatusReqInput)] == [""]


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
