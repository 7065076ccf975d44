"""History of a run of the demo of adapters."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..history import LoopHistory, RunHistory, Turn
from ..rollout import exact_share


@dataclass(frozen=True, kw_only=True)
class SwapRecord(Turn):
    """A turn whose adapter replaced the one before it; ``update_ms`` is how long the trainer waited."""

    adapter_epoch: int
    """The engine's count of loaded adapters, whatever their names."""
    norm: float
    """Frobenius norm of the change of the base's weights."""
    switched: int
    """Samples, running or waiting, that went on with the new version."""


@dataclass(kw_only=True)
class AdapterHistory(LoopHistory[SwapRecord]):
    """Record of one adapter's loop."""

    def summary(self) -> dict[str, Any]:
        """Return the adapter's figures of ``summary.json``."""
        waits = [record.update_ms for record in self.updates]
        return {
            "reward_first": round(self.evals[0].reward, 4),
            "reward_last": round(self.evals[-1].reward, 4),
            "ess_min": round(min(record.step.ess for record in self.updates), 4),
            "updates": len(self.updates),
            "swap_ms_p50": round(statistics.median(waits), 3),
            "swap_ms_max": round(max(waits), 3),
            "adapter_epoch_last": self.updates[-1].adapter_epoch,
            "norm_last": round(self.updates[-1].norm, 4),
            "samples": self.counts.finished,
            "samples_across_a_swap": self.counts.crossed,
            "samples_of_another_adapter": self.counts.foreign,
            "max_logprob_gap": max(record.gap.first_max for record in self.updates),
            "max_logprob_gap_later": max(record.gap.later_max for record in self.updates),
            "requests_lost": self.ledger.submitted - self.ledger.ended,
        }


@dataclass(kw_only=True)
class LoraHistory(RunHistory):
    """Record of one run: ``adapters`` by name, which is also their target's."""

    adapter_parameters: int = 0
    adapters: dict[str, AdapterHistory] = field(default_factory=dict)

    def turns(self) -> Iterator[SwapRecord]:
        """Yield the turns of all adapters."""
        for each in self.adapters.values():
            yield from each.updates

    def rewards_by_target(self) -> dict[str, list[float]]:
        """Return the held-out reward of the base and of each adapter at the end, for every target."""
        answers = {"base": next(iter(self.adapters.values())).evals[0].answers}
        answers |= {name: each.evals[-1].answers for name, each in self.adapters.items()}
        return {
            name: [exact_share(found, target) for target in self.adapters] for name, found in answers.items()
        }

    def summary(self) -> dict[str, Any]:
        """Return the figures of ``summary.json``; exact shares on held-out words."""
        adapters = {name: each.summary() for name, each in self.adapters.items()}
        waits = [record.update_ms for record in self.turns()]

        def most(name: str) -> float:
            return max(float(each[name]) for each in adapters.values())

        return {
            "reward_first": round(statistics.mean(each["reward_first"] for each in adapters.values()), 4),
            "reward_last": round(statistics.mean(each["reward_last"] for each in adapters.values()), 4),
            "swaps": len(waits),
            "swap_ms_p50": round(statistics.median(waits), 3),
            "swap_ms_max": round(max(waits), 3),
            "tokens_per_s": round(self.tokens / self.rl_s, 1),
            "max_logprob_gap": most("max_logprob_gap"),
            "max_logprob_gap_later": most("max_logprob_gap_later"),
            "samples_of_another_adapter": sum(
                each["samples_of_another_adapter"] for each in adapters.values()
            ),
            "requests_lost": sum(each["requests_lost"] for each in adapters.values()),
            "transport": self.transport,
            "adapters": adapters,
        }
