"""What each shape runs: the requests, the load under which pauses are measured, and how often.

Prompts are uniform random ids, drawn anew for every run, so no engine's prefix cache ever helps.
"""

import random
from dataclasses import dataclass

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


WORKLOADS = {
    "tiny": Workload(
        shape="tiny",
        model="tiny",
        requests=64,
        prompt_tokens=32,
        new_tokens=128,
        rollouts=3,
        pause_cycles=40,
        updates=5,
        load_new_tokens=736,
        vocab_size=4096,
        kv_bytes_per_token=6 * 2 * 2 * 64 * 2,
    ),
    "0.6b": Workload(
        shape="0.6b",
        model="0.6b",
        requests=32,
        prompt_tokens=128,
        new_tokens=64,
        rollouts=1,
        pause_cycles=10,
        updates=3,
        load_new_tokens=256,
        vocab_size=151936,
        kv_bytes_per_token=28 * 2 * 8 * 128 * 2,
    ),
    "long": Workload(
        shape="long",
        model="0.6b",
        requests=8,
        prompt_tokens=2000,
        new_tokens=256,
        rollouts=1,
        vocab_size=151936,
        kv_bytes_per_token=28 * 2 * 8 * 128 * 2,
    ),
    "rl": Workload(
        shape="rl",
        model="tiny",
        requests=32,
        samples=8,
        prompt_tokens=512,
        new_tokens=128,
        rollouts=2,
        vocab_size=4096,
        kv_bytes_per_token=6 * 2 * 2 * 64 * 2,
    ),
    "rl-0.6b": Workload(
        shape="rl-0.6b",
        model="0.6b",
        requests=4,
        samples=8,
        prompt_tokens=512,
        new_tokens=128,
        rollouts=1,
        vocab_size=151936,
        kv_bytes_per_token=28 * 2 * 8 * 128 * 2,
    ),
    "moe": Workload(
        shape="moe",
        model="moe-0.2b",
        requests=32,
        prompt_tokens=64,
        new_tokens=64,
        rollouts=3,
        vocab_size=32_000,
        kv_bytes_per_token=8 * 2 * 4 * 64 * 2,
    ),
    "hybrid": Workload(
        shape="hybrid",
        model="hybrid",
        requests=32,
        prompt_tokens=64,
        new_tokens=64,
        rollouts=3,
        vocab_size=32_000,
        kv_bytes_per_token=2 * 2 * 2 * 64 * 2,
    ),
    "mla": Workload(
        shape="mla",
        model="mla-0.2b",
        requests=32,
        prompt_tokens=64,
        new_tokens=64,
        rollouts=1,
        vocab_size=32_000,
        kv_bytes_per_token=8 * (256 + 32) * 2,
    ),
}
