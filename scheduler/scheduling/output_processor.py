"""Processes a step's output: records tokens, finds finished requests, builds their terminal results.

Invariants:
- I1: a request is finished here and nowhere else, once, with exactly one terminal result for its client.
- I2: tokens, logprobs and weight-version spans of a terminal result have equal lengths, and routed experts
  have a row for each position but the last; this is checked before the result is handed on.
- Recording a step is array work; Python loops only over requests that end, stream, or open a new span.
- Streamed tokens and terminal results go to an :class:`OutputSink`, which sends them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from time import monotonic
from typing import Any, Protocol

import numpy as np

from ...io_struct import ErrorCode, FinishReason, GenerateReqOutput, RoutedExperts
from ..execution.forward import FurtherLogprobs, HostOutput
from ..memory.device_memory import is_out_of_memory
from .batcher import Batcher, ScheduledBatch
from .live_requests import LiveRequests
from .request import NO_TOKEN, OutputArrays, Phase, Request, RequestTable, WeightStamp
from .sampling_extras import LogprobRecord
from .sampling_inputs import InputSpan
from .sampling_masks import MAX_MASK_BYTES
from .waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

OnFinished = Callable[[Request, GenerateReqOutput], None]


class OutputSink(Protocol):
    def add_tokens(
        self,
        requests: Iterable[Request],
        starts: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        raw: Sequence[float],
        sampled: Sequence[float],
    ) -> None: ...

    def add_result(self, client: bytes, result: GenerateReqOutput) -> None: ...


class OutputProcessor:
    def __init__(
        self,
        table: RequestTable,
        batcher: Batcher,
        waiting: WaitingQueue,
        live: LiveRequests[Request],
        sink: OutputSink,
        *,
        on_finished: OnFinished,
        stamp: WeightStamp,
    ) -> None:
        """``on_finished`` is called once for each request, after its slot and KV were released."""
        self.generated_tokens = 0
        self.finished: Counter[str] = Counter()
        """Number of finished requests by the type of their finish reason."""
        self._table = table
        self._batcher = batcher
        self._waiting = waiting
        self._live = live
        self._sink = sink
        self._on_finished = on_finished
        self._stamp = stamp
        self._stamp_number = 0

    def set_stamp(self, stamp: WeightStamp) -> None:
        """Have tokens that are sampled from now on carry ``stamp``."""
        self._stamp = stamp
        self._stamp_number += 1

    def record(self, batch: ScheduledBatch, output: HostOutput) -> None:
        """Record a step's tokens and finish the requests that end. Rows of requests that ended in flight are
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

    def finish(self, request: Request, reason: FinishReason, *, keep_prefix: bool = True) -> None:
        """Finish a request: build its result, then release its slot and KV."""
        assert request.phase is not Phase.FINISHED, "a request ends once"
        try:
            result = self._result(request, self._table.outputs(request), reason)
        except (
            Exception
        ) as error:  # the request must get a terminal result, whatever is wrong with its outputs
            logger.error("request %s: its result could not be built", request.rid, exc_info=error)
            self._table.forget_outputs(request)
            message = f"its result could not be built: {type(error).__name__}: {error}"
            code = ErrorCode.OUT_OF_MEMORY if is_out_of_memory(error) else ErrorCode.INTERNAL
            lost = FinishReason(type="error", message=message, code=code)
            result = self._result(request, OutputArrays.empty(), lost)
            keep_prefix = False
        waiting = request.phase is Phase.WAITING
        request.phase = Phase.FINISHED
        self._live.remove(request)
        self._sink.add_result(request.client, result)
        self.finished[result.finish_reason.type] += 1
        if waiting:
            self._waiting.forget_finished()
        else:
            self._table.live[request.slot] = False
            self._batcher.retire(request, keep_prefix=keep_prefix)
        self._on_finished(request, result)

    def abort(self, requests: Iterable[Request], message: str, code: ErrorCode | None = None) -> int:
        """Abort ``requests`` now, with their partial tokens; return how many were live."""
        reason = FinishReason(type="abort", message=message, code=code)
        return self._finish_each(requests, reason, keep_prefix=True)

    def abort_all(self, message: str) -> int:
        """Abort every live request, queued ones included."""
        return self.abort(self._live, message)

    def fail(self, requests: Iterable[Request], message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """Finish ``requests`` with an error after a failed step. They keep their earlier tokens; their KV is
        not cached.
        """
        self._finish_each(requests, FinishReason(type="error", message=message, code=code), keep_prefix=False)

    def _finish_each(self, requests: Iterable[Request], reason: FinishReason, *, keep_prefix: bool) -> int:
        count = 0
        for request in requests:
            if request.phase is Phase.FINISHED:
                continue
            count += 1
            try:
                self.finish(request, reason, keep_prefix=keep_prefix)
            except Exception as error:  # the other requests must be finished, too
                logger.error("request %s could not be released completely", request.rid, exc_info=error)
        return count

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
        self._sink.add_tokens(
            [request for slot in slots.tolist() if (request := table.by_slot[slot]) is not None],
            (at - table.prompt_len[slots]).tolist(),
            table.tokens[slots, at].tolist(),
            table.logprobs[slots, at].tolist(),
            table.raw[slots, at].tolist(),
            table.sampled[slots, at].tolist(),
        )

    def _result(self, request: Request, outputs: OutputArrays, reason: FinishReason) -> GenerateReqOutput:
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
    """Return the result fields that come from ``record``, for ``count`` output tokens."""
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
