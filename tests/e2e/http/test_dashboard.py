"""The dashboard in a real browser, over a real engine: what it shows changes when the engine does, and it
asks nobody else.

One engine, one front end in a thread, one headless Chromium for the module.
"""

import contextlib
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from support.browser import browsing, chromium
from support.http_server import listening

from caesura.client import SamplingParams, SchedulerClient, launch_scheduler
from caesura.client.memory_view.record import fetch

KEY = "a key for users"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[SchedulerClient]:
    with (
        # An idle engine would note an event of its own some time after the last request: how long that is, is
        # the machine's.
        launch_scheduler(
            tiny_model, num_threads=1, kv_pool_tokens=4096, idle_empty_s=3600, enable_drift_check=True
        ) as launched,
        SchedulerClient(launched.endpoint) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def address(engine) -> Iterator[str]:
    served = {"served_model_name": f"policy {HOSTILE}", "api_key": KEY}
    with listening(endpoint=engine.endpoint, connect_timeout=None, **served) as server:
        yield server.url


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    with chromium() as driver:
        yield driver


class Page:
    """The open page, with its key entered."""

    def __init__(self, browser: webdriver.Chrome, address: str) -> None:
        self.browser = browser
        browser.get(address)
        assert browser.current_url == f"{address}/dashboard"
        assert browser.title == "Caesura", "which is all that it says without a key"
        self.until(lambda: self.find("login").is_displayed())
        assert not self.find("board").is_displayed(), "without a key it has nothing to show"
        self.before_login = browser.get_log("browser")
        self.find("key").send_keys(KEY)
        self.find("login").submit()
        self.until(lambda: self.find("board").is_displayed())

    def find(self, name):
        return self.browser.find_element(By.ID, name)

    def text(self, name) -> str:
        return self.find(name).text

    def until(self, holds) -> None:
        WebDriverWait(self.browser, 60, poll_frequency=0.1).until(lambda _: holds())

    def widths(self) -> tuple[int, int]:
        return tuple(self.browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]"))

    def requests(self) -> list[str]:
        """Return the addresses that the page has asked for since the last call."""
        events = (json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance"))
        sent = (event["params"] for event in events if event["method"] == "Network.requestWillBeSent")
        return [
            params["request"]["url"] for params in sent if params.get("documentURL", "").startswith("http")
        ]


@pytest.fixture(scope="module")
def page(browser, address) -> Page:
    return Page(browser, address)


@browsing
def test_dashboard_shows_pauses_and_updates(engine, page, other_model):
    page.until(lambda: page.text("generation") == "RUNNING")
    with contextlib.ExitStack() as stack:
        engine.pause("in_place", owner=f"trainer {HOSTILE}")
        stack.callback(engine.continue_generation, force=True)
        shows_the_pause(engine, page, other_model)
    page.until(lambda: page.text("generation") == "RUNNING")
    assert page.browser.title.endswith(" · running")


def shows_the_pause(engine, page, other_model):
    page.until(lambda: page.text("generation") == "PAUSED in place")
    assert f"by trainer {HOSTILE}" in page.text("generation-note"), "what is told is text"
    before = page.text("generation-note")
    # its age rises: the page lives while the engine rests
    page.until(lambda: page.text("generation-note") != before)
    page.until(lambda: page.browser.find_elements(By.CSS_SELECTOR, "#timeline rect.pause"))

    engine.update_weights_from_disk(str(other_model), weight_version=f"step 1 {HOSTILE}", flush_cache=False)
    page.until(lambda: page.text("version") == f"step 1 {HOSTILE}")
    assert page.text("weights-note") == "epoch 1, valid"
    serves = f"policy {HOSTILE} · step 1 {HOSTILE} · paused in place"
    assert (page.text("title"), page.browser.title) == (serves, serves)
    page.until(lambda: page.browser.find_elements(By.CSS_SELECTOR, "#timeline rect.update"))
    causes = page.browser.execute_script(_CAUSES)  # at once: the rows are replaced every second
    assert causes[:3] == ["tag update_commit", "tag update_begin", "tag pause"], "newest first"


@browsing
def test_dashboard_draws_load_and_memory_while_tokens_come(engine, page):
    handles = [
        engine.submit([5, 6, 7], SamplingParams(max_new_tokens=240, ignore_eos=True)) for _ in range(8)
    ]
    for handle in handles:
        handle.result()
    page.until(lambda: int(page.browser.execute_script(_TOKENS)) >= 8 * 240)
    for chart in ("throughput", "requests", "kv", "drift", "timeline", "allocated"):
        page.until(lambda chart=chart: page.browser.find_elements(By.CSS_SELECTOR, f"#{chart} path.line"))
    assert "ok: epoch" in page.text("drift-note")
    tags = page.text("tags")
    assert all(tag in tags for tag in ("weights", "KV cache", "runtime"))


@browsing
def test_dashboard_shows_sample_durations_and_update_stages(engine, page, other_model):
    def first_cells(table):
        script = (
            "return [...document.getElementById(arguments[0]).rows].map((row) => row.cells[0].textContent)"
        )
        return page.browser.execute_script(script, table)

    engine.generate([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
    page.until(lambda: {"in the queue", "whole sample"} <= set(first_cells("latencies")))
    assert first_cells("staleness")[:2] == ["none", "1 update"]
    with paused(engine):
        engine.update_weights_from_disk(str(other_model), weight_version="by stage", flush_cache=False)
    page.until(lambda: page.text("version") == "by stage")
    page.until(lambda: len(first_cells("update")) == 6)
    assert first_cells("update")[0] == "wait for the step in flight"
    assert first_cells("update")[-1].startswith("resume")


@contextlib.contextmanager
def paused(engine):
    """Pause the engine in the block, and yield the time of the pause."""
    engine.pause("in_place")
    try:
        yield fetch(engine, timeout=None).events[-1].at
    finally:
        engine.continue_generation()


_CAUSES = "return [...document.querySelectorAll('#events .tag')].map((tag) => tag.className)"
_TOKENS = "return document.querySelector('#tiles small').textContent.split(' ')[0].replaceAll(',', '')"


@browsing
@pytest.mark.parametrize("width", [320, 390, 800, 1600])
def test_nothing_runs_out_of_the_window(page, width):
    metrics_of_screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics_of_screen)
    try:
        page.until(lambda: page.widths()[1] == width)
        assert page.widths()[0] <= width
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@browsing
def test_dashboard_follows_dark_mode(page):
    def background():
        return page.browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    before = background()
    page.find("theme").click()
    after = background()
    scheme = "return getComputedStyle(document.documentElement).colorScheme"
    assert page.browser.execute_script(scheme) == "dark", "scroll bars too"
    page.find("theme").click()
    assert before != after
    assert background() == before


@browsing
def test_dashboard_asks_only_this_server_without_errors(page, address):
    page.until(lambda: len(page.find("events").text) > 0)
    asked = page.requests()
    assert any("/dashboard/data?" in url for url in asked)
    assert {urlsplit(url).netloc for url in asked if not url.startswith("data:")} == {
        urlsplit(address).netloc
    }
    assert not any(KEY in url or "key" in urlsplit(url).query for url in asked), "keys travel in headers"
    refused = [entry["message"] for entry in page.before_login]
    assert all("401" in message for message in refused), refused
    assert page.browser.get_log("browser") == []
