"""The output of steps: records tokens, ends samples, builds their terminal results.

Invariants:
- I1: a sample, whether tokens or an image, is finished by :meth:`Outputs.finish` and nowhere else, once, with
  exactly one terminal result for its client.
- I2: tokens, logprobs and weight-version spans of a terminal result have equal lengths, and routed experts a
  row for each position but the last; this is checked before the result is handed on.
- Recording a step is array work; Python loops only over requests that end, stream, or open a new span. It
  asks ``np.count_nonzero``: ``any`` and ``all`` of an array go through functions in Python.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from ...io_struct import ErrorCode, FinishReason, GenerateReqOutput, RoutedExperts
from ..execution.forward import FurtherLogprobs, HostOutput
from ..memory.device_memory import is_out_of_memory
from .batcher import Batcher, ScheduledBatch
from .hidden_states import record_hidden
from .request import NO_TOKEN, OutputArrays, Phase, Request, WeightStamp
from .sampling import MAX_MASK_BYTES, InputSpan
from .waiting_queue import LiveRequests, SampleT, WaitingQueue

if TYPE_CHECKING:
    from ..runtime.engine import Engine

logger = logging.getLogger(__name__)


class Outputs(ABC, Generic[SampleT]):
    def __init__(self, engine: "Engine") -> None:
        self.generated_tokens = 0
        """Tokens, or denoised steps of samples, since the engine's start."""
        self.finished: Counter[str] = Counter()
        self._waiting: WaitingQueue[SampleT] = engine.waiting
        self._live: LiveRequests[SampleT] = engine.live
        self._outbox = engine.outbox
        self._replies = engine.replies
        self._stamp = engine.state.stamp

    @abstractmethod
    def record(self, batch: Any, output: Any) -> None:
        pass

    @abstractmethod
    def _result(self, sample: SampleT, reason: FinishReason) -> Any:
        pass

    @abstractmethod
    def _lost_result(self, sample: SampleT, reason: FinishReason) -> Any:
        """Return a terminal result without content, in place of one that cannot be built."""

    @abstractmethod
    def _release(self, sample: SampleT, *, waited: bool, keep_prefix: bool) -> None:
        """Release what a finished sample holds; ``waited``: it was in the queue."""

    def set_stamp(self, stamp: WeightStamp) -> None:
        self._stamp = stamp

    def finish(self, sample: SampleT, reason: FinishReason, *, keep_prefix: bool = True) -> None:
        """Build the result, then release; with ``keep_prefix`` what was computed may serve others."""
        assert sample.phase is not Phase.FINISHED, "a sample ends once"
        try:
            result = self._result(sample, reason)
        except Exception as error:  # a terminal result must be sent, whatever is wrong with the outputs
            logger.error("request %s: its result could not be built", sample.rid, exc_info=error)
            message = f"its result could not be built: {type(error).__name__}: {error}"
            code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL
            result = self._lost_result(sample, FinishReason(type="error", message=message, code=code))
            keep_prefix = False
        waited = sample.phase is Phase.WAITING
        sample.phase = Phase.FINISHED
        self._live.remove(sample)
        self._deliver(sample, result)
        if waited:
            self._waiting.forget_finished()
        self._release(sample, waited=waited, keep_prefix=keep_prefix)

    def _deliver(self, sample: SampleT, result: Any) -> None:
        self._outbox.add_result(sample.client, result)
        self.finished[result.finish_reason.type] += 1
        self._replies.finished(sample, result)

    def abort(self, samples: Iterable[SampleT], message: str, code: ErrorCode | None = None) -> int:
        reason = FinishReason(type="abort", message=message, code=code)
        return self._finish_each(samples, reason, keep_prefix=True)

    def abort_all(self, message: str) -> int:
        return self.abort(self._live, message)

    def fail(self, samples: Iterable[SampleT], message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """Finish samples with an error after a failed step. They keep what earlier steps made."""
        self._finish_each(samples, FinishReason(type="error", message=message, code=code), keep_prefix=False)

    def _finish_each(self, samples: Iterable[SampleT], reason: FinishReason, *, keep_prefix: bool) -> int:
        count = 0
        for sample in samples:
            if sample.phase is Phase.FINISHED:
                continue
            count += 1
            try:
                self.finish(sample, reason, keep_prefix=keep_prefix)
            except Exception as error:  # the others must be finished, too
                logger.error("request %s could not be released completely", sample.rid, exc_info=error)
        return count


class OutputProcessor(Outputs[Request]):
    def __init__(self, engine: "Engine", batcher: Batcher) -> None:
        super().__init__(engine)
        self._table = batcher.table
        self._batcher = batcher
        self._drift = engine.drift
        self._stamp_number = 0

    def set_stamp(self, stamp: WeightStamp) -> None:
        super().set_stamp(stamp)
        self._stamp_number += 1

    def abort_all(self, message: str) -> int:
        self._drift.cancel()
        return super().abort_all(message)

    def _deliver(self, sample: Request, result: GenerateReqOutput) -> None:
        if sample.check is not None:
            self._drift.scored(sample.check, result)
            return
        super()._deliver(sample, result)
        if self._drift.chooses and result.finish_reason.type in ("stop", "length"):
            self._drift.ended(sample, self._table.outputs(sample))

    def record(self, batch: ScheduledBatch, output: HostOutput) -> None:
        """Record a step's tokens and finish requests; rows that ended in flight are ignored."""
        table = self._table
        if output.inputs is not None:
            _record_inputs(batch.inputs, output.inputs)
        if output.hidden is not None:
            record_hidden(batch.hidden, output.hidden)
        if batch.drafts is None:
            self._record_tokens(batch, output, table.live[batch.sample_slots])
            return
        depth, kept = batch.drafts.depth, batch.drafts.verify(output.token_ids)
        self._batcher.count_drafts(batch.slots[depth > 0])
        for each in range(int(depth[kept].max()) + 1):
            keep = kept & (depth == each) & table.live[batch.slots]
            if each:
                self._batcher.count_drafts(batch.slots[keep], accepted=True)
            self._record_tokens(batch, output, keep)

    def _record_tokens(self, batch: ScheduledBatch, output: HostOutput, keep: np.ndarray) -> None:
        """Record the rows of ``keep``, bool [S], of which no request has several but replays."""
        table = self._table
        all_live = np.count_nonzero(keep) == len(keep)
        slots = batch.sample_slots if all_live else batch.sample_slots[keep]
        tokens = output.token_ids if all_live else output.token_ids[keep]
        invalid = tokens == NO_TOKEN
        if np.count_nonzero(invalid):
            self._fail_non_finite(np.unique(slots[invalid]))
            keep = keep & table.live[batch.sample_slots]
            all_live = False
            slots, tokens = batch.sample_slots[keep], output.token_ids[keep]
        if not len(slots):
            return
        at = batch.sample_positions if all_live else batch.sample_positions[keep]
        table.tokens[slots, at] = tokens
        table.logprobs[slots, at] = output.logprobs if all_live else output.logprobs[keep]
        if output.raw_logprobs is not None:
            table.raw[slots, at] = output.raw_logprobs if all_live else output.raw_logprobs[keep]
        if output.sampled_logprobs is not None:
            table.sampled[slots, at] = output.sampled_logprobs if all_live else output.sampled_logprobs[keep]
        if output.further is not None:
            self._record_further(batch, output.further, keep)
        self._open_spans(slots, at)
        table.length[slots] = at + 1  # this line makes all of the step's tokens known at once
        checked = 0
        if batch.forward.sampling.given is not None:
            checked = sum(self._table.by_slot[slot].check is not None for slot in slots)
        self.generated_tokens += len(slots) - checked
        self._end_finished(slots, tokens, at)
        if table.sampling.grammars:
            self._follow_grammars(slots, at)
        streaming = table.stream[slots]
        if np.count_nonzero(streaming) and np.count_nonzero(streaming := streaming & table.live[slots]):
            self._stream(slots[streaming], at[streaming])

    def _record_further(self, batch: ScheduledBatch, further: FurtherLogprobs, keep: np.ndarray) -> None:
        special, table = batch.forward.sampling.special, self._table
        assert special is not None
        rows = special.rows.numpy()[special.wants_host]
        slots = batch.sample_slots[rows]
        places = batch.sample_positions[rows] - table.prompt_len[slots]
        known = keep[rows].tolist(), slots.tolist(), places.tolist()
        values = (*top_tokens(further), further.token_ids_logprobs.numpy())
        masks = repeat(None) if further.kept is None else further.kept.numpy()
        for is_kept, slot, at, mask, *of_row in zip(*known, masks, *values, strict=False):
            request = table.by_slot[slot]
            if request is None or not is_kept:
                continue
            if request.record is not None:
                request.record.put_output(at, *of_row)
            if request.masks is not None:
                assert mask is not None, "asked for, and not computed"
                request.masks.put(at, mask)

    def _fail_non_finite(self, slots: np.ndarray) -> None:
        for slot in slots:
            request = self._table.by_slot[slot]
            assert request is not None
            logger.error(
                "request %s: logits are not finite (weights epoch %d)", request.rid, self._stamp.epoch
            )
            message = "the model's logits are not finite: check the weights"
            if self._table.sampling.special[slot]:
                params = request.params
                message = (
                    f"the logits are not finite after repetition_penalty = {params.repetition_penalty:g}, "
                    f"frequency_penalty = {params.frequency_penalty:g}, "
                    f"presence_penalty = {params.presence_penalty:g}, "
                    f"{len(params.logit_bias or ())} biases, {len(params.allowed_token_ids or ())} allowed "
                    f"tokens and min_new_tokens = {params.min_new_tokens}: "
                    "check these, and the weights"
                )
            if request.grammar is not None:
                message = f"no token that the grammar allows is left, or {message}"
            self.fail([request], message)

    def _open_spans(self, slots: np.ndarray, at: np.ndarray) -> None:
        table = self._table
        current = 2 * self._stamp_number + table.stale_kv[slots]
        changed = table.stamp[slots] != current
        if not np.count_nonzero(changed):
            return
        rows = slots[changed]
        columns = rows, table.stale_kv[rows], at[changed] - table.prompt_len[rows]
        for slot, stale, first in zip(*(column.tolist() for column in columns), strict=True):
            request = table.by_slot[slot]
            assert request is not None
            stamp = self._stamp if request.adapter is None else request.adapter.stamped(self._stamp)
            if not request.spans or request.spans[-1][:2] != (stamp, stale):
                request.spans.append((stamp, stale, first))
        table.stamp[slots] = current

    def _end_finished(self, slots: np.ndarray, tokens: np.ndarray, at: np.ndarray) -> None:
        table = self._table
        masked = slots[table.sampling.masked[slots]]
        if np.count_nonzero(table.replays[slots]):  # their last tokens alone may end them
            may_end = ~table.replays[slots] | (at + 1 == table.limit[slots])
            slots, tokens = slots[may_end], tokens[may_end]
        stops = table.stop_ids[slots] == tokens[:, None]
        full = table.length[slots] >= table.limit[slots]
        if np.count_nonzero(stops) or np.count_nonzero(full):
            stopped = stops.any(axis=1)
            for row in np.flatnonzero(stopped | full):
                request = table.by_slot[slots[row]]
                assert request is not None
                if stopped[row]:
                    reason = FinishReason(type="stop", matched=int(tokens[row]))
                else:
                    reason = FinishReason(type="length", length=request.limit - len(request.prompt))
                self.finish(request, reason)
        for slot in masked:
            request = table.by_slot[slot]
            if request is not None and request.masks is not None and request.masks.nbytes > MAX_MASK_BYTES:
                limit = f"its sampling masks take more than {MAX_MASK_BYTES} bytes"
                message = f"{limit}: lower top_k, top_p or max_new_tokens"
                self.fail([request], message, ErrorCode.INVALID_REQUEST)

    def _follow_grammars(self, slots: np.ndarray, at: np.ndarray) -> None:
        """Let grammars see the new tokens, and end samples that no token can follow."""
        table, columns = self._table, self._table.sampling
        for row in np.flatnonzero(columns.constrained[slots] & ~table.replays[slots]):
            slot, position = slots[row], int(at[row]) + 1
            if not table.live[slot]:
                continue
            request, state = table.by_slot[slot], columns.grammars[slot]
            assert request is not None
            state.follow(table.tokens[slot, columns.output_start[slot] : position])
            end = state.end(may_stop=position >= columns.may_stop_at[slot])
            if end is not None:
                self.end_of_grammar(request, state.reason if end == "error" else None)

    def end_of_grammar(self, request: Request, reason: str | None) -> None:
        """Finish a sample whose grammar is complete, or failed for a ``reason``."""
        if reason is None:
            self.finish(request, FinishReason(type="stop"))
        else:
            self.fail([request], f"grammar: {reason}", ErrorCode.INVALID_REQUEST)

    def _stream(self, slots: np.ndarray, at: np.ndarray) -> None:
        table = self._table
        self._outbox.add_tokens(
            [request for slot in slots.tolist() if (request := table.by_slot[slot]) is not None],
            (at - table.prompt_len[slots]).tolist(),
            table.tokens[slots, at].tolist(),
            table.logprobs[slots, at].tolist(),
            table.raw[slots, at].tolist(),
            table.sampled[slots, at].tolist(),
        )

    def _lost_result(self, sample: Request, reason: FinishReason) -> GenerateReqOutput:
        self._table.forget_outputs(sample)
        return self._built(sample, OutputArrays.empty(), reason)

    def _release(self, sample: Request, *, waited: bool, keep_prefix: bool) -> None:
        if sample.adapter is not None:
            sample.adapter.running -= 1
        if not waited:
            self._table.live[sample.slot] = False
            self._batcher.retire(sample, keep_prefix=keep_prefix)

    def _result(self, sample: Request, reason: FinishReason) -> GenerateReqOutput:
        return self._built(sample, self._table.outputs(sample), reason)

    def _built(self, request: Request, outputs: OutputArrays, reason: FinishReason) -> GenerateReqOutput:
        count = len(outputs.tokens)
        spans = request.version_spans(count) if request.spans else []
        covered = sum(span.end - span.start for span in spans)
        assert count == len(outputs.logprobs) == covered, (
            f"request {request.rid}: {count} tokens, {len(outputs.logprobs)} logprobs, {covered} in spans"
        )
        now = monotonic()
        return GenerateReqOutput(
            rid=request.rid,
            index=request.index,
            output_ids=outputs.tokens.astype("<i4").tobytes(),
            output_logprobs=outputs.logprobs.astype("<f4").tobytes() if request.return_logprob else None,
            raw_logprobs=outputs.raw.astype("<f4").tobytes() if request.return_raw else None,
            sampled_logprobs=outputs.sampled.astype("<f4").tobytes() if request.return_sampled else None,
            **({} if request.record is None else request.record.result_fields(count)),
            sampling_mask=None if request.masks is None else request.masks.wire(count),
            routed_experts=self._routed_experts(request, count) if reason.type != "error" else None,
            hidden_states=None if request.hidden is None else request.hidden.wire(len(request.prompt), count),
            finish_reason=reason,
            weight_versions=spans,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            seed=request.seed,
            num_retractions=request.num_retractions,
            drafted_tokens=request.drafted_tokens,
            accepted_tokens=request.accepted_tokens,
            queue_time=(request.first_scheduled or now) - request.arrival,
            e2e_latency=now - request.arrival,
        )

    def _routed_experts(self, request: Request, count: int) -> RoutedExperts | None:
        rows = self._batcher.routed_experts(request)
        start = request.routed_from
        if rows is None or start is None:
            return None
        expected = len(request.prompt) + count - 1 - start if count else 0
        assert len(rows) == expected, (
            f"request {request.rid}: {len(rows)} rows of routed experts, {expected} positions"
        )
        narrow = rows.dtype.itemsize == 1
        return RoutedExperts(
            data=rows.astype("|u1" if narrow else "<u2", copy=False).tobytes(),
            shape=list(rows.shape),
            dtype="U8" if narrow else "U16",
            start=start,
        )


def _record_inputs(spans: list[InputSpan], values: FurtherLogprobs) -> None:
    columns = values.logprobs.numpy(), *top_tokens(values), values.token_ids_logprobs.numpy()
    offset = 0
    for span in spans:
        rows = slice(offset, offset := offset + span.count)
        span.record.put_inputs(span.first, *(column[rows] for column in columns))


def top_tokens(further: FurtherLogprobs) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest tokens [N, F] and their log-probabilities; of equal ones the lower token first."""
    ids, top = further.top_ids.numpy(), further.top.numpy()
    tied = np.flatnonzero((top[:, 1:] == top[:, :-1]).any(axis=1))
    if len(tied):
        ids = ids.copy()
        order = np.lexsort((ids[tied], -top[tied]), axis=1)
        ids[tied] = np.take_along_axis(ids[tied], order, axis=1)
    return ids, top
