"""Sampling, filtered or not, in one compiled call; the definitions are those of ``execution/sampler.py``."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..memory.workspace import Workspace
from . import native
from .native import INT, POINTER, SIZE, FurtherLogprobs, LogitEdits, Sampling

_FURTHER = native.by_dtype("caesura_further_logprobs", POINTER, INT)
_SAMPLE = native.by_dtype("caesura_sample", POINTER, INT)
_MOST_ALLOWED = 1024
"""Allowed tokens of a row, whatever the vocabulary: their logits are kept in two buffers of 256 items."""
_workspace_size = native.function("caesura_sample_workspace", SIZE, result=SIZE)


class RowSampler:
    """Sampling with a workspace of its own. Invariant: a row's bits depend on that row alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._workspace = Workspace()

    @staticmethod
    def sample(arguments: Sampling, dtype: torch.dtype) -> None:
        _SAMPLE[dtype](ctypes.byref(arguments), torch.get_num_threads())

    def arguments(
        self,
        logits: Tensor,
        temperature: Tensor | None,
        greedy: Tensor,
        uniforms: Tensor,
        token_ids: Tensor,
        logprobs: Tensor,
        raw_logprobs: Tensor | None,
        sampled_logprobs: Tensor | None = None,
        *,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        last_kept: Tensor | None = None,
        given: Tensor | None = None,
        edits: LogitEdits | None = None,
    ) -> Sampling:
        """Return what samples ``logits`` into the last four positional arguments, and into ``last_kept``.

        It holds addresses, not the tensors, and serves until the workspace is taken for more threads.

        Args:
            logits: [S, V] of :data:`~.native.FLOATS`, columns contiguous.
            temperature: float32 [S], > 0, or None for 1; greedy rows use neither it nor the filters.
            uniforms: float64 [S] in [0, 1).
            token_ids: int64 [S]; -1 where a row was not finite.
            logprobs: float32 [S], of the scaled logits; NaN where a row was not finite.
            raw_logprobs: float32 [S], of the logits as given, or None.
            sampled_logprobs: float32 [S], in the filtered, renormalised distribution; 0 for greedy rows; or
                None.
            top_k: int64 [S], V where unused.
            top_p, min_p: float32 [S], 1 and 0 where unused. No ``top_k`` or ``top_p``: no row is filtered.
            last_kept: int64 [S], the last kept token in descending order; -1 where all are or not finite; or
                None.
            given: int64 [S], tokens that are not drawn; -1 where one is; or None.
            edits: those of S rows (:meth:`edits`), or None.
        """
        per_row = (
            (temperature, torch.float32),
            (greedy, torch.bool),
            (uniforms, torch.float64),
            (token_ids, torch.int64),
            (logprobs, torch.float32),
            (raw_logprobs, torch.float32),
            (sampled_logprobs, torch.float32),
            (top_k, torch.int64),
            (top_p, torch.float32),
            (min_p, torch.float32),
            (last_kept, torch.int64),
            (given, torch.int64),
        )
        self._check(logits, per_row)
        if (top_k is None or top_p is None) and not top_k is top_p is min_p is None:
            raise ValueError("top_k, top_p and min_p do not fit together: a filter needs the first two")
        if edits is not None and edits.rows != logits.shape[0]:
            raise ValueError(f"edits of {edits.rows} rows do not fit {logits.shape[0]} rows of logits")
        return Sampling(
            logits.data_ptr(), logits.stride(0), logits.shape[0], self._vocab_size,
            *(None if t is None else t.data_ptr() for t, _ in per_row),
            None if edits is None else ctypes.pointer(edits), self._memory(),
        )  # fmt: skip

    def further(
        self,
        logits: Tensor,
        rows: Tensor,
        temperature: Tensor,
        top: int,
        ids: Tensor,
        last_kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the ``top`` likeliest tokens of ``rows``, their log-probabilities, and those of ``ids``.

        Args:
            logits: [S, V] as in :meth:`arguments`.
            rows: int64 [N], within S.
            temperature: float32 [N].
            ids: int64 [N, M], within V.
            last_kept: int64 [N], as in :meth:`arguments`, or None.

        Returns:
            int32 and float32 [N, ``top``], descending, of equal ones the lower id first; float32 [N, M]; with
            ``last_kept`` bool [N, V], True for what is kept. NaN where a row is not finite.
        """
        self._check(logits, ())
        count, shape = len(rows), (len(rows), ids.shape[-1])
        columns = (
            (rows, (count,), torch.int64),
            (temperature, (count,), torch.float32),
            (ids, shape, torch.int64),
            *([] if last_kept is None else [(last_kept, (count,), torch.int64)]),
        )
        _check_each("further log-probabilities", columns)
        if not 0 <= top <= self._vocab_size:
            raise ValueError(f"the {top} likeliest of {self._vocab_size} tokens do not fit")
        top_ids, found = torch.empty((count, top), dtype=torch.int32), torch.empty((count, top))
        of_ids = torch.empty(shape)
        kept = None if last_kept is None else torch.empty((count, self._vocab_size), dtype=torch.bool)
        arguments = FurtherLogprobs(
            logits.data_ptr(), logits.stride(0), self._vocab_size, count,
            rows.data_ptr(), temperature.data_ptr(), top, top_ids.data_ptr(), found.data_ptr(),
            ids.shape[1], ids.data_ptr(), of_ids.data_ptr(),
            *(None if each is None else each.data_ptr() for each in (last_kept, kept)), self._memory(),
        )  # fmt: skip
        _FURTHER[logits.dtype](ctypes.byref(arguments), torch.get_num_threads())
        return top_ids, found, of_ids, kept

    def _memory(self) -> int:
        """Return the workspace's address. What no row needs of it is address space, not memory."""
        size = torch.get_num_threads(), _workspace_size(self._vocab_size)
        return self._workspace.take("rows", size, torch.float64).data_ptr()

    def edits(
        self,
        places: Tensor,
        penalties: Sequence[Tensor],
        counters: Tensor,
        counts: Tensor,
        biases: tuple[Tensor, Tensor],
        allowed: tuple[Tensor, Tensor],
    ) -> LogitEdits:
        """Return what edits rows before they are sampled; it keeps the tensors. Ids in them are not checked.

        Args:
            places: int64 [S], of a row among the E edited ones, whose first P have penalties; -1: not edited.
            penalties: repetition, frequency and presence penalties, float32 [P] each.
            counters: int64 [P], rows of ``counts``, each once.
            counts: int32 [.., V]: twice how often a token stands in the output, plus one if it stands in the
                prompt; sampling adds what it samples.
            biases: token ids, int64 [E, B], and what is added to their logits, float32 [E, B].
            allowed: token ids, int64 [E, A], and for each row True if it may have no others, bool [E].
        """
        (ids, values), (allowed_ids, restricted) = biases, allowed
        edited, held = len(ids), len(counters)
        expected = (
            (places, (len(places),), torch.int64),
            *((each, (held,), torch.float32) for each in penalties),
            (counters, (held,), torch.int64),
            (counts, (len(counts), self._vocab_size), torch.int32),
            (ids, (edited, ids.shape[-1]), torch.int64),
            (values, tuple(ids.shape), torch.float32),
            (allowed_ids, (edited, allowed_ids.shape[-1]), torch.int64),
            (restricted, (edited,), torch.bool),
        )
        _check_each("edits", expected)
        if held > edited:
            raise ValueError(f"penalties of {held} rows do not fit {edited} edited ones")
        if allowed_ids.shape[1] > _MOST_ALLOWED:
            raise ValueError(f"{allowed_ids.shape[1]} allowed tokens do not fit into the workspace")
        made = LogitEdits(
            len(places), places.data_ptr(), held, *(t.data_ptr() for t in (*penalties, counters, counts)),
            ids.shape[1], ids.data_ptr(), values.data_ptr(),
            allowed_ids.shape[1], allowed_ids.data_ptr(), restricted.data_ptr(),
        )  # fmt: skip
        made.kept = expected
        return made

    def _check(self, logits: Tensor, per_row: Sequence[tuple[Tensor | None, torch.dtype]]) -> None:
        rows = logits.shape[0]
        fits = logits.shape[1:] == (self._vocab_size,) and logits.dtype in _SAMPLE and logits.stride(1) == 1
        if not fits or not all(
            t is None or (t.shape == (rows,) and t.dtype == dtype and t.is_contiguous())
            for t, dtype in per_row
        ):
            given = [None if t is None else (t.dtype, tuple(t.shape)) for t, _ in per_row]
            raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} and per row {given} do not fit")


def _check_each(told: str, expected: Sequence[tuple[Tensor, tuple[int, ...], torch.dtype]]) -> None:
    if not all(t.shape == shape and t.dtype == dtype and t.is_contiguous() for t, shape, dtype in expected):
        raise ValueError(f"{told} do not fit: {[(t.dtype, tuple(t.shape)) for t, _, _ in expected]}")
