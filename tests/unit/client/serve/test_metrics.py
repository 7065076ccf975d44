"""Metrics: what is counted is what is scraped, and one look a second at the engine however many ask."""

import asyncio
import re
import threading
from base64 import b64encode
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.fake_scheduler import FakeScheduler, answer, memory_event, silent, status_reply
from support.http_server import front_end

from caesura.client import AsyncSchedulerClient
from caesura.client.serve.app import ServeOptions, create_app
from caesura.client.serve.pages import document, engine_watch, metrics
from caesura.client.serve.pages.document import Tick
from caesura.client.serve.pages.engine_watch import GAP_S, TICK_S, TICKS, EngineWatch, Ticks, percentiles
from caesura.client.serve.pages.metrics import PREFIX, Metrics
from caesura.io_struct import (
    ComponentStatus,
    Distribution,
    DriftPart,
    DriftReport,
    DriftUpdate,
    EmptyCacheTotal,
    EngineTotals,
    GetStatusReqInput,
    GetStatusReqOutput,
    GrammarStatus,
    ImageLoad,
    KVTierStatus,
    MemoryByTag,
    PauseTotal,
    PromptCacheStatus,
    StageStatus,
    StepFailures,
    UpdateTotal,
)
from caesura.io_struct.distribution import Histogram, one_two_five

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
    drafts=2,
    drafted_tokens=8,
    accepted_tokens=6,
)
BY_TAG = memory_event(1).by_tag
DRIFT = DriftReport(
    weights_epoch=3,
    weight_version="3",
    samples=2,
    tokens=60,
    state="unhealthy",
    k3=0.5,
    parts=[
        DriftPart(by="span", name="clean", tokens=60, k3=0.5, max_abs=2.0),
        DriftPart(by="span", name="stale_kv", tokens=4, k3=0.75, max_abs=1.0),
        DriftPart(by="position", name="0-255", tokens=60, k3=0.5, max_abs=2.0),
    ],
    update=DriftUpdate(tokens=30, k3=0.25),
)
KV_TIER = KVTierStatus(
    host_bytes=4096, file_bytes=512, limit_bytes=8192, file_limit_bytes=1024, hit_tokens=48,
    stored_tokens=96, load_s=0.25, store_s=0.5, saved_prefill_s=1.5, failures=1,
)  # fmt: skip


def busy(request):
    if not isinstance(request, GetStatusReqInput):
        return answer(request)
    return [
        msgspec.structs.replace(
            status_reply(request),
            totals=TOTALS,
            memory_by_tag=BY_TAG,
            step_failures=StepFailures(failed=1, token_limit=64),
            components=[ComponentStatus(name="vae", residency="layerwise", nbytes=9000, device_bytes=4096)],
            drift=DRIFT,
            prompt_cache=PromptCacheStatus(entries=3, nbytes=3 << 10, limit_bytes=1 << 20, hits=8, misses=5),
            kv_tier=KV_TIER,
            grammars=GrammarStatus(compiled=3, failed=1, waiting=0, wait_s=0.5, masks=40, mask_s=0.25),
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


def test_drift_is_told_by_span_and_ends_the_health(tmp_path):
    async def ask():
        async with served(tmp_path) as it:
            return await it.scrape(), await it.http.get("/health"), await it.http.get("/ready")

    scraped, health, ready = asyncio.run(ask())
    assert (scraped["drift_k3", "clean"], scraped["drift_k3", "stale_kv"]) == (0.5, 0.75)
    assert (scraped["drift_max_abs", "clean"], scraped["drift_tokens", "stale_kv"]) == (2.0, 4)
    assert (scraped["drift_samples",], scraped["drift_update_k3",]) == (2, 0.25)
    assert (scraped["drift_state", "unhealthy"], scraped["drift_state", "ok"]) == (1, 0)
    assert (health.status_code, ready.status_code) == (503, 503)
    assert "drift: k3 = 0.5 is over drift_limit" in health.text


def get(tmp_path, *paths, headers=None, **options):
    """Return the server's answers, one after the other."""

    async def ask():
        async with served(tmp_path, **options) as it:
            return [await it.http.get(path, headers=headers) for path in paths]

    return asyncio.run(ask())


@pytest.fixture
def impatient(monkeypatch):
    """Every look asks the engine, and waits for it only a moment."""
    monkeypatch.setattr(engine_watch, "FRESH_S", 0.0)
    monkeypatch.setattr(engine_watch, "ANSWER_S", 0.2)


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
        ("grammars_total", "compiled"): 3, ("grammars_total", "failed"): 1, ("grammar_masks_total",): 40,
        ("kv_tier_bytes", "host"): 4096, ("kv_tier_bytes", "file"): 512,
        ("kv_tier_hit_tokens_total",): 48, ("kv_tier_stored_tokens_total",): 96,
        ("kv_tier_copy_seconds_total", "load"): 0.25, ("kv_tier_copy_seconds_total", "store"): 0.5,
        ("kv_tier_saved_prefill_seconds_total",): 1.5, ("kv_tier_failures_total",): 1,
        ("grammar_wait_seconds_total",): 0.5, ("grammar_mask_seconds_total",): 0.25,
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
        ("spec_accept_length",): 4, ("spec_accept_rate",): 0.75,
        ("spec_draft_tokens_total",): 8, ("spec_accepted_tokens_total",): 6, ("engine_restarts_total",): 0,
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
    "cache_hit_rate", "token_usage", "num_used_tokens", "num_cached_tokens", "max_total_num_tokens",
}  # fmt: skip


def test_an_image_engine_has_steps_and_no_tokens(tmp_path):
    load = ImageLoad(encoding=1, denoising=2, decoding=3)

    def paints(request):
        (reply,) = busy(request)
        return [msgspec.structs.replace(reply, images=load)]

    (reply,) = get(tmp_path, "/metrics", handler=paints)
    found = samples(text_string_to_metric_families(reply.text))
    names = {name for name, *_ in found}
    assert names >= IMAGE_FIGURES
    assert not names & TOKEN_FIGURES
    stages = [found["image_samples", stage] for stage in ("encoding", "denoising", "decoding")]
    assert (stages, found["denoise_steps_total",]) == ([1, 2, 3], 34)


def test_every_series_names_the_model(tmp_path):
    (plain,), (strict,) = (
        get(tmp_path, "/metrics", headers={"accept": f"{kind};version=1.0.0"})
        for kind in ("text/plain", "application/openmetrics-text")
    )
    for reply in (plain, strict):  # Prometheus refuses a parameter that comes twice
        assert reply.headers["content-type"].count("charset") == 1
    assert plain.headers["content-type"].startswith("text/plain; version=1.0.0")
    assert strict.headers["content-type"].startswith("application/openmetrics-text")
    for families in (text_string_to_metric_families(plain.text), parse_openmetrics(strict.text)):
        for family in families:
            assert all(sample.name.startswith(family.name) for sample in family.samples)
            assert family.name.startswith(PREFIX)
            assert all(sample.labels["model_name"] == "policy" for sample in family.samples)


async def test_simultaneous_scrapes_cost_the_engine_one_status(tmp_path):
    asked = threading.Event()

    def once_all_ask(request):
        asked.wait()
        return busy(request)

    async with served(tmp_path, once_all_ask) as it:
        scrapes = [asyncio.ensure_future(it.http.get("/metrics")) for _ in range(20)]
        for _ in range(1000):  # more turns than a scrape takes until it waits for the engine
            await asyncio.sleep(0)
        asked.set()
        await asyncio.gather(*scrapes)
        assert it.engine.requests.qsize() == 1


async def test_an_engine_that_is_gone_leaves_its_last_figures(tmp_path, impatient):
    async with served(tmp_path) as it:
        await it.scrape()
        it.engine.close()
        found, page = await it.scrape(), (await it.http.get("/dashboard/data")).json()
    assert (found["engine_up",], found["generation_tokens_total",], found["gen_throughput",]) == (0, 34, 0)
    assert found["engine_status_age_seconds",] > 0
    assert (page["answered"], page["status"]["generated_tokens"], page["history"]) == (False, 34, None)


async def test_an_engine_that_never_answered_is_down_and_no_error(tmp_path, impatient):
    async with served(tmp_path, handler=silent) as it:
        it.metrics.error("timed_out")
        found, page = await it.scrape(), (await it.http.get("/dashboard/data")).json()
    assert found["engine_up",] == 0
    assert ("generation_tokens_total",) not in found
    assert found["errors_total", "timed_out"] == 1
    assert (page["answered"], page["status"]) == (False, None)


def test_the_page_gets_only_news(tmp_path):
    data = "/dashboard/data"
    first, second, below, *beyond = get(
        tmp_path, data, f"{data}?after=1&since=1e12", *(f"{data}?after={n}" for n in (-1, 2**63, 10**30))
    )
    assert [answer.status_code for answer in beyond] == [400, 400]
    first, second, below = (each.json() for each in (first, second, below))
    assert [event["seq"] for event in first["history"]["events"]] == [1, 2]
    assert [event["seq"] for event in second["history"]["events"]] == [2]
    assert below["history"]["events"] == first["history"]["events"]
    assert (len(first["ticks"]), second["ticks"]) == (1, [])
    assert first["model_name"] == "policy"


def test_the_page_is_open_and_its_data_is_not(tmp_path):
    paths = ("/dashboard", "/", "/metrics", "/dashboard/data")
    page, root, scrape, refused = get(tmp_path, *paths, api_key="secret")
    bearer = {"authorization": "Bearer secret"}
    (told,) = get(tmp_path, "/dashboard/data", headers=bearer, api_key="secret")
    assert [reply.status_code for reply in (page, scrape, refused, told)] == [200, 200, 401, 200]
    assert not any(b"secret" in reply.content for reply in (page, root, scrape, refused, told))
    assert (root.status_code, root.headers["location"], root.content) == (307, "dashboard", b"")
    assert told.headers["cache-control"] == "no-store"


def test_the_content_policy_allows_only_the_pages_own_parts(tmp_path):
    (page,) = get(tmp_path, "/dashboard")
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


def test_prometheus_scrapes_the_composed_front_end():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))["services"]
    (job,) = yaml.safe_load((ROOT / "docker/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert job["metrics_path"] == metrics.metrics.paths.copy().pop()
    assert compose[host]["ports"] == [f"127.0.0.1:{port}:{port}"], "of this machine only"
    assert set(compose[host]["networks"]) & set(compose["prometheus"]["networks"])
    assert compose["scheduler"]["network_mode"] == "none"
    assert ServeOptions().port == int(port)


@given(st.lists(st.tuples(st.floats(0, 20_000), st.integers(1, 5))))
def test_a_histogram_counts_values_up_to_each_bound(seen):
    bounds = one_two_five(-2, 3)
    histogram = Histogram(bounds)
    for value, times in seen:
        histogram.observe(value, times)
    buckets, total = histogram.cumulative()
    assert [float(bound) for bound, _ in buckets] == [*bounds, float("inf")]
    for bound, count in buckets:
        assert count == sum(times for value, times in seen if value <= float(bound))
    assert total == pytest.approx(sum(value * times for value, times in seen))
    assert (histogram.quantile(0.5) is None) == (percentiles({"in the queue": histogram}) == []) == (not seen)


class Scripted:
    """A client whose engine says what it is told to."""

    def __init__(self, *seen):
        self.seen = list(seen)

    async def status(self, *, owner, timeout):  # noqa: ASYNC109  (as the client's)
        found = self.seen.pop(0)
        if isinstance(found, GetStatusReqOutput):
            return found
        uptime, tokens, incarnation = found
        reply = status_reply(GetStatusReqInput())
        return msgspec.structs.replace(
            reply, uptime_s=uptime, generated_tokens=tokens, incarnation=str(incarnation)
        )


@pytest.mark.parametrize(
    ("seen", "throughput"),
    [
        pytest.param([(5.0, 100, 1)], 0.0, id="one look says nothing"),
        pytest.param([(5.0, 100, 1), (5.25, 125, 1)], 100.0, id="close looks"),
        pytest.param([(5.0, 0, 1), (6.0, 50, 1), (7.0, 250, 1), (8.0, 350, 1)], 100.0, id="the last second"),
        pytest.param([(5.0, 0, 1), (20.0, 3000, 1)], 0.0, id="nothing is known of a gap"),
        pytest.param([(500.0, 9000, 1), (1.0, 10, 2), (2.0, 30, 2)], 20.0, id="another engine"),
        pytest.param([(5.0, 0, 1)] + [(5 + t / 8, 100 * t, 1) for t in range(1, 33)], 800.0, id="many looks"),
    ],
)  # fmt: skip
async def test_throughput_is_of_the_engines_last_second(seen, throughput, impatient):
    watch, client = EngineWatch(), Scripted(*seen)
    for _ in seen:
        look = await watch.look(client)  # type: ignore[arg-type]
    ticks = watch.ticks.since(0.0)
    assert look.throughput == pytest.approx(throughput)
    assert [tick.uptime_s for tick in ticks][-1] == seen[-1][0], "the newest is always among them"
    gaps = [after.uptime_s - before.uptime_s for before, after in pairwise(ticks[:-1])]
    assert all(gap >= TICK_S for gap in gaps)


async def test_ticks_come_while_nobody_asks():
    watch = EngineWatch()
    with pytest.raises(IndexError):  # the script is over
        await watch.sample(Scripted((1.0, 100, 1), (2.0, 200, 1)))  # type: ignore[arg-type]
    assert [tick.generated_tokens for tick in watch.ticks.since(0.0)] == [100, 200]


def tick(uptime):
    return Tick(1000.0 + uptime, float(uptime), 0, 0, 0, 0, 0)


@given(st.integers(1, 30 * TICKS), st.sets(st.integers(1, 30 * TICKS), max_size=3))
def test_ticks_reach_back_to_the_start_and_stay_bounded(count, missing):
    missing = {at for at in missing if at < count}
    kept = Ticks()
    for number in range(count):
        gaps = sum(at <= number for at in missing)
        kept.add(tick(number * TICK_S + gaps * (GAP_S + 1)))
    found = kept.since(0.0)
    assert len(found) <= 2 * TICKS + 1
    assert found[-1].uptime_s == tick((count - 1) * TICK_S + len(missing) * (GAP_S + 1)).uptime_s
    assert found[0].uptime_s <= max(0.05 * found[-1].uptime_s, 0.0)
    assert all(before.uptime_s < after.uptime_s for before, after in pairwise(found))
    recent = found[-min(len(found), TICKS) :]
    assert all(after.gap == (after.uptime_s - before.uptime_s > GAP_S) for before, after in pairwise(recent))
    assert sum(each.gap for each in found) <= len(missing)


def test_a_gap_stays_where_its_tick_is_thinned():
    count = 5 * TICKS
    for at in range(1, count, 197):
        kept = Ticks()
        for number in range(count):
            kept.add(tick(number + (GAP_S + 1 if number >= at else 0)))
        found = kept.since(0.0)
        (gap,) = (position for position, each in enumerate(found) if each.gap)
        assert gap
        assert found[gap - 1].uptime_s < at <= found[gap].uptime_s - GAP_S


def stages(**seconds):
    return [
        StageStatus(name=name.replace("_", "."), count=1, total_s=total, median_s=0.0, longest_s=0.0)
        for name, total in seconds.items()
    ]


async def test_an_update_is_shown_by_stage_afterwards(impatient):
    status = msgspec.structs.replace(status_reply(GetStatusReqInput()), generation="running")

    def after(commits, generation, **seconds):
        totals = EngineTotals(updates=[UpdateTotal(source="disk", committed=commits, failed=0)])
        return msgspec.structs.replace(status, generation=generation, totals=totals, stages=stages(**seconds))

    seen = [
        after(3, "running", pause=9.0, update_copy=5.0),
        after(4, "paused", pause=9.5, update_copy=6.0),
        after(4, "running", pause=9.5, update_copy=6.0, **{"continue": 0.25}),
        after(6, "running", pause=10.5, update_copy=6.0, **{"continue": 0.25}),
    ]

    watch, client = EngineWatch(), Scripted(*seen)
    found = []
    for _ in seen:
        await watch.look(client)  # type: ignore[arg-type]
        found.append(watch.last_update)
    first, paused, one, two = found
    assert (first, paused) == (None, None), "nothing is known of updates before the first look"
    assert one.updates == 1
    assert {name: value for name, value in one.seconds.items() if value} == {
        "pause": 0.5, "update.copy": 1.0, "continue": 0.25
    }  # fmt: skip
    assert (two.updates, two.seconds["pause"], two.seconds["update.copy"]) == (2, 0.5, 0.0)


@given(st.lists(st.floats(0.001, 900), min_size=1), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_lies_in_the_bucket_of_the_exact_value(seen, share):
    bounds = one_two_five(-3, 3)
    histogram = Histogram(bounds)
    for value in seen:
        histogram.observe(value)
    exact = sorted(seen)[max(0, -(-int(share * 1000) * len(seen) // 1000) - 1)]
    upper = next(bound for bound in bounds if exact <= bound)
    lower = max((bound for bound in bounds if bound < exact), default=0.0)
    assert lower <= histogram.quantile(share) <= upper
