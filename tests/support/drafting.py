"""Speculation without its calculation of what pays."""

import pytest

from caesura.scheduler.scheduling import speculation


def draft_all(patch: pytest.MonkeyPatch) -> None:
    """Draft all that is found, whatever a step takes, and however much of it is in vain."""
    patch.setattr(
        speculation.Speculation, "_best_count", lambda self, rows, chances, search_s=0.0: len(chances)
    )
    for name in ("_AT_FIRST", "_MOST_ALLOWED", "_SEARCHING", "_MOST_SAVED"):
        patch.setattr(speculation, name, float("inf"))
