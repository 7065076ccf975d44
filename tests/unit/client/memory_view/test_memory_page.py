"""The memory page and the live view: what they say is what the engine has told, and nothing of it can break them."""

import json
import random
import re
import signal
import sys
import threading
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from rich.console import Console
from support.fake_scheduler import FakeScheduler, VanishError, answer, memory_event, status_reply

from caesura.client import SchedulerClient, cli
from caesura.client.memory_view import MemoryRecord, chart, fetch, live, write_page
from caesura.client.memory_view.chart import LEFT, MAX_POINTS, RIGHT, WIDTH
from caesura.client.memory_view.page import render, tiles
from caesura.client.memory_view.text import MINUS, size, span, tick
from caesura.io_struct import (
    GetMemoryHistoryReqInput,
    GetMemoryHistoryReqOutput,
    GetStatusReqInput,
    MemoryByTag,
    MemoryStretch,
)

MIB = 1 << 20


def cycles(count, *, grows=0, label="step"):
    """A start, then pause, update and continue ``count`` times; each continue returns 5 MB and leaves ``grows`` bytes."""
    events = [memory_event(1, "start", detail="/models/tiny")]
    base = 100 * MIB
    for number in range(count):
        seq = len(events) + 1
        full = base + 5 * MIB + grows
        parts = dict.fromkeys(MemoryByTag.__struct_fields__, 0)
        parts |= {
            "runtime": 60 * MIB,
            "weights": 20 * MIB,
            "kv": number * grows,
            "other": full - 80 * MIB - number * grows,
        }
        common = {"reserved": full, "by_tag": MemoryByTag(**parts), "weights_epoch": number}
        after = base + grows
        events += [
            memory_event(seq, "pause", detail="in_place", **{**common, "reserved": base + 5 * MIB}),
            memory_event(seq + 1, "update_begin", detail=f"disk, version '{label} {number}'", **common),
            memory_event(seq + 2, "update_commit", detail=f"disk, version '{label} {number}', 9 tensors", **common),
            memory_event(
                seq + 3, "continue", returned=5 * MIB, residual=grows - 5 * MIB, **{**common, "reserved": after}
            ),
        ]  # fmt: skip
        base = after
    return events


def record_of(events, older=()):
    return MemoryRecord(status_reply(GetStatusReqInput()), events, older)


class Page(HTMLParser):
    """The tags of a page, their balance and their attributes."""

    VOID = frozenset({"meta", "br", "link"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.urls = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.urls += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def charts(text, name):
    """The SVG elements of one chart, a view each."""
    return [
        ET.fromstring(found)
        for found in re.findall(rf'<svg class="chart[^"]*" data-chart="{name}".*?</svg>', text)
    ]


def of_class(element, kind):
    return [each for each in element.iter() if each.get("class") == kind]


def points(element):
    """The points of a path of lines."""
    return [tuple(map(float, pair.split(","))) for pair in re.findall(r"[ML]([^MLZ]+)", element.get("d"))]


def embedded(text):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    )


def test_the_page_needs_nothing_else(tmp_path):
    write_page(record_of(cycles(30)), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.open == [], "every element is closed"
    assert page.urls == []
    assert not re.search(r"https?://|//\w+\.\w|@import|url\(", text)
    assert not re.search(r"\$\{?[a-z]+\}?[^`{\w]", text.split("<script>")[0]), "every placeholder is filled"


def test_what_clients_send_stays_text():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'"
    events = [*cycles(2, label=evil), memory_event(20, "failure", detail=evil)]
    text = render(record_of(events))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert Page(text).urls == []
    assert evil in embedded(text)["event"][-1][1], "and arrives whole where it is shown"


def test_a_record_without_events_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no event"):
        write_page(record_of([]), tmp_path / "page.html")


def test_every_pause_update_and_continue_is_marked():
    events = cycles(12)
    events += [memory_event(len(events) + 1, "failure"), memory_event(len(events) + 2, "idle", returned=MIB)]
    text = render(record_of(events))
    by_time, by_event, *_ = charts(text, "timeline")
    for view in (by_time, by_event):
        assert len(of_class(view, "paused")) == len(of_class(view, "pause")) == 12
        assert len(of_class(view, "update")) == len(of_class(view, "continue")) == 12
        assert len(of_class(view, "mark failure")) == len(of_class(view, "mark idle")) == 1
    bars = charts(text, "returned")[0]
    assert (len(of_class(bars, "bar")), len(of_class(bars, "bar elsewhere"))) == (12, 1)
    assert len(of_class(bars, "left")) == 12
    first = of_class(by_time, "paused")[0]
    seconds = 3 / (events[-1].at - events[0].at)
    assert float(first.get("width")) == pytest.approx(seconds * (WIDTH - LEFT - RIGHT), abs=0.1)
    assert "pause in_place: lasted 3.0 s" in ET.tostring(first, encoding="unicode")


def test_a_pause_that_lasts_reaches_the_edge():
    events = [*cycles(1), memory_event(6, "pause", detail="abort"), memory_event(7, "release", returned=9)]
    last = of_class(charts(render(record_of(events)), "timeline")[0], "paused")[-1]
    assert float(last.get("x")) + float(last.get("width")) == pytest.approx(WIDTH - RIGHT, abs=0.1)


def test_what_is_reserved_after_each_continue_is_a_line_of_its_own():
    view = charts(render(record_of(cycles(7))), "timeline")[1]
    (floor,) = of_class(view, "line-floor")
    heights = {y for _, y in points(floor)}
    assert len(points(floor)) == 7
    assert len(heights) == 1, "nothing grows"
    assert heights < {y for _, y in points(of_class(view, "line-reserved")[0])}


def test_the_line_drops_where_memory_was_returned():
    (line,) = of_class(charts(render(record_of(cycles(1))), "timeline")[0], "line-reserved")
    (x_before, y_before), (x_after, y_after) = points(line)[-2:]
    assert x_before == x_after
    assert y_before < y_after, "down on the screen"


def test_parts_are_stacked_to_what_is_reserved():
    events = cycles(4, grows=MIB)
    chart_of_parts = charts(render(record_of(events)), "parts")[0]
    bands = {tag: of_class(chart_of_parts, f"fill-{tag}") for tag in ("runtime", "weights", "kv", "other")}
    assert all(len(found) == 1 for found in bands.values())
    assert of_class(chart_of_parts, "fill-graphs") == []
    zero = points(bands["runtime"][0])[-1][1]
    half = len(events)
    tops = points(bands["other"][0])[:half]
    scale = (zero - tops[-2][1]) / events[-2].reserved
    for (_, y), event in zip(tops[1:], events[1:], strict=True):
        total = sum(getattr(event.by_tag, tag) for tag in event.by_tag.__struct_fields__)
        assert (zero - y) / scale == pytest.approx(total, rel=0.01)


def test_older_stretches_are_drawn_before_the_events():
    events = cycles(3)
    older = [
        MemoryStretch(
            start=900.0 + 10 * n, end=910.0 + 10 * n, events=8, reserved_min=90 * MIB, reserved_max=140 * MIB,
            reserved_last=99 * MIB, pauses=2, returned=0,
        )
        for n in range(10)
    ]  # fmt: skip
    record = record_of(events, older)
    assert record.start == 900.0
    by_time, by_event = charts(render(record), "timeline")
    (folded,) = of_class(by_time, "folded")
    assert points(folded)[0][0] == LEFT
    assert max(x for x, _ in points(folded)) < min(
        x for x, _ in points(of_class(by_time, "line-reserved")[0])
    )
    assert of_class(by_event, "folded") == []


def test_the_figures_of_the_tiles():
    found = {name: (figure, note) for figure, name, note in tiles(record_of(cycles(21, grows=MIB)))}
    assert found["growth"] == ("+11.0 MB", "over the last 11 cycles; KV pages +11.0 MB of it")
    assert found["returned at continue"] == ("105.0 MB", "5.0 MB in the median of 21")
    assert found["largest residual"][0] == f"{MINUS}4.0 MB"
    assert found["paused, median"] == ("3.0 s", "21 times, longest 3.0 s")
    assert found["weight updates"] == ("21", "last: disk, version 'step 20', 9 tensors")
    few = {name: figure for figure, name, _ in tiles(record_of(cycles(1)))}
    assert few["growth"] == "\N{EN DASH}"


def test_a_long_record_stays_small_and_keeps_its_peak():
    events = cycles(1023)
    peak = events[2001] = memory_event(2002, "update_begin", reserved=900 * MIB)
    text = render(record_of(events))
    assert len(text) < 3 * MIB
    view = charts(text, "timeline")[1]
    line = points(of_class(view, "line-reserved")[0])
    assert len(line) <= 2 * MAX_POINTS
    x = LEFT + (peak.seq - 1) / (len(events) - 1) * (WIDTH - LEFT - RIGHT)
    assert min(line, key=lambda point: point[1])[0] == pytest.approx(x, abs=0.2)
    assert text.count("<tr><td class=n>") == 200


def test_thinning_keeps_ends_and_the_largest():
    values = [random.Random(3).random() for _ in range(5000)]
    values[1234] = 2.0
    kept = chart.thinned(values, 100)
    assert len(kept) <= 100
    assert kept == sorted(set(kept))
    assert {0, 4999, 1234} <= set(kept)
    assert chart.thinned(values[:50], 100) == list(range(50))


@pytest.mark.parametrize("spread", [0, 1, MIB // 3, 700 * MIB])
def test_a_close_up_shows_all_values_and_no_mountains(spread):
    scale = chart.close_up([500 * MIB, 500 * MIB + spread], 10, 110)
    assert scale.high - scale.low >= chart.MIN_SPAN
    assert 10 <= scale(500 * MIB + spread) <= scale(500 * MIB) <= 110
    ticks = scale.ticks(6)
    assert 2 <= len(ticks) <= 7
    assert all(scale.low <= value <= scale.high for value in ticks)


def test_words():
    assert [size(n) for n in (0, -1, 1536 * 1024, 20 << 30)] == ["0.0 MB", "0.0 MB", "1.5 MB", "20.0 GB"]
    assert [size(n, sign=True) for n in (0, MIB, -MIB)] == ["0.0 MB", "+1.0 MB", f"{MINUS}1.0 MB"]
    assert [span(s) for s in (0.0123, 5, 600, 90000)] == ["12.3 ms", "5.0 s", "10 min", "25.0 h"]
    assert [tick(s) for s in (0.5, 90, 300, 7200)] == ["0.5 s", "90 s", "5 min", "2 h"]


class History:
    """Answers history requests out of a list of events, two at a time, as an engine pages."""

    def __init__(self, events):
        self.events = events
        self.asked = []

    def __call__(self, request):
        if not isinstance(request, GetMemoryHistoryReqInput):
            return answer(request)
        self.asked.append(request.after)
        found = [event for event in self.events if event.seq > request.after]
        return [GetMemoryHistoryReqOutput(id=request.id, events=found[:2], more=len(found) > 2)]


@pytest.fixture
def endpoint(tmp_path_factory, monkeypatch):
    endpoint = f"ipc://{tmp_path_factory.mktemp('s')}/s"
    monkeypatch.setenv("CAESURA_ENDPOINT", endpoint)
    return endpoint


def test_fetching_follows_the_pages_and_then_asks_for_news_only(endpoint):
    history = History(cycles(3))
    with FakeScheduler(endpoint, history), SchedulerClient(endpoint) as client:
        record = fetch(client, timeout=10)
        assert [event.seq for event in record.events] == list(range(1, 14))
        history.asked.clear()
        extended = memory_event(13, "sample", reserved=7, until=2000.0)
        history.events = [*history.events[:-1], extended, memory_event(14, "idle")]
        record = fetch(client, record, timeout=10)
        assert history.asked == [12], "the last known one again, and what is newer"
        assert [event.seq for event in record.events] == list(range(1, 15))
        assert record.events[12] == extended
        history.events = [memory_event(seq) for seq in range(40, 44)]  # everything known is forgotten
        assert [event.seq for event in fetch(client, record, timeout=10).events] == [40, 41, 42, 43]


def text_of(renderable, width=120):
    console = Console(width=width, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def test_the_screen_shows_state_figures_parts_and_events():
    shown = text_of(live.screen(record_of(cycles(12, grows=MIB)), [100 * MIB, 104 * MIB]))
    for text in (
        "paused in_place 1.5 s",
        "3.0 MB reserved",
        "+2.0 MB over 2 cycles",
        "runtime",
        "60.0 MB",
        "█",
    ):
        assert text in shown
    assert "update commits disk, version 'step 11', 9 tensors" in shown
    assert "100.0 MB to 104.0 MB in the last 2 looks" in shown


def test_a_narrow_screen_cuts_words_and_no_figures():
    shown = text_of(live.screen(record_of(cycles(3, grows=MIB)), [MIB]), width=72)
    assert f"{MINUS}4.0 MB" in shown
    assert "…" in shown


@pytest.mark.parametrize(
    "looks,expected",
    [([0, 8 * MIB], ["  █", "  █", "▁ █"]), ([5, 5], ["   ", "   ", "▁ ▁"])],
)
def test_the_curve(looks, expected):
    lines = [str(line) for line in live.curve_lines(looks, min(looks), max(looks))]
    assert [" ".join(line) for line in lines] == [line.ljust(3) for line in expected]


@pytest.fixture
def caesura(monkeypatch, capsys):
    """Run the command line; returns exit status, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["caesura", "memory", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return exit.value.code, captured.out, captured.err

    return run


def test_the_verb_prints_the_last_events(endpoint, caesura):
    with FakeScheduler(endpoint, History(cycles(3))):
        code, out, err = caesura("--last", "2")
    assert (code, err) == (0, "")
    assert "update commits disk, version 'step 2', 9 tensors" in out
    assert "version 'step 1'" not in out


def test_the_verb_writes_the_page_and_json(endpoint, caesura, tmp_path):
    page = tmp_path / "out.html"
    with FakeScheduler(endpoint, History(cycles(2))):
        assert caesura("--html", str(page))[:2] == (0, f"wrote {page}: 9 events\n")
        code, out, _ = caesura("--json")
    assert page.read_text().startswith("<!doctype html>")
    assert code == 0
    assert [json.loads(line)["cause"] for line in out.splitlines()][:3] == ["start", "pause", "update_begin"]


def test_without_a_terminal_live_is_a_plain_table(endpoint, caesura):
    with FakeScheduler(endpoint, History(cycles(1))):
        code, out, err = caesura("--live", "--interval", "0.05", "--for", "0.2")
    head, *rows = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split()[:3] == ["time", "reserved", "MB"]
    assert len(rows) >= 2
    assert all(row.endswith("5 continue") for row in rows)
    assert "\x1b" not in out


def test_an_engine_that_ends_ends_the_live_view_with_an_error(endpoint, caesura):
    looks = []

    def handler(request):
        looks.append(request)
        if len(looks) > 4:
            raise VanishError
        return answer(request)

    with FakeScheduler(endpoint, handler):
        code, out, err = caesura("--live", "--interval", "0.05")
    assert code == 1
    assert len(out.splitlines()) >= 2
    assert err.startswith("error: ")


def test_ctrl_c_ends_the_live_view(endpoint):
    looks = threading.Semaphore(0)

    def handler(request):
        looks.release()
        return answer(request)

    def interrupt():
        for _ in range(2):  # a look is two questions
            looks.acquire()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with FakeScheduler(endpoint, handler), SchedulerClient(endpoint) as client:
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        live.watch(client, Console(width=100), interval_s=60.0, timeout=10)
        interrupter.join()
