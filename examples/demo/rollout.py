"""Requests to the engine: a pool of training prompts that never runs dry, and the held-out evaluation.

Invariants:
- Every sample submitted is entered in the :class:`Ledger`, every terminal result too; what is missing at the
  end is ``requests_lost``.
- No word that is held out is ever submitted for training.
- The engine always has work: each pump submits as many prompts as have ended, so that every pause meets
  requests in flight.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from caesura.client import GenerateOutput, SamplingParams, TimedOut
from caesura.io_struct import WeightVersionSpan

from . import task
from .engine import Engine, Handle
from .messages import Group, Sample, Span
from .settings import Settings

DRAIN_S = 20.0


@dataclass
class Sampled:
    """The policy that is sampled: the engine's weights, or an adapter of them."""

    target: str = task.BACKWARDS
    """The spelling that is rewarded."""
    adapter: str | None = None
    updates: dict[int, int] = field(default_factory=dict)
    """Update by the engine's epoch of the adapter."""

    def update_of(self, span: WeightVersionSpan) -> int | None:
        """Return the update that sampled the tokens of ``span``, or None if another policy did."""
        if span.adapter != self.adapter:
            return None
        return int(span.version) if self.adapter is None else self.updates.get(span.adapter_epoch)

    def updates_of(self, output: GenerateOutput) -> list[int] | None:
        """Return the update of each span, or None if any is another policy's."""
        found = [update for span in output.weight_versions if (update := self.update_of(span)) is not None]
        return found if len(found) == len(output.weight_versions) else None


@dataclass
class Ledger:
    """Counts of samples asked for and ended."""

    submitted: int = 0
    ended: int = 0

    def submit(
        self,
        client: Engine,
        word: str,
        sampling_params: SamplingParams,
        *,
        return_logprob: bool,
        adapter: str | None,
    ) -> Handle:
        """Submit the prompt of ``word`` and count it."""
        handle = client.submit(
            task.prompt_ids(word), sampling_params, return_logprob=return_logprob, adapter=adapter
        )
        self.submitted += sampling_params.n
        return handle

    def collect(self, handle: Handle, timeout: float | None = None) -> list[GenerateOutput]:
        """Return and count all samples of ``handle``; raise what the engine answered instead."""
        outputs: list[GenerateOutput] = handle.results(timeout)
        self.ended += len(outputs)
        return outputs


@dataclass(frozen=True)
class ScoredGroup:
    """All samples of one training prompt with their rewards."""

    word: str
    target: str
    samples: list[Sample]

    @property
    def exact(self) -> float:
        """Share of the samples that are exactly right."""
        right = [task.is_exact(self.word, sample.output_ids, self.target) for sample in self.samples]
        return sum(right) / len(right)

    @property
    def reward(self) -> float:
        """Mean over the samples of the reward that is trained on."""
        return sum(sum(sample.rewards) for sample in self.samples) / len(self.samples)

    @property
    def informative(self) -> bool:
        """True if the samples differ in reward; otherwise every advantage is zero."""
        return any(sample.rewards != self.samples[0].rewards for sample in self.samples)

    @property
    def first_version(self) -> int:
        """The oldest weights that sampled any of its tokens."""
        return min(sample.spans[0].version for sample in self.samples)

    def to_message(self) -> Group:
        """Return the message for the trainer."""
        return Group(prompt_ids=task.prompt_ids(self.word), samples=self.samples)


@dataclass
class PoolCounts:
    """Counts over the whole run, in samples unless it says groups."""

    finished: int = 0
    crossed: int = 0
    """Samples whose tokens come from two versions or more."""
    most_versions: int = 1
    """Versions in the one sample that saw most of them."""
    groups_without_signal: int = 0
    """Groups of equal samples, which are left out as by DAPO's dynamic sampling."""
    groups_too_old: int = 0
    foreign: int = 0
    """Samples with tokens of another policy than the one that was asked for; none is trained on."""


@dataclass
class RolloutPool:
    """Keeps ``settings.groups_in_flight`` prompts with the engine and hands out what has come back."""

    client: Engine
    settings: Settings
    ledger: Ledger
    policy: Sampled = field(default_factory=Sampled)
    counts: PoolCounts = field(default_factory=PoolCounts)
    exemplar: tuple[str, Sample] | None = None
    """A right answer that lived across an update, with its word, or None."""

    def __post_init__(self) -> None:
        self._rng = random.Random(f"rollouts {self.policy.adapter or ''}{self.settings.seed}")
        self._params = SamplingParams(
            max_new_tokens=task.MAX_NEW_TOKENS,
            temperature=self.settings.temperature,
            n=self.settings.samples_per_prompt,
        )
        self._in_flight: deque[tuple[str, Handle]] = deque()
        self._ready: deque[ScoredGroup] = deque(maxlen=2 * self.settings.groups_per_update)
        self._scored: list[ScoredGroup] = []

    @property
    def ready(self) -> int:
        """Number of groups with signal that wait for the trainer."""
        return len(self._ready)

    def pump(self) -> None:
        """Take in what has ended and submit as much again, without waiting."""
        waiting: deque[tuple[str, Handle]] = deque()
        for word, handle in self._in_flight:
            if handle.done():
                self._take_in(word, self.ledger.collect(handle))
            else:
                waiting.append((word, handle))
        self._in_flight = waiting
        while len(self._in_flight) < self.settings.groups_in_flight:
            word = task.training_word(self._rng)
            assert not task.is_held_out(word)
            handle = self.ledger.submit(
                self.client, word, self._params, return_logprob=True, adapter=self.policy.adapter
            )
            self._in_flight.append((word, handle))

    def discard_older_than(self, version: int) -> None:
        """Drop waiting groups with tokens of weights before ``version``."""
        fresh = [group for group in self._ready if group.first_version >= version]
        self.counts.groups_too_old += len(self._ready) - len(fresh)
        self._ready.clear()
        self._ready.extend(fresh)

    def take(self, count: int) -> list[ScoredGroup]:
        """Return up to ``count`` groups, the newest first: older weights say less."""
        return [self._ready.pop() for _ in range(min(count, len(self._ready)))]

    def scored_since(self) -> list[ScoredGroup]:
        """Return all groups scored since the last call, those without signal included."""
        scored, self._scored = self._scored, []
        return scored

    def drain(self) -> None:
        """Abort what is in flight and wait for the terminal results; what does not come stays missing.

        Samples of an adapter are not aborted, as other adapters learn on.
        """
        if self._in_flight and self.policy.adapter is None:
            self.client.abort(abort_all=True, timeout=DRAIN_S)
        for _, handle in self._in_flight:
            try:
                self.ledger.collect(handle, DRAIN_S)
            except TimedOut:
                continue  # the ledger tells
        self._in_flight.clear()

    def _take_in(self, word: str, outputs: list[GenerateOutput]) -> None:
        counts, samples, target = self.counts, [], self.policy.target
        for output in outputs:
            counts.finished += 1
            updates = self.policy.updates_of(output)
            if updates is None:
                counts.foreign += 1
                continue
            sample = _sample(output, updates, task.token_rewards(word, output.output_ids, target))
            samples.append(sample)
            versions = len(set(updates))
            counts.crossed += versions > 1
            counts.most_versions = max(counts.most_versions, versions)
            if versions > 1 and task.is_exact(word, sample.output_ids, target):
                self._propose(word, sample)
        if len(samples) < len(outputs):
            return
        group = ScoredGroup(word, target, samples)
        self._scored.append(group)
        if group.informative:
            self._ready.append(group)
        else:
            counts.groups_without_signal += 1

    def _propose(self, word: str, sample: Sample) -> None:
        """Make ``sample`` the exemplar if it shows more versions, or a longer shortest span."""
        if self.exemplar is None or _spread(sample) >= _spread(self.exemplar[1]):
            self.exemplar = (word, sample)


def _spread(sample: Sample) -> tuple[int, int]:
    return len(sample.spans), min(span.end - span.start for span in sample.spans)


@dataclass
class Evaluation:
    """Greedy answers to all held-out words, of one version."""

    policy: Sampled
    version: int
    handles: dict[str, Handle]
    ledger: Ledger

    @classmethod
    def start(
        cls, client: Engine, ledger: Ledger, policy: Sampled, words: list[str], version: int
    ) -> "Evaluation":
        """Submit every word; the weights must not change before :meth:`done`."""
        params = SamplingParams(max_new_tokens=task.MAX_NEW_TOKENS, temperature=0.0)
        assert all(map(task.is_held_out, words))
        handles = {
            word: ledger.submit(client, word, params, return_logprob=False, adapter=policy.adapter)
            for word in words
        }
        return cls(policy, version, handles, ledger)

    def done(self) -> bool:
        """Return True if every answer is there."""
        return all(handle.done() for handle in self.handles.values())

    def answers(self) -> dict[str, list[int]]:
        """Wait for the output tokens by word."""
        answers = {}
        for word, handle in self.handles.items():
            (output,) = self.ledger.collect(handle)
            updates = self.policy.updates_of(output)
            assert updates is not None, f"{word}: sampled by another policy ({output.weight_versions})"
            assert set(updates) == {self.version}, f"{word}: sampled by {updates}, not by {self.version}"
            answers[word] = output.output_ids
        return answers


def exact_share(answers: dict[str, list[int]], target: str = task.BACKWARDS) -> float:
    """Return the held-out reward: the share of words answered exactly."""
    return sum(task.is_exact(word, output_ids, target) for word, output_ids in answers.items()) / len(answers)


def _sample(output: GenerateOutput, updates: list[int], rewards: list[float]) -> Sample:
    assert output.output_logprobs is not None
    spans = [
        Span(version=update, start=span.start, end=span.end, stale_kv=span.stale_kv)
        for update, span in zip(updates, output.weight_versions, strict=True)
    ]
    return Sample(output_ids=output.output_ids, logprobs=output.output_logprobs, rewards=rewards, spans=spans)
