"""Data-parallel attention: each rank has the hidden states of its own tokens, those whose KV it has.

Invariants:
- All ranks divide a step alike, from its page table. A ledger of several ranks (``cache/manager.py``) numbers
  pages on from rank to rank; in a rank's pool its own begin at 1. Rows on the scratch page, those of a
  warm-up, are taken in turns.
- A layer whose weights are divided gets the rows of all ranks, rank by rank, and each rank the sums of its
  own: their bits are those of a sum over ranks of whole tensors. Or rows go to the ranks of their experts
  alone (:class:`Exchange`), whose results are added in the same order: equal bits again.
- A rank takes part in every collective of a step, also if it has no token: nobody waits for it in vain.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..execution.forward import ForwardBatch
from ..parallel.group import TensorParallel
from ..runtime.engine_config import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows that go to some ranks each, and what these ranks make of them."""

    parallel: TensorParallel
    counts: list[list[int]]
    """Rows from each rank to each."""
    tokens: Tensor
    """int64: this rank's token in each row that it sends."""

    def send(self, x: Tensor) -> Tensor:
        """Return the rows that come to this rank, rank by rank; ``x`` are those of its own tokens."""
        return self.parallel.all_to_all(x.index_select(0, self.tokens), self.counts)

    def sums(self, results: Tensor, num_tokens: int) -> Tensor:
        """Return each own token's sum of all ranks' results, in their order; ``results``: of rows that came.

        As other sums over ranks it is taken in float32, and rounded once.
        """
        sent = self.counts[self.parallel.rank]
        back = self.parallel.all_to_all(results, list(zip(*self.counts, strict=True)))
        total = torch.zeros((num_tokens, back.shape[1]), dtype=torch.float32, device=back.device)
        for part, tokens in zip(back.split(sent), self.tokens.split(sent), strict=True):
            total.index_add_(0, tokens, part.float())
        return total.to(back.dtype)


class RankRows:
    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self.counts: list[int] = []
        """Tokens of each rank in this step."""
        self.may_exchange = False
        """False in steps that only decode: a collective more costs these more than bytes, and an accelerator
        would wait for the host, which must learn where rows go."""
        self._by_rank = self._places = torch.empty(0, dtype=torch.int64)

    def divide(self, batch: ForwardBatch, pages: int) -> ForwardBatch | None:
        """Begin a step; return this rank's rows for an attention backend to plan, or None if it has none.

        ``pages``: of each rank, without scratch.
        """
        device, rank, ranks = batch.positions.device, self._parallel.rank, self._parallel.size
        table = batch.page_table.numpy() if batch.page_table_host is None else batch.page_table_host
        first, q_lens = table[:, 0], np.asarray(batch.q_lens_host, np.int64)
        owners = np.where(first > 0, (first - 1) // pages, np.arange(len(first)) % ranks)
        of_token = np.repeat(owners, q_lens)
        self.counts = np.bincount(of_token, minlength=ranks).tolist()
        self.may_exchange = batch.num_decode < batch.num_rows
        own = of_token == rank
        places = np.where(own, np.cumsum(own) - 1, -1)
        by_rank = np.argsort(of_token, kind="stable")
        self._by_rank, self._places = (torch.from_numpy(each).to(device) for each in (by_rank, places))
        numbers = np.flatnonzero(owners == rank)
        if not len(numbers):
            return None
        rows = torch.from_numpy(numbers).to(device)
        return replace(
            batch,
            num_decode=int((numbers < batch.num_decode).sum()),
            input_ids=self.own(batch.input_ids),
            positions=self.own(batch.positions),
            kv_slots=(self.own(batch.kv_slots) - rank * pages * PAGE_SIZE).clamp_(min=0),
            page_table=(batch.page_table.index_select(0, rows) - rank * pages).clamp_(min=0),
            page_table_host=None
            if batch.page_table_host is None
            else np.maximum(batch.page_table_host[numbers] - rank * pages, 0),
            kv_lens=batch.kv_lens.index_select(0, rows),
            q_lens_host=q_lens[numbers].tolist(),
            kv_lens_host=[batch.kv_lens_host[row] for row in numbers.tolist()],
            slots=batch.slots.index_select(0, rows),
        )

    def by_rank(self, x: Tensor) -> Tensor:
        """Return ``x`` [T, ...] of the step's tokens in the order of :meth:`gather`."""
        return x.index_select(0, self._by_rank)

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's rows of ``x`` [T, ...]."""
        return x.index_select(0, self.part(self._by_rank))

    def part(self, x: Tensor) -> Tensor:
        """Return a view of this rank's rows of ``x`` [T, ...], which are in the order of :meth:`gather`."""
        part: Tensor = x.split(self.counts)[self._parallel.rank]
        return part

    def gather(self, x: Tensor) -> Tensor:
        """Return [T, width] of all tokens, rank by rank; ``x`` are this rank's."""
        return self._parallel.gather_rows(x, self.counts)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum of all ranks' ``x`` [T, width]."""
        return self._parallel.reduce_scatter(x, self.counts)

    def exchange(self, goes: Tensor) -> Exchange:
        """Send each of [T] tokens, in the order of :meth:`gather`, where ``goes`` bool [T, ranks] is True."""
        # The one wait for an accelerator: with the counts the host knows every size that follows.
        counts = torch.stack([part.sum(0) for part in goes.split(self.counts)]).tolist()
        tokens = self.part(goes).t().nonzero_static(size=sum(counts[self._parallel.rank]))[:, 1]
        return Exchange(self._parallel, counts, tokens)

    def pick(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return [S, width] of the step's ``tokens`` [S], zeros where they are another rank's; ``x`` as own.

        The sum over ranks (:meth:`sum`) of such rows is exact.
        """
        if not len(x):
            return x.new_zeros((len(tokens), x.shape[1]))
        places = self._places.index_select(0, tokens)
        return x.index_select(0, places.clamp_min(0)).masked_fill_((places < 0).unsqueeze(1), 0)

    def sum(self, x: Tensor) -> Tensor:
        """Return ``x`` after it has become the sum over all ranks."""
        self._parallel.all_reduce(x)
        return x
