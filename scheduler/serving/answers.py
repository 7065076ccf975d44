"""Stored answers by message id, so that a retry of a message has no second effect.

Invariants:
- A message id is new once. Afterwards it is under way, answered with a stored answer, or answered and *forgotten* (the answer
  is no longer stored). A retry under a forgotten id is refused. Forgotten ids are remembered for at least
  :data:`REMEMBERED_IDS` later ids.
- Answers younger than ``window_s`` and the last :data:`STORED_ANSWERS` answers are stored. If all of them together take more
  than ``limit_bytes``, the oldest are dropped, and then what exchanges under way have answered so far, the largest
  first. An exchange that alone takes more drops its own.
- An exchange under way that has dropped answers is *lost*: it goes on for those who wait for it, and nobody can attach to it.
- Results that their client may not have read are *kept*: they can be fetched by rid while they are stored, for ``window_s``
  seconds after that client left, or until a new generation uses the rid.
- The table of forgotten ids has a fixed size and is allocated at start.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from ...io_struct import (
    BatchTokenOutput,
    CaesuraError,
    ErrorCode,
    FetchResultReqOutput,
    FramedMessage,
    GenerateImagesReqOutput,
    GenerateReqOutput,
    Message,
    ScoreReqOutput,
)
from .send_queues import result_bytes

SampleResult = GenerateReqOutput | GenerateImagesReqOutput
"""The terminal result of one sample."""

STORED_ANSWERS = 1024
REMEMBERED_IDS = 1 << 15
ANSWER_BYTES = 1536
"""Estimated memory of a stored answer beside its arrays: its fields, ids and table entries."""

_BUCKETS, _WAYS = 1 << 13, 16
"""Shape of the table of forgotten ids: four of :data:`REMEMBERED_IDS` ids fall into a bucket on average, rarely over sixteen."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One effect: the messages that asked for it, the clients that wait for it, and its answers so far."""

    message_ids: list[str]
    clients: list[bytes]
    remaining: int = 1
    """Number of answers still to come; a generation has one per sample."""
    answers: list[Message] = field(default_factory=list)
    nbytes: int = 0
    is_lost: bool = False
    """Its answers so far took too much memory, and were dropped."""
    rid: str = ""
    """Of a generation; else empty."""
    generation: bytes = b""
    """Digest of the generate request without its message id."""
    done_at: float = 0.0
    """When the last answer was added, on the monotonic clock."""


class Answers:
    """The exchanges under way, and the stored answers of finished ones."""

    def __init__(self, window_s: float, limit_bytes: int) -> None:
        """
        Args:
            window_s: how long an answer is stored at least, as far as memory allows.
            limit_bytes: of all stored answers together.
        """
        self._window_s = window_s
        self._limit_bytes = limit_bytes
        self._exchanges: dict[str, tuple[bytes, Exchange]] = {}
        self._done: deque[Exchange] = deque()
        self._begun: dict[Exchange, None] = {}
        """Under way, with answers."""
        self._kept: dict[str, Exchange] = {}
        self._forgotten = ForgottenIds()
        self.stored_bytes = 0

    def attach(
        self, client: bytes, message_id: str, frame: bytes, buffers: Sequence[memoryview] = ()
    ) -> list[Message] | None:
        """Register a message, or attach a retry of it.

        Args:
            buffers: frames behind ``frame`` that say what is asked for, too.

        Returns:
            For a retry, the answers so far; ``client`` will get the later ones. None if the id is new.

        Raises:
            CaesuraError: ``id_conflict`` if the id was used with other frames; ``answer_forgotten``.
        """
        digest = hashlib.blake2b(frame, digest_size=16)
        for buffer in buffers:
            digest.update(buffer)
        body = digest.digest()
        known = self._exchanges.get(message_id)
        if known is None:
            if message_id in self._forgotten:
                raise _forgotten(message_id)
            self._exchanges[message_id] = body, Exchange([message_id], [client])
            return None
        if known[0] != body:
            raise CaesuraError(ErrorCode.ID_CONFLICT, f"message id {message_id} was used with another body")
        if known[1].is_lost:
            raise _forgotten(message_id)
        self._add_waiter(client, known[1])
        return known[1].answers

    def get(self, message_id: str) -> Exchange | None:
        """The exchange of a message that is under way or stored."""
        known = self._exchanges.get(message_id)
        return None if known is None else known[1]

    def join(self, client: bytes, message_id: str, exchange: Exchange) -> list[Message]:
        """Make the just attached ``message_id`` part of ``exchange``, which it repeats; returns its answers so far.

        Raises:
            CaesuraError: ``answer_forgotten``.
        """
        if exchange.is_lost:
            raise _forgotten(exchange.message_ids[0])
        body, _ = self._exchanges[message_id]
        self._exchanges[message_id] = body, exchange
        exchange.message_ids.append(message_id)
        self._add_waiter(client, exchange)
        return exchange.answers

    def add(self, exchange: Exchange, answer: Message, nbytes: int) -> None:
        """Add an answer to ``exchange``; with the last one it is done."""
        exchange.remaining -= 1
        if not exchange.is_lost:
            exchange.answers.append(answer)
            exchange.nbytes += nbytes
            self.stored_bytes += nbytes
            self._begun[exchange] = None
        if exchange.nbytes > self._limit_bytes:
            self._lose(exchange)
        if exchange.remaining == 0:
            self._end(exchange)
        self._drop_oldest()

    def begin_generation(self, message_id: str, rid: str, generation: bytes, *, samples: int) -> None:
        """Record that the just attached ``message_id`` begins generation ``rid`` with ``samples`` samples."""
        _, exchange = self._exchanges[message_id]
        exchange.rid, exchange.generation, exchange.remaining = rid, generation, samples
        self._kept.pop(rid, None)

    def kept(self, rid: str, generation: bytes | None = None) -> list[SampleResult]:
        """The kept results of ``rid``, by sample index.

        Args:
            generation: digest of a request; results of another request are not returned. None accepts any.
        """
        exchange = self._kept.get(rid)
        if exchange is None or (generation is not None and exchange.generation != generation):
            return []
        if exchange.done_at <= monotonic() - self._window_s:
            del self._kept[rid]
            return []
        results = {result.index: result for answer in exchange.answers for result in results_in(answer)}
        return [results[index] for index in sorted(results)]

    def keep_for(self, client: bytes) -> None:
        """Keep the results that only ``client`` waited for, because it has left and may not have read them."""
        done, self._done = self._done, deque()
        kept = [exchange for exchange in done if exchange.rid and exchange.clients == [client]]
        self._kept |= {exchange.rid: exchange for exchange in kept}
        for exchange in kept:
            exchange.done_at = monotonic()
        moved = set(kept)
        self._done.extend(exchange for exchange in done if exchange not in moved)
        self._done.extend(kept)  # keeps the queue ordered by done_at

    def awaited_by(self) -> set[bytes]:
        """Every client that waits for an answer."""
        awaited = (exchange for _, exchange in self._exchanges.values() if exchange.remaining > 0)
        return {client for exchange in awaited for client in exchange.clients}

    def is_awaited(self, message_id: str) -> bool:
        """Whether a client that is not known to be gone waits for the answer."""
        exchange = self.get(message_id)
        return exchange is not None and bool(exchange.clients)

    def leave(self, client: bytes, message_ids: Iterable[str]) -> None:
        """Record that ``client`` is gone and no longer waits for the answers to ``message_ids``."""
        for message_id in message_ids:
            exchange = self.get(message_id)
            if exchange is not None and client in exchange.clients:
                exchange.clients.remove(client)

    def _add_waiter(self, client: bytes, exchange: Exchange) -> None:
        if exchange.remaining and client not in exchange.clients:
            exchange.clients.append(client)

    def _end(self, exchange: Exchange) -> None:
        self._begun.pop(exchange, None)
        if exchange.is_lost:
            self._forget(exchange)
            return
        exchange.done_at = monotonic()
        self._done.append(exchange)

    def _lose(self, exchange: Exchange) -> None:
        """Drop the answers of an exchange, however many are still to come."""
        del self._begun[exchange]
        self.stored_bytes -= exchange.nbytes
        exchange.answers, exchange.nbytes, exchange.is_lost = [], 0, True

    def _drop_oldest(self) -> None:
        horizon = monotonic() - self._window_s
        while self._done:
            exchange = self._done[0]
            keeps = len(self._done) <= STORED_ANSWERS or exchange.done_at > horizon
            if keeps and self.stored_bytes <= self._limit_bytes:
                return
            self._done.popleft()
            self.stored_bytes -= exchange.nbytes
            self._forget(exchange)
        while self.stored_bytes > self._limit_bytes:
            self._lose(max(self._begun, key=lambda each: each.nbytes))

    def _forget(self, exchange: Exchange) -> None:
        if self._kept.get(exchange.rid) is exchange:
            del self._kept[exchange.rid]
        for message_id in exchange.message_ids:
            del self._exchanges[message_id]
            self._forgotten.add(message_id)


class ForgottenIds:
    """Message ids whose answers are no longer stored: a table of hashes in which a full bucket overwrites its oldest entry.

    Python's string hash is keyed per process, so a client cannot choose ids that collide.
    """

    def __init__(self) -> None:
        self._table = array(
            "Q", bytes(8 * _BUCKETS * _WAYS)
        )  # array() copies the bytes, which touches all pages now, so the table never grows later
        self._oldest = bytearray(_BUCKETS)

    def add(self, message_id: str) -> None:
        key, bucket = _key(message_id)
        place = self._oldest[bucket]
        self._table[bucket * _WAYS + place] = key
        self._oldest[bucket] = (place + 1) % _WAYS

    def __contains__(self, message_id: str) -> bool:
        key, bucket = _key(message_id)
        return key in self._table[bucket * _WAYS : (bucket + 1) * _WAYS]


def _forgotten(message_id: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.ANSWER_FORGOTTEN,
        f"message {message_id} was answered before, and its answer is no longer stored",
    )


def _key(message_id: str) -> tuple[int, int]:
    number = hash(message_id) & (1 << 64) - 1
    return number or 1, number % _BUCKETS


def results_in(answer: Message) -> Sequence[SampleResult]:
    """The terminal results that ``answer`` is or contains."""
    if isinstance(answer, BatchTokenOutput):
        return answer.finished
    return [answer] if isinstance(answer, GenerateImagesReqOutput) else []


def answer_bytes(answer: Message) -> int:
    """Estimated memory of storing ``answer``."""
    if isinstance(answer, FramedMessage):
        return ANSWER_BYTES + sum(map(len, answer.buffers))
    if isinstance(answer, BatchTokenOutput):
        return sum(map(result_bytes, answer.finished))
    if isinstance(answer, FetchResultReqOutput):
        return ANSWER_BYTES + sum(map(result_bytes, answer.results))
    return ANSWER_BYTES + (sum(map(len, answer.logprobs)) if isinstance(answer, ScoreReqOutput) else 0)
