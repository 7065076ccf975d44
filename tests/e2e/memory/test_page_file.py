"""The page of `caesura memory --html` in a real browser."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selenium import webdriver
from selenium.webdriver.common.by import By
from support.browser import browsing, chromium
from support.fake_scheduler import memory_event
from support.memory_records import MIB, cycles, record_of

from caesura.client.serve.pages.document import PageData, ReplicaView, Tick, filed, write_page
from caesura.io_struct import GetMemoryHistoryReqOutput, MemoryStretch

pytestmark = browsing
LEFT, RIGHT = 54, 8
MINUS = "\N{MINUS SIGN}"
BY_TIME, BY_EVENT, CLOSE = range(3)


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        yield driver


class File:
    def __init__(self, browser: webdriver.Chrome, path) -> None:
        self.browser = browser
        browser.get(path.as_uri())

    def choose(self, axis: int) -> None:
        self.browser.find_elements(By.CSS_SELECTOR, "#axes button")[axis].click()

    def chart(self, name: str) -> ET.Element:
        markup = self.browser.find_element(By.ID, name).get_attribute("outerHTML")
        return ET.fromstring(markup)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.textContent)"
        return self.browser.execute_script(script, selector)

    def tiles(self, name: str) -> dict[str, tuple[str, str]]:
        parts = zip(*(self.texts(f"#{name} {tag}") for tag in ("span", "b", "small")), strict=True)
        return {kind: (figure, note) for kind, figure, note in parts}

    def rows(self, name: str) -> list[list[str]]:
        script = "return [...arguments[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
        return self.browser.execute_script(script, self.browser.find_element(By.ID, name))


@pytest.fixture
def show(browser, tmp_path):
    def written(events, older=()) -> File:
        write_page(record_of(events, older), tmp_path / "page.html")
        return File(browser, tmp_path / "page.html")

    yield written
    complaints = browser.get_log("browser")
    assert complaints == []


def elements_of_class(chart: ET.Element, kind: str) -> list[ET.Element]:
    return [each for each in chart.iter() if each.get("class") == kind]


def points(path: ET.Element) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split(","))) for pair in re.findall(r"[ML]([^MLZ]+)", path.get("d"))]


def bands(chart: ET.Element) -> list[tuple[float, float]]:
    return [
        (float(x), float(width))
        for path in elements_of_class(chart, "band")
        for x, width in re.findall(r"M([\d.]+),[\d.]+h([\d.]+)", path.get("d"))
    ]


def width_of(chart: ET.Element) -> float:
    return float(chart.get("viewBox").split()[2])


def test_a_file_makes_no_requests_and_names_the_model(show, browser):
    browser.get_log("performance")
    page = show(cycles(2))
    assert page.texts("#title") == ["tiny · v0 · paused in place"] == [browser.title]
    assert page.texts("#trouble") == [""]
    assert not browser.find_element(By.ID, "login").is_displayed()
    assert not browser.find_element(By.ID, "load").is_displayed(), "nobody has watched the load"
    sent = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    asked = [event["params"] for event in sent if event["method"] == "Network.requestWillBeSent"]
    urls = [event["request"]["url"] for event in asked]
    assert all(url.startswith(("file:", "data:")) for url in urls), urls


@pytest.mark.parametrize("axis", [BY_TIME, BY_EVENT])
def test_every_pause_update_and_continue_is_marked(show, axis):
    events = cycles(12)
    events += [memory_event(len(events) + 1, "failure"), memory_event(len(events) + 2, "idle", returned=MIB)]
    page = show(events)
    page.choose(axis)
    timeline, returned = page.chart("timeline"), page.chart("returned")
    for chart in (timeline, returned, page.chart("allocated"), page.chart("parts")):
        assert len(bands(chart)) == 12
    assert len(elements_of_class(timeline, "pause")) == len(elements_of_class(timeline, "update")) == 12
    assert len(elements_of_class(timeline, "continue")) == 12
    assert (
        len(elements_of_class(timeline, "mark failure")) == len(elements_of_class(timeline, "mark idle")) == 1
    )
    assert (len(elements_of_class(returned, "bar")), len(elements_of_class(returned, "bar elsewhere"))) == (
        12,
        1,
    )
    assert len(elements_of_class(returned, "left")) == 12
    share = 3 / (events[-1].at - events[0].at) if axis == BY_TIME else 3 / len(events)
    assert bands(timeline)[0][1] == pytest.approx(share * (width_of(timeline) - LEFT - RIGHT), abs=0.2)


@pytest.mark.parametrize("axis", [BY_TIME, BY_EVENT])
def test_a_pause_that_lasts_reaches_the_edge(show, axis):
    page = show(
        [*cycles(1), memory_event(6, "pause", detail="abort"), memory_event(7, "release", returned=9)]
    )
    page.choose(axis)
    timeline = page.chart("timeline")
    x, width = bands(timeline)[-1]
    assert x + width == pytest.approx(width_of(timeline) - RIGHT, abs=0.2)


def test_the_close_view_has_the_last_events(show):
    page = show(cycles(30))
    page.choose(CLOSE)
    assert len(bands(page.chart("timeline"))) == 12, "48 events, a cycle has four"
    assert len(elements_of_class(page.chart("returned"), "bar")) == 12


def test_reserved_memory_after_a_continue_is_a_mark(show):
    page = show(cycles(7))
    page.choose(BY_EVENT)
    timeline = page.chart("timeline")
    (floor,) = elements_of_class(timeline, "line floor")
    marks = re.findall(r"M([\d.]+),([\d.]+)h0.1", floor.get("d"))
    assert len(marks) == 7
    assert "L" not in floor.get("d")
    heights = {float(y) for _, y in marks}
    assert len(heights) == 1, "nothing grows"
    (reserved,) = elements_of_class(timeline, "line reserved")
    assert heights < {y for _, y in points(reserved)}
    (x_before, y_before), (x_after, y_after) = points(reserved)[-2:]
    assert x_before == x_after, "the emptying takes no time"
    assert y_before < y_after, "down on the screen"


def test_no_line_spans_a_time_without_readings(show):
    first = [memory_event(1, "start"), memory_event(2), memory_event(3)]
    later = [memory_event(500 + number) for number in range(3)]
    page = show([*first, *later])
    for name in ("timeline", "allocated"):
        kind = "line reserved" if name == "timeline" else "line allocated"
        before, after = elements_of_class(page.chart(name), kind)
        assert max(x for x, _ in points(before)) < LEFT + 10
        assert min(x for x, _ in points(after)) > LEFT + 10
    page.choose(BY_EVENT)
    assert len(elements_of_class(page.chart("timeline"), "line reserved")) == 1, "events follow one another"


def test_parts_stack_up_to_reserved_memory(show):
    events = cycles(4, grows=MIB)
    page = show(events)
    parts = page.chart("parts")
    layers = {tag: elements_of_class(parts, f"fill-{tag}") for tag in ("runtime", "weights", "kv", "other")}
    assert all(len(found) == 1 for found in layers.values())
    assert elements_of_class(parts, "fill-graphs") == []
    zero = points(layers["runtime"][0])[-1][1]
    tops = points(layers["other"][0])[: 2 * len(events) : 2]
    scale = (zero - tops[1][1]) / events[1].reserved
    for (_, y), event in zip(tops, events, strict=True):
        total = sum(getattr(event.by_tag, tag) for tag in event.by_tag.__struct_fields__)
        assert (zero - y) / scale == pytest.approx(total, rel=0.01)
    rows = {row[0]: row[1:4] for row in page.rows("tags")}
    assert rows["runtimewhat the process held before: Python, torch"] == ["60.0 MiB", "0.0 MiB", "60.0 MiB"]


def test_older_stretches_are_drawn_before_the_events(show):
    older = [
        MemoryStretch(
            start=900.0 + 10 * n, end=910.0 + 10 * n, events=8, reserved_min=90 * MIB, reserved_max=140 * MIB,
            reserved_last=99 * MIB, pauses=2, returned=0,
        )
        for n in range(10)
    ]  # fmt: skip
    page = show(cycles(3), older)
    timeline = page.chart("timeline")
    (folded,), (line,) = elements_of_class(timeline, "folded"), elements_of_class(timeline, "line reserved")
    assert points(folded)[0][0] == LEFT
    assert max(x for x, _ in points(folded)) < min(x for x, _ in points(line))
    page.choose(BY_EVENT)
    assert elements_of_class(page.chart("timeline"), "folded") == []


def test_the_conclusions(show):
    page = show(cycles(21, grows=MIB))
    found = page.tiles("conclusions") | page.tiles("tiles")
    assert found["growth without KV pages"] == (
        "0.0 MiB",
        "over the last 11 cycles; pages of the KV pool in use for the first time: +11.0 MiB",
    )
    assert found["returned at continue"] == ("105.0 MiB", "5.0 MiB in the median of 21")
    assert found["most left behind by a pause"][0] == f"{MINUS}4.0 MiB"
    assert found["pauses"][1] == "0.0 ms in all, 3.0 s in the median, at most 3.0 s"
    assert found["weight updates"][1] == "none failed; last: disk, version 'step 20', 9 tensors"
    assert show(cycles(1)).tiles("conclusions")["growth without KV pages"][0] == "\N{EN DASH}"


def test_events_are_a_table_newest_first(show):
    last = memory_event(
        82, "continue", until=1083.5, detail="in_place", returned=MIB, residual=-MIB, step=1234
    )
    page = show([*cycles(20), last])
    rows = page.rows("events")
    seq, at, what, *figures = rows[0]
    assert (seq, what) == ("82", "continuein_place")
    assert at.endswith(" + 1.5 s")
    assert figures == ["1,234", "0", "3.0 MiB", "1.0 MiB", "1.0 MiB", f"{MINUS}1.0 MiB"]
    assert len(rows) == 82
    assert len(show(cycles(60)).rows("events")) == 200


def test_a_long_record_keeps_its_peak_and_loses_the_bands(show):
    events = cycles(1023)
    events[2001] = memory_event(2002, "update_begin", reserved=900 * MIB)
    page = show(events)
    page.choose(BY_EVENT)
    timeline = page.chart("timeline")
    (line,) = elements_of_class(timeline, "line reserved")
    x, _ = min(points(line), key=lambda point: point[1])
    assert x == pytest.approx(LEFT + 2001 / len(events) * (width_of(timeline) - LEFT - RIGHT), abs=0.2)
    band = page.browser.find_element(By.CSS_SELECTOR, "#timeline .band")
    assert not band.is_displayed(), "so many are no pauses any more but a colour"


@pytest.mark.parametrize("spread", [0, 1, MIB // 3, 700 * MIB])
def test_a_close_up_shows_all_values_and_no_mountains(show, spread):
    page = show([memory_event(1, reserved=500 * MIB), memory_event(2, reserved=500 * MIB + spread)])
    low, high = page.browser.execute_script("return closeUp(arguments[0])", [500 * MIB, 500 * MIB + spread])
    assert low <= 500 * MIB <= 500 * MIB + spread <= high
    assert high - low >= 4 * MIB
    lines = page.texts("#timeline text")
    assert 2 <= len(lines) <= 8


def test_the_pointer_tells_of_the_nearest_event(show):
    page = show(cycles(3))
    page.choose(BY_EVENT)
    chart = page.browser.find_element(By.ID, "allocated")
    x = -chart.size["width"] / 2 + LEFT + 1
    webdriver.ActionChains(page.browser).move_to_element_with_offset(chart, int(x), 0).perform()
    assert page.texts("#tooltip")[0].startswith("#1 start /models/tiny")
    crosses = page.browser.find_elements(By.CSS_SELECTOR, "#memory .cross")
    assert [cross.get_attribute("visibility") for cross in crosses] == ["visible"] * 4
    webdriver.ActionChains(page.browser).move_to_element(page.browser.find_element(By.ID, "foot")).perform()
    assert {cross.get_attribute("visibility") for cross in crosses} == {"hidden"}


SPEED = 100


def watched(looks, pauses, speed=SPEED):
    def ran(at):
        return at - sum(max(0.0, min(end, at) - begin) for begin, end in pauses)

    return [[at, at - 900.0, speed * ran(at), 1, 0, 0, 0, [], False] for at in looks]


@st.composite
def watches(draw):
    edges = sorted(draw(st.lists(st.integers(1000_0, 1060_0), max_size=12, unique=True)))
    pauses = [(a / 10, b / 10) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    looks = sorted(draw(st.lists(st.integers(1000_00, 1060_00), min_size=2, max_size=80, unique=True)))
    return pauses, watched([look / 100 for look in looks], pauses)


@given(seen=watches())
def test_no_throughput_reaches_into_a_pause(browser, blank, seen):
    pauses, ticks = seen
    pieces = browser.execute_script("return rates(...arguments)", ticks, pauses)
    for piece in pieces:
        for at, rate in piece:
            assert rate == pytest.approx(SPEED, rel=0.02), "as fast at the edge as elsewhere"
            assert ticks[0][0] <= at <= ticks[-1][0]
        if piece:
            inside = [(b, e) for b, e in pauses if b < piece[-1][0] - 1e-6 and e > piece[0][0] + 1e-6]
            assert inside == [], "neither a point nor the line between two"


@given(seen=watches(), values=st.lists(st.integers(0, 9), min_size=80, max_size=80))
def test_no_line_slants_over_the_edge_of_a_pause(browser, blank, seen, values):
    pauses, ticks = seen
    points = [[tick[0], value] for tick, value in zip(ticks, values)]
    drawn = browser.execute_script("return steady(...arguments)", points, pauses)
    assert [point for point in drawn if point in points] == points, "what was seen is drawn"
    edges = [edge for pause in pauses for edge in pause]
    for (start, before), (end, after) in itertools.pairwise(drawn):
        assert start <= end
        crossed = [edge for edge in edges if start < edge < end]
        assert before == after or not crossed


def test_nothing_is_drawn_from_a_tick_to_one_after_a_gap(browser, tmp_path):
    ticks = [Tick(*tick) for tick in watched([1000.0 + n for n in range(40)], [])]
    ticks[20].gap = True
    record = record_of([memory_event(1, "start")])
    history = GetMemoryHistoryReqOutput(id="1", events=list(record.events), more=False)
    data = PageData(now=1040.0, status=record.status, history=history, ticks=ticks)
    (tmp_path / "page.html").write_bytes(filed(data))
    page = File(browser, tmp_path / "page.html")
    for name, kind in (("throughput", "tokens"), ("requests", "running"), ("kv", "kv")):
        before, after = elements_of_class(page.chart(name), f"line {kind}")
        assert points(before)[-1][0] < points(after)[0][0]


def test_a_throughput_is_over_about_a_second(browser, blank):
    looks = [1000.0 + 0.25 * n for n in range(40)]
    ticks = [
        [at, at - 900.0, 100 * int(at), 1, 0, 0, 0, [], False] for at in looks
    ]  # a long step every second
    (piece,) = browser.execute_script("return rates(...arguments)", ticks, [])
    assert {round(rate) for _, rate in piece[4:]} == {100}


def test_each_replica_has_a_strip_of_its_absences(browser, tmp_path):
    ticks = [Tick(*tick) for tick in watched([1000.0 + n for n in range(40)], [])]
    for number, tick in enumerate(ticks):
        tick.loads = [3, -1 if 10 <= number < 20 else 5]
    record = record_of([memory_event(1, "start")])
    history = GetMemoryHistoryReqOutput(id="1", events=list(record.events), more=False)
    replicas = [
        ReplicaView(name="replica-0", state="serving", reason=""),
        ReplicaView(name="replica-1", state="gone", reason="it is being restarted"),
    ]
    data = PageData(now=1040.0, status=record.status, history=history, ticks=ticks, replicas=replicas)
    (tmp_path / "page.html").write_bytes(filed(data))
    page = File(browser, tmp_path / "page.html")
    assert page.texts("#replicas .legend") == [
        "replica-0: serves 3 samples",
        "replica-1: does not serve: it is being restarted",
    ]
    absent = page.browser.find_elements(By.CSS_SELECTOR, "#replicas .absent")
    assert len(absent) == 1
    chart_width = page.browser.find_element(By.CSS_SELECTOR, "#replicas svg").size["width"]
    drawn = float(absent[0].get_attribute("width")) / (chart_width - LEFT - RIGHT)
    assert drawn == pytest.approx(9 / 39, abs=0.02)
    assert page.texts("#memory-title") == ["Memory of replica-0"]


@pytest.fixture(scope="module")
def blank(browser, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(record_of(cycles(1)), path)
    browser.get(path.as_uri())


def test_the_line_of_throughput_ends_where_the_pause_begins(browser, tmp_path):
    events = [
        memory_event(1, "start"),
        memory_event(20, "pause", detail="in_place"),
        memory_event(26, "continue"),
        memory_event(40, "pause", detail="in_place"),
    ]
    looks = [1000.0 + 0.7 * n for n in range(2, 70)]
    ticks = [Tick(*tick) for tick in watched(looks, [(1020.0, 1026.0), (1040.0, 2000.0)])]
    history = GetMemoryHistoryReqOutput(id="1", events=events, more=False)
    data = PageData(
        now=1050.0, status=record_of(events).status, history=history, ticks=ticks, throughput=70.0
    )
    (tmp_path / "page.html").write_bytes(filed(data))
    page = File(browser, tmp_path / "page.html")
    throughput = page.chart("throughput")
    shaded = bands(throughput)
    assert len(shaded) == 2
    drawn = [points(path) for path in elements_of_class(throughput, "line tokens")]
    assert len(drawn) == 2
    assert drawn[0][-1][0] == pytest.approx(shaded[0][0], abs=0.2)
    assert drawn[1][0][0] == pytest.approx(sum(shaded[0]), abs=0.2)
    assert drawn[1][-1][0] == pytest.approx(shaded[1][0], abs=0.2)
    heights = [y for piece in drawn for _, y in piece]
    assert max(heights) - min(heights) < 0.5, "no ramp before a pause, none after"
    assert page.tiles("tiles")["tokens/s"][0] == "0", "the second before the pause is none of the present"
