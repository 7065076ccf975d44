"""Typed access to a config.json whose values may be anything.

Invariant: a value of the wrong type or range is a CHECKPOINT_ERROR that names its field.
"""

import sys
from typing import Any

from ...io_struct import CaesuraError
from ..files import checkpoint_error

MAX_COUNT = 2**31 - 1
"""No size of a model is larger."""


class ConfigReader:
    """Typed access to one config; an invalid value is a CHECKPOINT_ERROR that names it."""

    def __init__(self, config: dict[str, Any], source: str) -> None:
        self._config = config
        self._source = source

    def with_defaults(self, defaults: dict[str, Any]) -> "ConfigReader":
        """The same, for fields that are absent."""
        return ConfigReader({**defaults, **self._config}, self._source)

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer; absent or null gives ``default``, or an error without one."""
        value = self._config.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
            raise self.invalid(name, f"= {value!r:.40} is not a positive integer below 2**31")
        return value

    def count_or(self, name: str, absent: int | None, null: int) -> int:
        """A positive integer; ``absent`` (None: as null) where the config lacks it, ``null`` where it says null."""
        return self.count(name, null if name in self._config or absent is None else absent)

    def positive(self, where: dict[str, Any], name: str, default: float | None = None) -> float:
        """A positive finite number in ``where``."""
        value = where.get(name)
        if value is None:
            value = default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value <= sys.float_info.max
        ):
            raise self.invalid(name, f"= {value!r} is not a positive number")
        return float(value)

    def invalid(self, field: str, reason: str) -> CaesuraError:
        """The error for ``field``."""
        return checkpoint_error(self._source, f"is not valid: {field} {reason}")
