"""Waiting for a condition instead of for a time.

No wait that is meant to succeed has a limit: the test has one, which allows for the machine
(``time_limit.py``).
"""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 86_400.0
"""Seconds of a limit that is none: longer than any test."""


def eventually(condition: Callable[[], T]) -> T:
    """Return the first true value of ``condition``, asked again and again."""
    while not (value := condition()):
        time.sleep(0.01)
    return value
