"""Prometheus metrics: ``/metrics``, with the front end's counters and what the engine's status says.

Invariants: counting costs about a microsecond (prometheus_client's histograms can neither observe a value
several times at once nor give percentiles). Names begin with :data:`PREFIX`, or are vLLM's; series have
``model_name``, as SGLang's. Without the engine a scrape has its last values, and ``engine_up`` 0.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from litestar import Response, get
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ....io_struct import (
    DriftReport,
    DriftState,
    GenerationState,
    GetStatusReqOutput,
    MemoryTag,
    PauseMode,
    WeightsState,
)
from ....io_struct.distribution import EPOCHS, SECONDS, Histogram, one_two_five
from ..bodies import HTTPRequest
from ..context import Front
from ..error_responses import printable
from ..server import Connections
from .document import Percentiles
from .engine_watch import EngineWatch, Look, percentiles

if TYPE_CHECKING:
    from ...group.replicas import ReplicaFleet

PREFIX = "caesura:"
_DRIFT = {
    "mean_abs": "Mean difference of log-probabilities scored again, without sign.",
    "p99": "99th percentile of these differences.",
    "max_abs": "Largest of these differences.",
    "k1": "KL divergence of the scores, estimated by the mean of -log r.",
    "k3": "KL divergence of the scores, estimated by the mean of r - 1 - log r.",
    "ess": "Effective sample size over tokens, with the ratios r as weights.",
    "clip_share": "Share of tokens with r outside of [1/2, 2].",
}
Values = float | Mapping[Any, float]
"""One value, or values by label (a string) or labels (a tuple of strings)."""


class Metrics:
    """Counters of the front end; one object per process, used from its event loop."""

    def __init__(self, max_connections: int = 4096, fleet: "ReplicaFleet | None" = None) -> None:
        self.engine = EngineWatch(fleet)
        self.connections = Connections(max_connections)
        self._started = 0
        self._finished: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._control: Counter[tuple[str, str]] = Counter()
        self._control_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._e2e = Histogram(one_two_five(-2, 3))
        self._first_token = Histogram(one_two_five(-3, 2))
        self._inter_token = Histogram(one_two_five(-4, 1))

    @property
    def under_way(self) -> int:
        return self._started - self._finished.total()

    def request_started(self) -> None:
        """Count a generation that was accepted; exactly one :meth:`request_finished` must follow."""
        self._started += 1

    def request_finished(
        self, tokens: int, seconds: float, first_token_s: float | None, finish_type: str
    ) -> None:
        """Count a finished generation; ``first_token_s`` is None without streaming."""
        self._finished[finish_type] += 1
        self._e2e.observe(seconds)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
            if tokens > 1:
                self._inter_token.observe((seconds - first_token_s) / (tokens - 1), tokens - 1)

    def control(self, name: str, seconds: float, ok: bool) -> None:
        key = (name, "ok" if ok else "error")
        self._control[key] += 1
        self._control_s[key] += seconds

    def error(self, code: str) -> None:
        self._errors[code] += 1

    def latencies(self) -> list[Percentiles]:
        """Return percentiles of what clients of this server waited for, and of what the engine counts."""
        histograms = {"first token": self._first_token, "between tokens": self._inter_token}
        return percentiles(self.engine.histograms() | histograms)

    def add_vllm_to(self, families: "Families") -> None:
        """Add what vLLM 0.33 counts of requests, by its names."""
        families.counter("request_success", "Finished generations.", self._finished, ("finished_reason",))
        families.histogram("e2e_request_latency_seconds", "Latency of a generation.", self._e2e)
        families.histogram("time_to_first_token_seconds", "Time to first token.", self._first_token)
        families.histogram("inter_token_latency_seconds", "Inter-token latency.", self._inter_token)

    def add_to(self, families: "Families") -> None:
        gauge, counter, histogram = families.gauge, families.counter, families.histogram
        text = "New engine processes seen since this server began."
        counter("engine_restarts", text, self.engine.restarts)
        gauge("num_http_reqs", "Generations in progress in the front end.", self.under_way)
        gauge("num_http_connections", "Open connections.", len(self.connections))
        text = "Connections that the server refused or closed, by reason."
        counter("http_connections_ended", text, self.connections.closed, ("reason",))
        counter("http_requests", "Finished generations by finish reason.", self._finished, ("finish_reason",))
        text = "Latency of a generation, from arrival to its end."
        histogram("e2e_request_latency_seconds", text, self._e2e)
        text = "Time to first token of streamed generations."
        histogram("time_to_first_token_seconds", text, self._first_token)
        text = "Inter-token latency: the mean of each streamed generation, counted once per token."
        histogram("inter_token_latency_seconds", text, self._inter_token)
        counter("control_calls", "Commands by name and result.", self._control, ("call", "result"))
        text = "Time spent in commands, by name and result."
        counter("control_seconds", text, self._control_s, ("call", "result"))
        counter("errors", "Error responses by code.", self._errors, ("code",))


class Families(Collector):
    """Gathers metric families; ``model_name`` becomes a label of every series."""

    def __init__(self, model_name: str, prefix: str = PREFIX) -> None:
        self._model_name = model_name
        self._prefix = prefix
        self._found: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        return self._found

    def gauge(self, name: str, text: str, values: Values, labels: Sequence[str] = ()) -> None:
        self._add(GaugeMetricFamily(self._prefix + name, text, labels=("model_name", *labels)), values)

    def counter(self, name: str, text: str, values: Values, labels: Sequence[str] = ()) -> None:
        self._add(CounterMetricFamily(self._prefix + name, text, labels=("model_name", *labels)), values)

    def states(self, name: str, text: str, label: str, states: Sequence[str], now: str | None) -> None:
        self.gauge(name, text, {state: float(state == now) for state in states}, (label,))

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        family = HistogramMetricFamily(self._prefix + name, text, labels=("model_name",))
        buckets, total = histogram.cumulative()
        family.add_metric((self._model_name,), buckets=buckets, sum_value=total)
        self._found.append(family)

    def info(self, name: str, text: str, values: dict[str, str]) -> None:
        family = InfoMetricFamily(self._prefix + name, text, labels=("model_name",))
        family.add_metric((self._model_name,), values)
        self._found.append(family)

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> None:
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            family.add_metric((self._model_name, *((key,) if isinstance(key, str) else key)), value)
        self._found.append(family)


def engine_families(families: Families, look: Look) -> None:
    text = "1 if the engine answers; if 0, the other metrics show its last known values."
    families.gauge("engine_up", text, look.answered)
    if look.status is None:
        return
    families.gauge("engine_status_age_seconds", "Age of the engine metrics.", look.age_s)
    _state(families, look.status)
    _load(families, look.status, look.throughput)
    _memory(families, look.status)
    _totals(families, look.status)
    if look.status.drift is not None:
        _drift(families, look.status.drift)


def _state(families: Families, status: GetStatusReqOutput) -> None:
    states, gauge = families.states, families.gauge
    text = "1 for the current state of generation."
    states("engine_state", text, "state", get_args(GenerationState), status.generation)
    text = "1 for the mode of the current pause."
    states("pause_mode", text, "mode", get_args(PauseMode), status.pause_mode)
    text = "1 for the current state of the weights."
    states("weights_state", text, "state", get_args(WeightsState), status.weights)
    released = {tag: tag in status.released_tags for tag in get_args(MemoryTag)}
    gauge("memory_released", "1 for each tag whose memory is released.", released, ("tag",))
    gauge("pause_age_seconds", "Duration of the current pause; 0 if not paused.", status.pause_age_s or 0.0)
    paused = _holding_kv(status) if status.generation == "paused" else 0
    gauge("num_paused_reqs", "Requests frozen by a pause, with their KV cache.", paused)
    gauge("weights_epoch", "Number of committed weight updates.", status.weights_epoch)
    words = {
        "weight_version": status.weight_version, "model_path": status.model_path, "dtype": status.dtype,
        "device": status.device, "engine_version": status.version,
    }  # fmt: skip
    words = {name: printable(word, 1024) for name, word in words.items()}
    families.info("engine", "The model and the engine that serve it.", words)


def _load(families: Families, status: GetStatusReqOutput, throughput: float) -> None:
    gauge = families.gauge
    if status.images is None:
        _tokens(families, status, throughput)
    else:
        gauge("denoise_throughput", "Denoise steps of samples per second.", throughput)
        text = "Running samples of an image engine, by the step that each needs next."
        gauge("image_samples", text, msgspec.structs.asdict(status.images), ("stage",))
        families.counter("denoise_steps", "Denoise steps of samples.", status.generated_tokens)
    text = "Running requests: those that hold KV cache, in prefill or decode."
    gauge("num_running_reqs", text, _holding_kv(status))
    text = "Running requests whose prefill is not complete."
    gauge("num_prefilling_reqs", text, status.prefilling_requests)
    gauge("num_queue_reqs", "Requests in the waiting queue.", status.waiting_requests)
    gauge("max_running_requests", "Maximum number of running requests.", status.max_running_requests)
    text = "Seconds since the last step finished; 0 before the first."
    gauge("step_age_seconds", text, status.last_step_age_s or 0.0)
    limit = status.step_failures.token_limit
    if limit is not None:
        text = "Maximum tokens per step (samples of an image engine), lowered after running out of memory."
        gauge("step_token_limit", text, limit)


def _tokens(families: Families, status: GetStatusReqOutput, throughput: float) -> None:
    gauge, counter, kv, totals = families.gauge, families.counter, status.kv, status.totals
    gauge("gen_throughput", "Generation throughput in tokens per second.", throughput)
    gauge("num_used_tokens", "KV cache tokens held by running requests.", kv.held)
    gauge("num_cached_tokens", "KV cache tokens held by the prefix cache alone (evictable).", kv.cached)
    gauge("max_total_num_tokens", "Size of the KV cache pool in tokens.", kv.total)
    text = "Fraction of the KV cache pool held by running requests, 0 to 1."
    gauge("token_usage", text, kv.held / max(kv.total, 1))
    rate = totals.cached_tokens / max(totals.prompt_tokens, 1)
    gauge("cache_hit_rate", "Fraction of prompt tokens found in the prefix cache, since start.", rate)
    counter("generation_tokens", "Generated tokens.", status.generated_tokens)
    counter("prompt_tokens", "Prompt tokens of requests that have been scheduled.", totals.prompt_tokens)
    counter("cached_tokens", "Prompt tokens found in the prefix cache.", totals.cached_tokens)
    if (tier := status.kv_tier) is not None:
        held = {"host": tier.host_bytes, "file": tier.file_bytes}
        gauge("kv_tier_bytes", "KV beside the pool, by place.", held, ("place",))
        text = "Tokens whose KV was copied back to the pool instead of computed."
        counter("kv_tier_hit_tokens", text, tier.hit_tokens)
        counter("kv_tier_stored_tokens", "Tokens whose KV was copied out of the pool.", tier.stored_tokens)
        spent = {"load": tier.load_s, "store": tier.store_s}
        counter("kv_tier_copy_seconds", "Time that these copies took.", spent, ("direction",))
        text = "Time that computing the hits would have taken, estimated."
        counter("kv_tier_saved_prefill_seconds", text, tier.saved_prefill_s)
        counter("kv_tier_failures", "Copies that failed.", tier.failures)
    if totals.drafts:
        text = "Tokens of a request's step with drafts, mean since start."
        gauge("spec_accept_length", text, 1 + totals.accepted_tokens / totals.drafts)
        text = "Fraction of drafted tokens that were sampled, since start."
        gauge("spec_accept_rate", text, totals.accepted_tokens / totals.drafted_tokens)
        counter("spec_draft_tokens", "Drafted tokens.", totals.drafted_tokens)
        counter("spec_accepted_tokens", "Drafted tokens that were sampled.", totals.accepted_tokens)


def _memory(families: Families, status: GetStatusReqOutput) -> None:
    memory, gauge = status.device_memory, families.gauge
    gauge("memory_reserved_bytes", "Bytes reserved by the device allocator.", memory.reserved)
    gauge("memory_allocated_bytes", "Bytes in use within the reserved memory.", memory.allocated)
    if memory.available is not None:
        gauge("memory_available_bytes", "Free bytes on the device.", memory.available)
    if status.memory_by_tag is not None:
        text = "Reserved memory by purpose, at the last memory event."
        gauge("memory_bytes", text, msgspec.structs.asdict(status.memory_by_tag), ("tag",))
    on_device = {each.name: each.device_bytes for each in status.components}
    if on_device:
        text = "Bytes on the device of components that come and go."
        gauge("component_bytes", text, on_device, ("component",))
    if (prompts := status.prompt_cache) is not None:
        gauge("prompt_cache_bytes", "Bytes of encoded prompts that are kept.", prompts.nbytes)
        families.counter("prompt_cache_hits", "Prompts that were found encoded.", prompts.hits)
        families.counter("prompt_cache_misses", "Prompts that were encoded.", prompts.misses)


def _totals(families: Families, status: GetStatusReqOutput) -> None:
    counter, totals, failures = families.counter, status.totals, status.step_failures
    ended = totals.finished_requests
    counter("num_requests", "Finished samples.", sum(ended.values()))
    counter("num_aborted_requests", "Aborted samples.", ended.get("abort", 0))
    counter("finished_requests", "Finished samples by finish reason.", ended, ("finish_reason",))
    text = "Retractions: times a request's KV cache was freed, to be recomputed."
    counter("num_retracted_requests", text, status.num_retractions)
    counter("steps", "Executed steps.", status.step)
    counter("failed_steps", "Steps that failed.", failures.failed)
    counter("retried_steps", "Steps that were computed again after a failure.", failures.retried)
    pauses = {pause.mode: pause.count for pause in totals.pauses}
    paused_s = {pause.mode: pause.seconds for pause in totals.pauses}
    counter("pauses", "Pauses by mode.", pauses, ("mode",))
    counter("pause_seconds", "Time spent paused, including the current pause.", paused_s, ("mode",))
    updates = {(update.source, "committed"): update.committed for update in totals.updates}
    updates |= {(update.source, "failed"): update.failed for update in totals.updates}
    text = "Weight updates by transport and result; a failed one left the weights poisoned."
    counter("weight_updates", text, updates, ("source", "result"))
    emptied = {each.place: each.count for each in totals.emptied}
    returned = {each.place: each.freed_bytes for each in totals.emptied}
    text = "Times the device allocator's cache was emptied, by place."
    counter("cache_emptyings", text, emptied, ("place",))
    text = "Bytes returned to the system by emptying the cache, by place."
    counter("cache_emptied_bytes", text, returned, ("place",))
    stages = {stage.name: stage.total_s for stage in status.stages}
    runs = {stage.name: stage.count for stage in status.stages}
    counter("stage_seconds", "Time by stage; update.* are the stages of weight updates.", stages, ("stage",))
    counter("stage_runs", "Runs by stage.", runs, ("stage",))
    if (grammars := status.grammars) is not None:
        became = {"compiled": grammars.compiled, "failed": grammars.failed}
        counter("grammars", "Grammars by what became of them.", became, ("result",))
        counter("grammar_wait_seconds", "Time that requests waited for grammars.", grammars.wait_s)
        counter("grammar_masks", "Positions whose allowed tokens were computed.", grammars.masks)
        counter("grammar_mask_seconds", "Time that this took.", grammars.mask_s)
    if totals.queue_time.counts:
        text = "Time of finished samples from arrival to the first scheduled step."
        families.histogram("queue_time_seconds", text, Histogram(SECONDS, totals.queue_time))
        text = "Time of finished samples from arrival to the end, in the engine."
        families.histogram("sample_latency_seconds", text, Histogram(SECONDS, totals.latency_s))
        text = "Weight commits between the first and the last token of finished samples."
        families.histogram("sample_staleness_epochs", text, Histogram(EPOCHS, totals.staleness))


def _drift(families: Families, report: DriftReport) -> None:
    gauge, spans = families.gauge, [part for part in report.parts if part.by == "span"]
    gauge("drift_samples", "Samples that the last self-check has scored again.", report.samples)
    gauge(
        "drift_tokens",
        "Tokens of the last self-check, by span.",
        {each.name: each.tokens for each in spans},
        ("span",),
    )
    for name, text in _DRIFT.items():
        gauge(f"drift_{name}", text, {each.name: getattr(each, name) for each in spans}, ("span",))
    if report.update is not None:
        text = "KL divergence (k3) between the weights before and after the last update."
        gauge("drift_update_k3", text, report.update.k3)
    families.states("drift_state", "State of the self-check.", "state", get_args(DriftState), report.state)


def _holding_kv(status: GetStatusReqOutput) -> int:
    return status.running_requests + status.prefilling_requests


def vllm_families(families: Families, status: GetStatusReqOutput) -> None:
    """Add vLLM 0.33's figures of the engine, by its names."""
    gauge, counter, kv, totals = families.gauge, families.counter, status.kv, status.totals
    gauge("num_requests_running", "Requests that hold KV cache.", _holding_kv(status))
    gauge("num_requests_waiting", "Requests in the waiting queue.", status.waiting_requests)
    gauge("kv_cache_usage_perc", "Fraction of the KV cache in use, 0 to 1.", kv.held / max(kv.total, 1))
    counter("num_preemptions", "Retractions of requests.", status.num_retractions)
    counter("prompt_tokens", "Prompt tokens of requests that have been scheduled.", totals.prompt_tokens)
    counter("generation_tokens", "Generated tokens.", status.generated_tokens)
    counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prompt_tokens)
    counter("prefix_cache_hits", "Prompt tokens found in it.", totals.cached_tokens)
    if totals.drafts:
        counter("spec_decode_num_drafts", "Times that a request had drafts in a step.", totals.drafts)
        counter("spec_decode_num_draft_tokens", "Drafted tokens.", totals.drafted_tokens)
        text = "Drafted tokens that were sampled."
        counter("spec_decode_num_accepted_tokens", text, totals.accepted_tokens)
    sizes = {(str(kv.page_size), str(kv.total // kv.page_size)): 1.0}
    gauge("cache_config_info", "Pages of the KV cache.", sizes, ("block_size", "num_gpu_blocks"))


def _replicas(families: Families, fleet: "ReplicaFleet") -> None:
    up = {member.name: member.serves for member in fleet.members}
    families.gauge("replica_up", "1 for each replica that serves.", up, ("replica",))
    load = {member.name: member.load for member in fleet.members}
    families.gauge("replica_load", "Samples that a replica has to generate.", load, ("replica",))
    text = "Samples that were continued on another replica."
    families.counter("moved_requests", text, fleet.dispatcher.moved)


@get("/metrics", opt={"access": "open"}, summary="Prometheus metrics")
async def metrics(request: HTTPRequest, front: Front) -> Response[bytes]:
    """Return the metrics, never an error: without an answer of the engine ``caesura:engine_up`` is 0."""
    look = await front.metrics.engine.look(front.client)
    families = Families(front.options.model_name)
    engine_families(families, look)
    front.metrics.add_to(families)
    if front.fleet is not None:
        _replicas(families, front.fleet)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(families)
    if front.options.vllm_metrics:
        vllm = Families(front.options.model_name, "vllm:")
        front.metrics.add_vllm_to(vllm)
        if look.status is not None:
            vllm_families(vllm, look.status)
        registry.register(vllm)
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    if isinstance(encode, partial) and encode.keywords.get("escaping") == "underscores":
        # Valid names should stay as they are, but prometheus_client takes the colon from those of samples,
        # and only those.
        encode = partial(encode, escaping="allow-utf-8")
    if media_type.startswith("text/"):  # Litestar adds the charset itself; Prometheus refuses a duplicate
        media_type = media_type.replace("; charset=utf-8", "")
    return Response(encode(registry), media_type=media_type)
