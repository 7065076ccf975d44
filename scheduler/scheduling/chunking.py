"""Limits the tokens of a step, so that steps (and pauses, which wait for a step) stay short and fit into
memory.

Time: a step is modelled as ``base + cost * prompt tokens``, both running averages of measurements. Prompts
get a quarter of the time, but no more than the target, if the base alone takes more than it. Memory:
when a step runs out of it, the token limit (decoding rows plus prompt tokens) is halved until one succeeds.
After ``patience`` good steps of about its size it is doubled again; the patience doubles if the larger limit
fails.

A budget is a whole number of pages, but under a memory limit. Measured times never decide which requests run.
"""

from ..runtime.engine_config import PAGE_SIZE

_WEIGHT = 0.25
_FIRST_TOKENS = 128
PATIENCE, MOST_PATIENCE = 16, 128
"""Good steps before the limit is doubled: minimum and maximum."""


class ChunkSizer:
    """Turns measured steps into the next budget; ``limit`` is set after a step ran out of memory."""

    def __init__(self, largest: int, target_s: float) -> None:
        """``target_s`` is the step time to aim at; if it is infinite, the budget is always ``largest``."""
        self.prompt_tokens = 0
        self.limit: int | None = None
        self._largest = largest
        self._target_s = target_s
        self._base_s = 0.0
        self._cost_s: float | None = None
        self._too_large = 0  # tokens of the first step that ran out of memory
        self._good_steps = 0  # since the last change of the limit
        self._patience = PATIENCE
        self._has_grown = False

    def budget(self, num_decode: int = 0) -> int:
        budget = self._largest
        if self._target_s != float("inf"):
            budget = int(min(max(self._affordable() // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE), self._largest))
        return budget if self.limit is None else max(min(budget, self.limit - num_decode), 0)

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        # While prompts wait, no step without them tells the base: one with the fewest prompt tokens does.
        if prompt_tokens == 0 or self._affordable() <= PAGE_SIZE:
            self._base_s += _WEIGHT * (seconds - self._base_s)
        elif seconds <= self._base_s:  # measured when the machine was slower
            self._base_s = 0.0
        if prompt_tokens == 0:
            return
        self.prompt_tokens += prompt_tokens
        cost = max(seconds - self._base_s, 1e-9) / prompt_tokens
        self._cost_s = cost if self._cost_s is None else self._cost_s + _WEIGHT * (cost - self._cost_s)

    def _affordable(self) -> float:
        if self._cost_s is None:
            return float(_FIRST_TOKENS)
        least = min(self._base_s / 3, self._target_s)
        return max(self._target_s - self._base_s, least) / self._cost_s

    @property
    def token_s(self) -> float:
        """Measured seconds of a prompt token; 0 before the first."""
        return self._cost_s or 0.0

    def halve(self, tokens: int) -> None:
        if self.limit is None:
            self._too_large, self._patience = tokens, PATIENCE
        elif self._has_grown:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.limit = max(tokens // 2, 1)
        self._good_steps, self._has_grown = 0, False

    def succeeded(self, tokens: int) -> None:
        if self.limit is None or 2 * tokens <= self.limit:  # a small step says nothing about larger ones
            return
        self._good_steps += 1
        if self._good_steps >= self._patience:
            if self._has_grown:
                self._patience = PATIENCE
            self.limit = 2 * self.limit if self.limit < self._too_large else None
            self._good_steps, self._has_grown = 0, True
