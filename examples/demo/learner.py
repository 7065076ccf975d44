"""Learning: the supervised warm-up, the policy-gradient step and the check of the engine's logprobs.

Invariants:
- Behaviour logprobs are the engine's, never recomputed ones: the importance ratio includes whatever differs
  between the two implementations.
- The check compares each token with the weights that sampled it, which is why the last few versions are kept.
"""

import copy
import random
from collections import OrderedDict
from dataclasses import dataclass
from itertools import cycle

import torch
from transformers import PreTrainedModel

from . import task
from .messages import GapStats, Group, Sample, StepStats
from .policy import token_logprobs
from .settings import Settings

EPSILON = 1e-4
"""Keeps a group's scale finite; far below ``1 / len(answer)``, the smallest difference in reward."""


@dataclass(frozen=True)
class Batch:
    """Groups as right-padded tensors; ``[rows, columns]`` where column ``i`` is about token ``i + 1``.

    ``tokens`` is int64 [rows, columns + 1]; the others are float32 but ``versions`` (int64, -1 on prompts and
    padding) and ``stale`` (bool).
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    versions: torch.Tensor
    stale: torch.Tensor


def group_advantages(samples: list[Sample]) -> list[list[float]]:
    """Return the group-normalised return of every output token.

    With the return-to-go ``G[i, t] = sum of r[i, u] for u >= t`` (0 beyond the end of sample i),

        A[i, t] = (G[i, t] - mean over the group of G[., t]) / (std over the group of G[., 0] + epsilon).

    GRPO (Shao et al., 2024, DeepSeekMath, arXiv 2402.03300, section 4.1.3, "process supervision") with the
    baseline taken at the same position: a token is judged by what it can still change. For one reward at the
    end this is the usual ``(R - mean) / std``.
    """
    length = max(len(sample.rewards) for sample in samples)
    rewards = torch.zeros(len(samples), length)
    for row, sample in enumerate(samples):
        rewards[row, : len(sample.rewards)] = torch.tensor(sample.rewards)
    returns = rewards.flip(1).cumsum(1).flip(1)
    advantages = (returns - returns.mean(0)) / (returns[:, 0].std() + EPSILON)
    return [advantages[row, : len(sample.rewards)].tolist() for row, sample in enumerate(samples)]


def collate(groups: list[Group]) -> Batch:
    """Return all samples of all groups as one batch."""
    rows = [
        (group.prompt_ids, sample, advantages)
        for group in groups
        for sample, advantages in zip(group.samples, group_advantages(group.samples), strict=True)
    ]
    width = max(len(prompt) + len(sample.output_ids) for prompt, sample, _ in rows)
    batch = Batch(
        tokens=torch.full((len(rows), width), task.PAD),
        mask=torch.zeros(len(rows), width - 1),
        behaviour=torch.zeros(len(rows), width - 1),
        advantages=torch.zeros(len(rows), width - 1),
        versions=torch.full((len(rows), width - 1), -1),
        stale=torch.zeros(len(rows), width - 1, dtype=torch.bool),
    )
    for row, (prompt, sample, advantages) in enumerate(rows):
        start = len(prompt) - 1
        end = start + len(sample.output_ids)
        batch.tokens[row, : end + 1] = torch.tensor(prompt + sample.output_ids)
        batch.mask[row, start:end] = 1.0
        batch.behaviour[row, start:end] = torch.tensor(sample.logprobs)
        batch.advantages[row, start:end] = torch.tensor(advantages)
        for span in sample.spans:
            batch.versions[row, start + span.start : start + span.end] = span.version
            batch.stale[row, start + span.start : start + span.end] = span.stale_kv or span.start > 0
    return batch


class Learner:
    """The policy, its optimiser and its recent versions."""

    def __init__(self, model: PreTrainedModel, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        # One optimiser for both phases: the second moments of the warm-up keep the first policy-gradient
        # steps small.
        self._trained = [value for value in model.parameters() if value.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained, lr=settings.warmup_lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._ring = VersionRing(model, settings.temperature, size=settings.max_lag + 2)

    def warmup_step(self, step: int, rng: random.Random) -> tuple[float, float]:
        """Run one supervised step on fresh words; return nats per token and the exact share before it.

        The share needs no generation: greedy decoding gives the answer if and only if every token of it is
        the arg-max given the right ones before it.
        """
        words = [task.training_word(rng) for _ in range(self.settings.warmup_batch)]
        assert not any(map(task.is_held_out, words))
        targets = cycle(self.settings.targets)
        rows = [
            (task.prompt_ids(word), task.answer_ids(word, target)) for word, target in zip(words, targets)
        ]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        tokens = torch.full((len(words), width), task.PAD)
        mask = torch.zeros(len(words), width - 1, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(rows):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            mask[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[mask], tokens[:, 1:][mask])
        right = (logits.argmax(-1) == tokens[:, 1:]) | ~mask
        self.descend(loss, self.settings.warmup_lr * min(1.0, (step + 1) / 20))
        return loss.item(), right.all(dim=1).float().mean().item()

    def remember(self, version: int) -> None:
        """Keep the model's weights as version ``version``."""
        self._ring.add(version, self.model)

    def step(self, update: int, batch: Batch) -> StepStats:
        """Run one policy-gradient step on ``batch``.

        With the ratio ``w = exp(logp - behaviour logp)`` of each token, the loss is

            - mean over all tokens of [ stop_gradient(min(w, cap)) * A * logp + entropy_bonus * H ]:

        REINFORCE with truncated importance sampling (the ratio's use as in IMPALA, Espeholt et al., 2018,
        arXiv 1802.01561, and, per token of a language model, CISPO, MiniMax-M1, 2025, arXiv 2506.13585),
        averaged over tokens rather than sequences (DAPO, Yu et al., 2025, arXiv 2503.14476).
        """
        settings = self.settings
        logprobs, entropy = token_logprobs(self.model, batch.tokens, settings.temperature)
        count = batch.mask.sum()
        ratio = torch.exp((logprobs.detach() - batch.behaviour) * batch.mask)
        weighted = ratio.clamp(max=settings.ratio_cap) * batch.advantages * logprobs
        mean_entropy = (entropy * batch.mask).sum() / count
        loss = -(weighted * batch.mask).sum() / count - settings.entropy_bonus * mean_entropy
        progress = (update - 1) / max(settings.updates - 1, 1)
        rate = settings.lr * min(1.0, update / settings.lr_rampup)
        norm = self.descend(loss, rate * (1.0 - (1.0 - settings.lr_final) * progress))
        ratios = ratio[batch.mask.bool()]
        return StepStats(
            loss=loss.item(),
            entropy=mean_entropy.item(),
            grad_norm=norm,
            ess=effective_sample_share(ratios),
            ratio_max=ratios.max().item(),
            tokens=ratios.numel(),
        )

    def verify(self, batch: Batch) -> GapStats:
        """Compare the engine's logprobs with a recomputation under each token's own weights."""
        return self._ring.gap(batch)

    def descend(self, loss: torch.Tensor, rate: float) -> float:
        """Clip and step with learning rate ``rate``; return the gradient's norm before clipping."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self.settings.max_grad_norm)
        self._optimizer.step()
        return norm.item()


def effective_sample_share(ratios: torch.Tensor) -> float:
    """Return Kish's effective sample size as a share: ``(sum w)^2 / (n sum w^2)``."""
    return (ratios.sum().square() / (ratios.numel() * ratios.square().sum())).item()


class VersionRing:
    """Copies of the last ``size`` versions, and a second model to put one into."""

    def __init__(self, model: PreTrainedModel, temperature: float, size: int) -> None:
        self._versions: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()
        self._temperature = temperature
        self._size = size
        self._scratch = copy.deepcopy(model)

    def add(self, version: int, model: PreTrainedModel) -> None:
        """Keep a copy of what ``model`` trains as ``version``; the oldest beyond ``size`` goes."""
        self._versions[version] = {
            name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad
        }
        while len(self._versions) > self._size:
            self._versions.popitem(last=False)

    @torch.inference_mode()
    def gap(self, batch: Batch) -> GapStats:
        """Return absolute differences over first spans (fresh KV) and over later ones.

        Raises:
            KeyError: a first span is of a version that is no longer kept.
        """
        first: list[torch.Tensor] = []
        later: list[torch.Tensor] = []
        for version in batch.versions.unique().tolist():
            if version < 0:
                continue
            here = batch.versions == version
            rows = here.any(dim=1)
            self._scratch.load_state_dict(self._versions[version], strict=False)
            logprobs, _ = token_logprobs(self._scratch, batch.tokens[rows], self._temperature)
            difference = (logprobs - batch.behaviour[rows]).abs()
            first.append(difference[here[rows] & ~batch.stale[rows]])
            later.append(difference[here[rows] & batch.stale[rows]])
        fresh, mixed = torch.cat(first), torch.cat(later)
        return GapStats(
            first_max=fresh.max().item() if len(fresh) else 0.0,
            first_tokens=len(fresh),
            later_max=mixed.max().item() if len(mixed) else 0.0,
            later_mean=mixed.mean().item() if len(mixed) else 0.0,
            later_tokens=len(mixed),
        )
