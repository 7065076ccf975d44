"""The state of one sample from arrival to its terminal result, and the table of the requests that hold KV.

- A :class:`Request` is in exactly one :class:`Phase`; ``FINISHED`` is entered once, and only by
  ``Outputs.finish``.
- It is bound to a slot if and only if it holds KV. Then its tokens are in the table's row, otherwise in its
  own arrays.
- Per-step work is array work on :class:`RequestTable`; Python touches a request only when it arrives, starts,
  ends, is retracted, or gets a new weight-version span.
- ``scheduled[slot]`` counts tokens whose KV is computed or in flight; ``length[slot]`` counts known tokens.
  Between steps at pipeline depth 0, ``length == scheduled + 1`` for every decoding row.
- A replay (``forced_output_ids``) is a prefill of prompt and output whose logits are wanted from the prompt's
  last token on. Its row has the whole output from the start; ``length`` counts what was recorded of it.
"""

import heapq
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...io_struct import GenerateReqInput, SamplingParams, WeightVersionSpan
from ..cache.radix import Salt
from ..execution.forward import NO_ADAPTER
from .hidden_states import HiddenRecord
from .sampling import LogprobRecord, SamplingColumns, SamplingMaskRecord

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..cache.manager import RequestKV
    from ..cache.pool import RoutingPool
    from ..layers.lora import Factors
    from ..scoring.drift_checks import Check
    from .grammars import GrammarState

NO_SLOT = -1
NO_TOKEN = -1
_STOP_WIDTH = 8


class Phase(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    """Holds KV pages for all of its known tokens, and has computed some of them."""
    DECODE = "decode"
    """Has computed the KV of all known tokens but the last, which the next step computes."""
    FINISHED = "finished"
    """The terminal result has been built; a step in flight may still use its slot."""


@dataclass(frozen=True, slots=True)
class WeightStamp:
    """Weights and adapter of a step, with the field names of the wire."""

    epoch: int
    version: str
    incarnation: str = ""
    adapter: str | None = None
    adapter_epoch: int = 0
    digest: str = ""
    adapter_digest: str = ""


@lru_cache(maxsize=64)
def fields_of(stamp: WeightStamp) -> "Mapping[str, Any]":
    return asdict(stamp)


@dataclass(slots=True, eq=False, kw_only=True)
class Adapter:
    """One version of an adapter: kept while it is loaded, and while samples are ``running`` with it."""

    name: str
    epoch: int
    serial: int
    """Number that no other version of this engine has; :attr:`epoch` may be that of several engines."""
    rank: int
    pinned: bool
    path: str
    digests: dict[str, bytes]
    """Digest of each tensor's bytes and scale, by its name."""
    digest: str
    """Digest of all of them, in hex."""
    copy: "Mapping[str, Factors] | None" = None
    """Factors on the host, by module, if it may give up its slot."""
    slot: int = NO_ADAPTER
    """Slot that it is in, from which alone samples are computed."""
    came: int = 0
    """Number of its arrival there."""
    makes_way: bool = False
    """True if no more samples are started, for the slot is wanted by another."""
    running: int = 0
    """Live samples that have it."""
    last_used: int = 0

    @property
    def may_start(self) -> bool:
        return self.slot != NO_ADAPTER and not self.makes_way

    def stamped(self, stamp: WeightStamp) -> WeightStamp:
        return replace(stamp, adapter=self.name, adapter_epoch=self.epoch, adapter_digest=self.digest)


@dataclass(slots=True)
class OutputArrays:
    """Per-token results of one sample; int32 tokens, the others float32 and meaningful where requested."""

    tokens: np.ndarray
    logprobs: np.ndarray
    raw: np.ndarray
    sampled: np.ndarray

    @staticmethod
    def empty() -> "OutputArrays":
        no_values = np.empty(0, np.float32)
        return OutputArrays(np.empty(0, np.int32), no_values, no_values, no_values)


@dataclass(slots=True, eq=False)
class Request:
    """One sample of one prompt. The comment above each block of fields says which code writes them."""

    # Written at admission, then constant, except that ``client`` changes when a retry attaches from another
    # socket.
    message_id: str
    rid: str
    index: int
    client: bytes
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    limit: int
    stop_ids: tuple[int, ...]
    salt: Salt
    stream: bool
    return_logprob: bool
    return_raw: bool
    return_sampled: bool
    arrival: float
    prompt_key: int
    """Hash of salt and prompt, equal for all samples of one generation."""
    routed_from: int | None = None
    early_stops: tuple[int, ...] = ()
    """Stop token ids that must not be sampled before ``min_new_tokens``."""
    continued: int = 0
    """The last tokens of ``prompt`` that penalties count as output."""
    details: bool = False
    lease: tuple[str, float] | None = None
    """Name and seconds of a lease on its cached pages."""
    adapter: Adapter | None = None
    """Written by ``control/adapters.py``, with ``salt`` and ``prompt_key``."""

    forced: np.ndarray | None = None
    """int32: the output of a replay."""

    grammar: "GrammarState | None" = None
    """Written by grammars.py; None: any token may be sampled."""

    check: "Check | None" = None
    """The sample that this is to score again for ``scoring/drift_checks.py``, or None."""

    # Written by batcher.py and waiting_queue.py.
    phase: Phase = Phase.WAITING
    slot: int = NO_SLOT
    kv: "RequestKV | None" = None
    first_scheduled: float | None = None
    cached_tokens: int = 0
    num_retractions: int = 0
    computes_shared_prefix: bool = False
    computes_inputs: bool = False
    """True if the prompt was scored since it has these pages, so by the present weights."""
    routed: np.ndarray | None = None
    restarted: bool = False
    """It decoded, has lost its states with a failed step, and does not decode again yet."""

    # Written by step_recovery.py.
    failed_alone_at: int | None = None
    """Tokens computed when a step of only its next token ran out of memory."""

    # Written by outputs.py.
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    # Written by outputs.py, evict and bind.
    record: LogprobRecord | None = None
    masks: SamplingMaskRecord | None = None
    hidden: HiddenRecord | None = None
    evicted: OutputArrays = field(default_factory=OutputArrays.empty)
    spans: list[tuple[WeightStamp, bool, int]] = field(default_factory=list)
    """(stamp, stale_kv, first output token)"""

    @property
    def first_uncached(self) -> int | None:
        """First position that must be computed even if it is cached: its results are wanted. None: none."""
        wanting = self.record, self.hidden
        firsts = [each.first_uncached for each in wanting if each is not None]
        return min((first for first in firsts if first is not None), default=None)

    @property
    def key(self) -> tuple[str, int]:
        return (self.rid, self.index)

    def version_spans(self, num_outputs: int) -> list[WeightVersionSpan]:
        """Return the weight-version spans; they cover ``[0, num_outputs)`` without gaps."""
        ends = [start for _, _, start in self.spans[1:]] + [num_outputs]
        return [
            WeightVersionSpan(**fields_of(stamp), start=start, end=end, stale_kv=stale)
            for (stamp, stale, start), end in zip(self.spans, ends, strict=True)
            if start < end  # a span without tokens was opened for a token whose step failed
        ]


def make_requests(
    message: GenerateReqInput,
    *,
    client: bytes,
    seed: int,
    limit: int,
    eos_token_ids: tuple[int, ...],
    arrival: float,
    num_layers: int = 0,
) -> list[Request]:
    params = message.sampling_params
    prompt = np.asarray(message.input_ids, np.int32)
    stop_ids = tuple(params.stop_token_ids) + (() if params.ignore_eos else eos_token_ids)
    prompt_key = hash((message.cache_salt, prompt.tobytes()))
    return [
        Request(
            message_id=message.id,
            rid=message.rid if message.rid is not None else message.id,
            index=index,
            client=client,
            prompt=prompt,
            params=params,
            seed=seed,
            limit=limit,
            stop_ids=stop_ids,
            salt=message.cache_salt,
            stream=message.stream,
            return_logprob=message.return_logprob,
            return_raw=message.return_raw_logprob,
            return_sampled=message.return_sampled_logprob,
            arrival=arrival,
            prompt_key=prompt_key,
            routed_from=message.routed_experts_start_len if message.return_routed_experts else None,
            early_stops=(*params.stop_token_ids, *eos_token_ids),
            record=LogprobRecord.of(message),
            masks=SamplingMaskRecord() if message.return_sampling_mask else None,
            hidden=HiddenRecord.of(message, num_layers),
            continued=message.continued_tokens,
            details=message.stream_details,
            lease=None if message.prefix_lease is None else (message.prefix_lease, message.prefix_lease_s),
            forced=None
            if params.forced_output_ids is None
            else np.asarray(params.forced_output_ids, np.int32),
        )
        for index in range(message.first_sample, message.first_sample + params.n)
    ]


class RequestTable:
    """Running requests as arrays, one row ("slot") each; resident only for contexts that occurred."""

    def __init__(self, slots: int, context_len: int, page_size: int, vocab_size: int) -> None:
        pages = -(-context_len // page_size)
        self.slots = slots
        self.vocab_size = vocab_size
        self.by_slot: list[Request | None] = [None] * slots
        self._free = list(range(slots))  # a heap

        # Constant while a request is bound; written by bind.
        self.prompt_len = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self.stop_ids = np.full((slots, _STOP_WIDTH), NO_TOKEN, np.int32)
        self.stream = np.zeros(slots, np.bool_)
        self.stale_kv = np.zeros(slots, np.bool_)
        self.adapter = np.full(slots, NO_ADAPTER, np.int64)
        """Slot of the adapter, or NO_ADAPTER."""
        self.replays = np.zeros(slots, np.bool_)
        self.wants_hidden = np.zeros(slots, np.bool_)
        self.sampling = SamplingColumns(slots, vocab_size)

        # Changed by steps.
        self.page_table = np.zeros((slots, pages), np.int32)
        self.tokens = np.zeros((slots, context_len + 1), np.int32)
        self.logprobs = np.zeros((slots, context_len + 1), np.float32)
        self.raw = np.zeros((slots, context_len + 1), np.float32)
        self.sampled = np.zeros((slots, context_len + 1), np.float32)
        self.length = np.zeros(slots, np.int64)
        self.scheduled = np.zeros(slots, np.int64)
        self.inflight = np.zeros(slots, np.int64)
        self.live = np.zeros(slots, np.bool_)
        """False once the terminal result is built."""
        self.stamp = np.full(slots, -1, np.int64)
        """Number of the weight stamp (and staleness) of the last span; -1 if unknown."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_slot(self) -> int:
        return heapq.heappop(self._free)

    def give_back_slot(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def bind(self, request: Request, slot: int) -> None:
        """Move ``request``'s tokens into row ``slot`` and set everything that a step reads."""
        evicted = request.evicted
        prompt_len = len(request.prompt)
        # These two allocate memory and may raise, so they come first, while nothing has been moved.
        self._set_stop_ids(slot, request.stop_ids)
        self.sampling.bind(slot, request)
        length = prompt_len + len(evicted.tokens)
        request.slot = slot
        self.by_slot[slot] = request
        self.tokens[slot, :prompt_len] = request.prompt
        self.tokens[slot, prompt_len:length] = evicted.tokens
        self.logprobs[slot, prompt_len:length] = evicted.logprobs
        self.raw[slot, prompt_len:length] = evicted.raw
        self.sampled[slot, prompt_len:length] = evicted.sampled
        request.evicted = OutputArrays.empty()
        self.prompt_len[slot] = prompt_len
        self.length[slot] = length
        self.limit[slot] = request.limit
        self.replays[slot] = request.forced is not None
        self.wants_hidden[slot] = request.hidden is not None
        if request.forced is not None:
            self.tokens[slot, prompt_len : request.limit] = request.forced
        self.stream[slot] = request.stream
        self.stale_kv[slot] = False
        self.adapter[slot] = NO_ADAPTER if request.adapter is None else request.adapter.slot
        self.inflight[slot] = 0
        self.live[slot] = True
        self.stamp[slot] = -1  # outputs.py then compares with the last span before it opens a new one

    def release(self, request: Request) -> None:
        slot = request.slot
        self.by_slot[slot] = None
        self.live[slot] = False
        self.sampling.release(slot)
        request.slot = NO_SLOT
        self.give_back_slot(slot)

    def evict(self, request: Request) -> None:
        request.evicted = self.outputs(request)
        self.release(request)

    def computable(self, slots: np.ndarray | int) -> np.ndarray:
        """Return how many tokens of ``slots`` a prefill computes: the last token of an output needs no KV."""
        found: np.ndarray = np.where(self.replays[slots], self.limit[slots] - 1, self.length[slots])
        return found

    def outputs(self, request: Request) -> OutputArrays:
        """Return the outputs so far: a copy of the row while bound, else the request's own arrays."""
        slot = request.slot
        if slot == NO_SLOT:
            return request.evicted
        window = slice(int(self.prompt_len[slot]), int(self.length[slot]))
        return OutputArrays(
            self.tokens[slot, window].copy(),
            self.logprobs[slot, window].copy(),
            self.raw[slot, window].copy(),
            self.sampled[slot, window].copy(),
        )

    def routed_experts(self, request: Request, routing: "RoutingPool | None") -> np.ndarray | None:
        """Return expert ids of positions [routed_from, known tokens - 1), as [rows, layers, top_k].

        Each is recorded once. Before the first sampled token none is: new weights may recompute the prompt.
        """
        if routing is None or request.routed_from is None:
            return None
        rows = request.routed
        if rows is None:
            rows = np.empty((0, routing.num_layers, routing.top_k), routing.numpy_dtype)
        slot = request.slot
        if slot == NO_SLOT or self.length[slot] == self.prompt_len[slot]:
            return rows
        first, end = request.routed_from + len(rows), int(self.length[slot]) - 1
        if first >= end:
            return rows
        return np.concatenate([rows, routing.read(self.page_table[slot], first, end)])

    def forget_outputs(self, request: Request) -> None:
        request.evicted = OutputArrays.empty()
        request.spans.clear()
        request.routed = None
        if request.slot != NO_SLOT:
            self.length[request.slot] = self.prompt_len[request.slot]

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            wider = np.full((self.slots, len(stop_ids)), NO_TOKEN, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
