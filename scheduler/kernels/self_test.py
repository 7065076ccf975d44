"""Self-tests of a library's kernels before they serve.

Invariant: whatever an attempt raises is an answer. Libraries that compile at first use raise all kinds of
errors.
"""

import re
from collections.abc import Callable, Iterable

_TELLS = re.compile(r"\berror\b|not found|no such|cannot|fatal", re.IGNORECASE)
_LONGEST = 300


def failure(attempt: Callable[[], Iterable[float]], agreement: float, what: str) -> str | None:
    """Return why ``what`` cannot serve; None if all differences of ``attempt`` are within ``agreement``."""
    try:
        largest = 0.0
        for difference in attempt():
            if not difference <= largest:  # NaN is larger than anything
                largest = difference
                if largest != largest:
                    break
    except Exception as error:  # noqa: BLE001  an edge, see above
        return f"{what} fails: {_told(error)}"
    return None if largest <= agreement else f"{what} is off by {largest:.3f}"


def _told(error: Exception) -> str:
    """Return an error's kind, its first line, and the first that tells more: builds put reasons below."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    told = f"{type(error).__name__}: {first}"[:_LONGEST].removesuffix(": ")
    reason = next((line for line in others if _TELLS.search(line)), None)
    return told if reason is None or _TELLS.search(first) else f"{told} … {reason[:_LONGEST]}"
