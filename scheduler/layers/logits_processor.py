"""Logits from hidden states.

Invariants:
- Logits live in one grow-only workspace; a call overwrites the result of the call before it.
- In a dummy run there are none, so warming up at the largest batch takes no memory by the vocabulary.
- Each rank computes a range of the vocabulary, and all gather all of it: they sample the same tokens from the
  same noise. Sampling on one rank would cost a second wait in every step, to send the tokens: 39 us over
  shared memory, 0.7 ms over gloo (``benchmarks/collectives.py``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from .parameters import Placement
from .sharding import per_rank, rounded_up

_dummy_run: ContextVar[bool] = ContextVar("autotune_dummy_run", default=False)


@contextmanager
def autotune_dummy_run_mode() -> Iterator[None]:
    """Make :meth:`LogitsProcessor.forward` in this thread return None at once; blocks may be nested."""
    outer = _dummy_run.set(True)
    try:
        yield
    finally:
        _dummy_run.reset(outer)


class LogitsProcessor:
    def __init__(
        self, project: Callable[[Tensor, Tensor], Tensor], vocab_size: int, *, place: Placement
    ) -> None:
        """Use ``project(hidden, out)``, which writes the head's product, of this rank's range, to ``out``."""
        self.project = project
        self._vocab_size, self._place = vocab_size, place
        self._range = rounded_up(vocab_size, place.parallel, "vocab_size").length
        self._widest = per_rank(vocab_size, place.parallel)

    def forward(self, hidden: Tensor) -> Tensor | None:
        """Return logits [S, vocab] in the model's dtype, valid until the next call; None in a dummy run."""
        if _dummy_run.get():
            return None
        shape, place = (hidden.shape[0], self._vocab_size), self._place
        out = place.workspace.take("logits", shape, place.dtype, place.device)
        if place.parallel.size == 1:
            return self.project(hidden, out)
        shape = hidden.shape[0], self._widest
        part = place.workspace.take("logits of this rank", shape, place.dtype, place.device)
        self.project(hidden, part[:, : self._range])
        return place.parallel.all_gather(part, out)
