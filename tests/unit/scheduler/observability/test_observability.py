"""Stage times and their log lines."""

import contextlib
import logging
import os
import resource
import subprocess
import sys

import pytest

from caesura.scheduler.observability import stage_profiler
from caesura.scheduler.observability.stage_profiler import StageProfiler, StageTotal
from caesura.scheduler.runtime import process
from caesura.scheduler.runtime.process import DescriptorCheck


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stage_profiler, "perf_counter", lambda: now[0])
    return now


def test_stages_accumulate_by_name_if_they_fail_too(clock):
    profiler = StageProfiler()
    for seconds in (1.0, 2.0):
        with profiler.stage("copy"):
            clock[0] += seconds
        clock[0] += 10.0
    with pytest.raises(KeyError), profiler.stage("outer"):
        clock[0] += 1.0
        with profiler.stage("inner"):
            clock[0] += 2.0
            raise KeyError
    found = {name: (total.count, total.seconds) for name, total in profiler.totals().items()}
    assert found == {"copy": (2, 3.0), "outer": (1, 3.0), "inner": (1, 2.0)}
    profiler.totals()["copy"].seconds = 9.0
    assert (profiler.seconds("copy"), profiler.seconds("never")) == (3.0, 0.0), "totals are a copy"


def test_median_and_longest_are_told(clock):
    profiler = StageProfiler()
    for seconds in (*[9.0] * 40, *[1.0] * 33, *[3.0] * 31):
        profiler.record("decode", seconds)
    total = profiler.totals()["decode"]
    assert (total.count, total.longest, total.median) == (104, 9.0, 1.0), "the median is of the last 64"
    assert len(total.recent) == stage_profiler.RECENT
    assert StageTotal().median == 0.0


def test_stages_of_operations_count_for_the_engine_once(clock):
    engine = StageProfiler()
    call, session = StageProfiler(engine, "update."), StageProfiler(engine, "update.")
    with call.stage("copy"):
        clock[0] += 1.0
    session.add(call)
    with session.stage("derive"):
        clock[0] += 2.0
    assert (session.seconds("copy"), session.seconds("derive")) == (1.0, 2.0)
    assert {name: total.count for name, total in engine.totals().items()} == {
        "update.copy": 1,
        "update.derive": 1,
    }


def test_stages_are_logged_with_the_memory_at_debug(clock, caplog):
    looks = []
    options = {"describe_memory": lambda: looks.append(1) or "reserved 5 MB"}
    silent, loud = StageProfiler(**options), StageProfiler(log=True, **options)
    with caplog.at_level(logging.DEBUG, logger="caesura"), silent.stage("copy"):
        pass
    assert (caplog.messages, looks) == ([], [])
    with caplog.at_level(logging.INFO, logger="caesura"), StageProfiler(loud, "update.").stage("copy"):
        clock[0] += 0.25
    assert caplog.messages == ["stage update.copy begins", "stage update.copy ends after 250.000 ms"]
    assert looks == [], "at INFO nobody looks at the memory"
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="caesura"):
        loud.begin("decode")
        loud.record("decode", 0.5)
    assert caplog.messages == ["stage decode begins", "stage decode ends after 500.000 ms, reserved 5 MB"]
    assert {record.levelname for record in caplog.records} == {"INFO"}


@pytest.mark.parametrize(
    ("allowed", "most", "expected"), [(300, 1 << 20, 300), (300, 200, 200), (300, 50, 100)]
)
def test_the_soft_limit_is_raised_as_far_as_allowed(allowed, most, expected):
    script = (
        "import resource; from caesura.scheduler.runtime import process as d\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {allowed}))\n"
        f"d.MAX_DESCRIPTORS = {most}\n"
        "print(d.raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(expected), str(expected), str(allowed)]


def test_coming_near_is_said_once_each_time(caplog):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    check, said = DescriptorCheck(), []
    with contextlib.ExitStack() as cleanup, caplog.at_level(logging.WARNING, logger=process.logger.name):
        cleanup.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(200):
            cleanup.enter_context(open(os.devnull))
        used = len(os.listdir("/proc/self/fd"))
        for limit in (2 * used, used + 9, used + 9, 2 * used, used + 9):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
            check()
            said.append(len(caplog.messages))
    assert said == [0, 1, 1, 1, 2]
    assert "near the limit" in caplog.messages[0]
