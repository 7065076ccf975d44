"""Lanes of tests to which the values of a parameter belong."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return the first ``count`` values for ``make test``, and the others for ``make test-long``."""
    values = list(values)
    return [*values[:count], *(_long(value) for value in values[count:])]


def every(values: Iterable[Any], nth: int) -> list[Any]:
    """Return every ``nth`` value for ``make test``, from the first, and the others for ``make test-long``."""
    return [_long(value) if number % nth else value for number, value in enumerate(values)]


def _long(value: Any) -> Any:
    if isinstance(value, type(pytest.param())):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.long], id=value.id)
    given = value if isinstance(value, tuple) else (value,)
    return pytest.param(*given, marks=pytest.mark.long)
