"""What the engine counts, as plain numbers.

Invariants: counters only rise, gauges are overwritten; the engine writes, anybody may read between two steps; nothing
here has a lock, a clock or an exporter.
"""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineMetrics:
    """Counters since start, then gauges. Times are in seconds, memory in bytes."""

    steps: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed, recomputation after a retraction included, prefix hits not."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    accepted_requests: int = 0
    refused_requests: int = 0
    finished_requests: Counter[str] = field(default_factory=Counter)
    """By finish reason."""
    retractions: int = 0
    """Requests that lost their KV, by preemption or by a ``retract`` pause."""
    pauses: Counter[str] = field(default_factory=Counter)
    """By mode."""
    pause_seconds: float = 0.0
    """From the pause request to the continue, summed."""
    updates: Counter[str] = field(default_factory=Counter)
    """Committed weight updates by source."""
    update_seconds: float = 0.0
    failed_updates: int = 0
    cache_empties: int = 0
    """Times the device allocator was emptied."""

    running_requests: int = 0
    waiting_requests: int = 0
    memory_reserved: int = 0
    """As of the last emptying."""

    def count_pause(self, mode: str) -> None:
        """A pause was acknowledged."""
        self.pauses[mode] += 1

    def count_update(self, source: str, seconds: float) -> None:
        """An update was committed ``seconds`` after it was accepted."""
        self.updates[source] += 1
        self.update_seconds += seconds
