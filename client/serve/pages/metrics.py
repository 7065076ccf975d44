"""Prometheus metrics: the front end's counters, and ``/metrics``, which adds those of the engine.

Invariants:
- Counting costs about a microsecond: plain integers, converted to metrics at a scrape.
- A scrape is answered even if the engine does not answer: with its last known values, and ``engine_up`` 0.
- Counters never decrease while their process runs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ....io_struct.distribution import Histogram, one_two_five
from ..connections import Connections
from ..context import Front
from .document import Percentiles
from .engine_metrics import EngineWatch, Look, engine_families, percentiles
from .metric_families import Families

if TYPE_CHECKING:
    from ...group.replicas import ReplicaFleet


class Metrics:
    """Counters of the front end; one object per process, used from its event loop."""

    def __init__(self, max_connections: int = 4096) -> None:
        self.engine = EngineWatch()
        """The engine's status, sampled every second while the server runs."""
        self.connections = Connections(max_connections)
        """The server's open connections."""
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
        """Number of generations in progress."""
        return self._started - self._finished.total()

    def request_started(self) -> None:
        """A generation was accepted; exactly one :meth:`request_finished` must follow."""
        self._started += 1

    def request_finished(
        self, tokens: int, seconds: float, first_token_s: float | None, finish_type: str
    ) -> None:
        """One generation has finished.

        Args:
            tokens: number of generated tokens, over all its samples.
            seconds: from arrival to the end.
            first_token_s: from arrival to the first token; None means unknown, as without streaming.
            finish_type: ``stop``, ``length``, ``abort`` or ``error``.
        """
        self._finished[finish_type] += 1
        self._e2e.observe(seconds)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
            if tokens > 1:
                self._inter_token.observe((seconds - first_token_s) / (tokens - 1), tokens - 1)

    def control(self, name: str, seconds: float, ok: bool) -> None:
        """Command ``name`` took ``seconds`` and succeeded or failed."""
        key = (name, "ok" if ok else "error")
        self._control[key] += 1
        self._control_s[key] += seconds

    def latencies(self) -> list[Percentiles]:
        """Percentiles of what clients of this server waited for, and of what the engine counts."""
        histograms = {"first token": self._first_token, "between tokens": self._inter_token}
        return percentiles(self.engine.histograms() | histograms)

    def error(self, code: str) -> None:
        """A response with an error of this code was sent."""
        self._errors[code] += 1

    def families(self, model_name: str, look: Look) -> list[Metric]:
        """All metric families; ``model_name`` is the served model's name."""
        families = Families(model_name)
        engine_families(families, look)
        families.counter(
            "engine_restarts", "New engine processes seen since this server began.", self.engine.restarts
        )
        self._own(families)
        return families.found

    def _own(self, families: Families) -> None:
        gauge, counter, histogram = families.gauge, families.counter, families.histogram
        gauge("num_http_reqs", "Generations in progress in the front end.", self.under_way)
        gauge("num_http_connections", "Open connections.", len(self.connections))
        text = "Connections that the server refused or closed, by reason."
        counter("http_connections_ended", text, self.connections.closed, ("reason",))
        counter("http_requests", "Finished generations by finish reason.", self._finished, ("finish_reason",))
        histogram(
            "e2e_request_latency_seconds", "Latency of a generation, from arrival to its end.", self._e2e
        )
        histogram(
            "time_to_first_token_seconds", "Time to first token of streamed generations.", self._first_token
        )
        text = "Inter-token latency: the mean of each streamed generation, counted once per token."
        histogram("inter_token_latency_seconds", text, self._inter_token)
        counter("control_calls", "Commands by name and result.", self._control, ("call", "result"))
        counter(
            "control_seconds",
            "Time spent in commands, by name and result.",
            self._control_s,
            ("call", "result"),
        )
        counter("errors", "Error responses by code.", self._errors, ("code",))


class _Families(Collector):
    """Wraps finished families: the library requires a collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

    def describe(self) -> Iterable[Metric]:
        """Empty, which skips the check of names: the registry has no other collector."""
        return ()


@get("/metrics", opt={"access": "open"}, summary="Prometheus metrics")
async def metrics(request: Request[Any, Any, State], front: Front) -> Response[bytes]:
    """Open to all and never an error: an engine that does not answer shows as ``caesura:engine_up 0``."""
    look = await front.metrics.engine.look(front.client)
    registry = CollectorRegistry(auto_describe=False)
    families = front.metrics.families(front.options.model_name, look)
    if front.fleet is not None:
        families += _replicas(front.options.model_name, front.fleet)
    registry.register(_Families(families))
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    if isinstance(encode, partial) and encode.keywords.get("escaping") == "underscores":
        # it leaves valid names as they are, but prometheus_client takes the colon from those of samples, and only from those
        encode = partial(encode, escaping="allow-utf-8")
    if media_type.startswith("text/"):  # Litestar adds the charset itself; Prometheus refuses a duplicate
        media_type = media_type.replace("; charset=utf-8", "")
    return Response(encode(registry), media_type=media_type)


def _replicas(model_name: str, fleet: "ReplicaFleet") -> list[Metric]:
    """What only several engines have."""
    families, members = Families(model_name), fleet.members
    up = {member.name: member.serves for member in members}
    families.gauge("replica_up", "1 for each replica that serves.", up, ("replica",))
    load = {member.name: member.load for member in members}
    families.gauge("replica_load", "Samples that a replica has to generate.", load, ("replica",))
    moved = fleet.dispatcher.moved
    families.counter("moved_requests", "Samples that were continued on another replica.", moved)
    return families.found


ROUTES: list[HTTPRouteHandler] = [metrics]
