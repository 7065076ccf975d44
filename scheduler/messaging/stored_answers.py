"""Answers: sent to every client that waits, and stored by message id, so that a retry has no second effect.

Invariants:
- A message id is new once. Afterwards it is under way, answered with a stored answer, or *forgotten*: a retry
  is refused then. Forgotten ids are remembered for at least :data:`REMEMBERED_IDS` later ids.
- Stored answers lie encoded in two rings written at start, and never make memory grow. That for commands is
  apart, so that the last :data:`STORED_ANSWERS` of them are stored whatever is generated.
- Answers of exchanges under way are kept outside, ``limit_bytes`` at most; beyond, the largest exchange drops
  its own and is *lost*: it goes on for those who wait for it, and nobody can attach to it.
- Results that their client may not have read are *kept*: they can be fetched by rid while they are stored,
  for ``window_s`` seconds after that client left, or until a new generation uses the rid.
- An answer that cannot be sent is replaced by an error; sending never raises. Tokens and results that a
  command caused are sent before its reply, to every client.
"""

import hashlib
import logging
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from ...io_struct import (
    BatchTokenOutput,
    CaesuraError,
    ErrorCode,
    FramedMessage,
    GenerateImagesReqOutput,
    GenerateReqOutput,
    Message,
    decode_reply,
    encode_reply,
)
from ..observability.throughput import SampleTotals
from ..runtime.guard import defect

if TYPE_CHECKING:
    from ..images.image_request import ImageRequest
    from ..runtime.engine import Engine
    from ..scheduling.request import Request

logger = logging.getLogger(__name__)

SampleResult = GenerateReqOutput | GenerateImagesReqOutput

STORED_ANSWERS = 1024
COMMAND_ANSWER_BYTES = 1024
"""Most bytes of a record in the ring for commands; a pause takes 240. Larger ones are stored like results."""
REMEMBERED_IDS = 1 << 15
_REMEMBERED_RIDS = 1 << 14
_PER_BUCKET, _WAYS = 4, 16
"""On average four remembered ids fall into a bucket, rarely over sixteen."""
_FORGOTTEN = 0
_LENGTH_BYTES = 8

Frames = Sequence[bytes | memoryview]
"""Header, and the frames behind it."""


@dataclass(slots=True, eq=False)
class Exchange:
    message_ids: list[str]
    clients: list[bytes]
    remaining: int = 1
    answers: list[Frames] = field(default_factory=list)
    nbytes: int = 0
    is_lost: bool = False
    rid: str = ""
    generation: bytes = b""
    """Digest of the generate request without its message id."""


class _Record(msgspec.Struct, array_like=True):
    digests: dict[str, bytes]
    client: bytes
    """The only client that waited for the results of a generation, or empty."""
    rid: str
    generation: bytes
    done_at: float
    answers: list[list[bytes]]


class Answers:
    def __init__(self, window_s: float, limit_bytes: int) -> None:
        """Results of clients that left can be fetched for ``window_s``; ``limit_bytes`` is their ring's."""
        self._window_s = window_s
        self._limit_bytes = limit_bytes
        self._exchanges: dict[str, tuple[bytes, Exchange]] = {}
        self._begun: dict[Exchange, None] = {}
        self._begun_bytes = 0
        self._rings = _Ring(STORED_ANSWERS * COMMAND_ANSWER_BYTES), _Ring(limit_bytes)
        self._ids = PlaceTable(REMEMBERED_IDS)
        self._rids = PlaceTable(_REMEMBERED_RIDS)
        self._left: dict[bytes, float] = {}
        """Monotonic times at which clients left, within ``window_s``; oldest first."""
        self.nbytes = sum(each.nbytes for each in (*self._rings, self._ids, self._rids))

    def attach(
        self, client: bytes, message_id: str, frame: bytes, buffers: Sequence[memoryview] = ()
    ) -> list[Message] | None:
        """Register a message (None), or attach a retry: return the answers so far, or refuse it."""
        digest = hashlib.blake2b(frame, digest_size=16)
        for buffer in buffers:
            digest.update(buffer)
        body = digest.digest()
        known = self._exchanges.get(message_id)
        if known is not None:
            _require_same(message_id, known[0], body)
            return self._wait(client, known[1], message_id)
        place = self._ids.find(message_id)
        if place is None:
            self._exchanges[message_id] = body, Exchange([message_id], [client])
            return None
        record = self._read(place)
        if record is None or message_id not in record.digests:
            raise _forgotten(message_id)
        _require_same(message_id, record.digests[message_id], body)
        return _decoded(record.answers)

    def get(self, message_id: str) -> Exchange | None:
        known = self._exchanges.get(message_id)
        return None if known is None else known[1]

    def join(self, client: bytes, message_id: str, exchange: Exchange) -> list[Message]:
        answers = self._wait(client, exchange, exchange.message_ids[0])
        body, _ = self._exchanges[message_id]
        self._exchanges[message_id] = body, exchange
        exchange.message_ids.append(message_id)
        return answers

    def add(self, exchange: Exchange, answer: Message) -> None:
        exchange.remaining -= 1
        place = _FORGOTTEN
        if not exchange.is_lost:
            try:
                frames = frames_of(answer)
                nbytes = sum(map(len, frames))
                exchange.answers.append(frames)
                exchange.nbytes += nbytes
                self._begun_bytes += nbytes
                self._begun[exchange] = None
                place = _FORGOTTEN if exchange.remaining else self._store(exchange)
            except (MemoryError, TypeError, ValueError):  # it cannot be encoded
                logger.exception("an answer to message %s is not stored", exchange.message_ids[0])
                self._lose(exchange)
        if exchange.remaining == 0:
            self._lose(exchange)
            for message_id in exchange.message_ids:
                del self._exchanges[message_id]
                self._ids.set(message_id, place)
            if exchange.rid:
                self._rids.set(exchange.rid, place)
        while self._begun_bytes > self._limit_bytes:
            self._lose(max(self._begun, key=lambda each: each.nbytes))

    def begin_generation(self, message_id: str, rid: str, generation: bytes, *, samples: int) -> None:
        _, exchange = self._exchanges[message_id]
        exchange.rid, exchange.generation, exchange.remaining = rid, generation, samples
        self._rids.discard(rid)

    def kept(self, rid: str, generation: bytes | None = None) -> list[SampleResult]:
        """Return the kept results of ``rid``, by sample index, if ``generation`` is the request's digest."""
        place = self._rids.find(rid) if self._left else None
        record = None if place is None else self._read(place)
        if record is None or record.rid != rid or generation not in (None, record.generation):
            return []
        left_at = self._left.get(record.client)
        if left_at is None or left_at < record.done_at or left_at <= monotonic() - self._window_s:
            return []
        results = [result for answer in _decoded(record.answers) for result in results_in(answer)]
        return sorted(results, key=lambda result: result.index)

    def keep_for(self, client: bytes) -> None:
        """Keep results that only ``client`` waited for: it has left and may not have read them."""
        now = monotonic()
        self._left.pop(client, None)
        self._left[client] = now
        for oldest, left_at in list(self._left.items()):
            if left_at > now - self._window_s and len(self._left) <= STORED_ANSWERS:
                break
            del self._left[oldest]

    def awaited_by(self) -> set[bytes]:
        return {client for _, exchange in self._exchanges.values() for client in exchange.clients}

    def leave(self, client: bytes, message_ids: Iterable[str]) -> None:
        for message_id in message_ids:
            exchange = self.get(message_id)
            if exchange is not None and client in exchange.clients:
                exchange.clients.remove(client)

    def _wait(self, client: bytes, exchange: Exchange, message_id: str) -> list[Message]:
        if exchange.is_lost:
            raise _forgotten(message_id)
        if client not in exchange.clients:
            exchange.clients.append(client)
        return _decoded(exchange.answers)

    def _store(self, exchange: Exchange) -> int:
        digests = {message_id: self._exchanges[message_id][0] for message_id in exchange.message_ids}
        client = exchange.clients[0] if exchange.rid and len(exchange.clients) == 1 else b""
        fields = digests, client, exchange.rid, exchange.generation, monotonic(), exchange.answers
        record = msgspec.msgpack.encode(fields)
        is_large = len(record) + _LENGTH_BYTES > COMMAND_ANSWER_BYTES
        number = int(is_large or bool(exchange.rid))
        start = self._rings[number].append(record)
        return _FORGOTTEN if start is None else len(self._rings) * start + number

    def _read(self, place: int) -> _Record | None:
        start, number = divmod(place, len(self._rings))
        found = self._rings[number].read(start)
        return None if found is None else msgspec.msgpack.decode(found, type=_Record)

    def _lose(self, exchange: Exchange) -> None:
        self._begun.pop(exchange, None)
        self._begun_bytes -= exchange.nbytes
        exchange.answers, exchange.nbytes, exchange.is_lost = [], 0, True


class Replies:
    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self.samples = SampleTotals()

    def answer(self, message_id: str, *answers: Message) -> None:
        engine = self._engine
        engine.outbox.deliver(engine.state.step)
        exchange = engine.answers.get(message_id)
        if exchange is None:
            return
        exchange.remaining = len(answers)
        for answer in answers:
            sent = answer
            for client in exchange.clients:
                sent = self.send_answer(client, sent, message_id)
            engine.answers.add(exchange, sent)

    def finished(self, request: "Request | ImageRequest", result: SampleResult) -> None:
        engine = self._engine
        self.samples.count(result)
        exchange = engine.answers.get(request.message_id)
        if exchange is None:
            return
        answer = self.result(result)
        engine.answers.add(exchange, answer)
        for client in exchange.clients:
            if client != request.client:
                self.send_answer(client, answer, request.message_id)

    def result(self, result: SampleResult) -> Message:
        if isinstance(result, GenerateReqOutput):
            return BatchTokenOutput(step=self._engine.state.step, finished=[result])
        return result

    def send_answer(self, client: bytes, answer: Message, message_id: str | None = None) -> Message:
        """Send ``answer`` to ``message_id`` (default: its ``id``), or else an error; return what was sent."""
        engine = self._engine
        try:
            assert isinstance(answer, Message), (
                f"a handler has returned a {type(answer).__name__}, not a message"
            )
            engine.router.send(client, answer)
        except Exception as error:  # noqa: BLE001  the answer cannot be encoded, or there is no memory for it
            answered = message_id if message_id is not None else str(getattr(answer, "id", ""))
            answer = defect("answering", answered, error)
            try:
                engine.router.send(client, answer)
            except Exception as again:
                logger.error("client %s: no answer could be sent", client.hex(), exc_info=again)
        return answer


class _Ring:
    """Records in memory written at start, the latest over the oldest; no address comes again or is 0."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bytes = bytearray(b"\0") * nbytes  # this writes to all pages, unlike bytearray(nbytes)
        self._end = nbytes

    def append(self, record: bytes) -> int | None:
        nbytes = _LENGTH_BYTES + len(record)
        if nbytes > self.nbytes:
            return None
        left = self.nbytes - self._end % self.nbytes
        start = self._end if nbytes <= left else self._end + left
        self._end = start + nbytes
        at = start % self.nbytes
        self._bytes[at : at + _LENGTH_BYTES] = len(record).to_bytes(_LENGTH_BYTES, "little")
        self._bytes[at + _LENGTH_BYTES : at + nbytes] = record
        return start

    def read(self, start: int) -> memoryview | None:
        if not start or start < self._end - self.nbytes:
            return None
        at, view = start % self.nbytes, memoryview(self._bytes)
        length = int.from_bytes(view[at : at + _LENGTH_BYTES], "little")
        return view[at + _LENGTH_BYTES : at + _LENGTH_BYTES + length]


class PlaceTable:
    """Places of answers by id: a hash table of fixed size in which a full bucket overwrites its oldest entry.

    Python's string hash is keyed per process, so a client cannot choose ids that collide.
    """

    def __init__(self, remembered: int) -> None:
        self._buckets = remembered // _PER_BUCKET
        entries = self._buckets * _WAYS
        # array() copies the bytes, which touches all pages now, so the table never grows later
        self._keys, self._places = array("Q", bytes(8 * entries)), array("Q", bytes(8 * entries))
        self._oldest = bytearray(self._buckets)
        self.nbytes = 16 * entries + self._buckets

    def set(self, name: Hashable, place: int) -> None:
        key, found = self._lookup(name)
        if found is None:
            bucket = key % self._buckets
            found = bucket * _WAYS + self._oldest[bucket]
            self._oldest[bucket] = (self._oldest[bucket] + 1) % _WAYS
        self._keys[found], self._places[found] = key, place

    def find(self, name: Hashable) -> int | None:
        _, found = self._lookup(name)
        return None if found is None else self._places[found]

    def discard(self, name: Hashable) -> None:
        _, found = self._lookup(name)
        if found is not None:
            self._keys[found] = 0

    def _lookup(self, name: Hashable) -> tuple[int, int | None]:
        key = hash(name) & (1 << 64) - 1 or 1
        first = key % self._buckets * _WAYS
        bucket = self._keys[first : first + _WAYS]
        return key, first + bucket.index(key) if key in bucket else None


def frames_of(message: Message) -> Frames:
    header = encode_reply(message)
    return (header, *message.buffers) if isinstance(message, FramedMessage) else (header,)


def results_in(answer: Message) -> Sequence[SampleResult]:
    if isinstance(answer, BatchTokenOutput):
        return answer.finished
    return [answer] if isinstance(answer, GenerateImagesReqOutput) else []


def _decoded(answers: Sequence[Frames]) -> list[Message]:
    messages: list[Message] = []
    for header, *buffers in answers:
        message = decode_reply(header)
        messages.append(message.with_buffers(buffers) if isinstance(message, FramedMessage) else message)
    return messages


def _require_same(message_id: str, known: bytes, body: bytes) -> None:
    if known != body:
        raise CaesuraError(ErrorCode.ID_CONFLICT, f"message id {message_id} was used with another body")


def _forgotten(message_id: str) -> CaesuraError:
    reason = f"message {message_id} was answered before, and its answer is no longer stored"
    return CaesuraError(ErrorCode.ANSWER_FORGOTTEN, reason)
