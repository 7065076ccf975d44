"""Metrics: what is counted is what is scraped, an engine costs one status however many ask."""

import asyncio
import re
from base64 import b64encode
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.fake_scheduler import FakeScheduler, answer, memory_event, status_reply
from support.http_server import front_end

from caesura.client import AsyncSchedulerClient
from caesura.client.serve.app import ServeOptions, create_app
from caesura.client.serve.pages import document, engine_watch, metrics
from caesura.client.serve.pages.metrics import PREFIX, Metrics
from caesura.io_struct import (
    ComponentStatus,
    Distribution,
    EmptyCacheTotal,
    EngineTotals,
    GetStatusReqInput,
    GetStatusReqOutput,
    ImageLoad,
    MemoryByTag,
    PauseTotal,
    PromptCacheStatus,
    StepFailures,
    UpdateTotal,
)

ROOT = Path(__file__).parents[4]
TOTALS = EngineTotals(
    prompt_tokens=200,
    cached_tokens=50,
    finished_requests={"stop": 5, "abort": 2},
    pauses=[PauseTotal(mode="in_place", count=3, seconds=4.5)],
    updates=[UpdateTotal(source="disk", committed=2, failed=1)],
    emptied=[EmptyCacheTotal(place="continue", count=3, freed_bytes=4096)],
    queue_time=Distribution(counts=[0, 0, 4, *[0] * 17], sum=0.02),
    latency_s=Distribution(counts=[*[0] * 9, 4, *[0] * 10], sum=4.0),
    staleness=Distribution(counts=[3, 1, *[0] * 8], sum=1.0),
)
BY_TAG = memory_event(1).by_tag


def busy(request):
    if not isinstance(request, GetStatusReqInput):
        return answer(request)
    status = status_reply(request)
    failures = StepFailures(failed=1, token_limit=64)
    there = [ComponentStatus(name="vae", residency="layerwise", nbytes=9000, device_bytes=4096)]
    prompts = PromptCacheStatus(entries=3, nbytes=3 << 10, limit_bytes=1 << 20, hits=8, misses=5)
    return [
        msgspec.structs.replace(
            status,
            totals=TOTALS,
            memory_by_tag=BY_TAG,
            step_failures=failures,
            components=there,
            prompt_cache=prompts,
        )
    ]


@dataclass
class Served:
    engine: FakeScheduler
    http: httpx.AsyncClient
    metrics: Metrics

    async def scrape(self):
        reply = await self.http.get("/metrics")
        assert reply.status_code == 200
        return samples(text_string_to_metric_families(reply.text))


def samples(families):
    return {
        (
            sample.name.removeprefix(PREFIX),
            *(v for k, v in sorted(sample.labels.items()) if k != "model_name"),
        ): (sample.value)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@asynccontextmanager
async def served(tmp_path, handler=busy, **options):
    with FakeScheduler(f"ipc://{tmp_path}/s.sock", handler) as engine:
        client = AsyncSchedulerClient(engine.endpoint)
        front = front_end(client, served_model_name="policy", **options)
        app = create_app(front)
        transport = httpx.ASGITransport(app)  # type: ignore[arg-type]  # two spellings of one protocol
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            try:
                yield Served(engine, http, front.metrics)
            finally:
                await client.close()


async def _what_a_scrape_says(tmp_path):
    async with served(tmp_path) as it:
        it.metrics.request_started()
        it.metrics.request_started()
        it.metrics.request_started()
        it.metrics.request_finished(11, 1.2, 0.2, "stop")
        it.metrics.request_finished(5, 0.4, None, "length")
        it.metrics.control("pause_generation", 0.25, True)
        it.metrics.control("pause_generation", 0.5, True)
        it.metrics.control("flush_cache", 0.1, False)
        it.metrics.error("not_idle")
        return await it.scrape()


def test_a_scrape_says_what_happened(tmp_path):
    found = asyncio.run(_what_a_scrape_says(tmp_path))
    expected = {
        ("engine_up",): 1, ("engine_state", "paused"): 1, ("engine_state", "running"): 0,
        ("pause_mode", "in_place"): 1,
        ("weights_state", "valid"): 1, ("memory_released", "kv_cache"): 0, ("pause_age_seconds",): 1.5,
        ("num_running_reqs",): 2, ("num_paused_reqs",): 2, ("num_queue_reqs",): 1, ("num_used_tokens",): 32,
        ("max_total_num_tokens",): 112, ("token_usage",): 32 / 112, ("cache_hit_rate",): 0.25,
        ("prompt_tokens_total",): 200, ("cached_tokens_total",): 50, ("generation_tokens_total",): 34,
        ("num_requests_total",): 7, ("num_aborted_requests_total",): 2,
        ("finished_requests_total", "stop"): 5,
        ("pauses_total", "in_place"): 3, ("pause_seconds_total", "in_place"): 4.5,
        ("weight_updates_total", "committed", "disk"): 2, ("weight_updates_total", "failed", "disk"): 1,
        ("memory_reserved_bytes",): 3 << 20,
        ("memory_bytes", "weights"): 2 << 20, ("memory_bytes", "kv"): 1 << 20,
        ("component_bytes", "vae"): 4096, ("prompt_cache_bytes",): 3 << 10,
        ("prompt_cache_hits_total",): 8, ("prompt_cache_misses_total",): 5,
        ("step_token_limit",): 64, ("failed_steps_total",): 1,
        ("num_http_reqs",): 1, ("http_requests_total", "stop"): 1, ("http_requests_total", "length"): 1,
        ("control_calls_total", "pause_generation", "ok"): 2,
        ("control_seconds_total", "pause_generation", "ok"): 0.75,
        ("control_calls_total", "flush_cache", "error"): 1, ("errors_total", "not_idle"): 1,
        ("e2e_request_latency_seconds_count",): 2, ("e2e_request_latency_seconds_bucket", "0.5"): 1,
        ("time_to_first_token_seconds_count",): 1, ("time_to_first_token_seconds_bucket", "0.2"): 1,
        ("inter_token_latency_seconds_count",): 10, ("inter_token_latency_seconds_bucket", "0.1"): 10,
        ("inter_token_latency_seconds_bucket", "0.05"): 0,
        ("queue_time_seconds_count",): 4, ("queue_time_seconds_bucket", "0.002"): 0,
        ("queue_time_seconds_bucket", "0.005"): 4, ("sample_latency_seconds_sum",): 4.0,
        ("sample_staleness_epochs_bucket", "0"): 3, ("sample_staleness_epochs_bucket", "1"): 4,
        ("engine_restarts_total",): 0,
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)
    info = next(name for name in found if name[0] == "engine_info")
    assert info[1:] == ("cpu", "float32", "0", "/models/tiny", "v0")


def test_the_documentation_lists_every_metric_and_no_other(tmp_path):
    found = {
        re.sub("_(bucket|sum|count)$", "", name) for name, *_ in asyncio.run(_what_a_scrape_says(tmp_path))
    }
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `caesura:(\w+)` \| ([^|]+) \|", text, re.MULTILINE)
    empty = {"stage_seconds_total", "stage_runs_total"}  # of an engine that has not run
    empty |= {"http_connections_ended_total"}  # of peers that behave
    empty |= IMAGE_FIGURES
    assert {name for name, _ in rows} - empty == found
    for name, kind in rows:
        assert name.endswith("_total") == kind.startswith("counter")


IMAGE_FIGURES = {"denoise_throughput", "denoise_steps_total", "image_samples"}
TOKEN_FIGURES = {
    "gen_throughput", "generation_tokens_total", "prompt_tokens_total", "cached_tokens_total",
    "cache_hit_rate",
    "token_usage", "num_used_tokens", "num_cached_tokens", "max_total_num_tokens",
}  # fmt: skip


def test_an_image_engine_has_steps_and_no_tokens(tmp_path):
    load = ImageLoad(encoding=1, denoising=2, decoding=3)

    def paints(request):
        return [
            msgspec.structs.replace(reply, images=load) if isinstance(reply, GetStatusReqOutput) else reply
            for reply in busy(request)
        ]

    async def scrape():
        async with served(tmp_path, paints) as it:
            return await it.scrape()

    found = asyncio.run(scrape())
    names = {name for name, *_ in found}
    assert names >= IMAGE_FIGURES
    assert not names & TOKEN_FIGURES
    stages = {stage: found["image_samples", stage] for stage in ("encoding", "denoising", "decoding")}
    assert stages == {"encoding": 1, "denoising": 2, "decoding": 3}
    assert found["denoise_steps_total",] == 34


def test_every_series_names_the_model_and_media_types_say_their_charset_once(tmp_path):
    async def scrape(accept):
        async with served(tmp_path) as it:
            return await it.http.get("/metrics", headers={"accept": accept})

    plain = asyncio.run(scrape("text/plain;version=1.0.0"))
    strict = asyncio.run(scrape("application/openmetrics-text;version=1.0.0"))
    for reply in (plain, strict):
        assert reply.headers["content-type"].count("charset") == 1, (
            "Prometheus refuses a parameter that comes twice"
        )
    assert plain.headers["content-type"].startswith("text/plain; version=1.0.0")
    assert strict.headers["content-type"].startswith("application/openmetrics-text")
    for families in (text_string_to_metric_families(plain.text), parse_openmetrics(strict.text)):
        for family in families:
            assert all(sample.name.startswith(family.name) for sample in family.samples)
            assert family.name.startswith(PREFIX)
            assert all(sample.labels["model_name"] == "policy" for sample in family.samples)


def test_simultaneous_scrapes_cost_the_engine_one_status(tmp_path):
    async def ask():
        async with served(tmp_path) as it:
            await asyncio.gather(*(it.http.get("/metrics") for _ in range(20)))
            return it.engine.requests.qsize()

    assert asyncio.run(ask()) == 1


def test_an_engine_that_is_gone_leaves_its_last_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_watch, "FRESH_S", 0.0)
    monkeypatch.setattr(engine_watch, "ANSWER_S", 0.2)

    async def ask():
        async with served(tmp_path) as it:
            await it.scrape()
            it.engine.close()
            return await it.scrape(), (await it.http.get("/dashboard/data")).json()

    found, page = asyncio.run(ask())
    assert (found["engine_up",], found["generation_tokens_total",], found["gen_throughput",]) == (0, 34, 0)
    assert found["engine_status_age_seconds",] > 0
    assert (page["answered"], page["status"]["generated_tokens"], page["history"]) == (False, 34, None)


def test_an_engine_that_never_answered_is_down_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_watch, "ANSWER_S", 0.1)

    async def ask():
        async with served(tmp_path, handler=lambda request: []) as it:
            it.metrics.error("timed_out")
            return await it.scrape(), (await it.http.get("/dashboard/data")).json()

    found, page = asyncio.run(ask())
    assert found["engine_up",] == 0
    assert ("generation_tokens_total",) not in found
    assert found["errors_total", "timed_out"] == 1
    assert (page["answered"], page["status"]) == (False, None)


def test_the_page_gets_only_news(tmp_path):
    async def ask():
        async with served(tmp_path) as it:
            first = (await it.http.get("/dashboard/data")).json()
            second = (await it.http.get("/dashboard/data", params={"after": 1, "since": first["now"]})).json()
            below = (await it.http.get("/dashboard/data", params={"after": -1})).json()
            beyond = [await it.http.get("/dashboard/data", params={"after": n}) for n in (2**63, 10**30)]
            return first, second, below, beyond

    first, second, below, beyond = asyncio.run(ask())
    assert [answer.status_code for answer in beyond] == [400, 400]
    assert [event["seq"] for event in first["history"]["events"]] == [1, 2]
    assert [event["seq"] for event in second["history"]["events"]] == [2]
    assert below["history"]["events"] == first["history"]["events"]
    assert len(first["ticks"]) == 1
    assert second["ticks"] == []
    assert first["model_name"] == "policy"


def test_the_page_is_open_and_its_data_is_not(tmp_path):
    async def ask():
        async with served(tmp_path, api_key="secret") as it:
            page = await it.http.get("/dashboard")
            root = await it.http.get("/")
            scrape = await it.http.get("/metrics")
            refused = await it.http.get("/dashboard/data")
            told = await it.http.get("/dashboard/data", headers={"authorization": "Bearer secret"})
            return page, root, scrape, refused, told

    page, root, scrape, refused, told = asyncio.run(ask())
    assert [reply.status_code for reply in (page, scrape, refused, told)] == [200, 200, 401, 200]
    assert not any(b"secret" in reply.content for reply in (page, root, scrape, refused, told))
    assert (root.status_code, root.headers["location"], root.content) == (307, "dashboard", b"")
    assert told.headers["cache-control"] == "no-store"


def test_the_content_policy_allows_only_the_pages_own_parts(tmp_path):
    async def ask():
        async with served(tmp_path) as it:
            return await it.http.get("/dashboard")

    page = asyncio.run(ask())
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digest = b64encode(sha256(inline.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert not re.search(r"(src|href|action)=\"(?!data:)", page.text), "it loads nothing"
    assert "innerHTML" not in page.text, "what is told becomes text"


def test_all_tags_of_memory_have_a_colour_on_the_page():
    css = (document.FOLDER / "page.css").read_text(encoding="utf-8")
    script = (document.FOLDER / "facts.js").read_text(encoding="utf-8")
    stacked = re.findall(r'"(\w+)"', re.search(r"const TAGS = \[(.*?)\]", script)[1])
    assert sorted(stacked) == sorted(MemoryByTag.__struct_fields__)
    assert all(f".fill-{tag} " in css for tag in stacked)


def test_prometheus_scrapes_the_front_end_of_the_compose_file():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))["services"]
    (job,) = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert job["metrics_path"] == metrics.metrics.paths.copy().pop()
    assert compose[host]["ports"] == [f"127.0.0.1:{port}:{port}"], "of this machine only"
    assert set(compose[host]["networks"]) & set(compose["prometheus"]["networks"])
    assert compose["scheduler"]["network_mode"] == "none"
    assert ServeOptions().port == int(port)
