"""Unfiltered sampling in one compiled pass per row; the definitions are those of ``runner/sampler.py``."""

import torch
from torch import Tensor

from . import native
from .native import INT, POINTER, SIZE

_BLOCK = 256

_SAMPLE = {
    dtype: native.function(f"caesura_sample_{name}", POINTER, SIZE, SIZE, SIZE, *[POINTER] * 7, INT)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "f32"))
}


class RowSampler:
    """Greedy and inverse-CDF sampling over the whole vocabulary, with a workspace of its own.

    Invariant: a row's result depends on that row alone, bit for bit.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._workspace = torch.empty(0, dtype=torch.float64)

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor | None,
        greedy: Tensor,
        uniforms: Tensor,
        token_ids: Tensor,
        logprobs: Tensor,
        raw_logprobs: Tensor | None,
    ) -> None:
        """Sample every row of ``logits`` into the last three arguments.

        Args:
            logits: [S, V] bfloat16 or float32, columns contiguous.
            temperature: float32 [S], > 0; greedy rows do not use theirs. None: 1 for all.
            greedy: bool [S].
            uniforms: float64 [S] in [0, 1); greedy rows do not use theirs.
            token_ids: int64 [S]; -1 where a row was not finite.
            logprobs: float32 [S], of the scaled logits; NaN where a row was not finite.
            raw_logprobs: float32 [S], of the logits as given. None: not wanted.

        Raises:
            ValueError: shapes, dtypes or strides that do not fit together.
        """
        rows = logits.shape[0]
        per_row = (
            (temperature, torch.float32),
            (greedy, torch.bool),
            (uniforms, torch.float64),
            (token_ids, torch.int64),
            (logprobs, torch.float32),
            (raw_logprobs, torch.float32),
        )
        fits = logits.shape[1:] == (self._vocab_size,) and logits.dtype in _SAMPLE and logits.stride(1) == 1
        if not fits or not all(
            t is None or (t.shape == (rows,) and t.dtype == dtype and t.is_contiguous())
            for t, dtype in per_row
        ):
            given = [None if t is None else (t.dtype, tuple(t.shape)) for t, _ in per_row]
            raise ValueError(f"logits {logits.dtype} {tuple(logits.shape)} and per row {given} do not fit")
        threads = native.num_threads()
        blocks = -(-self._vocab_size // _BLOCK)
        if self._workspace.numel() < threads * blocks:
            self._workspace = torch.empty(threads * blocks, dtype=torch.float64)
        _SAMPLE[logits.dtype](
            logits.data_ptr(),
            logits.stride(0),
            rows,
            self._vocab_size,
            *(None if t is None else t.data_ptr() for t, _ in per_row),
            self._workspace.data_ptr(),
            threads,
        )
