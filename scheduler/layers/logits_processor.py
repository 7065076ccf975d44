"""Logits from hidden states.

Invariants:
- Logits live in one grow-only workspace; a call overwrites the result of the call before it.
- In a dummy run there are none, so warming up at the largest batch takes no memory by the vocabulary.
- Each rank computes a range of the vocabulary, and all gather all of it: they sample the same tokens from the
  same noise. Sampling on one rank would cost a second wait in every step, to send the tokens: 39 us over
  shared memory, 0.7 ms over gloo (``benchmarks/collectives.py``).
- With data-parallel attention, whose steps have many rows, each rank gets all of the vocabulary for a share
  of the rows instead, samples these, and tells the others (:class:`SharedLogits`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
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


class SharedLogits:
    """Logits [S, vocab] of which each rank has computed a range of the columns, and samples some rows.

    The shares of ranks follow one another, and are as equal as they can be: they depend on S alone.
    """

    def __init__(self, part: Tensor, vocab_size: int, place: Placement) -> None:
        """``part`` [S, width]: this rank's columns, padded to those of the widest range."""
        self._part, self._vocab_size, self._place = part, vocab_size, place
        size = place.parallel.size
        self._counts = [len(range(rank, len(part), size)) for rank in range(size)]
        before = sum(self._counts[: place.parallel.rank])
        self.own = range(before, before + self._counts[place.parallel.rank])
        """Rows that this rank samples."""

    def __len__(self) -> int:
        return len(self._part)

    @property
    def device(self) -> torch.device:
        return self._part.device

    def share(self) -> Tensor:
        """Return all columns of the :attr:`own` rows; a collective."""
        place, width, rows = self._place, self._part.shape[1], len(self.own)
        found = place.parallel.all_to_all(self._part, [self._counts] * place.parallel.size)
        out = place.workspace.take("logits", (rows, self._vocab_size), place.dtype, place.device)
        for columns, part in zip(
            out.split(width, 1), found.view(place.parallel.size, rows, width), strict=True
        ):
            columns.copy_(part[:, : columns.shape[1]])
        return out

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Return all columns of the rows ``index`` (int64) on every rank, as a tensor does; a collective."""
        part = self._part.index_select(dim, index)
        return self._place.parallel.all_gather(part, part.new_empty((len(index), self._vocab_size)))

    def gather(self, x: Tensor) -> Tensor:
        """Return [S, width] of all ranks' shares; ``x`` is that of the :attr:`own` rows. A collective."""
        return self._place.parallel.gather_rows(x, self._counts)


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
        out, place = self.memory(hidden.shape[0]), self._place
        if place.parallel.size == 1:
            return self.project(hidden, out)
        return place.parallel.all_gather(self._part(hidden), out)

    def forward_shared(self, hidden: Tensor) -> SharedLogits | None:
        """Do as :meth:`forward`, but let each rank have the logits of a share of the rows."""
        if _dummy_run.get():
            return None
        return SharedLogits(self._part(hidden), self._vocab_size, self._place)

    def _part(self, hidden: Tensor) -> Tensor:
        """Return [S, width], this rank's columns and padding to the widest range."""
        place, shape = self._place, (hidden.shape[0], self._widest)
        part = place.workspace.take("logits of this rank", shape, place.dtype, place.device)
        self.project(hidden, part[:, : self._range])
        return part

    def memory(self, rows: int) -> Tensor:
        place = self._place
        return place.workspace.take("logits", (rows, self._vocab_size), place.dtype, place.device)
