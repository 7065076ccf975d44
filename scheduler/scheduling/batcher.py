"""Schedules the tokens of the next step: continuous batching with chunked prefill and preemption.

One step mixes all decoding requests (one token each) with as many prompt tokens as
:class:`~.chunking.ChunkSizer` allows, which keeps it short whatever the prompts are, and so a pause.

- A request gets KV pages for all of its known tokens when it starts, and one more whenever it crosses a page
  border. One that cannot get its page preempts the request that started last, of those on the same rank if
  ranks have pages of their own. The oldest request always advances.
- A slot whose step is in flight keeps its pages: preemption, retraction and release wait for the step.
- The first step after a barrier takes no prompts if requests decode: those were stopped, and prompts have
  gathered meanwhile. Of two such steps in a row, the second takes prompts, and where updates restart prompts
  again and again, all do until one is complete.
- A prefix is computed once: a request waits while a running request computes the same prompt, then shares its
  pages and, if it wants any, the prompt's log-probabilities.
- If a call raises, every request stays where it was, or where a later call finds it.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from ..cache.manager import CacheManager, RankPages, RequestKV
from ..cache.pool import RoutingPool
from ..execution.forward import NO_ADAPTER, ForwardBatch
from ..runtime.engine_config import PAGE_SIZE
from .chunking import ChunkSizer
from .grammars import Grammars
from .hidden_states import HiddenSpan, hidden_spans, hidden_tokens
from .request import Adapter, Phase, Request, RequestTable
from .sampling import InputSpan, input_spans, input_tokens, sampling_batch, uniforms_of
from .speculation import DraftRows, Speculation, draft_rows
from .step_storage import LinearStateSteps, WindowedSteps
from .waiting_queue import WaitingQueue, pages_for

logger = logging.getLogger(__name__)

LOOK_AHEAD = 128
"""Queued requests that one start looks at, when many of them wait for a shared prefix."""
PAGES_PER_SKIPPED_REQUEST = 2
"""Free pages left for each skipped request: for the unshared end of its prompt, and to grow."""
_MOST_RESTARTS = 2
"""Restarts without a prompt that was complete before, after which barriers delay prompts no more."""


@dataclass(slots=True)
class StepArrays:
    """A plain decode step's tensors as arrays: behind a step's computation, a call into torch takes long."""

    positions: np.ndarray
    kv_slots: np.ndarray
    kv_lens: np.ndarray
    page_table: np.ndarray
    uniforms: np.ndarray
    rows: np.ndarray
    known: np.ndarray | None

    @classmethod
    def of(cls, forward: ForwardBatch) -> "StepArrays":
        return cls(
            positions=forward.positions.numpy(),
            kv_slots=forward.kv_slots.numpy(),
            kv_lens=forward.kv_lens.numpy(),
            page_table=forward.page_table.numpy(),
            uniforms=forward.sampling.uniforms.numpy(),
            rows=np.arange(forward.num_rows),
            known=None if forward.known is None else forward.known.numpy(),
        )


@dataclass(slots=True, kw_only=True)
class ScheduledBatch:
    forward: ForwardBatch
    slots: np.ndarray
    ends: np.ndarray
    """int64 [R]: position behind the last token of each row."""
    sample_slots: np.ndarray
    """int64 [S]: slots that a token is sampled for; replays have several, in order."""
    sample_positions: np.ndarray
    """int64 [S]: positions of these tokens."""
    completed: list[Request]
    num_tokens: int
    inputs: list[InputSpan]
    hidden: list[HiddenSpan]
    drafts: DraftRows | None = None

    @property
    def kind(self) -> str:
        """Stage that the step counts as; a step with any prompt tokens is a prefill."""
        return "decode" if self.forward.num_decode == len(self.slots) else "prefill"


class RepeatableStep(NamedTuple):
    """A step that a step of the same rows differs from in positions and noise alone."""

    batch: ScheduledBatch
    arrays: StepArrays


class Batcher:
    images = None

    def __init__(
        self,
        table: RequestTable,
        cache: CacheManager,
        waiting: WaitingQueue[Request],
        *,
        chunks: ChunkSizer,
        routing: RoutingPool | None = None,
        grammars: Grammars | None = None,
        speculates: bool = False,
    ) -> None:
        """``routing`` stores the expert ids of computed tokens; None if the model has no experts.

        ``speculates``: draft tokens; every step must be completed before the next is scheduled.
        """
        self.speculation = Speculation(table) if speculates else None
        self.table = table
        self.cache = cache
        self.waiting = waiting
        self.num_retractions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.drafts = self.drafted_tokens = self.accepted_tokens = 0
        self.after_barrier = False
        """True: no step has been built since the steps were stopped."""
        self._was_decode_alone = False
        self._restarts = 0  # of prompts since one was complete
        self._chunk_sizer = chunks
        self._routing = routing
        self._grammars = grammars
        self._windows = WindowedSteps(table, cache)
        self._states = LinearStateSteps(table, cache)
        self._active: list[Request] = []  # in start order: the last one is preempted first
        self._prefilling: list[Request] = []
        self._prefixes_in_progress: defaultdict[int, list[Request]] = defaultdict(list)
        self._starting: Request | None = None
        """The request that :meth:`_start` works on; it stays set if that raises."""
        self._decode_slots: np.ndarray | None = None  # until requests join or leave the decoding rows
        self._repeatable: RepeatableStep | None = None  # the last step, if it is one
        self._decode_offset = 0  # rotates the decoding rows while not all of them fit into one step
        self._deferred_releases: list[tuple[Request, bool]] = []
        """Finished requests of a step in flight; True if their KV may go to the prefix cache."""

    @property
    def num_running(self) -> int:
        return len(self._active) - len(self._prefilling)

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def prefilled_tokens(self) -> int:
        return self._chunk_sizer.prompt_tokens

    @property
    def num_holding(self) -> int:
        return len(self._active) + len(self._deferred_releases)

    @property
    def in_flight(self) -> bool:
        return bool(self.table.inflight.any())

    @property
    def has_work(self) -> bool:
        startable = len(self.waiting) - (0 if self._grammars is None else self._grammars.num_waiting)
        return bool(self._active) or startable > 0

    def schedule(self) -> ScheduledBatch | None:
        """Build the next step; None if nothing can run, or a step in flight must be completed first."""
        self._starting = None
        if restarted := self._restarted_chunks():
            self.after_barrier = self._was_decode_alone = False
            return self._next(np.empty(0, np.int64), restarted)
        decode = self._rotate_decode_rows(self._ready_decode_slots())
        if not self._extend_decode_pages(decode):
            return None
        if self._decode_slots is None:  # a preemption has removed rows
            decode = decode[np.isin(decode, self._ready_decode_slots())]
        chunks = []
        waits = self.after_barrier and not self._was_decode_alone and self._restarts < _MOST_RESTARTS
        self._was_decode_alone = waits and len(decode) > 0
        self.after_barrier = False
        if not self._was_decode_alone:
            budget = self._chunk_sizer.budget(len(decode))
            chunks = self._prefill_chunks(budget, self.table.slots - len(decode))
        if not len(decode) and not chunks:
            return None
        if self.speculation is None or chunks:
            return self._next(decode, chunks)
        return self._next(*self._with_drafts(self.speculation, decode))

    def _with_drafts(
        self, speculation: Speculation, decode: np.ndarray
    ) -> tuple[np.ndarray, list[tuple[Request, int]], DraftRows | None]:
        """Add rows for drafts as far as there are pages without preemption."""
        drafts = []
        room = self.table.slots - len(decode) if self._chunk_sizer.limit is None else 0
        for draft in speculation.propose(decode, room):
            request = self.table.by_slot[decode[draft.row]]
            assert request is not None and request.kv is not None
            known = int(self.table.length[request.slot])
            if self.cache.extend(request.kv, known + len(draft.tokens)):
                drafts.append(draft)
        if not drafts:
            return decode, [], None
        rows, drafted = draft_rows(self.table, decode, drafts)
        return rows, [], drafted

    def complete_step(self, batch: ScheduledBatch, seconds: float) -> None:
        self._chunk_sizer.observe(batch.num_tokens - batch.forward.num_decode, seconds)
        self._chunk_sizer.succeeded(batch.num_tokens)
        self.table.inflight[batch.slots] -= 1
        if batch.drafts is not None:  # of what was not sampled nothing is computed
            self.table.scheduled[batch.slots] = self.table.length[batch.slots] - 1
        if self.speculation is not None and batch.kind == "decode":
            self.speculation.observe(batch.slots, batch.drafts, seconds)
        self._states.completed(batch.slots, batch.forward)
        prompts = batch.completed + self._replays_past_prompt(batch)
        for request in prompts:
            request.restarted = False
            self._release_prefix_waiters(request)
            self._keep_inputs(request)
        self._run_deferred_releases(kv_is_valid=True)
        for request in prompts:
            if request.phase is not Phase.FINISHED and request.kv is not None:
                computed = self.table.length[request.slot] - 1
                self.cache.donate(request.kv, self.table.tokens[request.slot, :computed])
        self._windows.completed(batch.slots, batch.forward)

    def _replays_past_prompt(self, batch: ScheduledBatch) -> list[Request]:
        """Return the replays that have computed all that is known, not yet shared, and that go on."""
        table, slots = self.table, batch.slots
        replays = table.replays[slots]
        if not np.count_nonzero(replays):
            return []
        known = table.length[slots] - 1  # after a retraction more than is computed
        past = replays & (known >= table.prompt_len[slots])
        past &= batch.ends >= known
        requests = (table.by_slot[slot] for slot in slots[past])
        return [r for r in requests if r and r.computes_shared_prefix and r.phase is Phase.PREFILL]

    def count_drafts(self, slots: np.ndarray, *, accepted: bool = False) -> None:
        """Count a drafted token of each of ``slots``, some of which come again, or one that is recorded."""
        if accepted:
            self.accepted_tokens += len(slots)
        else:
            self.drafts += len(np.unique(slots))
            self.drafted_tokens += len(slots)
        for slot in slots.tolist():
            request = self.table.by_slot[slot]
            assert request is not None, "a row of a step is a request's"
            request.accepted_tokens += accepted
            request.drafted_tokens += not accepted

    def roll_back_step(self, batch: ScheduledBatch) -> None:
        """Roll back a lost step, the one launched last first; what lost its state needs :meth:`restore`."""
        table = self.table
        self._states.rolled_back(batch.slots)
        table.inflight[batch.slots] -= 1
        np.subtract.at(table.scheduled, batch.slots, np.asarray(batch.forward.q_lens_host, np.int64))
        for request in batch.completed:
            if request.phase is Phase.DECODE:
                request.phase = Phase.PREFILL
            else:
                self._release_prefix_waiters(request)
        self._prefilling = [request for request in self._active if request.phase is Phase.PREFILL]
        self._decode_slots = None
        self._run_deferred_releases(kv_is_valid=False)

    @property
    def step_limit(self) -> int | None:
        return self._chunk_sizer.limit

    def halve(self, batch: ScheduledBatch) -> bool:
        """Limit steps to half of ``batch``; return False if it is a single token that failed before."""
        requests = self.requests_of(batch)
        if batch.num_tokens == 1 and requests:
            (request,) = requests
            computed = int(self.table.scheduled[request.slot])
            before, request.failed_alone_at = request.failed_alone_at, computed
            if before is not None and computed <= before:
                return False
        self._chunk_sizer.halve(batch.num_tokens)
        logger.warning("steps are limited to %d tokens for now", self._chunk_sizer.limit)
        return True

    def restore(self, runner: Any) -> None:
        """Restore states and last tokens that lost steps have overwritten. No step may be in flight."""
        for request in self._active[::-1]:
            if request.kv is not None and request.kv.state is not None and request.kv.state.lost:
                self._requeue(request, keep_prefix=True)
                request.restarted = len(request.evicted.tokens) > 0
        slots = np.asarray([r.slot for r in self._active if r.phase is Phase.DECODE], np.int64)
        if not len(slots):
            return
        try:
            runner.set_last_tokens(slots, self.table.tokens[slots, self.table.length[slots] - 1])
        except Exception as error:  # the device may be in any state
            logger.error("cannot restore the last tokens: retracting every request", exc_info=error)
            self.retract_all()

    def schedule_failure_candidates(self) -> list[Request]:
        """Return the request that was being started; else all with KV; else the first waiting one."""
        starting = self._starting
        if starting is not None and starting.phase is Phase.WAITING:
            return [starting]
        return self._active.copy() or self.waiting.head()

    def requests_of(self, batch: ScheduledBatch) -> list[Request]:
        rows = (self.table.by_slot[slot] for slot in batch.slots)
        return [request for request in rows if request is not None]

    def routed_experts(self, request: Request) -> np.ndarray | None:
        return self.table.routed_experts(request, self._routing)

    def retire(self, request: Request, *, keep_prefix: bool = True) -> None:
        """Release the slot and KV of a finished request, after the step in flight if that uses them."""
        self._remove(request)
        if self.speculation is not None and request.check is None:
            self.speculation.ended(request)
        self._release(request, keep_prefix=keep_prefix)

    def retract_all(self, *, keep_prefix: bool = False) -> None:
        """Free the KV of every running request and requeue it in order. No step may be in flight."""
        for request in self._active[::-1]:
            self._requeue(request, keep_prefix=keep_prefix)

    def restart_prefills(self) -> None:
        """Requeue all in prefill: KV and prompt logprobs must come from the weights that sample."""
        self._restarts += bool(self._prefilling)
        for request in self._prefilling[::-1]:
            self._requeue(request, keep_prefix=False, count=False)
        for request in self.waiting.live():
            _forget_inputs(request)

    def change_adapter(self, before: Adapter, slot: int | None) -> None:
        """Let requests of ``before`` go on in ``slot`` over their KV; requeue them if None, or in prefill.

        No step may be in flight.
        """
        self._repeatable = None
        self._restarts += any(request.adapter is before for request in self._prefilling)
        for request in self.waiting.live():
            if request.adapter is before:
                _forget_inputs(request)
        for request in [request for request in self._active[::-1] if request.adapter is before]:
            if slot is None or request.phase is Phase.PREFILL or request.kv is None:
                self._requeue(request, keep_prefix=False, count=slot is None)
                _forget_inputs(request)
            else:
                self.cache.mark_stale(request.kv)
                self.table.adapter[request.slot], self.table.stale_kv[request.slot] = slot, True
                self.table.stamp[request.slot] = -1

    def mark_stale(self) -> None:
        for request in self._active:
            self.table.stale_kv[request.slot] = True

    def _run_deferred_releases(self, *, kv_is_valid: bool) -> None:
        deferred, self._deferred_releases = self._deferred_releases, []
        for request, keep_prefix in deferred:
            self._release(request, keep_prefix=keep_prefix and kv_is_valid)

    def _release_prefix_waiters(self, request: Request) -> None:
        """Let requests with the same prompt start, which waited for the prefix of ``request``."""
        if request.computes_shared_prefix:
            request.computes_shared_prefix = False
            self._prefixes_in_progress[request.prompt_key].remove(request)
            if not self._prefixes_in_progress[request.prompt_key]:
                del self._prefixes_in_progress[request.prompt_key]

    def _keep_inputs(self, request: Request) -> None:
        record, kept = request.record, self.cache.prompt_logprobs
        if record is None or not request.computes_inputs:
            return
        known = kept.get(request.salt, request.prompt)
        if record.first_uncached is None and (known is None or not known.covers(record)):
            kept.put(request.salt, request.prompt, record)

    def _take_inputs(self, request: Request) -> int | None:
        """Return the first prompt position that must be computed for log-probabilities, or None."""
        record = request.record
        if record is None or record.first_uncached is None:
            return None
        known = self.cache.prompt_logprobs.get(request.salt, request.prompt)
        if known is not None and known.covers(record):
            record.take_inputs(known)
        return record.first_uncached

    def _rotate_decode_rows(self, decode: np.ndarray) -> np.ndarray:
        limit = self._chunk_sizer.limit
        fits = limit is None or len(decode) <= limit
        return decode if fits else np.roll(decode, -self._decode_offset)[:limit]

    def _ready_decode_slots(self) -> np.ndarray:
        if self._decode_slots is None:
            slots = [r.slot for r in self._active if r.phase is Phase.DECODE]
            self._decode_slots = np.asarray(slots, np.int64)
        slots_array = self._decode_slots
        needs_token = self.table.scheduled[slots_array] + 1 < self.table.limit[slots_array]
        if self.table.sampling.grammars:  # their masks need the token in flight
            needs_token &= ~self.table.sampling.constrained[slots_array] | (
                self.table.inflight[slots_array] == 0
            )
        all_need = np.count_nonzero(needs_token) == len(slots_array)
        return slots_array if all_need else slots_array[needs_token]

    def _extend_decode_pages(self, decode: np.ndarray) -> bool:
        """Allocate KV, preempting the youngest; return False if a step in flight must end first."""
        table = self.table
        for slot in decode[table.scheduled[decode] % PAGE_SIZE == 0].tolist():
            request = table.by_slot[slot]
            if request is None or request.kv is None:
                continue  # preempted by an earlier row of this loop
            needed = int(table.scheduled[slot]) + 1
            while request.kv is not None and not self.cache.extend(request.kv, needed):
                if self.in_flight:
                    return False
                self._requeue(self._youngest(request.kv.home), keep_prefix=True)
        return True

    def _youngest(self, home: RankPages) -> Request:
        return next(each for each in reversed(self._active) if each.kv is not None and each.kv.home is home)

    def _requeue(self, request: Request, *, keep_prefix: bool, count: bool = True) -> None:
        assert not self.table.inflight[request.slot], "a request in flight cannot be retracted"
        request.routed = self.routed_experts(request)
        self._remove(request)
        self._close_kv(request, keep_prefix=keep_prefix)
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
            self._release_prefix_waiters(request)

    def _release(self, request: Request, *, keep_prefix: bool) -> None:
        if self.table.inflight[request.slot]:
            self._deferred_releases.append((request, keep_prefix))
            return
        self._close_kv(request, keep_prefix=keep_prefix)
        self.table.release(request)

    def _close_kv(self, request: Request, *, keep_prefix: bool) -> None:
        assert request.kv is not None
        slot = request.slot
        known = min(int(self.table.scheduled[slot]), int(self.table.length[slot]))
        try:
            kept = self.table.tokens[slot, :known] if keep_prefix else None
            self.cache.close(request.kv, kept, request.lease)
        except Exception as error:
            if not keep_prefix:
                raise
            logger.error(
                "request %s: its KV could not be donated to the prefix cache", request.rid, exc_info=error
            )
            self.cache.close(request.kv, None)
        request.kv = None

    def _restarted_chunks(self) -> list[tuple[Request, int]]:
        """Return chunks of requests that lost their states; decoding rows wait while memory is short."""
        chunks: list[tuple[Request, int]] = []
        budget = 0 if self._chunk_sizer.limit is None else self._chunk_sizer.budget()
        for request in self._prefilling:
            if request.restarted and budget:
                budget -= self._append_chunk(request, budget, 1, chunks)
        while budget > 0 and any(request.restarted for request in self.waiting.head()):
            if (started := self._start_next()) is None:
                break
            budget -= self._append_chunk(started, budget, 1, chunks)
        return chunks

    def _prefill_chunks(self, budget: int, samples: int) -> list[tuple[Request, int]]:
        """Return chunks of at most ``budget`` tokens, of which ``samples`` have a successor to sample."""
        chunks: list[tuple[Request, int]] = []
        for request in self._prefilling:
            if not budget or not samples:
                return chunks
            budget -= self._append_chunk(request, budget, samples, chunks)
            samples -= self._samples(*chunks[-1])
        while budget > 0 and samples > 0 and (started := self._start_next()) is not None:
            budget -= self._append_chunk(started, budget, samples, chunks)
            samples -= self._samples(*chunks[-1])
        return chunks

    def _samples(self, request: Request, taken: int) -> int:
        """Return how many samples ``taken`` tokens of ``request`` need at most; 1 is kept for every chunk."""
        start = int(self.table.scheduled[request.slot])
        return (
            1 if request.forced is None else max(1, start + taken - max(start, self._first_sample(request)))
        )

    def _first_sample(self, request: Request) -> int:
        """Return the position of the last token that is recorded."""
        return int(self.table.length[request.slot]) - 1

    def _start_next(self) -> Request | None:
        if not (self.table.num_free and self.cache.can_open and len(self.waiting)):
            return None
        return self.waiting.start_next(self._may_start, self._start, LOOK_AHEAD)

    def _append_chunk(
        self, request: Request, budget: int, samples: int, chunks: list[tuple[Request, int]]
    ) -> int:
        table, slot = self.table, request.slot
        start = int(table.scheduled[slot])
        taken = min(budget, int(table.computable(slot)) - start)
        if request.forced is not None:
            # Counters of penalties advance by one token a step.
            most = 1 if table.sampling.penalised[slot] else samples
            taken = min(taken, max(self._first_sample(request) - start, 0) + most)
        chunks.append((request, taken))
        return taken

    def _may_start(self, request: Request) -> bool | None:
        """Return False for a request that waits for a prefix, None for one without its adapter or grammar."""
        if request.adapter is not None and not request.adapter.may_start:
            return None
        if request.grammar is not None and request.grammar.compiled is None:
            return None
        leaders = self._prefixes_in_progress.get(request.prompt_key)
        if not leaders:
            return True
        record = request.record
        if record is not None and record.first_uncached is not None:
            records = [leader.record for leader in leaders if leader.record is not None]
            if any(each.covers(record) for each in records):
                return False
        return not self._shareable_pages(request)

    def _shareable_pages(self, request: Request) -> int:
        if not self.cache.prefix_cache:
            return 0
        first = request.first_uncached
        return (len(request.prompt) - 1 if first is None else first) // PAGE_SIZE

    def _start(self, request: Request, num_skipped: int) -> bool:
        """Bind ``request`` to a slot with pages, leaving some free for ``num_skipped`` earlier requests."""
        self._starting = request
        started = self._bind(request, num_skipped)
        self._starting = None
        return started

    def _bind(self, request: Request, num_skipped: int) -> bool:
        table, cache = self.table, self.cache
        tokens = np.concatenate([request.prompt, request.evicted.tokens])
        slot = table.take_slot()
        row = table.page_table[slot]
        row[:] = 0
        kv, bound = None, False
        try:
            scores = self._take_inputs(request)
            first = request.first_uncached
            # A cached prefix yields neither logits nor hidden states, so it ends before the first that are
            # wanted.
            shareable = tokens if first is None else tokens[: first + 1]
            length = len(tokens) if request.forced is None else request.limit - 1
            for home in cache.homes(shareable, request.salt, self._fair_share()):
                kv = cache.open(shareable, request.salt, row, home)
                if self._fits(kv, length, num_skipped):
                    break
                cache.close(kv, None)
                kv = None
            if kv is None:
                return False
            if cache.tier is not None:
                cache.tier.saved_s += cache.restore(kv, shareable) * self._chunk_sizer.token_s
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
            if request.check is None:
                self.prompt_tokens += len(request.prompt)
                self.cached_tokens += cached
        request.phase = Phase.PREFILL
        self._active.append(request)
        self._prefilling.append(request)
        request.computes_inputs = scores is not None and cache.prefix_cache
        request.computes_shared_prefix = request.computes_inputs or kv.num_shared < self._shareable_pages(
            request
        )
        if request.computes_shared_prefix:
            self._prefixes_in_progress[request.prompt_key].append(request)
        return True

    def _fair_share(self) -> int:
        """Return the requests of each rank, if all that may run soon were divided equally."""
        return -(-min(self.table.slots, len(self._active) + len(self.waiting)) // len(self.cache.ranks))

    def _fits(self, kv: RequestKV, length: int, num_skipped: int) -> bool:
        """Extend ``kv`` to ``length`` tokens, if every other request there keeps one page to grow.

        Starting more would only preempt one of them.
        """
        reserved = kv.home.num_open - 1 + PAGES_PER_SKIPPED_REQUEST * num_skipped
        missing = pages_for(length) - kv.num_pages
        return missing <= kv.home.available() - reserved and self.cache.extend(kv, length)

    def _next(
        self, decode: np.ndarray, chunks: list[tuple[Request, int]], drafts: DraftRows | None = None
    ) -> ScheduledBatch:
        last = self._repeatable
        same = last is not None and last.batch.slots is decode and not chunks and drafts is None
        is_short = self._chunk_sizer.limit is not None
        if last is not None and same and self._states.may_repeat(decode, memory_is_short=is_short):
            batch = self._repeated(last)
        else:
            batch = self._build(decode, chunks, drafts)
            self._repeatable = None
            if self._is_plain(batch):
                self._repeatable = RepeatableStep(batch, StepArrays.of(batch.forward))
        self._advance(batch)  # last, since nothing takes this back if the step is not launched
        return batch

    def _build(
        self, decode: np.ndarray, chunks: list[tuple[Request, int]], drafts: DraftRows | None
    ) -> ScheduledBatch:
        table, num_decode = self.table, len(decode)
        chunk_slots = [request.slot for request, _ in chunks]
        slots = np.concatenate([decode, np.asarray(chunk_slots, np.int64)]) if chunks else decode
        q_lens = np.ones(len(slots), np.int64)
        q_lens[num_decode:] = [taken for _, taken in chunks]
        starts = table.scheduled[slots]
        if drafts is not None:
            starts += drafts.depth
        ends = starts + q_lens
        token_starts = np.cumsum(q_lens) - q_lens
        row_of_token = np.repeat(np.arange(len(slots)), q_lens)
        positions = np.arange(int(q_lens.sum())) - token_starts[row_of_token] + starts[row_of_token]
        token_slots = slots[row_of_token]
        pages = table.page_table[token_slots, positions // PAGE_SIZE]
        input_ids = table.tokens[token_slots, positions].astype(np.int64)

        width = pages_for(int(ends.max()))
        page_table = table.page_table[slots, :width]
        window_slots, window_table = self._windows.places(
            slots, starts, ends, page_table, row_of_token, positions
        )
        complete = np.flatnonzero(ends[num_decode:] == table.computable(slots[num_decode:]))
        samples, sample_positions = self._sampled(
            slots, starts, ends, np.concatenate([np.arange(num_decode), num_decode + complete])
        )
        sample_slots = slots[samples]
        spans = input_spans(chunks, table) if chunks else []
        hidden: list[HiddenSpan] = []
        if table.wants_hidden[slots].any():
            hidden = hidden_spans(table, slots, starts, ends)
        adapters: torch.Tensor | None = None
        if table.adapter[slots].max() != NO_ADAPTER:
            adapters = torch.from_numpy(table.adapter[token_slots])
        forward = ForwardBatch(
            num_decode=num_decode,
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            kv_slots=torch.from_numpy(pages.astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE),
            page_table=torch.from_numpy(page_table),
            window_slots=window_slots,
            window_table=window_table,
            states=self._states.places(
                slots, starts, ends, num_decode, memory_is_short=self._chunk_sizer.limit is not None
            ),
            kv_lens=torch.from_numpy(ends.astype(np.int32)),
            q_lens_host=q_lens.tolist(),
            kv_lens_host=ends.tolist(),
            slots=torch.from_numpy(slots),
            known=None if self.speculation is None else torch.from_numpy(input_ids[:num_decode]),
            sample_tokens=torch.from_numpy((token_starts - starts)[samples] + sample_positions - 1),
            sample_slots=torch.from_numpy(sample_slots),
            sampling=sampling_batch(table, sample_slots, sample_positions),
            inputs=input_tokens(spans, slots, token_starts - starts),
            hidden=hidden_tokens(hidden, slots, token_starts - starts),
            adapters=adapters,
        )
        return ScheduledBatch(
            forward=forward,
            slots=slots,
            ends=ends,
            sample_slots=sample_slots,
            sample_positions=sample_positions,
            completed=[chunks[row][0] for row in complete],
            num_tokens=len(positions),
            inputs=spans,
            hidden=hidden,
            drafts=drafts,
        )

    def _is_plain(self, batch: ScheduledBatch) -> bool:
        forward, sampling = batch.forward, batch.forward.sampling
        if any(each is not None for each in (batch.drafts, forward.window_slots, sampling.given)):
            return False
        if sampling.special is not None and not sampling.special.repeats:
            return False
        if forward.states is not None and not forward.states.in_place:
            return False
        return forward.num_decode == len(batch.slots) and not self.table.wants_hidden[batch.slots].any()

    def _repeated(self, last: RepeatableStep) -> ScheduledBatch:
        """Build the step that follows ``last`` of the same rows, in its tensors: the runner has read them."""
        (before, arrays), table = last, self.table
        slots, forward = before.slots, before.forward
        starts = table.scheduled[slots]
        ends = starts + 1
        host = ends.tolist()
        uniforms = uniforms_of(table, slots, ends)
        page_table = table.page_table[slots, : pages_for(max(host))]
        if page_table.shape != arrays.page_table.shape:
            forward = replace(forward, page_table=torch.from_numpy(page_table))
            arrays = StepArrays.of(forward)
        pages = starts // PAGE_SIZE
        arrays.page_table[:] = page_table
        arrays.kv_slots[:] = (page_table[arrays.rows, pages] - pages) * np.int64(PAGE_SIZE) + starts
        arrays.positions[:], arrays.kv_lens[:], arrays.uniforms[:] = starts, ends, uniforms
        if arrays.known is not None:
            arrays.known[:] = table.tokens[slots, starts]
        forward.kv_lens_host = host
        batch = replace(before, forward=forward, ends=ends, sample_positions=ends)
        self._repeatable = RepeatableStep(batch, arrays)
        return batch

    def _advance(self, batch: ScheduledBatch) -> None:
        """Count the tokens of a step as scheduled, before it is launched."""
        table, slots = self.table, batch.slots
        table.scheduled[slots] = batch.ends
        table.inflight[slots] += 1
        if batch.completed:
            self._restarts = 0
        for request in batch.completed:
            request.phase = Phase.DECODE
            self._prefilling.remove(request)
            self._decode_slots = None
        if self._chunk_sizer.limit is not None:
            self._decode_offset += batch.forward.num_decode
        self._states.launched(slots, batch.forward)
        if batch.forward.sampling.special is not None:
            table.sampling.counted[batch.sample_slots] = batch.sample_positions + 1

    def _sampled(
        self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, samples: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and positions of all tokens that are sampled or replayed, in the order of rows.

        ``samples``: rows whose last token has a successor to sample, if they are no replays.
        """
        if not self.table.replays[slots].any():
            return samples, ends[samples]
        count = np.zeros(len(slots), np.int64)
        count[samples] = 1
        replayed = ends - np.maximum(starts, self.table.length[slots] - 1)
        count = np.where(self.table.replays[slots], np.maximum(replayed, 0), count)
        rows = np.repeat(np.arange(len(slots)), count)
        behind = np.cumsum(count)[rows] - np.arange(len(rows)) - 1
        return rows, ends[rows] - behind


def _forget_inputs(request: Request) -> None:
    """Let what is known of a prompt be computed again, by the weights that sample its first token."""
    if len(request.evicted.tokens):
        return
    if request.record is not None:
        request.record.forget_inputs()
    if request.hidden is not None:
        request.hidden.forget()
