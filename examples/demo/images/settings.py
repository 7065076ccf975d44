"""Everything one run of the image demo is told, in one frozen value."""

from dataclasses import dataclass
from typing import Any

from ..settings import RunSettings


@dataclass(frozen=True, kw_only=True)
class ImageSettings(RunSettings):
    """Settings of a run; the defaults are the full one, under four minutes on two cores."""

    seed: int = 3

    # Before the policy is served
    vae_steps: int = 280
    flow_steps: int = 1000
    true_colours: float = 0.4
    """Share of captions that name the true colour: what the policy has left to learn."""

    # Rollouts (engine)
    samples_per_prompt: int = 10
    steps: int = 10
    window: int = 5
    """The first steps add noise and have log-probabilities; they decide about the colour. The others do not.
    """
    noise_level: float = 0.7
    engine_threads: int = 1

    # Flow-GRPO (learner)
    updates: int = 40
    minibatches: int = 4
    """Optimiser steps of one update."""
    lr: float = 1e-3
    lr_final: float = 0.3
    """Share of ``lr`` at the last update; linear in between."""
    clip: float = 2e-3
    """Clip range of the ratio of probabilities, small as these are means over a latent's elements."""
    kl: float = 0.03
    """Weight of the divergence from the first policy, without which the shapes are lost."""
    advantage_floor: float = 0.05
    """Added to the standard deviation of a group's rewards."""
    chunk: int = 240
    """Steps of trajectories that one forward pass of the learner takes."""
    learner_threads: int = 1

    # Evaluation (engine, without noise)
    eval_every: int = 10
    eval_samples: int = 8

    @classmethod
    def quick(cls, **changes: Any) -> "ImageSettings":
        """Return a run of seconds that walks every path, and learns little."""
        small = {
            "vae_steps": 30,
            "flow_steps": 40,
            "samples_per_prompt": 4,
            "updates": 3,
            "eval_every": 3,
            "eval_samples": 2,
        }
        return cls(**(small | changes))

    @property
    def sigmas(self) -> list[float]:
        """Return equally spaced noise levels: near 0 the log-probabilities would be useless."""
        return [1 - step / self.steps for step in range(self.steps)]
