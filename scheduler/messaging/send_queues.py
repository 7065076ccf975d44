"""The queues of messages that clients have not taken yet: one per client, merged while they wait, and
bounded.

Invariants:
- Order is kept: encoded frames first, then the *open* token outputs, into which later ones merge. An encoded
  frame is never encoded again.
- Stream deltas beyond :data:`MAX_PENDING_DELTA_TOKENS` are dropped, because the terminal result contains all
  tokens. Replies and results are never dropped; a client with too many counts as gone.
- A result counts from the moment it waits, merged or not, with an estimate of its memory.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...io_struct import (
    BatchTokenOutput,
    DeltaLogprobs,
    FramedMessage,
    GenerateReqOutput,
    Message,
    StreamDelta,
    encode_reply,
)
from .stream_details import details_bytes, merge_details

MAX_PENDING_DELTA_TOKENS = 1 << 16
"""Most tokens of deltas per client; further ones are dropped, which leaves a gap in ``starts``."""
MAX_PENDING_MESSAGES = 1 << 16
"""Most unread replies and results per client; one with more counts as gone."""
MAX_PENDING_BYTES = 256 << 20
"""Most bytes of replies, results and deltas per client; one with more counts as gone."""
MAX_ALL_PENDING_BYTES = 1 << 30
"""Most bytes of all clients together; beyond it, the client with the most counts as gone."""
SEAL_BYTES = 4 << 20
"""Bytes at which open token outputs are encoded, so that encoding one message never takes long."""
_ROW_BYTES = 64  # of a delta's row beside its columns: a reference to the rid, and its share of the lists
_RESULT_BYTES = 1536  # of a result's fields beside its arrays


Frames = Sequence[bytes | memoryview]


def frames_of(message: Message) -> Frames:
    header = encode_reply(message)
    return (header, *message.buffers) if isinstance(message, FramedMessage) else (header,)


@dataclass(slots=True)
class Load:
    messages: int = 0
    nbytes: int = 0


class Backlogs:
    def __init__(self) -> None:
        self.load = Load()
        self._queues: dict[bytes, Backlog] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, client: bytes) -> bool:
        return client in self._queues

    def __getitem__(self, client: bytes) -> "Backlog":
        return self._queues[client]

    def items(self) -> Iterator[tuple[bytes, "Backlog"]]:
        """Iterate over a copy, because queues may be dropped meanwhile."""
        yield from list(self._queues.items())

    def begin(self, client: bytes, frames: Frames) -> list[bytes]:
        """Start the queue of ``client`` with a message that it could not take; return the clients over a
        limit.
        """
        self._queues[client] = Backlog(self.load)
        self._queues[client].put(frames)
        return self._over(client)

    def append(self, client: bytes, message: Message) -> list[bytes]:
        """Append ``message`` to the queue of ``client``; return the clients over a limit, which count as
        gone.
        """
        self._queues[client].append(message)
        return self._over(client)

    def forget(self, client: bytes) -> None:
        queue = self._queues.pop(client, None)
        if queue is not None:
            queue.drop()

    def _over(self, client: bytes) -> list[bytes]:
        load = self._queues[client].load
        if load.messages > MAX_PENDING_MESSAGES or load.nbytes > MAX_PENDING_BYTES:
            return [client]
        if self.load.nbytes > MAX_ALL_PENDING_BYTES:
            return [max(self._queues, key=lambda each: self._queues[each].load.nbytes)]
        return []


class Backlog:
    """Queue of one client: encoded frames, then the open token outputs."""

    def __init__(self, total: Load) -> None:
        """``total`` is the load of all queues together, which this one updates."""
        self.load = Load()
        self._total = total
        self._frames: deque[_Encoded] = deque()
        self._delta_tokens = 0
        """Tokens of deltas, in frames and open outputs together."""
        self._is_open = False
        self._step = 0
        self._finished: list[GenerateReqOutput] = []
        self._deltas: list[StreamDelta] = []
        self._open = Load()
        self._open_delta = _OpenDelta()

    def append(self, message: Message) -> None:
        if not isinstance(message, BatchTokenOutput):
            self._seal()
            self.put(frames_of(message))
            return
        self._is_open = True
        self._step = message.step
        self._finished += message.finished
        for result in message.finished:
            self._charge_open(1, result_bytes(result))
        if message.delta is not None:
            self._add_delta(message.delta)
        if self._open.nbytes + self._open_delta.nbytes > SEAL_BYTES:
            self._seal()

    def put(self, frames: Frames) -> None:
        self._push(_Encoded(frames, 1, 0))

    def head(self) -> Frames | None:
        """Return the message to send next, or None if the queue is empty."""
        if not self._frames:
            self._seal()
        return self._frames[0].frames if self._frames else None

    def pop(self) -> None:
        """Remove :meth:`head`, which was sent."""
        message = self._frames.popleft()
        self._charge(-message.messages, -message.nbytes)
        self._delta_tokens -= message.delta_tokens

    def drop(self) -> None:
        """Subtract what is left from the loads."""
        self._charge(-self.load.messages, -self.load.nbytes)

    def _push(self, message: "_Encoded") -> None:
        self._frames.append(message)
        self._charge(message.messages, message.nbytes)

    def _charge(self, messages: int, nbytes: int) -> None:
        for load in (self.load, self._total):
            load.messages += messages
            load.nbytes += nbytes

    def _charge_open(self, messages: int, nbytes: int) -> None:
        self._open.messages += messages
        self._open.nbytes += nbytes
        self._charge(messages, nbytes)

    def _add_delta(self, delta: StreamDelta) -> None:
        tokens = len(delta.tokens) // 4
        if self._delta_tokens + tokens > MAX_PENDING_DELTA_TOKENS:
            self._drop_open_deltas()
            return
        nbytes = delta_bytes(delta)
        self._deltas.append(delta)
        self._open_delta.tokens += tokens
        self._open_delta.nbytes += nbytes
        self._delta_tokens += tokens
        self._charge(0, nbytes)

    def _drop_open_deltas(self) -> None:
        self._delta_tokens -= self._open_delta.tokens
        self._charge(0, -self._open_delta.nbytes)
        self._deltas, self._open_delta = [], _OpenDelta()

    def _seal(self) -> None:
        """Merge the open token outputs and encode them into a frame."""
        if not self._is_open:
            return
        finished, tokens = self._finished, self._open_delta.tokens
        ended = {(result.rid, result.index) for result in finished}
        delta = merge(self._deltas, ended) if self._deltas else None
        self._charge(-self._open.messages, -self._open.nbytes)
        self._drop_open_deltas()
        self._is_open = False
        self._finished, self._open = [], Load()
        if delta is not None or finished:
            output = BatchTokenOutput(step=self._step, finished=finished, delta=delta)
            self._delta_tokens += tokens
            self._push(_Encoded((encode_reply(output),), len(finished), tokens))


@dataclass(frozen=True, slots=True)
class _Encoded:
    frames: Frames
    messages: int
    delta_tokens: int

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.frames))


@dataclass(slots=True)
class _OpenDelta:
    tokens: int = 0
    nbytes: int = 0


def result_bytes(result: GenerateReqOutput) -> int:
    """Estimate the bytes of keeping ``result``."""
    arrays = (
        result.output_ids,
        result.output_logprobs,
        result.raw_logprobs,
        result.sampled_logprobs,
        result.input_logprobs,
    )
    routed = 0 if result.routed_experts is None else len(result.routed_experts.data)
    mask = result.sampling_mask
    routed += 0 if mask is None else len(mask.ids) + len(mask.offsets)
    rows = (
        result.output_top_logprobs,
        result.output_token_ids_logprobs,
        result.input_top_logprobs,
        result.input_token_ids_logprobs,
    )
    further = sum(len(row.ids) + len(row.logprobs) for row in rows if row is not None)
    return _RESULT_BYTES + routed + further + sum(len(array) for array in arrays if array is not None)


def delta_bytes(delta: StreamDelta) -> int:
    """Estimate the bytes of keeping ``delta``."""
    further = sum(
        len(each.ks) + len(each.ids) + len(each.logprobs)
        for each in (delta.top, delta.token_ids)
        if each is not None
    )
    columns = (delta.indices, delta.starts, delta.counts, delta.tokens, delta.logprobs)
    return (
        _ROW_BYTES * (1 + len(delta.rids)) + further + details_bytes(delta.details) + sum(map(len, columns))
    )


def merge(deltas: list[StreamDelta], ended: set[tuple[str, int]]) -> StreamDelta | None:
    """Merge deltas into one, with a row for each contiguous run of a sample's tokens; None if no row is left.

    Samples in ``ended`` are left out, because their terminal result follows.
    """
    numbers: dict[tuple[str, int], int] = {}
    indices = np.concatenate([np.frombuffer(delta.indices, "<i4") for delta in deltas])
    rids = [rid for delta in deltas for rid in delta.rids]
    keys = list(zip(rids, indices.tolist(), strict=True))
    samples = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(keys))
    starts = np.concatenate([np.frombuffer(delta.starts, "<i4") for delta in deltas])
    counts = np.concatenate([np.frombuffer(delta.counts, "<i4") for delta in deltas])
    tokens = np.concatenate([np.frombuffer(delta.tokens, "<i4") for delta in deltas])
    logprobs = np.concatenate([np.frombuffer(delta.logprobs, "<f4") for delta in deltas])

    dead = np.fromiter((key in ended for key in numbers), np.bool_, len(numbers))
    order = np.argsort(samples, kind="stable")  # by sample, and within it by time
    order = order[~dead[samples[order]]]
    if not len(order):
        return None
    samples, starts, row_counts = samples[order], starts[order], counts[order]
    continues = (samples[1:] == samples[:-1]) & (starts[1:] == starts[:-1] + row_counts[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    places = _places(counts, order)
    names = list(numbers)
    return StreamDelta(
        rids=[names[sample][0] for sample in samples[first].tolist()],
        indices=np.asarray([names[sample][1] for sample in samples[first].tolist()], "<i4").tobytes(),
        starts=starts[first].astype("<i4").tobytes(),
        counts=np.add.reduceat(row_counts, first).astype("<i4").tobytes(),
        tokens=tokens[places].tobytes(),
        logprobs=logprobs[places].tobytes(),
        top=_merge_further([(delta, delta.top) for delta in deltas], counts, order, first),
        token_ids=_merge_further([(delta, delta.token_ids) for delta in deltas], counts, order, first),
        details=merge_details(deltas, places),
    )


def _places(lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return indices of the values of the rows ``order`` among those of all rows, which have ``lengths``
    each.
    """
    begins, taken = (np.cumsum(lengths) - lengths)[order], lengths[order]
    offsets = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    places: np.ndarray = np.repeat(begins, taken) + offsets
    return places


def _merge_further(
    deltas: list[tuple[StreamDelta, DeltaLogprobs | None]],
    counts: np.ndarray,
    order: np.ndarray,
    first: np.ndarray,
) -> DeltaLogprobs | None:
    """Return the extra logprobs of the rows ``order``, merged into runs that begin at entries ``first``."""
    if not any(further for _, further in deltas):
        return None
    ks = np.concatenate(
        [
            np.zeros(len(delta.rids), np.int32) if further is None else np.frombuffer(further.ks, "<i4")
            for delta, further in deltas
        ]
    )
    known = [further for _, further in deltas if further is not None]
    ids = np.concatenate([np.frombuffer(further.ids, "<i4") for further in known])
    logprobs = np.concatenate([np.frombuffer(further.logprobs, "<f4") for further in known])
    places = _places(counts * ks, order)
    return DeltaLogprobs(
        ks=ks[order][first].astype("<i4").tobytes(),
        ids=ids[places].tobytes(),
        logprobs=logprobs[places].tobytes(),
    )
