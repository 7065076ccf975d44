"""How much a step may compute, so that a step, and with it a pause, stays short on any machine, and fits into memory.

A step's time is taken as ``base + cost * prompt tokens``, where *base* is what steps without prompt tokens take and *cost*
what the others took beyond that; both are running averages of what was measured.

A step that memory did not suffice for halves what the next ones may have, decoding rows and prompt tokens alike, until one
succeeds. What was halved is doubled again after a number of steps about as large as it allows. That number is doubled when
growing turns out to have been wrong, and small again once it was right, so that a shortage that lasts costs little and one
that has passed is forgotten soon.

Invariants: a budget is a whole number of pages, at least one, at most ``largest``; when memory has run out, any number of
tokens. Which requests run never depends on time, only how their prompts are cut.
"""

from ..config import PAGE_SIZE

_WEIGHT = 0.25  # of a new measurement
_FIRST_TOKENS = 128
"""Before anything was measured."""
PATIENCE, MOST_PATIENCE = 16, 128
"""Good steps before the limit is doubled."""


class ChunkSizer:
    """Turns measured steps into the next step's budget of prompt tokens.

    Attributes:
        limit: tokens of any kind that a step may have since memory ran out, at least 1. None: it has not run out, or that no
            longer matters.
    """

    def __init__(self, largest: int, target_s: float) -> None:
        """``target_s`` seconds are aimed at; infinite: always ``largest``."""
        self.limit: int | None = None
        self._largest = largest
        self._target_s = target_s
        self._base_s = 0.0
        self._cost_s: float | None = None
        self._too_large = 0  # tokens of the step that memory first did not suffice for
        self._good_steps = 0  # since the limit was changed last
        self._patience = PATIENCE
        self._has_grown = False

    def budget(self, num_decode: int = 0) -> int:
        """Prompt tokens for the next step, beside ``num_decode`` decoding rows."""
        budget = self._in_time()
        return budget if self.limit is None else max(min(budget, self.limit - num_decode), 0)

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """A step of ``prompt_tokens`` prompt tokens (and any number of decoding ones) took ``seconds``."""
        if prompt_tokens == 0:
            self._base_s += _WEIGHT * (seconds - self._base_s)
            return
        cost = max(seconds - self._base_s, 1e-9) / prompt_tokens
        self._cost_s = cost if self._cost_s is None else self._cost_s + _WEIGHT * (cost - self._cost_s)

    def halve(self, tokens: int) -> None:
        """Memory did not suffice for a step of ``tokens`` tokens of any kind: none gets more than half of that, for now."""
        if self.limit is None:
            self._too_large, self._patience = tokens, PATIENCE
        elif self._has_grown:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.limit = max(tokens // 2, 1)
        self._good_steps, self._has_grown = 0, False

    def succeeded(self, tokens: int) -> None:
        """Memory sufficed for a step of ``tokens`` tokens of any kind."""
        if self.limit is None or 2 * tokens <= self.limit:  # which says nothing about larger ones
            return
        self._good_steps += 1
        if self._good_steps >= self._patience:
            if self._has_grown:
                self._patience = PATIENCE  # growing was right
            self.limit = 2 * self.limit if self.limit < self._too_large else None
            self._good_steps, self._has_grown = 0, True

    def _in_time(self) -> int:
        if self._target_s == float("inf"):
            return self._largest
        if self._cost_s is None:
            return min(self._largest, _FIRST_TOKENS)
        # A quarter even where decoding alone takes the time: prompts must get on, too.
        affordable = max(self._target_s - self._base_s, self._target_s / 4) / self._cost_s
        return int(min(max(affordable // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE), self._largest))
