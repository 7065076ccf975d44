"""The registry of accepted requests that have not ended, by (rid, sample) and by rid.

Invariant: a request is added once, on admission, and removed once, by ``OutputProcessor.finish``.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .request import Request


class LiveRequests:
    """All requests from admission to their end, whether they wait, run or are frozen by a pause."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, int], Request] = {}
        self._by_rid: defaultdict[str, list[Request]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        """In the order of admission. Iterates over a copy, because finishing a request removes it."""
        return iter(list(self._by_key.values()))

    def add(self, requests: Iterable[Request]) -> None:
        """Register admitted requests."""
        for request in requests:
            self._by_key[request.key] = request
            self._by_rid[request.rid].append(request)

    def remove(self, request: Request) -> None:
        """Unregister a finished request."""
        del self._by_key[request.key]
        samples = self._by_rid[request.rid]
        samples.remove(request)
        if not samples:
            del self._by_rid[request.rid]

    def samples(self, rid: str) -> list[Request]:
        """The live samples of generation ``rid``."""
        return list(self._by_rid.get(rid, ()))

    def of_client(self, client: bytes) -> list[Request]:
        """The live requests whose results go to ``client``."""
        return [request for request in self._by_key.values() if request.client == client]
