"""Waiting for a condition instead of for a time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], seconds: float = 20.0) -> T:
    """The first true value of ``condition``, asked again and again; AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.01)
    return value
