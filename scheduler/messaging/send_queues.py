"""The queues of messages that clients have not taken yet: one per client, merged while they wait, and
bounded.

Invariants:
- Order is kept: encoded frames first, then the *open* token outputs, into which later ones merge.
- Stream deltas beyond :data:`MAX_PENDING_DELTA_TOKENS` are dropped, because the terminal result contains all
  tokens. Replies and results are never dropped; a client with too many counts as gone.
- A result counts from the moment it waits, merged or not, with an estimate of its memory.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ...io_struct import (
    BatchTokenOutput,
    DeltaDetails,
    DeltaLogprobs,
    DeltaWeights,
    GenerateReqOutput,
    Message,
    StreamDelta,
    encode_reply,
)
from ..scheduling.sampling import joined_masks
from .stored_answers import Frames, frames_of

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


@dataclass(slots=True)
class Load:
    messages: int = 0
    nbytes: int = 0
    tokens: int = 0

    def add(self, other: "Load", sign: int = 1) -> None:
        self.messages += sign * other.messages
        self.nbytes += sign * other.nbytes
        self.tokens += sign * other.tokens


class Backlogs(dict[bytes, "Backlog"]):
    def __init__(self) -> None:
        super().__init__()
        self.load = Load()

    def begin(self, client: bytes, frames: Frames) -> list[bytes]:
        self[client] = Backlog(self.load)
        self[client].put(frames, 1)
        return self._over(client)

    def append(self, client: bytes, message: Message) -> list[bytes]:
        self[client].append(message)
        return self._over(client)

    def forget(self, client: bytes) -> None:
        queue = self.pop(client, None)
        if queue is not None:
            queue.drop()

    def _over(self, client: bytes) -> list[bytes]:
        load = self[client].load
        if load.messages > MAX_PENDING_MESSAGES or load.nbytes > MAX_PENDING_BYTES:
            return [client]
        if self.load.nbytes > MAX_ALL_PENDING_BYTES:
            return [max(self, key=lambda each: self[each].load.nbytes)]
        return []


class Backlog:
    def __init__(self, total: Load) -> None:
        self.load = Load()
        self._total = total
        self.frames: deque[tuple[Frames, Load]] = deque()
        self._open: _Open | None = None

    def append(self, message: Message) -> None:
        if not isinstance(message, BatchTokenOutput):
            self._seal()
            self.put(frames_of(message), 1)
            return
        opened = self._open = self._open or _Open()
        opened.step = message.step
        opened.finished += message.finished
        for result in message.finished:
            self._charge(Load(1, result_bytes(result)), opened.results)
        if (delta := message.delta) is not None:
            tokens = len(delta.tokens) // 4
            if self.load.tokens + tokens > MAX_PENDING_DELTA_TOKENS:
                self._discharge(opened.streamed)
                opened.deltas, opened.streamed = [], Load()
            else:
                opened.deltas.append(delta)
                nbytes = _ROW_BYTES * (1 + len(delta.rids)) + _array_bytes(delta)
                self._charge(Load(0, nbytes, tokens), opened.streamed)
        if opened.results.nbytes + opened.streamed.nbytes > SEAL_BYTES:
            self._seal()

    def put(self, frames: Frames, messages: int, tokens: int = 0) -> None:
        load = Load(messages, sum(map(len, frames)), tokens)
        self.frames.append((frames, load))
        self._charge(load)

    def head(self) -> Frames | None:
        if not self.frames:
            self._seal()
        return self.frames[0][0] if self.frames else None

    def pop(self) -> None:
        self._discharge(self.frames.popleft()[1])

    def drop(self) -> None:
        self._total.add(self.load, -1)

    def _charge(self, load: Load, *parts: Load) -> None:
        for each in (self.load, self._total, *parts):
            each.add(load)

    def _discharge(self, load: Load) -> None:
        self.load.add(load, -1)
        self._total.add(load, -1)

    def _seal(self) -> None:
        opened = self._open
        if opened is None:
            return
        ended = {(result.rid, result.index) for result in opened.finished}
        delta = merge(opened.deltas, ended) if opened.deltas else None
        self._open = None
        self._discharge(opened.results)
        self._discharge(opened.streamed)
        if delta is not None or opened.finished:
            output = BatchTokenOutput(step=opened.step, finished=opened.finished, delta=delta)
            self.put((encode_reply(output),), len(opened.finished), opened.streamed.tokens)


@dataclass(slots=True)
class _Open:
    step: int = 0
    finished: list[GenerateReqOutput] = field(default_factory=list)
    deltas: list[StreamDelta] = field(default_factory=list)
    results: Load = field(default_factory=Load)
    streamed: Load = field(default_factory=Load)


def result_bytes(result: GenerateReqOutput) -> int:
    return _RESULT_BYTES + _array_bytes(result)


def _array_bytes(value: object) -> int:
    if isinstance(value, msgspec.Struct):
        return sum(_array_bytes(getattr(value, name)) for name in value.__struct_fields__)
    return len(value) if isinstance(value, bytes) else 0


def merge(deltas: list[StreamDelta], ended: set[tuple[str, int]]) -> StreamDelta | None:
    """Merge deltas, with a row for each run of a sample that is not in ``ended``; None without rows."""
    numbers: dict[tuple[str, int], int] = {}
    indices, starts, counts, tokens = (
        np.concatenate([np.frombuffer(getattr(delta, name), "<i4") for delta in deltas])
        for name in ("indices", "starts", "counts", "tokens")
    )
    logprobs = np.concatenate([np.frombuffer(delta.logprobs, "<f4") for delta in deltas])
    rids = [rid for delta in deltas for rid in delta.rids]
    keys = list(zip(rids, indices.tolist(), strict=True))
    samples = np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(keys))
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
        details=_merge_details(deltas, places),
    )


def _places(lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
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


def _merge_details(deltas: Sequence[StreamDelta], places: np.ndarray) -> DeltaDetails | None:
    if not any(delta.details for delta in deltas):
        return None
    numbers: dict[DeltaWeights, int] = {}
    sampled_by, raw, sampled = [], [], []
    for delta in deltas:
        count = len(delta.tokens) // 4
        if delta.details is None:
            sampled_by.append(np.full(count, -1, "<i4"))
            raw.append(np.full(count, np.nan, "<f4"))
            sampled.append(np.full(count, np.nan, "<f4"))
            continue
        known = [numbers.setdefault(weights, len(numbers)) for weights in delta.details.weights]
        renumbered = np.asarray([*known, -1], "<i4")  # the last entry is that of -1
        sampled_by.append(renumbered[np.frombuffer(delta.details.sampled_by, "<i4")])
        raw.append(np.frombuffer(delta.details.raw_logprobs, "<f4"))
        sampled.append(np.frombuffer(delta.details.sampled_logprobs, "<f4"))
    masks = [mask for delta in deltas for mask in _each_mask(delta.details, len(delta.tokens) // 4)]
    return DeltaDetails(
        weights=list(numbers),
        sampled_by=np.concatenate(sampled_by)[places].tobytes(),
        raw_logprobs=np.concatenate(raw)[places].tobytes(),
        sampled_logprobs=np.concatenate(sampled)[places].tobytes(),
        sampling_mask=joined_masks([masks[place] for place in places]),
    )


def _each_mask(details: DeltaDetails | None, count: int) -> list[np.ndarray | None]:
    if details is None or details.sampling_mask is None:
        return [None] * count
    ids, offsets = (
        np.frombuffer(data, "<i4") for data in (details.sampling_mask.ids, details.sampling_mask.offsets)
    )
    return [ids[start:end] for start, end in itertools.pairwise(offsets.tolist())]
