"""Processes a step's output: records tokens, finds finished requests, builds their terminal results.

Invariants:
- I2: tokens, logprobs and weight-version spans of a terminal result have equal lengths, and routed experts a
  row for each position but the last; this is checked before the result is handed on.
- Recording a step is array work; Python loops only over requests that end, stream, or open a new span.
"""

import logging
from collections.abc import Callable
from itertools import repeat
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from ...io_struct import ErrorCode, FinishReason, GenerateReqOutput, RoutedExperts
from ..execution.forward import FurtherLogprobs, HostOutput
from .batcher import Batcher, ScheduledBatch
from .live_requests import LiveRequests
from .outputs import Outputs
from .request import NO_TOKEN, OutputArrays, Request, RequestTable, WeightStamp
from .sampling_extras import LogprobRecord
from .sampling_inputs import InputSpan
from .sampling_masks import MAX_MASK_BYTES
from .waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from ..messaging.outbox import Outbox

logger = logging.getLogger(__name__)


class OutputProcessor(Outputs[Request]):
    def __init__(
        self,
        table: RequestTable,
        batcher: Batcher,
        waiting: WaitingQueue[Request],
        live: LiveRequests[Request],
        outbox: "Outbox",
        *,
        on_finished: Callable[[Request, GenerateReqOutput], None],
        stamp: WeightStamp,
    ) -> None:
        super().__init__(waiting, live, outbox, on_finished=on_finished, stamp=stamp)
        self._table = table
        self._batcher = batcher
        self._stamp_number = 0

    def set_stamp(self, stamp: WeightStamp) -> None:
        super().set_stamp(stamp)
        self._stamp_number += 1

    def record(self, batch: ScheduledBatch, output: HostOutput) -> None:
        """Record a step's tokens and finish the requests that end; rows of requests that ended in flight are
        ignored.
        """
        table = self._table
        if output.inputs is not None:
            _record_inputs(batch.inputs, output.inputs)
        keep = table.live[batch.sample_slots]
        all_live = bool(keep.all())
        slots = batch.sample_slots if all_live else batch.sample_slots[keep]
        tokens = output.token_ids if all_live else output.token_ids[keep]
        valid = tokens != NO_TOKEN
        if not valid.all():
            self._fail_non_finite(slots[~valid])
            keep = keep & (output.token_ids != NO_TOKEN)
            all_live = False
            slots, tokens = batch.sample_slots[keep], output.token_ids[keep]
        if not len(slots):
            return
        at = table.length[slots]
        table.tokens[slots, at] = tokens
        table.logprobs[slots, at] = output.logprobs if all_live else output.logprobs[keep]
        if output.raw_logprobs is not None:
            table.raw[slots, at] = output.raw_logprobs if all_live else output.raw_logprobs[keep]
        if output.sampled_logprobs is not None:
            table.sampled[slots, at] = output.sampled_logprobs if all_live else output.sampled_logprobs[keep]
        if output.further is not None:
            self._record_further(batch, output.further)
        self._open_spans(slots, at)
        table.length[slots] = at + 1  # this line makes all of the step's tokens known at once
        self.generated_tokens += len(slots)
        self._end_finished(slots, tokens)
        streaming = table.stream[slots] & table.live[slots]
        if streaming.any():
            self._stream(slots[streaming], at[streaming])

    def _record_further(self, batch: ScheduledBatch, further: FurtherLogprobs) -> None:
        special, table = batch.forward.sampling.special, self._table
        assert special is not None
        rows = special.rows.numpy()[special.wants_host]
        values = further.top_ids.numpy(), further.top.numpy(), further.token_ids_logprobs.numpy()
        kept = repeat(None) if further.kept is None else further.kept.numpy()
        for row, mask, *of_row in zip(rows.tolist(), kept, *values, strict=False):
            slot = batch.sample_slots[row]
            request = table.by_slot[slot]
            if request is None or not table.live[slot]:
                continue
            at = int(table.length[slot] - table.prompt_len[slot])
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
            self.fail([request], self._non_finite_message(request))

    def _non_finite_message(self, request: Request) -> str:
        if not self._table.extras.special[request.slot]:
            return "the model's logits are not finite: check the weights"
        params = request.params
        return (
            f"the logits are not finite after repetition_penalty = {params.repetition_penalty:g}, "
            f"frequency_penalty = {params.frequency_penalty:g}, "
            f"presence_penalty = {params.presence_penalty:g}, "
            f"{len(params.logit_bias or ())} biases and min_new_tokens = {params.min_new_tokens}: "
            "check these, and the weights"
        )

    def _open_spans(self, slots: np.ndarray, at: np.ndarray) -> None:
        table = self._table
        current = 2 * self._stamp_number + table.stale_kv[slots]
        changed = np.flatnonzero(table.stamp[slots] != current)
        for row in changed:
            slot = slots[row]
            request = table.by_slot[slot]
            assert request is not None
            stale = bool(table.stale_kv[slot])
            if not request.spans or request.spans[-1][:2] != (self._stamp, stale):
                request.spans.append((self._stamp, stale, int(at[row] - table.prompt_len[slot])))
        table.stamp[slots] = current

    def _end_finished(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        table = self._table
        stopped = (table.stop_ids[slots] == tokens[:, None]).any(axis=1)
        full = table.length[slots] >= table.limit[slots]
        for row in np.flatnonzero(stopped | full):
            request = table.by_slot[slots[row]]
            assert request is not None
            if stopped[row]:
                reason = FinishReason(type="stop", matched=int(tokens[row]))
            else:
                reason = FinishReason(type="length", length=request.limit - len(request.prompt))
            self.finish(request, reason)
        for slot in slots[table.extras.masked[slots]]:
            request = table.by_slot[slot]
            if request is not None and request.masks is not None and request.masks.nbytes > MAX_MASK_BYTES:
                limit = f"its sampling masks take more than {MAX_MASK_BYTES} bytes"
                message = f"{limit}: lower top_k, top_p or max_new_tokens"
                self.fail([request], message, ErrorCode.INVALID_REQUEST)

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
        record = request.record
        return GenerateReqOutput(
            rid=request.rid,
            index=request.index,
            output_ids=outputs.tokens.astype("<i4").tobytes(),
            output_logprobs=outputs.logprobs.astype("<f4").tobytes() if request.return_logprob else None,
            raw_logprobs=outputs.raw.astype("<f4").tobytes() if request.return_raw else None,
            sampled_logprobs=outputs.sampled.astype("<f4").tobytes() if request.return_sampled else None,
            **({} if record is None else _further_fields(record, count)),
            sampling_mask=None if request.masks is None else request.masks.wire(count),
            routed_experts=self._routed_experts(request, count) if reason.type != "error" else None,
            finish_reason=reason,
            weight_versions=spans,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            seed=request.seed,
            num_retractions=request.num_retractions,
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


def _further_fields(record: LogprobRecord, count: int) -> dict[str, Any]:
    top, token_ids = record.output_rows(0, count)
    input_logprobs, input_top, input_token_ids = record.input_rows()
    return {
        "output_top_logprobs": top,
        "output_token_ids_logprobs": token_ids,
        "input_logprobs": input_logprobs,
        "input_top_logprobs": input_top,
        "input_token_ids_logprobs": input_token_ids,
    }


def _record_inputs(spans: list[InputSpan], values: FurtherLogprobs) -> None:
    columns = [
        column.numpy() for column in (values.logprobs, values.top_ids, values.top, values.token_ids_logprobs)
    ]
    offset = 0
    for span in spans:
        rows = slice(offset, offset := offset + span.count)
        span.record.put_inputs(span.first, *(column[rows] for column in columns))
