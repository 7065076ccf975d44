"""Typed access to a config.json whose values may be anything.

Invariant: a value of the wrong type or range is a CHECKPOINT_ERROR that names its field.
"""

from typing import Any

from ...io_struct import CaesuraError
from ..runtime.files import checkpoint_error

MAX_COUNT = 2**20
"""Largest size of a model, but for these."""
_MAX_COUNTS = {
    "num_hidden_layers": 2**12,
    "num_nextn_predict_layers": 2**12,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**27,
    "original_max_position_embeddings": 2**27,
    "sliding_window": 2**31 - 1,
    "max_window_layers": 2**31 - 1,
}
_NUMBERS = (1e-6, 1e6)
_BOUNDS = {"rms_norm_eps": (1e-30, 1.0), "rope_theta": (2.0, 1e18), "rope_local_base_freq": (2.0, 1e18)}
"""Least and largest value of other numbers, and of these."""
MAX_TOKEN_ID = 2**31 - 1


class ConfigReader:
    def __init__(self, config: dict[str, Any], source: str) -> None:
        self.config = config
        self._source = source

    def count(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; absent or null gives ``default``, or an error without one."""
        return self.integer(self.config.get(name), name, default)

    def integer(self, value: object, name: str, default: int | None = None) -> int:
        """Return ``value`` as a positive integer; null gives ``default``, or an error without one."""
        value, most = default if value is None else value, _MAX_COUNTS.get(name, MAX_COUNT)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.invalid(name, f"= {value!r:.40} is not a positive integer of at most {most}")
        return value

    def count_or_zero(self, name: str, absent: int) -> int:
        value = self.config.get(name, absent)
        return 0 if value is None or value == 0 else self.integer(value, name)

    def count_or(self, name: str, absent: int | None, null: int) -> int:
        """Return a positive integer; ``absent`` (None: as null) if the config lacks it, ``null`` for null."""
        return self.count(name, null if name in self.config or absent is None else absent)

    def positive(self, where: dict[str, Any], name: str, default: float | None = None) -> float:
        """Return a positive number of a usable size; absent or null gives ``default``, if there is one."""
        value = where.get(name)
        if value is None:
            value = default
        least, most = _BOUNDS.get(name, _NUMBERS)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise self.invalid(name, f"= {value!r:.40} is not a number from {least:g} to {most:g}")
        return float(value)

    def invalid(self, field: str, reason: str) -> CaesuraError:
        return checkpoint_error(self._source, f"is not valid: {field} {reason}")
