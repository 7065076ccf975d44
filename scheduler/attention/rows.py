"""Groups of a step's rows to compute together, for backends that gather pages.

Invariant: every row is in exactly one group, and only a group of a single row may need more pages than the
limit.
"""

import numpy as np
import torch
from torch import Tensor

_SPLIT_PAGES = 64
WORKSPACE_BYTES = 4 << 20
"""Most bytes of gathered K, V, latents or float32 scores at a time on a CPU: what its caches keep."""
_ON_DEVICES = 64 << 20


def workspace_bytes(device: torch.device) -> int:
    """Return the most bytes of gathered pages at a time; a longer row takes what it needs."""
    return WORKSPACE_BYTES if device.type == "cpu" else _ON_DEVICES


def group_rows(pages: np.ndarray, max_pages: int) -> list[np.ndarray]:
    """Order rows by descending length; cut where the workspace is full or padding costs more than a launch.

    ``pages``: int64 [n], of each row; ``max_pages``: of one group, padding included. Return row numbers.
    """
    order = np.argsort(-pages, kind="stable")
    sorted_pages = pages[order].tolist()
    total, first = len(sorted_pages), 0
    groups = []
    for row in range(1, total + 1):
        longest = sorted_pages[first]
        full = (row - first + 1) * longest > max_pages
        if row < total and not full and (longest - sorted_pages[row]) * (total - row) < _SPLIT_PAGES:
            continue
        groups.append(order[first:row])
        first = row
    return groups


def as_index(rows: np.ndarray, device: torch.device) -> Tensor | slice:
    """Return ``rows`` as a slice if they are a range, since reading through it is a view."""
    if rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)
