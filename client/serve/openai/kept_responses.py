"""Answers of ``/v1/responses`` that later ones may go on from, in bounded memory.

Invariants: the oldest answers go first, where all of them exceed :data:`MAX_BYTES`. They end with the server.
"""

from collections import OrderedDict

import msgspec

MAX_BYTES = 64 << 20


class KeptResponse(msgspec.Struct, frozen=True):
    body: bytes
    messages: bytes
    """The conversation up to this answer, in OpenAI's form without instructions, as JSON."""

    @property
    def size(self) -> int:
        return len(self.body) + len(self.messages)


class KeptResponses:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._by_id: OrderedDict[str, KeptResponse] = OrderedDict()

    def keep(self, response_id: str, kept: KeptResponse) -> None:
        self.forget(response_id)
        self._by_id[response_id] = kept
        self._bytes += kept.size
        while self._bytes > self._max_bytes:
            self._bytes -= self._by_id.popitem(last=False)[1].size

    def get(self, response_id: str) -> KeptResponse | None:
        return self._by_id.get(response_id)

    def forget(self, response_id: str) -> bool:
        """Return True if it was there."""
        kept = self._by_id.pop(response_id, None)
        self._bytes -= 0 if kept is None else kept.size
        return kept is not None
