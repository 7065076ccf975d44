"""Log-probabilities of whole prompts, kept for requests that ask for the same again.

Invariant: what is kept is of the present weights epoch; the adapter's version is part of the salt.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from .radix import Salt

if TYPE_CHECKING:
    from ..scheduling.sampling import LogprobRecord

MAX_BYTES = 64 << 20
"""Bytes that are kept; the prompt not used for longest goes first."""
ENTRY_BYTES = 2048
"""Bytes of each record beside its rows: the objects that hold them."""


class PromptLogprobs:
    def __init__(self) -> None:
        self.nbytes = 0
        self._kept: OrderedDict[tuple[Salt, bytes], LogprobRecord] = OrderedDict()

    def put(self, salt: Salt, prompt: np.ndarray, record: "LogprobRecord") -> None:
        """Keep a copy of all log-probabilities of a ``prompt``, instead of an earlier one."""
        key = (salt, prompt.tobytes())
        self._forget(key)
        self._kept[key] = record.inputs_alone()
        self.nbytes += _size(key, record)
        while self.nbytes > MAX_BYTES:
            self._forget(next(iter(self._kept)))

    def get(self, salt: Salt, prompt: np.ndarray) -> "LogprobRecord | None":
        key = (salt, prompt.tobytes())
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0

    def _forget(self, key: tuple[Salt, bytes]) -> None:
        if (record := self._kept.pop(key, None)) is not None:
            self.nbytes -= _size(key, record)


def _size(key: tuple[Salt, bytes], record: "LogprobRecord") -> int:
    return ENTRY_BYTES + len(key[1]) + record.input_bytes + record.token_ids.nbytes
