"""Rows of weights as int8 or codes of four bits, compiled (``cpu/quantize.cpp``).

Invariant: the result is that of ``layers/scaled_blocks.quantize``, bit for bit, but for what a NaN holds.
"""

import torch
from torch import Tensor

from ..memory.workspace import Workspace
from . import native
from .linear import CODE_COLUMNS, INT8_COLUMNS, Codes
from .native import INT, POINTER, SIZE

_ROWS = native.by_dtype("caesura_quantize_rows", POINTER, SIZE, SIZE, SIZE, INT, POINTER, SIZE, POINTER, INT)
_INT8, _INT4, _E2M1 = range(3)


def quantize_rows(rows: Tensor, codes: Codes | None, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Return ``rows`` [n, in] as int8, or as uint8 [n, in / 2] of ``codes``, and scales [n, blocks].

    Blocks are those that products take; scales lie block by block. Both are in ``workspace``.
    """
    count, inputs = rows.shape
    rows = rows if rows.dtype in native.FLOATS else rows.float()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    kind, columns, width = _INT8, INT8_COLUMNS, inputs
    if codes is not None:
        kind, columns, width = _E2M1 if codes.by_powers else _INT4, CODE_COLUMNS, inputs // 2
    numbers = workspace.take("quantized", (count, width), torch.uint8)
    scales = workspace.take("scales", (-(-inputs // columns), count), torch.float32)
    _ROWS[rows.dtype](
        rows.data_ptr(), rows.stride(0) * rows.itemsize, count, inputs, kind, numbers.data_ptr(), width,
        scales.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return numbers if codes is not None else numbers.view(torch.int8), scales.t()
