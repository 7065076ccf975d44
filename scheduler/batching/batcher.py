"""Which tokens the next step computes: continuous batching with chunked prefill and preemption.

One step mixes all decoding requests (one token each) with as many prompt tokens as :class:`~.chunking.ChunkSizer`
allows, so a step, and with it a pause, stays short whatever the prompts are.

Invariants:
- KV pages for every known token are taken when a request is admitted; afterwards it asks for one page at a time, and
  only when it crosses a page boundary. A request that cannot get its page preempts the youngest one.
- The oldest request always advances: admission refused whatever could not run alone.
- A slot whose step is in flight keeps its pages: preemption and retraction wait for the step, release is deferred.
- A prefix is computed once: a request whose prompt a running one is just computing waits for it to be shared.
- A call that raises leaves every request where it was, or where a later call can take it from: a step is on the books
  once all of it has been built.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from time import monotonic

import numpy as np
import torch

from ..cache.manager import CacheManager
from ..cache.routing import RoutingPool
from ..config import PAGE_SIZE
from ..forward import ForwardBatch
from .chunking import ChunkSizer
from .request import NO_SLOT, Phase, Request, RequestTable
from .sampling_inputs import InputSpan, input_spans, input_tokens, sampling_batch
from .waiting_queue import WaitingQueue, pages_for

logger = logging.getLogger(__name__)

LOOK_AHEAD = 128
"""Queued requests considered for one admission; bounds the work when many wait for a shared prefix."""
PAGES_OVERTAKEN = 2
"""That who overtakes leaves to each of those: the end of its prompt, which is not shared, and a page to grow."""


@dataclass(slots=True, kw_only=True)
class ScheduledBatch:
    """A step as the scheduler sees it; ``forward`` is what the device sees."""

    forward: ForwardBatch
    slots: np.ndarray
    """int64 [R]"""
    sample_slots: np.ndarray
    """int64 [S]: who receives the sampled tokens."""
    completed: list[Request]
    """Requests whose prompt this step finishes."""
    num_tokens: int
    inputs: list[InputSpan]
    """What ``forward.inputs`` is of, in its order."""


class Batcher:
    """Owns the running requests and builds steps from them and from the waiting queue."""

    def __init__(
        self,
        table: RequestTable,
        cache: CacheManager,
        waiting: WaitingQueue,
        *,
        chunks: ChunkSizer,
        share_prefixes: bool,
        routing: RoutingPool | None = None,
    ) -> None:
        """``routing`` holds the experts of what is computed. None: the model has none."""
        self.table = table
        self.cache = cache
        self.waiting = waiting
        self.num_retractions = 0
        self.prompt_tokens = 0
        """Of all requests that have begun to run; with the next, the hit rate of the prefix cache."""
        self.cached_tokens = 0
        self._sizer = chunks
        self._share = share_prefixes
        self._routing = routing
        self._active: list[Request] = []  # in the order of admission: the last one is preempted first
        self._prefilling: list[Request] = []
        self._computing: Counter[int] = Counter()  # prompt keys whose prefix is not in the tree yet
        self._starting: Request | None = None  # while it is tried, and afterwards where that has raised
        self._decode_slots: np.ndarray | None = None  # cached; None after a change of membership
        self._turn = 0  # where the decoding rows of the next step begin, while not all of them fit into one
        # Finished, but their slot is in a step in flight; with whether their KV may be kept as a prefix.
        self._leaving: list[tuple[Request, bool]] = []

    @property
    def num_running(self) -> int:
        """Requests with KV that sample tokens."""
        return len(self._active) - len(self._prefilling)

    @property
    def num_prefilling(self) -> int:
        """Requests with KV whose prompt is not finished."""
        return len(self._prefilling)

    @property
    def num_holding(self) -> int:
        """Requests with KV, those that only wait for a step in flight included."""
        return len(self._active) + len(self._leaving)

    @property
    def in_flight(self) -> bool:
        """A launched step has not landed."""
        return bool(self.table.inflight.any())

    @property
    def has_work(self) -> bool:
        """A call of :meth:`schedule` may produce a step."""
        return bool(self._active) or len(self.waiting) > 0

    def schedule(self) -> ScheduledBatch | None:
        """Build the next step; None when there is nothing to run, or a step in flight must land first."""
        self._starting = None
        decode = self._in_turn(self._decodable())
        if not self._grow(decode):
            return None
        if self._decode_slots is None:  # preemption has taken rows
            decode = decode[np.isin(decode, self._decodable())]
        chunks = self._chunks(self._sizer.budget(len(decode)))
        if not len(decode) and not chunks:
            return None
        return self._build(decode, chunks)

    def complete_step(self, batch: ScheduledBatch, seconds: float) -> None:
        """The step, which took ``seconds``, is consumed: release what only waited for it, share new prefixes."""
        self._sizer.observe(batch.num_tokens - batch.forward.num_decode, seconds)
        self._sizer.succeeded(batch.num_tokens)
        self.table.inflight[batch.slots] -= 1
        for request in batch.completed:
            self._has_computed(request)
        self._let_go(trusted=True)
        for request in batch.completed:
            if request.phase is Phase.DECODE and request.kv is not None:
                self.cache.donate(
                    request.kv, self.table.tokens[request.slot, : self.table.length[request.slot] - 1]
                )

    def roll_back_step(self, batch: ScheduledBatch) -> None:
        """Take back a step whose results are lost, the last launched one first: its tokens are to be computed again.

        What it wrote lies beyond what is known to be computed, and is overwritten by the step that computes it again.
        """
        table = self.table
        table.inflight[batch.slots] -= 1
        table.scheduled[batch.slots] -= np.asarray(batch.forward.q_lens_host, np.int64)
        for request in batch.completed:
            if request.phase is Phase.DECODE:
                request.phase = Phase.PREFILL
            else:
                self._has_computed(request)
        self._prefilling = [request for request in self._active if request.phase is Phase.PREFILL]
        self._decode_slots = None
        self._let_go(trusted=False)

    def last_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """``(slots, tokens)`` [n] of the decoding requests: what each has sampled last. No step may be in flight."""
        slots = np.asarray([r.slot for r in self._active if r.phase is Phase.DECODE], np.int64)
        return slots, self.table.tokens[slots, self.table.length[slots] - 1]

    def suspects(self) -> list[Request]:
        """Who may be the reason that a call of :meth:`schedule` has raised.

        Whom it was starting, alone; else those with KV, else the first that waits.
        """
        starting = self._starting
        if starting is not None and starting.phase is Phase.WAITING:
            return [starting]
        return self._active.copy() or self.waiting.head()

    def requests_of(self, batch: ScheduledBatch) -> list[Request]:
        """The requests whose rows are in ``batch``."""
        rows = (self.table.by_slot[slot] for slot in batch.slots)
        return [request for request in rows if request is not None]

    def routed_experts(self, request: Request) -> np.ndarray | None:
        """Expert ids of positions [routed_from, known tokens - 1), [rows, layers, top_k]; None unless ``request`` asked.

        Positions are recorded once: what was computed before a retraction is not looked up again, whatever computed it
        since. That holds from the first sampled token on; before it nothing rests on the rows, and a prompt may
        be computed from its start again under other weights, so there are none.
        """
        routing = self._routing
        if routing is None or request.routed_from is None:
            return None
        rows = request.routed
        if rows is None:
            rows = np.empty((0, routing.num_layers, routing.top_k), routing.numpy_dtype)
        slot = request.slot
        if slot == NO_SLOT or self.table.length[slot] == self.table.prompt_len[slot]:
            return rows
        first, end = request.routed_from + len(rows), int(self.table.length[slot]) - 1
        if first >= end:
            return rows
        return np.concatenate([rows, routing.read(self.table.page_table[slot], first, end)])

    def retire(self, request: Request, *, keep_prefix: bool = True) -> None:
        """``request`` is finished: give its slot and KV back, once no step in flight uses them.

        Args:
            keep_prefix: offer its KV to the prefix cache; False after a failed step.
        """
        self._remove(request)
        self._release(request, keep_prefix=keep_prefix)

    def retract_all(self) -> int:
        """Give the KV of every running request back and requeue them in their order. No step may be in flight."""
        requests = self._active[::-1]
        for request in requests:
            self._requeue(request, keep_prefix=False)
        return len(requests)

    def restart_prefills(self) -> int:
        """After a commit: requests whose KV is not complete compute all of it under the new weights.

        Those that have sampled nothing, and those that were being recomputed after a retraction: no KV of theirs has
        been used under the old weights, so mixing the two would gain nothing. Log-probabilities of a prompt go with the
        tokens that follow it: where there are none yet, those of the old weights are forgotten, also of who waits.
        """
        unfinished = list(self._prefilling)
        for request in reversed(unfinished):
            self._requeue(request, keep_prefix=False, count=False)
        for request in self.waiting.live():
            if request.record is not None and not len(request.evicted.tokens):
                request.record.forget_inputs()
        return len(unfinished)

    def mark_stale(self) -> None:
        """After a commit: what the running requests sample from now on rests on KV of older weights."""
        for request in self._active:
            self.table.stale_kv[request.slot] = True

    def _let_go(self, *, trusted: bool) -> None:
        """Release those who only waited for the step that has just left."""
        leaving, self._leaving = self._leaving, []
        for request, keep_prefix in leaving:
            self._release(request, keep_prefix=keep_prefix and trusted)

    def _has_computed(self, request: Request) -> None:
        """Nobody waits for what ``request`` computes of its prompt any more."""
        if request.shares_prefix:
            request.shares_prefix = False
            self._computing[request.prompt_key] -= 1
            if not self._computing[request.prompt_key]:
                del self._computing[request.prompt_key]

    def _in_turn(self, decode: np.ndarray) -> np.ndarray:
        """As many of the rows ``decode`` as a step may have, those first that have waited longest."""
        limit = self._sizer.limit
        return decode if limit is None or len(decode) <= limit else np.roll(decode, -self._turn)[:limit]

    def _decodable(self) -> np.ndarray:
        """Slots that can sample one more token; a request whose last token is in flight is left out."""
        if self._decode_slots is None:
            slots = [r.slot for r in self._active if r.phase is Phase.DECODE]
            self._decode_slots = np.asarray(slots, np.int64)
        slots_array = self._decode_slots
        more = self.table.scheduled[slots_array] + 1 < self.table.limit[slots_array]
        return slots_array if more.all() else slots_array[more]

    def _grow(self, decode: np.ndarray) -> bool:
        """Pages for the next token of every decoding request. False: a step in flight must land first."""
        table = self.table
        for slot in decode[table.scheduled[decode] % PAGE_SIZE == 0]:
            request = table.by_slot[slot]
            if request is None or request.kv is None:
                continue  # preempted by an earlier row of this loop
            while request.kv is not None and not self.cache.extend(
                request.kv, int(table.scheduled[slot]) + 1
            ):
                if self.in_flight:
                    return False
                self._requeue(self._active[-1], keep_prefix=True)
        return True

    def _requeue(self, request: Request, *, keep_prefix: bool, count: bool = True) -> None:
        assert not self.table.inflight[request.slot], "a request in flight cannot be retracted"
        request.routed = self.routed_experts(request)
        self._remove(request)
        self._close(request, keep_prefix=keep_prefix)
        self.table.evict(request)
        self.waiting.push_front([request])
        if count:
            request.num_retractions += 1
            self.num_retractions += 1

    def _remove(self, request: Request) -> None:
        self._active.remove(request)
        self._decode_slots = None
        if request in self._prefilling:
            self._prefilling.remove(request)
            self._has_computed(request)

    def _release(self, request: Request, *, keep_prefix: bool) -> None:
        if self.table.inflight[request.slot]:
            self._leaving.append((request, keep_prefix))
            return
        self._close(request, keep_prefix=keep_prefix)
        self.table.release(request)

    def _close(self, request: Request, *, keep_prefix: bool) -> None:
        assert request.kv is not None
        slot = request.slot
        known = min(int(self.table.scheduled[slot]), int(self.table.length[slot]))
        try:
            self.cache.close(request.kv, self.table.tokens[slot, :known] if keep_prefix else None)
        except Exception as error:
            if not keep_prefix:
                raise
            logger.error("no prefix of request %s is kept", request.rid, exc_info=error)
            self.cache.close(request.kv, None)
        request.kv = None

    def _chunks(self, budget: int) -> list[tuple[Request, int]]:
        """(request, prompt tokens to compute), ``budget`` in all: prompts already begun first, then new admissions."""
        chunks: list[tuple[Request, int]] = []
        for request in self._prefilling:
            if budget == 0:
                return chunks
            budget -= self._take_chunk(request, budget, chunks)
        while budget > 0 and self.table.num_free and len(self.waiting):
            started = self.waiting.start_next(self._may_start, self._start, LOOK_AHEAD)
            if started is None:
                break
            budget -= self._take_chunk(started, budget, chunks)
        return chunks

    def _take_chunk(self, request: Request, budget: int, chunks: list[tuple[Request, int]]) -> int:
        remaining = int(self.table.length[request.slot] - self.table.scheduled[request.slot])
        taken = min(budget, remaining)
        chunks.append((request, taken))
        return taken

    def _may_start(self, request: Request) -> bool:
        """Not while a prefix is being computed that it will share in a step or two."""
        return not self._computing[request.prompt_key] or not self._shareable_pages(request)

    def _shareable_pages(self, request: Request) -> int:
        """Pages of its prompt that may come from the prefix cache."""
        if not self._share:
            return 0
        first = None if request.record is None else request.record.first_uncached
        return (len(request.prompt) - 1 if first is None else first) // PAGE_SIZE

    def _start(self, request: Request, overtaken: int) -> bool:
        """Bind ``request`` to a slot with KV pages for all it knows; False (nothing changed) when they cannot be had now.

        Args:
            overtaken: who came before it, and waits for a prefix; they find room for what is their own.
        """
        self._starting = request
        started = self._bind(request, overtaken)
        self._starting = None
        return started

    def _bind(self, request: Request, overtaken: int) -> bool:
        table, cache = self.table, self.cache
        tokens = np.concatenate([request.prompt, request.evicted.tokens])
        slot = table.take_slot()
        row = table.page_table[slot]
        row[:] = 0
        kv, bound = None, False
        try:
            first = None if request.record is None else request.record.first_uncached
            # A cached prefix has no logits: it must end where some are wanted.
            kv = cache.open(tokens if first is None else tokens[: first + 1], request.salt, row)
            # One page of growth is left to everybody who runs: admitting more would only preempt them.
            left = len(self._active) + PAGES_OVERTAKEN * overtaken
            missing = pages_for(len(tokens)) - kv.num_pages
            if missing > cache.available() - left or not cache.extend(kv, len(tokens)):
                return False
            table.bind(request, slot)
            bound = True
        finally:
            if not bound:
                if kv is not None:
                    cache.close(kv, None)
                table.give_back_slot(slot)
        request.kv = kv
        cached = kv.num_shared * PAGE_SIZE
        table.scheduled[slot] = cached
        if request.first_scheduled is None:
            request.first_scheduled = monotonic()
            request.cached_tokens = cached
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += cached
        request.phase = Phase.PREFILL
        self._active.append(request)
        self._prefilling.append(request)
        request.shares_prefix = kv.num_shared < self._shareable_pages(request)
        if request.shares_prefix:
            self._computing[request.prompt_key] += 1
        return True

    def _build(self, decode: np.ndarray, chunks: list[tuple[Request, int]]) -> ScheduledBatch:
        table = self.table
        num_decode = len(decode)
        chunk_slots = [request.slot for request, _ in chunks]
        slots = np.concatenate([decode, np.asarray(chunk_slots, np.int64)])
        q_lens = np.ones(len(slots), np.int64)
        q_lens[num_decode:] = [taken for _, taken in chunks]
        starts = table.scheduled[slots]
        ends = starts + q_lens
        token_starts = np.cumsum(q_lens) - q_lens
        row_of_token = np.repeat(np.arange(len(slots)), q_lens)
        positions = np.arange(int(q_lens.sum())) - token_starts[row_of_token] + starts[row_of_token]
        token_slots = slots[row_of_token]
        pages = table.page_table[token_slots, positions // PAGE_SIZE]
        input_ids = table.tokens[token_slots, positions].astype(np.int64)

        samples = np.concatenate(
            [
                np.arange(num_decode),
                num_decode + np.flatnonzero(ends[num_decode:] == table.length[slots[num_decode:]]),
            ]
        )
        sample_slots = slots[samples]
        spans = input_spans(chunks, table) if chunks else []
        width = pages_for(int(ends.max()))
        forward = ForwardBatch(
            num_decode=num_decode,
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            kv_slots=torch.from_numpy(pages.astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE),
            page_table=torch.from_numpy(table.page_table[slots, :width]),
            kv_lens=torch.from_numpy(ends.astype(np.int32)),
            q_lens_host=q_lens.tolist(),
            kv_lens_host=ends.tolist(),
            slots=torch.from_numpy(slots),
            sample_tokens=torch.from_numpy((token_starts + q_lens - 1)[samples]),
            sample_slots=torch.from_numpy(sample_slots),
            sampling=sampling_batch(table, sample_slots, ends[samples]),
            inputs=input_tokens(spans, slots, token_starts - starts),
        )
        batch = ScheduledBatch(
            forward=forward,
            slots=slots,
            sample_slots=sample_slots,
            completed=[
                request
                for request, taken in chunks
                if table.scheduled[request.slot] + taken == table.length[request.slot]
            ],
            num_tokens=len(positions),
            inputs=spans,
        )
        self._book(batch, ends)
        if forward.sampling.special is not None:
            table.extras.counted[sample_slots] = ends[samples] + 1
        return batch

    def _book(self, batch: ScheduledBatch, ends: np.ndarray) -> None:
        """``batch`` is in flight from now on, and computes its rows up to the positions ``ends``."""
        self.table.scheduled[batch.slots] = ends
        self.table.inflight[batch.slots] += 1
        for request in batch.completed:
            request.phase = Phase.DECODE
            self._prefilling.remove(request)
            self._decode_slots = None
        if self._sizer.limit is not None:
            self._turn += batch.forward.num_decode
