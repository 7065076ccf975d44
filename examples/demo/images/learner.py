"""Flow-GRPO (Liu et al., 2025, arXiv 2505.05470): the policy, its optimiser, and the check of the engine's
log-probabilities.

Invariants:
- Behaviour log-probabilities are the engine's, never recomputed ones.
- The check compares each step with the weights that made it, which the result's spans name; the last few
  versions are kept.
- Latents and log-probabilities are float32: in bfloat16 they would be off by more than the clip range.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from .settings import ImageSettings

_VERSIONS = 4
"""Number of versions back that a trajectory may reach."""


@dataclass(frozen=True)
class Batch:
    """The steps in the window of n trajectories, on the CPU."""

    latents: Tensor
    """float32 [n, window + 1, 4, 8, 8]: before each step, and after the last."""
    behaviour: Tensor
    """float32 [n, window]: the engine's log-probabilities, means over the elements of a latent."""
    versions: Tensor
    """int64 [n, window]: versions of the weights that made each step."""
    embeds: Tensor
    """float32 [n, tokens, 64]: embeddings that the engine conditioned on."""
    pooled: Tensor
    """float32 [n, 64]"""
    rewards: Tensor
    """float32 [n]; neighbours in groups of ``samples_per_prompt`` share a prompt."""


@dataclass(frozen=True)
class Step:
    """Measurements of one update."""

    gap: float
    """Largest difference between the engine's and the learner's log-probability of a step."""
    clipped: float
    """Share of ratios outside of the clip range."""
    kl: float
    grad_norm: float
    """Norm before clipping, of the last minibatch."""


class Learner:
    """Trains ``transformer`` in place."""

    def __init__(self, transformer: SD3Transformer2DModel, settings: ImageSettings) -> None:
        self.transformer = transformer.train()
        self._settings = settings
        self._first = _frozen(transformer)
        self._versions = OrderedDict({0: self._first})
        self._sigmas = torch.tensor([*settings.sigmas, 0.0])
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._optimizer = torch.optim.AdamW(
            transformer.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-10
        )

    def remember(self, version: int) -> None:
        """Keep the transformer's weights as version ``version``."""
        self._versions[version] = _frozen(self.transformer)
        while len(self._versions) > _VERSIONS:
            self._versions.popitem(last=False)

    def verify(self, batch: Batch) -> float:
        """Return the largest difference to the engine's log-probabilities under each step's own weights."""
        gaps = [torch.zeros(())]
        with torch.no_grad():
            for version in batch.versions.unique().tolist():
                rows, steps = (batch.versions == version).nonzero(as_tuple=True)
                for part in range(0, len(rows), self._settings.chunk):
                    chosen = (
                        rows[part : part + self._settings.chunk],
                        steps[part : part + self._settings.chunk],
                    )
                    logprobs, _, _ = self._steps(self._versions[version], batch, *chosen)
                    gaps.append((logprobs - batch.behaviour[chosen]).abs().max())
        return torch.stack(gaps).max().item()  # max() of tensors: NaN stays NaN

    def update(self, number: int, batch: Batch, before_last: Callable[[], None]) -> Step:
        """Make update ``number``, from 1: some optimiser steps over shuffled (trajectory, step) pairs.

        The loss of a pair is ``-min(w A, clip(w) A) + kl * D`` (PPO's clipped objective: Schulman et al.,
        2017, arXiv 1707.06347), with the advantage A normalised in the prompt's group and the divergence D of
        the step's Gaussian from that of the first policy.

        Args:
            before_last: called before the last minibatch.
        """
        settings = self._settings
        gap = self.verify(batch)
        done = (number - 1) / max(settings.updates - 1, 1)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.lr * (1 - (1 - settings.lr_final) * done)
        advantages = self._advantages(batch.rewards)
        pairs = torch.cartesian_prod(torch.arange(len(batch.rewards)), torch.arange(settings.window))
        pairs = pairs[torch.randperm(len(pairs), generator=self._generator)]
        clipped, divergence, norm = 0.0, 0.0, 0.0
        for minibatch, chosen in enumerate(pairs.chunk(settings.minibatches), 1):
            if minibatch == settings.minibatches:
                before_last()
            self._optimizer.zero_grad()
            for part in chosen.split(settings.chunk):
                outside, kl = self._accumulate(batch, advantages, part, len(chosen))
                clipped += outside
                divergence += kl
            norm = nn.utils.clip_grad_norm_(self.transformer.parameters(), 1.0).item()
            self._optimizer.step()
        return Step(gap=gap, clipped=clipped / len(pairs), kl=divergence / len(pairs), grad_norm=norm)

    def _advantages(self, rewards: Tensor) -> Tensor:
        groups = rewards.view(-1, self._settings.samples_per_prompt)
        scale = groups.std(1, keepdim=True) + self._settings.advantage_floor
        return ((groups - groups.mean(1, keepdim=True)) / scale).flatten()

    def _accumulate(self, batch: Batch, advantages: Tensor, pairs: Tensor, count: int) -> tuple[float, float]:
        """Add these pairs' part of the gradient; return the number clipped and the sum of divergences."""
        settings = self._settings
        rows, steps = pairs.unbind(1)
        logprobs, mean, std = self._steps(self.transformer, batch, rows, steps)
        with torch.no_grad():
            _, first, _ = self._steps(self._first, batch, rows, steps)
        ratio = (logprobs - batch.behaviour[rows, steps]).exp()
        within = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gains = torch.minimum(ratio * advantages[rows], within * advantages[rows])
        kl = ((mean - first) ** 2 / (2 * std**2)).flatten(1).mean(1)
        ((settings.kl * kl - gains).sum() / count).backward()
        return (ratio != within).sum().item(), kl.sum().item()

    def _steps(
        self, transformer: SD3Transformer2DModel, batch: Batch, rows: Tensor, steps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probability [k] of the steps, and the mean and deviation of each step's Gaussian.

        Flow-GRPO, equation 9: with the velocity v of the model, ``s = noise_level * sqrt(sigma / (1 -
        sigma))`` and ``dt < 0``, the next latent has the mean ``x + (v + s^2 / (2 sigma) * (x + (1 - sigma)
        v)) dt`` and the deviation ``s sqrt(-dt)``. Where sigma is 1, s takes the second sigma for the one
        that would divide by zero.
        """
        x, after = batch.latents[rows, steps], batch.latents[rows, steps + 1]
        sigma = self._sigmas[steps].view(-1, 1, 1, 1)
        dt = self._sigmas[steps + 1].view(-1, 1, 1, 1) - sigma
        v = transformer(
            x, batch.embeds[rows], batch.pooled[rows], self._sigmas[steps] * 1000, return_dict=False
        )[0]
        s = self._settings.noise_level * (sigma / (1 - sigma.where(sigma < 1, self._sigmas[1]))).sqrt()
        mean = x + (v + s**2 / (2 * sigma) * (x + (1 - sigma) * v)) * dt
        std = s * (-dt).sqrt()
        density = -((after - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
        return density.flatten(1).mean(1), mean, std


def _frozen(transformer: SD3Transformer2DModel) -> SD3Transformer2DModel:
    return copy.deepcopy(transformer).eval().requires_grad_(False)
