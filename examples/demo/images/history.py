"""History of a run of the image demo."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from .learner import Step

MB = 1e6


@dataclass(frozen=True)
class Evaluation:
    """Rewards of the policy without noise, with the same seeds each time."""

    update: int
    reward: float
    """Mean reward of prompts that are trained on; the next two likewise."""
    right_colour: float
    right_shape: float
    held_out_reward: float
    """Mean reward of prompts that are never trained on; the next likewise."""
    held_out_colour: float
    pictures: dict[str, Tensor]
    """float32 [samples, 3, 32, 32] in [-1, 1], by prompt."""


@dataclass(frozen=True)
class Update:
    """One turn: a batch of trajectories, an update of the policy, a pause."""

    update: int
    reward: float
    """Mean reward of the batch, sampled with noise; the next two likewise."""
    right_colour: float
    right_shape: float
    step: Step
    wait_s: float
    """Seconds that the learner waited for the batch."""
    learn_s: float
    pause_ms: float
    update_ms: float
    continue_ms: float
    held: int
    """Trajectories that the pause found between two of their steps."""
    crossed: int
    """Trajectories of the batch with steps of more than one version."""
    reserved_before_mb: float
    reserved_after_mb: float


@dataclass
class ImageHistory:
    """Record of one run, filled while it runs."""

    parameters: int = 0
    pretrain_s: float = 0.0
    engine_start_s: float = 0.0
    rl_s: float = 0.0
    wall_s: float = 0.0
    images: int = 0
    updates: list[Update] = field(default_factory=list)
    evals: list[Evaluation] = field(default_factory=list)
    losses: list[tuple[str, int, float]] = field(default_factory=list)
    """Stage, step and loss of the pretraining."""

    def summary(self) -> dict[str, Any]:
        """Return the figures of ``summary.json``."""
        first, last, pauses = self.evals[0], self.evals[-1], [each.pause_ms for each in self.updates]
        return {
            "reward_first": round(first.reward, 4),
            "reward_last": round(last.reward, 4),
            "right_colour_first": round(first.right_colour, 4),
            "right_colour_last": round(last.right_colour, 4),
            "right_shape_first": round(first.right_shape, 4),
            "right_shape_last": round(last.right_shape, 4),
            "held_out_reward_first": round(first.held_out_reward, 4),
            "held_out_reward_last": round(last.held_out_reward, 4),
            "held_out_colour_first": round(first.held_out_colour, 4),
            "held_out_colour_last": round(last.held_out_colour, 4),
            "updates": len(self.updates),
            "images": self.images,
            "images_per_s": round(self.images / self.rl_s, 1),
            "trajectories_across_an_update": sum(each.crossed for each in self.updates),
            "held_at_pauses": sum(each.held for each in self.updates),
            "pause_ms_p50": round(median(pauses), 2),
            "pause_ms_max": round(max(pauses), 2),
            "update_ms_p50": round(median(each.update_ms for each in self.updates), 2),
            "reserved_mb_first": round(self.updates[0].reserved_after_mb, 2),
            "reserved_mb_last": round(self.updates[-1].reserved_after_mb, 2),
            "max_logprob_gap": max(each.step.gap for each in self.updates),
            "wall_s": round(self.wall_s, 1),
        }
