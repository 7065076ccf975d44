"""The registry of accepted requests that have not ended, by (rid, sample) and by rid.

Invariant: a request is added once, when it was admitted, and removed once, by the transition that ends it
(``output_processor.py``).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .request import Request


class LiveRequests:
    """Requests from admission to their end, whether they wait, run or are frozen."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, int], Request] = {}
        self._by_rid: defaultdict[str, list[Request]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        """In the order of admission; over a copy, since ending a request removes it."""
        return iter(list(self._by_key.values()))

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._by_key

    def __getitem__(self, key: tuple[str, int]) -> Request:
        return self._by_key[key]

    def add(self, requests: Iterable[Request]) -> None:
        """Requests that admission has accepted."""
        for request in requests:
            self._by_key[request.key] = request
            self._by_rid[request.rid].append(request)

    def remove(self, request: Request) -> None:
        """``request`` has ended."""
        del self._by_key[request.key]
        samples = self._by_rid[request.rid]
        samples.remove(request)
        if not samples:
            del self._by_rid[request.rid]

    def samples(self, rid: str) -> list[Request]:
        """The live samples of generation ``rid``."""
        return list(self._by_rid.get(rid, ()))

    def of_client(self, client: bytes) -> list[Request]:
        """Those whose results go to ``client``."""
        return [request for request in self._by_key.values() if request.client == client]
