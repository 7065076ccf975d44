"""Workloads: the requests of each shape, the load under which pauses are measured, and repeats.

Prompts are uniform random ids, drawn anew for every run, so no engine's prefix cache ever helps.
"""

import random
from dataclasses import dataclass

from architectures import ARCHITECTURES

Prompt = list[int]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of the benchmark plan; lengths in tokens."""

    shape: str
    model: str
    """Checkpoint, a key of ``architectures.ARCHITECTURES``."""
    requests: int
    samples: int = 1
    """Samples of each prompt; they share its prefix."""
    prompt_tokens: int
    new_tokens: int
    rollouts: int
    """Measured whole runs per start, after one that is not counted."""
    pause_cycles: int = 0
    """Number of pauses; 0 if only rollouts are measured."""
    updates: int = 0
    load_new_tokens: int = 0
    """Length of the requests that are paused: long enough that few end while pauses are measured."""
    vocab_size: int
    kv_bytes_per_token: int

    @property
    def context_len(self) -> int:
        return self.prompt_tokens + max(self.new_tokens, self.load_new_tokens)

    @property
    def kv_tokens(self) -> int:
        """Room for the whole load at full length and a third more: nobody is preempted."""
        return -(-self.requests * self.samples * self.context_len * 4 // 3 // 1024) * 1024

    @property
    def tokens(self) -> int:
        """Tokens that one rollout samples."""
        return self.requests * self.samples * self.new_tokens

    def prompts(self, seed: int) -> list[Prompt]:
        """Return one prompt per request, different for every seed."""
        rng = random.Random(f"{self.shape}:{seed}")
        return [
            [rng.randrange(self.vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.requests)
        ]

    def describe(self) -> str:
        return (
            f"{self.requests} requests, {self.prompt_tokens} in, "
            + (f"{self.samples} samples each, " if self.samples > 1 else "")
            + f"{self.new_tokens} out, temperature 1, end of sequence ignored"
        )


def _workload(
    shape: str, model: str, requests: int, prompt_tokens: int, new_tokens: int, **more: int
) -> Workload:
    sizes = ARCHITECTURES[model]
    return Workload(
        shape=shape,
        model=model,
        requests=requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        vocab_size=sizes.vocab_size,
        kv_bytes_per_token=round(2 * sizes.num_hidden_layers * sizes.cached_width),
        **more,
    )


WORKLOADS = {
    each.shape: each
    for each in (
        _workload("tiny", "tiny", 64, 32, 128, rollouts=3, pause_cycles=40, updates=5, load_new_tokens=736),
        _workload("0.6b", "0.6b", 32, 128, 64, rollouts=1, pause_cycles=10, updates=3, load_new_tokens=256),
        _workload("long", "0.6b", 8, 2000, 256, rollouts=1),
        _workload("rl", "tiny", 32, 512, 128, rollouts=2, samples=8),
        _workload("rl-0.6b", "0.6b", 4, 512, 128, rollouts=1, samples=8),
        _workload("moe", "moe-0.2b", 32, 64, 64, rollouts=3),
        _workload("hybrid", "hybrid", 32, 64, 64, rollouts=3),
        _workload("mla", "mla-0.2b", 32, 64, 64, rollouts=1),
    )
}
"""All shapes in bfloat16."""
