"""Settings of the demo of an agent."""

from dataclasses import dataclass
from typing import Any, Self

from ..settings import Settings, Transport


@dataclass(frozen=True, kw_only=True)
class AgentSettings(Settings):
    """Settings of a run: episodes of several turns, by HTTP."""

    transport: Transport = "tensor"
    warmup_max_steps: int = 400
    warmup_batch: int = 48
    warmup_lr: float = 2e-3
    warmup_exact: float = 0.5
    """The warm-up ends once this share of fresh demonstrations is right, but for guesses."""
    warmup_calls: float = 0.3
    """Share of the demonstrations that call the tool; the others guess."""
    updates: int = 50
    lr: float = 4e-4
    lr_rampup: int = 5
    groups_per_update: int = 16
    """Words per update."""
    samples_per_prompt: int = 8
    """Episodes of each word."""
    temperature: float = 1.0
    held_out_prompts: int = 48
    max_running_requests: int = 128

    @classmethod
    def quick(cls, **changes: Any) -> Self:
        small = {"updates": 3, "eval_every": 3, "groups_per_update": 4, "held_out_prompts": 12}
        return cls(**(small | {"warmup_max_steps": 60} | changes))
