"""The registry of accepted requests that have not ended, by (rid, sample) and by rid."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from .request import Phase


class LiveSample(Protocol):
    message_id: str
    rid: str
    index: int
    client: bytes
    """Client that gets the result; changes when a retry attaches from another socket."""
    phase: Phase

    @property
    def key(self) -> tuple[str, int]: ...


SampleT = TypeVar("SampleT", bound=LiveSample)


class LiveRequests(Generic[SampleT]):
    """All requests from admission to their end, whether they wait, run or are frozen by a pause."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, int], SampleT] = {}
        self._by_rid: defaultdict[str, list[SampleT]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[SampleT]:
        """Iterate over a copy, in the order of admission: finishing a request removes it."""
        return iter(list(self._by_key.values()))

    def add(self, requests: Iterable[SampleT]) -> None:
        for request in requests:
            self._by_key[request.key] = request
            self._by_rid[request.rid].append(request)

    def remove(self, request: SampleT) -> None:
        del self._by_key[request.key]
        samples = self._by_rid[request.rid]
        samples.remove(request)
        if not samples:
            del self._by_rid[request.rid]

    def samples(self, rid: str) -> list[SampleT]:
        return list(self._by_rid.get(rid, ()))

    def of_client(self, client: bytes) -> list[SampleT]:
        return [request for request in self._by_key.values() if request.client == client]
