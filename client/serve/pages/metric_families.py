"""Prometheus metric families with one naming scheme.

Invariant: every name begins with :data:`PREFIX` and every series carries ``model_name``, as SGLang's do, so that its
dashboards work after one relabelling rule (docs/reference/metrics.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from ....io_struct.distribution import Histogram

PREFIX = "caesura:"
Values = float | Mapping[Any, float]
"""One value, or values by label (a string) or labels (a tuple of strings)."""


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
        """A distribution of values."""
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
