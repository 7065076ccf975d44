"""Pause cycles are measured under a load that stays, by every transport."""

import json
from dataclasses import replace

import pause_cycles
import pytest
from harness.cycles import NO_UPDATE, TARGET_STEP_S, verdicts
from harness.load import Around, Feeder, Steady, Steps
from harness.transports import TRANSPORTS
from harness.workload import WORKLOADS

from caesura.io_struct import (
    BatchTokenOutput,
    FinishReason,
    GenerateReqInput,
    GenerateReqOutput,
    Keepalive,
    StreamDelta,
    encode,
)
from caesura.io_struct.codec import decode_request

SMALL = replace(WORKLOADS["tiny"], requests=6, prompt_tokens=8, new_tokens=8, rollouts=1, load_new_tokens=400)


class Submitted:
    """A socket that keeps what it is given."""

    def __init__(self) -> None:
        self.requests: list[GenerateReqInput] = []

    def send(self, frame: bytes) -> None:
        request = decode_request(frame)
        assert isinstance(request, GenerateReqInput)
        self.requests.append(request)


@pytest.fixture
def submitted():
    return Submitted()


@pytest.fixture
def feeder(submitted):
    return Feeder(submitted, SMALL, seed=0)


def tokens(step, rids, ended=(), reason="length"):
    column = b"\0\0\0\0" * len(rids)
    delta = StreamDelta(
        rids=list(rids), indices=column, starts=column, counts=column, tokens=column, logprobs=column
    )
    finished = [
        GenerateReqOutput(
            rid=rid,
            output_ids=b"",
            finish_reason=FinishReason(type=reason, message="why"),
            weight_versions=[],
            prompt_tokens=8,
            cached_tokens=0,
            seed=0,
        )
        for rid in ended
    ]
    return encode(BatchTokenOutput(step=step, delta=delta if rids else None, finished=finished))


def test_the_load_is_steady_when_everybody_has_sampled_since(feeder, submitted):
    rids = [request.id for request in submitted.requests]
    feeder.take(tokens(1, rids), 0.0)
    feeder.ask(Steady(2))
    feeder.take(tokens(2, rids[1:]), 0.1)
    feeder.take(tokens(3, rids[1:]), 0.2)
    assert feeder.answer() is None  # the first one has not sampled
    feeder.take(encode(Keepalive(step=3)), 0.3)
    feeder.take(tokens(4, rids[:1]), 0.4)
    assert feeder.answer() == (None,)
    assert feeder.answer() is None  # one answer to each question


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_only_successors_of_aborted_requests_are_awaited(feeder, submitted, reason):
    rids = [request.id for request in submitted.requests]
    feeder.take(tokens(1, rids), 0.0)
    feeder.take(tokens(2, [], ended=rids[:1], reason=reason), 0.1)
    feeder.ask(Steady(1))
    feeder.take(tokens(3, rids[1:]), 0.2)
    assert (feeder.answer() == (None,)) == (reason == "length")
    feeder.take(tokens(4, [submitted.requests[-1].id]), 0.3)  # which from now on samples like the others
    feeder.ask(Steady(1))
    feeder.take(tokens(5, rids[1:]), 0.4)
    assert feeder.answer() is None


def test_steps_around_a_pause_are_told_apart_by_number(feeder, submitted):
    rids = [request.id for request in submitted.requests]
    feeder.ask(Steady(0))
    for step in (5, 6):
        feeder.take(tokens(step, rids), float(step))
    feeder.ask(Around(7))
    feeder.take(tokens(7, rids), 9.0)  # sampled before the pause, however late it came
    feeder.take(tokens(7, [], ended=rids, reason="abort"), 9.5)  # ends bring no tokens
    assert feeder.answer() is None
    feeder.take(tokens(9, [submitted.requests[-1].id]), 11.0)
    assert feeder.answer() == (((7, 9.0), (9, 11.0)),)
    feeder.ask(Steps(2))
    feeder.take(tokens(10, [submitted.requests[-1].id]), 12.0)
    assert feeder.answer() is None
    feeder.take(tokens(11, [submitted.requests[-1].id]), 13.0)
    assert feeder.answer() == ([(10, 12.0), (11, 13.0)],)


@pytest.mark.parametrize(("mode", "first_limit"), [("in_place", 8.0), ("retract", 1e3 * TARGET_STEP_S + 2)])
def test_a_target_is_one_step_and_two_milliseconds(mode, first_limit):
    step = {"count": 10, "p50": 4.0, "p95": 5.0, "p99": 6.0, "max": 60.0}
    summary = {"pause": step | {"p99": 8.1}, "first_token, plain": step | {"p99": 7.9}}
    found = verdicts(mode, summary, step)
    assert (found["pause"]["limit_ms"], found["pause"]["met"]) == (8.0, False)
    assert found["first_token, plain"]["limit_ms"] == first_limit
    assert found["first_token, plain"]["met"]
    assert found["first_token, plain"]["met_by_median_step"] == (mode == "retract")


@pytest.mark.slow
def test_every_transport_and_mode_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(WORKLOADS, "tiny", SMALL)
    cycles, steps = 2, 9
    transports = (NO_UPDATE, *TRANSPORTS)
    argv = ["--cycles", str(cycles), "--steps", str(steps), "--json", str(tmp_path / "out.json")]
    assert pause_cycles.main([*argv, "--transports", ",".join(transports)]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["modes"].keys() == set(pause_cycles.MODES)
    for mode, report in result["modes"].items():
        assert report["step_ms"]["count"] == steps
        assert 0 < report["step_ms"]["p50"] <= report["step_ms"]["p99"] <= report["step_ms"]["max"]
        assert tuple(report["transports"]) == transports
        for transport, found in report["transports"].items():
            assert found["ms"]["pause"]["count"] == 2 * cycles
            assert found["ms"]["gap, plain"]["count"] == found["ms"]["gap, empty-cache"]["count"] == cycles
            assert found["fewest_requests_met"] >= SMALL.requests // 2, (mode, transport)
            for cycle in found["cycles_s"]:
                # The parts of a gap follow one another.
                parts = cycle["barrier"] + cycle["update"] + cycle["first_token"]
                assert parts <= cycle["gap"] + 1e-6
                assert min(cycle[part] for part in ("pause", "update", "resume", "first_token")) > 0
                assert cycle["steps"] == 1 if mode == "in_place" else cycle["steps"] >= 1
    assert "one step + 2 ms" in capsys.readouterr().out
