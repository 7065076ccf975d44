"""Log lines, stage times, counters."""

import contextlib
import io
import json
import logging
import os
import re

import pytest
from support.waiting import eventually

from caesura.scheduler.observability import stage_profiler
from caesura.scheduler.observability.stage_profiler import StageProfiler, StageTotal
from caesura.scheduler.runtime import log


@pytest.fixture
def stream():
    """Configured logging, undone afterwards."""
    logger = logging.getLogger("caesura")
    before = (logger.level, list(logger.handlers), logger.propagate)
    yield io.StringIO()
    for handler in set(logger.handlers) - set(before[1]):
        handler.close()
    logger.setLevel(before[0])
    logger.handlers, logger.propagate = before[1], before[2]


def test_a_record_is_one_line_with_time_level_and_module(stream):
    log.configure("info", stream=stream)
    logging.getLogger("caesura.scheduler.runtime.loop").info("held %d\nERROR forged", 3)
    logging.getLogger("caesura.scheduler.runtime.loop").debug("below the level")
    log.flush()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO scheduler\.runtime\.loop: held 3\\nERROR forged\n",
        stream.getvalue(),
    )


def test_the_rank_is_shown_where_it_is_not_zero(stream):
    log.configure("INFO", rank=3, stream=stream)
    logging.getLogger("caesura.x").warning("hello")
    log.flush()
    assert " WARNING rank3 x: hello\n" in stream.getvalue()


def test_the_name_is_shown_where_there_is_one(stream):
    log.configure("INFO", rank=1, stream=stream, name="replica-0 100%")
    logging.getLogger("caesura.x").warning("hello")
    log.flush()
    assert " WARNING replica-0 100% rank1 x: hello\n" in stream.getvalue()


def test_a_line_of_json_has_time_level_and_replica_whatever_was_logged(stream):
    log.configure("INFO", rank=1, stream=stream, log_format="json", name="replica-0")
    logger = logging.getLogger("caesura.scheduler.runtime.loop")
    logger.info("held %d\n\x1b\ud800", 3)
    try:
        int("x")
    except ValueError:
        logger.exception("failed")
    logger.info("%d", "no number")
    for _ in range(log.REPEATS + 2):
        logger.warning("again")
    log.flush()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    for line in lines:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert (line["process"], line["replica"], line["rank"]) == ("scheduler", "replica-0", 1)
    first, second, third, *repeated = lines
    assert (first["level"], first["logger"], first["message"]) == (
        "INFO", "scheduler.runtime.loop", r"held 3\n\x1b\ud800"
    )  # fmt: skip
    assert second["traceback"][0].startswith("Traceback")
    assert "could not be formatted" in third["message"]
    assert repeated[-1]["message"].startswith("2 more like these")


def test_a_traceback_is_indented(stream):
    log.configure(logging.INFO, stream=stream)
    try:
        int("first\nsecond")
    except ValueError:
        logging.getLogger("caesura.x").exception("failed")
    log.flush()
    head, *rest = stream.getvalue().splitlines()
    assert head.endswith("ERROR x: failed")
    assert rest[0] == "\tTraceback (most recent call last):"
    assert all(line.startswith("\t") for line in rest)


def test_configuring_twice_prints_once_and_leaves_the_root_alone(stream):
    root_handlers = list(logging.getLogger().handlers)
    log.configure("INFO", stream=io.StringIO())
    log.configure("INFO", stream=stream)
    logging.getLogger("caesura.x").info("once")
    log.flush()
    assert stream.getvalue().count("once") == 1
    assert logging.getLogger().handlers == root_handlers


def test_stderr_is_the_default(stream, capsys):
    log.configure("INFO")
    logging.getLogger("caesura.x").info("hello")
    log.flush()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("INFO x: hello\n")


def test_unknown_level_is_refused(stream):
    with pytest.raises(ValueError, match="LOUD"):
        log.configure("loud", stream=stream)


def test_what_clients_send_reaches_a_terminal_as_text(stream):
    log.configure("INFO", stream=stream)
    hostile = "rid \x1b]0;title\x07\x9b31m\r\u202egnp.exe \ud800 é"
    logging.getLogger("caesura.x").warning("aborted %s", hostile)
    try:
        pytest.fail(hostile)
    except pytest.fail.Exception:
        logging.getLogger("caesura.x").exception("failed")
    log.flush()
    text = stream.getvalue()
    assert all(char.isprintable() or char in "\n\t" for char in text)
    assert r"aborted rid \x1b]0;title\x07\x9b31m\r\u202egnp.exe \ud800 é" in text
    assert r"Failed: rid \x1b" in text


@pytest.fixture
def pipe(stream):
    """A log that nobody reads: the end to read it from."""
    reader, writer = os.pipe()
    with open(writer, "w") as unread:
        log.configure("INFO", stream=unread)
        yield reader
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(reader, 1 << 20):
                log.flush()
    os.close(reader)


def test_a_line_is_not_as_long_as_a_client_likes(stream):
    log.configure("info", stream=stream)
    try:
        pytest.fail("\1" * 1_000_000)
    except pytest.fail.Exception:
        logging.getLogger("caesura.scheduler.x").exception("it sent %s", "\1" * 1_000_000)
    log.flush()
    written = stream.getvalue()
    assert "it sent " in written
    assert "(1000008 characters)" in written
    assert max(map(len, written.split("\n"))) < 4 * log.MAX_LINE + 200


def test_an_unread_log_blocks_nobody_and_says_what_was_lost(pipe):
    reader = pipe
    logger = logging.getLogger("caesura.x")
    for number in range(30_000):
        logger.info("%05d %s", number, "." * 80)
    log.flush()  # comes back, or the process would never end
    text = ""
    while "characters dropped" not in text:
        text += os.read(reader, 1 << 20).decode()
    kept = [line for line in text.splitlines() if line.endswith("....")]
    (dropped,) = re.findall(" ([0-9]+) characters dropped", text)
    assert len(kept) + int(dropped) / len(kept[0] + "\n") == 30_000
    logger.info("heard again")
    while "heard again\n" not in text:
        text += os.read(reader, 1 << 20).decode()


def test_a_call_site_that_repeats_a_warning_says_how_often(stream, monkeypatch):
    monkeypatch.setattr(log, "REPEAT_WINDOW_S", 0.2)
    log.configure("INFO", stream=stream)
    logger = logging.getLogger("caesura.x")
    for number in range(1000):
        logger.warning("malformed %d", number)
    logger.warning("another")
    for number in range(100):
        logger.info("said %d", number)
    eventually(lambda: "more like these" in stream.getvalue())  # without a further record
    text = stream.getvalue()
    assert text.count("said ") == 100
    assert "another" in text
    written = text.count("malformed")
    held = sum(int(count) for count in re.findall(" ([0-9]+) more like these from x line", text))
    assert (written % log.REPEATS, written + held) == (0, 1000)


def test_a_record_that_cannot_be_formatted_is_a_line(stream, capsys):
    log.configure("INFO", stream=stream)
    logging.getLogger("caesura.x").info("%d", "no number")
    log.flush()
    assert "caesura.x line" in stream.getvalue()
    assert capsys.readouterr().err == ""


@pytest.fixture
def clock(monkeypatch):
    """A clock that is advanced by hand."""
    now = [100.0]
    monkeypatch.setattr(stage_profiler, "perf_counter", lambda: now[0])
    return now


def test_stages_accumulate_by_name(clock):
    profiler = StageProfiler()
    for seconds in (1.0, 2.0):
        with profiler.stage("copy"):
            clock[0] += seconds
        clock[0] += 10.0
    with profiler.stage("flush"):
        clock[0] += 0.5
    assert {name: (total.count, total.seconds) for name, total in profiler.totals().items()} == {
        "copy": (2, 3.0),
        "flush": (1, 0.5),
    }
    assert profiler.seconds("copy") == 3.0
    assert profiler.seconds("never") == 0.0
    profiler.reset()
    assert profiler.totals() == {}


def test_nested_stages_both_count_and_a_failing_one_too(clock):
    profiler = StageProfiler()
    with pytest.raises(KeyError), profiler.stage("outer"):
        clock[0] += 1.0
        with profiler.stage("inner"):
            clock[0] += 2.0
            raise KeyError
    assert profiler.seconds("outer") == 3.0
    assert profiler.seconds("inner") == 2.0


def test_totals_are_a_copy(clock):
    profiler = StageProfiler()
    with profiler.stage("copy"):
        clock[0] += 1.0
    profiler.totals()["copy"].seconds = 9.0
    assert profiler.seconds("copy") == 1.0


def test_median_and_longest_are_told(clock):
    profiler = StageProfiler()
    for seconds in (*[9.0] * 40, *[1.0] * 33, *[3.0] * 31):
        profiler.record("decode", seconds)
    total = profiler.totals()["decode"]
    assert (total.count, total.longest, total.median) == (104, 9.0, 1.0), "the median is of the last 64"
    assert len(total.recent) == stage_profiler.RECENT
    assert StageTotal().median == 0.0


def test_an_operations_stages_count_for_the_engine_too_and_once(clock):
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


def test_stages_are_logged_by_option_with_the_memory_at_debug(clock, caplog):
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
