"""Which tokens the next step computes: continuous batching with chunked prefill and preemption.

One step mixes all decoding requests (one token each) with as many prompt tokens as :class:`~.chunking.ChunkSizer`
allows, so a step, and with it a pause, stays short whatever the prompts are.

Invariants:
- KV pages for every known token are taken when a request is admitted; afterwards it asks for one page at a time, and
  only when it crosses a page boundary. A request that cannot get its page preempts the youngest one.
- The oldest request always advances: admission refused whatever could not run alone.
- A slot whose step is in flight keeps its pages: preemption and retraction wait for the step, release is deferred.
- A prefix is computed once: a request whose prompt a running one is just computing waits for it to be shared.
"""

from collections import Counter
from dataclasses import dataclass
from time import monotonic

import numpy as np
import torch

from .cache.manager import CacheManager
from .chunking import ChunkSizer
from .config import PAGE_SIZE
from .forward import ForwardBatch, SamplingBatch
from .request import Phase, Request, RequestTable
from .runner.sampler import noise
from .waiting import WaitingQueue, pages_for

LOOK_AHEAD = 128
"""Queued requests considered for one admission; bounds the work when many wait for a shared prefix."""


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
    ) -> None:
        self.table = table
        self.cache = cache
        self.waiting = waiting
        self.num_retractions = 0
        self._sizer = chunks
        self._share = share_prefixes
        self._active: list[Request] = []  # in the order of admission: the last one is preempted first
        self._prefilling: list[Request] = []
        self._computing: Counter[int] = Counter()  # prompt keys whose prefix is not in the tree yet
        self._decode_slots: np.ndarray | None = None  # cached; None after a change of membership
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
        """A call of :meth:`choose` may produce a step."""
        return bool(self._active) or len(self.waiting) > 0

    def choose(self) -> ScheduledBatch | None:
        """Build the next step; None when there is nothing to run, or a step in flight must land first."""
        decode = self._decodable()
        if not self._grow(decode):
            return None
        decode = self._decodable()  # preemption may have taken rows
        chunks = self._chunks()
        if not len(decode) and not chunks:
            return None
        return self._build(decode, chunks)

    def landed(self, batch: ScheduledBatch, seconds: float | None = None, *, failed: bool = False) -> None:
        """The step's results have been consumed: share new prefixes, release what only waited for it.

        ``seconds`` is how long it took. None: it failed.
        """
        if seconds is not None:
            self._sizer.observe(batch.num_tokens - batch.forward.num_decode, seconds)
        self.table.inflight[batch.slots] -= 1
        for request in batch.completed:
            self._computing[request.prompt_key] -= 1
            if not self._computing[request.prompt_key]:
                del self._computing[request.prompt_key]
            if request.phase is Phase.DECODE and not failed and request.kv is not None:
                self.cache.donate(
                    request.kv, self.table.tokens[request.slot, : self.table.length[request.slot] - 1]
                )
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for request, keep_prefix in leaving:
                self._release(request, keep_prefix=keep_prefix and not failed)

    def requests_of(self, batch: ScheduledBatch) -> list[Request]:
        """The requests whose rows are in ``batch``."""
        rows = (self.table.by_slot[slot] for slot in batch.slots)
        return [request for request in rows if request is not None]

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
        been used under the old weights, so mixing the two would gain nothing.
        """
        unfinished = list(self._prefilling)
        for request in reversed(unfinished):
            self._requeue(request, keep_prefix=False, count=False)
        return len(unfinished)

    def mark_stale(self) -> None:
        """After a commit: what the running requests sample from now on rests on KV of older weights."""
        for request in self._active:
            self.table.stale_kv[request.slot] = True

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
        self._remove(request)
        self._close(request, keep_prefix=keep_prefix)
        self.table.park(request)
        self.waiting.push_front([request])
        if count:
            request.num_retractions += 1
            self.num_retractions += 1

    def _remove(self, request: Request) -> None:
        self._active.remove(request)
        self._decode_slots = None
        if request in self._prefilling:
            self._prefilling.remove(request)
            self._computing[request.prompt_key] -= 1
            if not self._computing[request.prompt_key]:
                del self._computing[request.prompt_key]

    def _release(self, request: Request, *, keep_prefix: bool) -> None:
        if self.table.inflight[request.slot]:
            self._leaving.append((request, keep_prefix))
            return
        self._close(request, keep_prefix=keep_prefix)
        self.table.unseat(request)

    def _close(self, request: Request, *, keep_prefix: bool) -> None:
        assert request.kv is not None
        slot = request.slot
        known = min(int(self.table.scheduled[slot]), int(self.table.length[slot]))
        self.cache.close(request.kv, self.table.tokens[slot, :known] if keep_prefix else None)
        request.kv = None

    def _chunks(self) -> list[tuple[Request, int]]:
        """(request, prompt tokens to compute): prompts already begun first, then new admissions."""
        budget = self._sizer.budget()
        chunks: list[tuple[Request, int]] = []
        for request in self._prefilling:
            if budget == 0:
                return chunks
            budget -= self._take_chunk(request, budget, chunks)
        while budget > 0 and self.table.num_free and len(self.waiting):
            candidate = self.waiting.pop_admissible(self._may_start, LOOK_AHEAD)
            if candidate is None:
                break
            if not self._start(candidate):
                self.waiting.push_front([candidate])
                break
            budget -= self._take_chunk(candidate, budget, chunks)
        return chunks

    def _take_chunk(self, request: Request, budget: int, chunks: list[tuple[Request, int]]) -> int:
        remaining = int(self.table.length[request.slot] - self.table.scheduled[request.slot])
        taken = min(budget, remaining)
        chunks.append((request, taken))
        return taken

    def _may_start(self, request: Request) -> bool:
        """Not while the same prompt is being computed: its prefix will be shared in a step or two."""
        return not (self._share and self._computing[request.prompt_key] and len(request.prompt) > PAGE_SIZE)

    def _start(self, request: Request) -> bool:
        """Seat ``request`` with KV pages for all it knows; False (nothing changed) when they cannot be had now."""
        table, cache = self.table, self.cache
        tokens = np.concatenate([request.prompt, request.parked.tokens])
        slot = table.take_slot()
        row = table.page_table[slot]
        row[:] = 0
        kv = cache.open(tokens, request.salt, row)
        # One page of growth is left to everybody who runs: admitting more would only preempt them.
        missing = pages_for(len(tokens)) - kv.num_pages
        if missing > cache.available() - len(self._active) or not cache.extend(kv, len(tokens)):
            cache.close(kv, None)
            table.give_back_slot(slot)
            return False
        request.kv = kv
        table.seat(request, slot)
        cached = kv.num_shared * PAGE_SIZE
        table.scheduled[slot] = cached
        if request.first_scheduled is None:
            request.first_scheduled = monotonic()
            request.cached_tokens = cached
        request.phase = Phase.PREFILL
        self._active.append(request)
        self._prefilling.append(request)
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

        table.scheduled[slots] = ends
        table.inflight[slots] += 1
        completed = [
            request for request, _ in chunks if table.scheduled[request.slot] == table.length[request.slot]
        ]
        for request in completed:
            request.phase = Phase.DECODE
            self._prefilling.remove(request)
            self._decode_slots = None
        samples = np.concatenate(
            [
                np.arange(num_decode),
                num_decode + np.flatnonzero(ends[num_decode:] == table.length[slots[num_decode:]]),
            ]
        )
        sample_slots = slots[samples]
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
            sampling=self._sampling(sample_slots, ends[samples]),
        )
        return ScheduledBatch(
            forward=forward,
            slots=slots,
            sample_slots=sample_slots,
            completed=completed,
            num_tokens=len(positions),
        )

    def _sampling(self, slots: np.ndarray, positions: np.ndarray) -> SamplingBatch:
        """Sampling inputs of ``slots``; ``positions`` are the absolute positions of the tokens to be sampled."""
        table = self.table
        return SamplingBatch(
            temperature=torch.from_numpy(table.temperature[slots]),
            greedy=torch.from_numpy(table.greedy[slots]),
            top_k=torch.from_numpy(table.top_k[slots]),
            top_p=torch.from_numpy(table.top_p[slots]),
            uniforms=torch.from_numpy(noise(table.seed[slots], table.index[slots], positions)),
            any_sampled=not bool(table.greedy[slots].all()),
            any_filtered=bool(table.filtered[slots].any()),
            want_raw=bool(table.want_raw[slots].any()),
            want_sampled=bool(table.want_sampled[slots].any()),
        )
