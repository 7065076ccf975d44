"""Prometheus metric families with one naming scheme, and a histogram whose update costs a microsecond.

Invariant: every name begins with :data:`PREFIX` and every series carries ``model_name``, as SGLang's do, so that its
dashboards work after one relabelling rule (docs/reference/metrics.md).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

PREFIX = "caesura:"
Values = float | Mapping[Any, float]
"""One value, or values by label (a string) or labels (a tuple of strings)."""


class Histogram:
    """Counts of values per bucket; the last bucket is unbounded."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: inclusive upper bounds, ascending."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts ``value`` ``times`` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Pairs of upper bound and cumulative count, and the sum of all values."""
        found, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            found.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(below)))
        return found, self._sum


def one_two_five(low: int, high: int) -> tuple[float, ...]:
    """Bounds 1, 2, 5, 10, … from ``10**low`` to ``10**high`` seconds."""
    steps = [float(f"{digit}e{power}") for power in range(low, high) for digit in (1, 2, 5)]
    return (*steps, 10.0**high)


class Families:
    """Gathers metric families; ``model_name`` becomes a label of every series."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.found: list[Metric] = []

    def gauge(self, name: str, text: str, values: Values, labels: Sequence[str] = ()) -> None:
        """A value that can rise and fall."""
        self._add(GaugeMetricFamily(PREFIX + name, text, labels=("model_name", *labels)), values)

    def counter(self, name: str, text: str, values: Values, labels: Sequence[str] = ()) -> None:
        """A value that only rises; the name of its series ends in ``_total``."""
        self._add(CounterMetricFamily(PREFIX + name, text, labels=("model_name", *labels)), values)

    def states(self, name: str, text: str, label: str, states: Sequence[str], now: str | None) -> None:
        """A gauge for each of ``states``: 1 for ``now``, else 0."""
        self.gauge(name, text, {state: float(state == now) for state in states}, (label,))

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """A distribution of seconds."""
        family = HistogramMetricFamily(PREFIX + name, text, labels=("model_name",))
        buckets, total = histogram.cumulative()
        family.add_metric((self._model_name,), buckets=buckets, sum_value=total)
        self.found.append(family)

    def info(self, name: str, text: str, values: dict[str, str]) -> None:
        """Text values, as labels of a series with value 1; its name ends in ``_info``."""
        family = InfoMetricFamily(PREFIX + name, text, labels=("model_name",))
        family.add_metric((self._model_name,), values)
        self.found.append(family)

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> None:
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            family.add_metric((self._model_name, *((key,) if isinstance(key, str) else key)), value)
        self.found.append(family)
