"""Sampling parameters that few requests use, as arrays by slot; and the extra log-probabilities of a request.

The extra log-probabilities ("further" in names) are: the top-k at each position, those of given token ids,
and those of the prompt's tokens.

Invariants:
- A slot without extras costs a step one element of a boolean array, and nothing else.
- A token counter belongs to one bound request with penalties. ``counted[slot]`` is the number of its tokens
  that the runner's counter includes once every launched step has run; 0 means that it must be rebuilt from
  the tokens.
- The record of an output position is overwritten when the position is sampled again, so a step that was
  rolled back leaves nothing.
"""

import heapq

import numpy as np
import numpy.typing as npt

from ...io_struct import GenerateReqInput, LogprobRows, SamplingParams


class LogprobRecord:
    """The extra log-probabilities of one sample, kept as long as its request."""

    def __init__(self, message: GenerateReqInput) -> None:
        self.top = message.top_logprobs_num
        self.token_ids = np.asarray(message.token_ids_logprob or (), np.int32)
        prompt_len, start = len(message.input_ids), message.logprob_start_len
        self.start: int | None = start if 0 <= start < prompt_len else None
        """Prompt position after which log-probabilities are wanted, or None."""
        self.num_inputs = 0 if self.start is None else prompt_len - 1 - self.start
        self.known_inputs = 0
        """Prompt log-probabilities recorded so far, from the first one on."""
        self._outputs = _Rows(self.top, len(self.token_ids))
        self._inputs = _Rows(self.top, len(self.token_ids))
        self._input_logprobs = np.empty(self.num_inputs, np.float32)

    @staticmethod
    def of(message: GenerateReqInput) -> "LogprobRecord | None":
        """Return a record for a request of ``message``; None if it asks for no extra log-probabilities."""
        record = LogprobRecord(message)
        wanted = record.wants_outputs or record.start is not None
        return record if message.return_logprob and wanted else None

    @property
    def wants_outputs(self) -> bool:
        """True if extra log-probabilities are wanted at each sampled position."""
        return self.top > 0 or len(self.token_ids) > 0

    @property
    def first_uncached(self) -> int | None:
        """First position that must be computed even if it is cached, or None."""
        return self.start if self.known_inputs < self.num_inputs else None

    def inputs_within(self, start: int, end: int) -> tuple[int, int]:
        """Return the positions among [start, end) whose logits are wanted, as ``(first, end)``."""
        if self.start is None or self.known_inputs >= self.num_inputs:
            return start, start
        first = max(start, self.start)
        return first, max(first, min(end, self.start + self.num_inputs))

    def put_output(self, at: int, top_ids: np.ndarray, top: np.ndarray, logprobs_of_ids: np.ndarray) -> None:
        """Record output token ``at``, from rows [K], [K] and [M]; this sample's columns come first."""
        self._outputs.put(at, top_ids[None], top[None], logprobs_of_ids[None])

    def put_inputs(
        self,
        first: int,
        logprobs: np.ndarray,
        top_ids: np.ndarray,
        top: np.ndarray,
        logprobs_of_ids: np.ndarray,
    ) -> None:
        """Record the tokens behind the positions from ``first`` on: [I], and [I, …] with columns as above."""
        assert self.start is not None
        at = first - self.start
        self._input_logprobs[at : at + len(logprobs)] = logprobs
        self._inputs.put(at, top_ids, top, logprobs_of_ids)
        self.known_inputs = at + len(logprobs)

    def forget_inputs(self) -> None:
        """Drop the prompt's log-probabilities: it is computed again under other weights."""
        self.known_inputs = 0

    def output_rows(self, start: int, end: int) -> tuple[LogprobRows | None, LogprobRows | None]:
        """Return ``(top, token_ids)`` of the output tokens [start, end), None where not asked for."""
        return self._outputs.wire(start, end, self.token_ids)

    def input_rows(self) -> tuple[bytes | None, LogprobRows | None, LogprobRows | None]:
        """Return the prompt's logprobs (the first is NaN), and ``(top, token_ids)``, if known."""
        if self.start is None or self.known_inputs < self.num_inputs:
            return None, None, None
        logprobs = np.concatenate([np.full(1, np.nan, "<f4"), self._input_logprobs]).astype("<f4").tobytes()
        return logprobs, *self._inputs.wire(0, self.num_inputs, self.token_ids)


class _Rows:
    """Growing arrays of log-probabilities by position: of the ``top`` likeliest and the requested tokens."""

    def __init__(self, top: int, num_token_ids: int) -> None:
        self._known = 0
        self._top_ids = np.empty((0, top), np.int32)
        self._top = np.empty((0, top), np.float32)
        self._of_ids = np.empty((0, num_token_ids), np.float32)

    def put(self, at: int, top_ids: np.ndarray, top: np.ndarray, logprobs_of_ids: np.ndarray) -> None:
        end = at + len(top)
        if end > len(self._top):
            room = max(end, 2 * len(self._top), 16)
            self._top_ids, self._top, self._of_ids = (
                np.concatenate([old, np.empty((room - len(old), old.shape[1]), old.dtype)])
                for old in (self._top_ids, self._top, self._of_ids)
            )
        self._top_ids[at:end] = top_ids[:, : self._top.shape[1]]
        self._top[at:end] = top[:, : self._top.shape[1]]
        self._of_ids[at:end] = logprobs_of_ids[:, : self._of_ids.shape[1]]
        self._known = end

    def wire(
        self, start: int, end: int, token_ids: np.ndarray
    ) -> tuple[LogprobRows | None, LogprobRows | None]:
        top, num_token_ids = self._top.shape[1], self._of_ids.shape[1]
        assert end <= self._known or not top + num_token_ids or start == end, (
            f"{self._known} rows, {end} tokens"
        )
        top_rows = token_ids_rows = None
        if top:
            top_rows = LogprobRows(
                k=top,
                ids=self._top_ids[start:end].astype("<i4").tobytes(),
                logprobs=self._top[start:end].astype("<f4").tobytes(),
            )
        if num_token_ids:
            token_ids_rows = LogprobRows(
                k=num_token_ids,
                ids=token_ids.astype("<i4").tobytes(),
                logprobs=self._of_ids[start:end].astype("<f4").tobytes(),
            )
        return top_rows, token_ids_rows


class SamplingExtras:
    """Rarely used sampling parameters by slot. The table writes ``counted`` and ``output_start``."""

    def __init__(self, slots: int) -> None:
        self.special = np.zeros(slots, np.bool_)
        """True for slots that use anything below except ``min_p``."""
        self.min_p = np.zeros(slots, np.float32)
        self.repetition = np.ones(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.penalised = np.zeros(slots, np.bool_)
        self.counter = np.zeros(slots, np.int64)
        self.counted = np.zeros(slots, np.int64)
        self.may_stop_at = np.zeros(slots, np.int64)
        """Absolute position from which tokens in ``stops`` may be sampled."""
        self.output_start = np.zeros(slots, np.int64)
        """Position of the first token that penalties count as output."""
        self.stops = _Ids(slots)
        self.bias = _Ids(slots)
        self.top = np.zeros(slots, np.int64)
        self.token_ids = _Ids(slots)
        self.masked = np.zeros(slots, np.bool_)
        """True for slots that want the tokens that the filters keep."""
        self.num_counters = 0
        """Most counters that were ever in use at once."""
        self._free_counters: list[int] = []  # a heap

    def bind(
        self,
        slot: int,
        params: SamplingParams,
        stops: tuple[int, ...],
        prompt_len: int,
        record: LogprobRecord | None,
        *,
        masked: bool,
    ) -> None:
        """Set the parameters of ``slot``; ``stops`` must not be sampled before ``min_new_tokens``."""
        self.release(slot)  # an earlier bind that raised may have left its counter behind
        bias = params.logit_bias or {}
        stops = stops if params.min_new_tokens else ()
        token_ids = record.token_ids if record is not None else np.empty(0, np.int32)
        self.stops.put(slot, stops, -np.inf)
        self.bias.put(slot, list(bias), list(bias.values()))
        self.token_ids.put(slot, token_ids, 0.0)
        self.may_stop_at[slot] = prompt_len + params.min_new_tokens
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self.top[slot] = record.top if record is not None else 0
        self.masked[slot] = masked
        self.counted[slot] = 0
        self.penalised[slot] = penalised = (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        if penalised:
            self.counter[slot] = self._take_counter()
        wanting = masked or (record is not None and record.wants_outputs)
        self.special[slot] = bool(penalised or bias or stops or wanting)

    def release(self, slot: int) -> None:
        if self.penalised[slot]:
            heapq.heappush(self._free_counters, int(self.counter[slot]))
        self.penalised[slot] = self.special[slot] = False

    def _take_counter(self) -> int:
        if self._free_counters:
            return heapq.heappop(self._free_counters)
        self.num_counters += 1
        return self.num_counters - 1


class _Ids:
    """A list of token ids with values for every slot, padded with 0; as wide as the longest list so far."""

    def __init__(self, slots: int) -> None:
        self.count = np.zeros(slots, np.int64)
        self.ids = np.zeros((slots, 0), np.int64)
        self.values = np.zeros((slots, 0), np.float32)

    def put(self, slot: int, ids: npt.ArrayLike, values: npt.ArrayLike) -> None:
        tokens = np.asarray(ids, np.int64)
        count = len(tokens)
        missing = count - self.ids.shape[1]
        if missing > 0:
            self.ids = np.pad(self.ids, ((0, 0), (0, missing)))
            self.values = np.pad(self.values, ((0, 0), (0, missing)))
        self.count[slot] = count
        self.ids[slot], self.values[slot] = 0, 0.0
        self.ids[slot, :count], self.values[slot, :count] = tokens, values

    def of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(ids, values)`` of ``slots``, [n, W], where W is the length of the longest list."""
        width = int(self.count[slots].max(initial=0))
        return self.ids[slots, :width], self.values[slots, :width]
