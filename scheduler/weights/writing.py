"""Writing pieces of an update some milliseconds at a time.

Invariants:
- No piece waits: a source that has none yet says None, and the caller waits for it in its own way.
- Between two calls the loop may look elsewhere; a call that has begun writes at least one piece.
"""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from ..observability.stage_profiler import StageProfiler
from .pieces import WeightPiece

WRITE_S = 0.002
"""How long a call writes: a stage and a turn of the loop for each piece would cost as much as a small one."""

END: Any = object()
"""Of a source's pieces, which may be None meanwhile."""


def write_some(
    write: Callable[[WeightPiece], None],
    piece: WeightPiece,
    pieces: Iterator[WeightPiece | None],
    stages: StageProfiler,
) -> Any:
    """``write`` ``piece`` and what follows at once, for :data:`WRITE_S`; returns what comes then: a piece, None, ``END``.

    ``stages`` receives the time of writing as ``copy`` and that of making pieces as ``receive``.
    """
    coming: Any = piece
    copy = receive = 0.0
    started = now = perf_counter()
    try:
        while True:
            write(coming)
            written = perf_counter()
            copy += written - now
            coming = next(pieces, END)
            now = perf_counter()
            receive += now - written
            if coming is None or coming is END or now - started > WRITE_S:
                return coming
    finally:
        stages.record("copy", copy)
        stages.record("receive", receive)
