"""`caesura memory`: its page, as a file, and its live view say what the engine has told."""

import io
import json
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console
from support.command_line import run_command
from support.fake_scheduler import FakeScheduler, VanishError, answer, memory_event
from support.memory_records import cycles, record_of

from caesura.client import SchedulerClient
from caesura.client.memory_view import live
from caesura.client.memory_view.record import MINUS, fetch, size, span
from caesura.client.serve.pages.document import PageData, write_page
from caesura.io_struct import GetMemoryHistoryReqInput, GetMemoryHistoryReqOutput, MemoryStretch

MIB = 1 << 20


class Page(HTMLParser):
    """The tags of a page, their balance and their attributes."""

    VOID = frozenset({"meta", "br", "link", "input", "img"})

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

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def embedded(text):
    return msgspec.json.decode(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1], type=PageData)


def test_the_page_needs_nothing_else(tmp_path):
    record = record_of(cycles(30), [MemoryStretch(**dict.fromkeys(MemoryStretch.__struct_fields__, 1))])
    write_page(record, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.open == [], "every element is closed"
    assert page.urls == ["data:,"], "the icon, which is none"
    assert not re.search(r"https?://(?!www.w3.org/2000/svg\b)|@import|url\(", text)
    policy = next(attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs)
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert not re.search(r"\$(css|script|data|policy)\b", text), "every placeholder is filled"
    data = embedded(text)
    assert data.history.events == record.events
    assert data.history.older == record.older
    assert data.status == record.status


def test_client_strings_stay_data(tmp_path):
    evil = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&amp;\"'$css $data"
    write_page(record_of([*cycles(2, label=evil), memory_event(20, "failure", detail=evil)]), tmp_path / "p")
    text = (tmp_path / "p").read_text()
    assert "<script>alert" not in text
    assert "<img src" not in text
    assert Page(text).urls == ["data:,"]
    assert embedded(text).history.events[-1].detail == evil, "and arrives whole"


def test_a_long_record_stays_small(tmp_path):
    write_page(record_of(cycles(1023)), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 3 * MIB


def test_a_record_without_events_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no event"):
        write_page(record_of([]), tmp_path / "page.html")


def test_writing_a_page_needs_no_package_of_the_front_end():
    program = (
        "import sys, caesura.client.serve.pages.document\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'litestar', 'uvicorn', "
        "'prometheus_client', 'jinja2'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("count,expected", [(1, None), (3, (2 * MIB, 2)), (21, (11 * MIB, 11))])
def test_growth_begins_where_an_engine_has_settled(count, expected):
    growth = record_of(cycles(count, grows=MIB)).growth
    assert (None if growth is None else (growth.reserved, growth.cycles)) == expected


def test_words():
    assert [size(n) for n in (0, -1, 1536 * 1024, 20 << 30)] == ["0.0 MiB", "0.0 MiB", "1.5 MiB", "20.0 GiB"]
    assert [size(n, sign=True) for n in (0, MIB, -MIB)] == ["0.0 MiB", "+1.0 MiB", f"{MINUS}1.0 MiB"]
    assert [span(s) for s in (0.0123, 5, 600, 90000)] == ["12.3 ms", "5.0 s", "10 min", "25.0 h"]


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


def test_fetching_asks_for_news_only(endpoint):
    history = History(cycles(3))
    with FakeScheduler(endpoint, history), SchedulerClient(endpoint) as client:
        record = fetch(client, timeout=None)
        assert [event.seq for event in record.events] == list(range(1, 14))
        history.asked.clear()
        extended = memory_event(13, "sample", reserved=7, until=2000.0)
        history.events = [*history.events[:-1], extended, memory_event(14, "idle")]
        record = fetch(client, record, timeout=None)
        assert history.asked == [12], "the last known one again, and what is newer"
        assert [event.seq for event in record.events] == list(range(1, 15))
        assert record.events[12] == extended
        history.events = [memory_event(seq) for seq in range(40, 44)]  # everything known is forgotten
        assert [event.seq for event in fetch(client, record, timeout=None).events] == [40, 41, 42, 43]


def text_of(renderable, width=120):
    console = Console(width=width, force_terminal=False, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_the_screen_shows_state_figures_parts_and_events():
    shown = text_of(live.screen(record_of(cycles(12, grows=MIB)), [100 * MIB, 104 * MIB]))
    for text in (
        "paused in_place 1.5 s",
        "3.0 MiB reserved",
        "0.0 MiB without KV pages over 2 cycles",
        "runtime",
        "60.0 MiB",
        "█",
        "update commits disk, version 'step 11', 9 tensors",
        "100.0 MiB to 104.0 MiB in the last 2 looks",
    ):
        assert text in shown


def test_a_narrow_screen_cuts_words_and_no_figures():
    shown = text_of(live.screen(record_of(cycles(3, grows=MIB)), [MIB]), width=72)
    assert f"{MINUS}4.0 MiB" in shown
    assert "…" in shown


@pytest.mark.parametrize(
    "looks,expected", [([0, 8 * MIB], ["  █", "  █", "▁ █"]), ([5, 5], ["   ", "   ", "▁ ▁"])]
)
def test_the_curve(looks, expected):
    lines = [str(line) for line in live.curve_lines(looks, min(looks), max(looks))]
    assert [" ".join(line) for line in lines] == [line.ljust(3) for line in expected]


@pytest.fixture
def caesura(endpoint):
    return partial(run_command, "memory", "--endpoint", endpoint)


def test_the_verb_prints_events_json_or_the_page(endpoint, caesura, tmp_path):
    page = tmp_path / "out.html"
    with FakeScheduler(endpoint, History(cycles(3))):
        code, out, err = caesura("--last", "2")
        _, whole, _ = caesura("--json")
        assert caesura("--html", str(page))[:2] == (0, f"wrote {page}: 13 events\n")
    assert (code, err) == (0, "")
    assert "update commits disk, version 'step 2', 9 tensors" in out
    assert "version 'step 1'" not in out
    causes = [json.loads(line)["cause"] for line in whole.splitlines()]
    assert causes[:3] == ["start", "pause", "update_begin"]
    assert embedded(page.read_text()).history.events == cycles(3)


def test_without_a_terminal_live_is_a_plain_table(endpoint, caesura):
    with FakeScheduler(endpoint, History(cycles(1))):
        code, out, err = caesura("--live", "--interval", "0.05", "--for", "0.2")
    head, *rows = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split()[:3] == ["time", "reserved", "MiB"]
    assert len(rows) >= 2
    assert all(row.endswith("5 continue") for row in rows)
    assert "\x1b" not in out


def test_the_end_of_an_engine_ends_the_live_view(endpoint, caesura):
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
        live.watch(client, Console(width=100), interval_s=60.0, timeout=None)
        interrupter.join()
