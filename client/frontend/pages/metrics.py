"""Prometheus metrics: what the front end counts, and ``/metrics``, which adds what the engine tells.

Invariants:
- Counting costs a microsecond or so: plain integers, made into metrics when somebody asks.
- A scrape is answered without the engine, too: then its last figures stand, and ``engine_up`` is 0.
- Counters never fall while their process lives.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..connections import Connections
from ..context import Front
from .engine_metrics import EngineWatch, Look, engine_families
from .metric_families import Families, Histogram, one_two_five


class Metrics:
    """Counts what the front end does; one for a process, used from its event loop."""

    def __init__(self, max_connections: int = 4096) -> None:
        self.engine = EngineWatch()
        """What the engine told last."""
        self.connections = Connections(max_connections)
        """Those of the server; counted there."""
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
        """How many generations have begun and not ended."""
        return self._started - self._finished.total()

    def request_started(self) -> None:
        """A generation was accepted; :meth:`request_finished` must follow, once, however it ends."""
        self._started += 1

    def request_finished(
        self, tokens: int, seconds: float, first_token_s: float | None, finish_type: str
    ) -> None:
        """One generation is over.

        Args:
            tokens: sampled, in sum over its samples.
            seconds: from arrival to the end.
            first_token_s: from arrival to the first token; None: unknown, as where nothing is streamed.
            finish_type: ``stop``, ``length``, ``abort`` or ``error``.
        """
        self._finished[finish_type] += 1
        self._e2e.observe(seconds)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
            if tokens > 1:
                self._inter_token.observe((seconds - first_token_s) / (tokens - 1), tokens - 1)

    def control(self, name: str, seconds: float, ok: bool) -> None:
        """A command ``name`` took ``seconds``, and was done or refused."""
        key = (name, "ok" if ok else "error")
        self._control[key] += 1
        self._control_s[key] += seconds

    def error(self, code: str) -> None:
        """A client was answered with an error of this code."""
        self._errors[code] += 1

    def families(self, model_name: str, look: Look) -> list[Metric]:
        """Everything there is to tell; ``model_name`` is what clients call the model."""
        families = Families(model_name)
        engine_families(families, look)
        self._own(families)
        return families.found

    def _own(self, families: Families) -> None:
        gauge, counter, histogram = families.gauge, families.counter, families.histogram
        gauge("num_http_reqs", "Generations under way in the front end.", self.under_way)
        gauge("num_http_connections", "Connections that are open.", len(self.connections))
        text = "Connections that the server refused or ended, by why."
        counter("http_connections_ended", text, self.connections.closed, ("reason",))
        counter("http_requests", "Generations that are over, by how.", self._finished, ("finish_reason",))
        histogram("e2e_request_latency_seconds", "From arrival to the end of a generation.", self._e2e)
        histogram("time_to_first_token_seconds", "Of streamed generations.", self._first_token)
        text = "Mean of each streamed generation, counted once for each of its tokens."
        histogram("inter_token_latency_seconds", text, self._inter_token)
        counter("control_calls", "Commands, by name and result.", self._control, ("call", "result"))
        counter("control_seconds", "Time they took.", self._control_s, ("call", "result"))
        counter("errors", "Answers with an error, by code.", self._errors, ("code",))


class _Families(Collector):
    """Families that are there already; the library wants a collector."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not checked against others, as there are none."""
        return ()


@get("/metrics", opt={"access": "open"}, summary="Prometheus metrics")
async def metrics(request: Request[Any, Any, State], front: Front) -> Response[bytes]:
    """Never refused and never an error: an engine that does not answer is ``caesura:engine_up 0``."""
    look = await front.metrics.engine.look(front.client)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(front.metrics.families(front.options.model_name, look)))
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    if media_type.startswith(
        "text/"
    ):  # of which Litestar says the charset itself; said twice, Prometheus refuses it
        media_type = media_type.replace("; charset=utf-8", "")
    return Response(encode(registry), media_type=media_type)


ROUTES: list[HTTPRouteHandler] = [metrics]
