"""How many prompt tokens a step may compute, so that a step, and with it a pause, stays short on any machine.

A step's time is taken as ``base + cost * prompt tokens``, where *base* is what steps without prompt tokens take and *cost*
what the others took beyond that; both are running averages of what was measured.

Invariants: a budget is a whole number of pages, at least one, at most ``largest``. Which requests run never depends on
time, only how their prompts are cut.
"""

from .config import PAGE_SIZE

_WEIGHT = 0.25  # of a new measurement
_FIRST_TOKENS = 128
"""Before anything was measured."""


class ChunkSizer:
    """Turns measured steps into the next step's budget of prompt tokens."""

    def __init__(self, largest: int, target_s: float) -> None:
        """``target_s`` seconds are aimed at; infinite: always ``largest``."""
        self._largest = largest
        self._target_s = target_s
        self._base_s = 0.0
        self._cost_s: float | None = None

    def budget(self) -> int:
        """Prompt tokens for the next step."""
        if self._target_s == float("inf"):
            return self._largest
        if self._cost_s is None:
            return min(self._largest, _FIRST_TOKENS)
        # A quarter even where decoding alone takes the time: prompts must get on, too.
        affordable = max(self._target_s - self._base_s, self._target_s / 4) / self._cost_s
        return int(min(max(affordable // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE), self._largest))

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """A step of ``prompt_tokens`` prompt tokens (and any number of decoding ones) took ``seconds``."""
        if prompt_tokens == 0:
            self._base_s += _WEIGHT * (seconds - self._base_s)
            return
        cost = max(seconds - self._base_s, 1e-9) / prompt_tokens
        self._cost_s = cost if self._cost_s is None else self._cost_s + _WEIGHT * (cost - self._cost_s)
