"""Waiting time, duration and staleness of finished samples, counted since the engine's start."""

from ...io_struct import GenerateImagesReqOutput, GenerateReqOutput
from ...io_struct.distribution import EPOCHS, SECONDS, Distribution, Histogram


class SampleTotals:
    """Histograms over finished samples."""

    def __init__(self) -> None:
        self._queue = Histogram(SECONDS)
        self._latency = Histogram(SECONDS)
        self._staleness = Histogram(EPOCHS)

    def count(self, result: GenerateReqOutput | GenerateImagesReqOutput) -> None:
        """Count a finished sample. One without a token has no staleness."""
        self._queue.observe(result.queue_time)
        self._latency.observe(result.e2e_latency)
        if spans := result.weight_versions:
            self._staleness.observe(spans[-1].epoch - spans[0].epoch)

    def totals(self) -> dict[str, Distribution]:
        """Return the histograms as fields of :class:`~caesura.io_struct.control.EngineTotals`."""
        return {
            "queue_time": self._queue.distribution(),
            "latency_s": self._latency.distribution(),
            "staleness": self._staleness.distribution(),
        }
