"""Sampling of requests: their parameters by slot, what a sample keeps of its
sampling (extra log-probabilities, "further" in names, and masks), and a step's sampling inputs.

Invariants:
- A slot without rarely used parameters costs a step one element of ``special``. Gathering a step's inputs is
  array work and changes no state, so a step that is built and not launched leaves no trace.
- ``counted[slot]`` is the number of a penalised request's tokens that the runner's counter includes once
  every launched step has run; 0 means that the counter must be rebuilt from the tokens.
- What is recorded of an output position is overwritten when the position is sampled again, so a step that was
  rolled back leaves nothing, and outlives retractions with the tokens.
- A mask is what the sampler drew from, not a computation beside it: the sampled token is in it, and a
  replayed one if it could have been sampled.
"""

import copy
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...io_struct import GREEDY_BELOW, MAX_SAMPLING_MASK, GenerateReqInput, LogprobRows, SamplingMask
from ..execution.forward import InputTokens, SamplingBatch, SpecialRows
from ..execution.sampler import noise, noise_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .grammars import GrammarState
    from .request import Request, RequestTable

MAX_MASK_BYTES = 16 << 20
"""Bytes of one sample's masks. A sample with more ends: its result would not fit into a message."""


class LogprobRecord:
    def __init__(self, message: GenerateReqInput) -> None:
        self.top = message.top_logprobs_num
        self.token_ids = np.asarray(message.token_ids_logprob or (), np.int32)
        prompt_len, start = len(message.input_ids), message.logprob_start_len
        self.start: int | None = start if 0 <= start < prompt_len else None
        self.num_inputs = 0 if self.start is None else prompt_len - 1 - self.start
        self._outputs = _Rows(self.top, len(self.token_ids))
        self._inputs: _Rows
        self._input_logprobs: np.ndarray
        self.forget_inputs()

    @staticmethod
    def of(message: GenerateReqInput) -> "LogprobRecord | None":
        record = LogprobRecord(message)
        wanted = record.wants_outputs or record.start is not None
        return record if message.return_logprob and wanted else None

    @property
    def wants_outputs(self) -> bool:
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
        self._outputs.put(at, at + 1, top_ids, top, logprobs_of_ids)

    def put_inputs(self, first: int, logprobs: np.ndarray, *columns: np.ndarray) -> None:
        """Record the tokens behind the positions from ``first`` on: [I], and [I, …] with columns as above."""
        assert self.start is not None
        at = first - self.start
        self._input_logprobs[at : at + len(logprobs)] = logprobs
        self._inputs.put(at, at + len(logprobs), *columns)
        self.known_inputs = at + len(logprobs)

    def forget_inputs(self) -> None:
        self.known_inputs = 0
        self._inputs = _Rows(self.top, len(self.token_ids))
        self._input_logprobs = np.empty(self.num_inputs, np.float32)

    @property
    def input_bytes(self) -> int:
        return self.num_inputs * (4 + 8 * self.top + 4 * len(self.token_ids))

    def covers(self, other: "LogprobRecord") -> bool:
        """Return True if this record of the same prompt is to have all that ``other`` wants of it."""
        if self.start is None or other.start is None or self.start > other.start or self.top < other.top:
            return False
        return not len(other.token_ids) or np.array_equal(self.token_ids, other.token_ids)

    def take_inputs(self, known: "LogprobRecord") -> None:
        """Take the prompt's log-probabilities from a complete record that covers this one."""
        first = known.num_inputs - self.num_inputs
        self._input_logprobs = known._input_logprobs[first:]
        self._inputs = known._inputs.cut(first, known.num_inputs, self.top, len(self.token_ids))
        self.known_inputs = self.num_inputs

    def inputs_alone(self) -> "LogprobRecord":
        """Return a copy without the output, which holds no more than :attr:`input_bytes` of rows."""
        found = copy.copy(self)
        found._outputs = _Rows(0, 0)
        found._input_logprobs = self._input_logprobs.copy()
        found._inputs = self._inputs.cut(0, self.num_inputs, self.top, len(self.token_ids)).copied()
        return found

    def output_rows(self, start: int, end: int) -> tuple[LogprobRows | None, LogprobRows | None]:
        """Return ``(top, token_ids)`` of the output tokens [start, end), None where not asked for."""
        return self._outputs.wire(start, end, self.token_ids)

    def result_fields(self, count: int) -> dict[str, Any]:
        """Return the fields of a result with ``count`` output tokens; the prompt's first logprob is NaN."""
        top, token_ids = self.output_rows(0, count)
        fields: dict[str, Any] = {"output_top_logprobs": top, "output_token_ids_logprobs": token_ids}
        if self.start is None or self.known_inputs < self.num_inputs:
            return fields
        top, token_ids = self._inputs.wire(0, self.num_inputs, self.token_ids)
        logprobs = np.concatenate([np.full(1, np.nan, "<f4"), self._input_logprobs]).astype("<f4").tobytes()
        inputs = {
            "input_logprobs": logprobs,
            "input_top_logprobs": top,
            "input_token_ids_logprobs": token_ids,
        }
        return fields | inputs


class _Rows:
    def __init__(self, top: int, num_token_ids: int) -> None:
        self._known = 0
        self._top_ids = np.empty((0, top), np.int32)
        self._top = np.empty((0, top), np.float32)
        self._of_ids = np.empty((0, num_token_ids), np.float32)

    def put(
        self, at: int, end: int, top_ids: np.ndarray, top: np.ndarray, logprobs_of_ids: np.ndarray
    ) -> None:
        """Set the rows [at, end); one row may come as a vector."""
        if end > len(self._top):
            room = max(end, 2 * len(self._top), 16)
            self._top_ids, self._top, self._of_ids = (
                np.concatenate([old, np.empty((room - len(old), old.shape[1]), old.dtype)])
                for old in (self._top_ids, self._top, self._of_ids)
            )
        if width := self._top.shape[1]:
            self._top_ids[at:end] = top_ids[..., :width]
            self._top[at:end] = top[..., :width]
        if width := self._of_ids.shape[1]:
            self._of_ids[at:end] = logprobs_of_ids[..., :width]
        self._known = end

    def cut(self, start: int, end: int, top: int, num_token_ids: int) -> "_Rows":
        found = _Rows(top, num_token_ids)
        found._known = end - start
        found._top_ids, found._top = self._top_ids[start:end, :top], self._top[start:end, :top]
        found._of_ids = self._of_ids[start:end, :num_token_ids]
        return found

    def copied(self) -> "_Rows":
        found = copy.copy(self)
        found._top_ids, found._top = self._top_ids.copy(), self._top.copy()
        found._of_ids = self._of_ids.copy()
        return found

    def wire(
        self, start: int, end: int, token_ids: np.ndarray
    ) -> tuple[LogprobRows | None, LogprobRows | None]:
        widths = top, num_ids = self._top.shape[1], self._of_ids.shape[1]
        assert end <= self._known or not any(widths) or start == end, f"{self._known} rows, {end} tokens"
        return (
            _rows(top, self._top_ids[start:end], self._top[start:end]) if top else None,
            _rows(num_ids, token_ids, self._of_ids[start:end]) if num_ids else None,
        )


def _rows(k: int, ids: np.ndarray, logprobs: np.ndarray) -> LogprobRows:
    return LogprobRows(k=k, ids=ids.astype("<i4").tobytes(), logprobs=logprobs.astype("<f4").tobytes())


class SamplingMaskRecord:
    """The tokens that top-k, top-p and min-p left at each output position of one sample."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._positions: list[np.ndarray] = []

    def put(self, at: int, kept: np.ndarray) -> None:
        """Record output token ``at``, from bool [V]; what was recorded behind it is forgotten."""
        for forgotten in self._positions[at:]:
            self.nbytes -= forgotten.nbytes
        del self._positions[at:]
        assert len(self._positions) == at, f"{len(self._positions)} masks before token {at}"
        ids = np.flatnonzero(kept).astype("<i4")
        self._positions.append(ids)
        self.nbytes += ids.nbytes

    def at(self, position: int) -> np.ndarray:
        return self._positions[position]

    def wire(self, count: int) -> SamplingMask | None:
        assert count <= len(self._positions), f"{len(self._positions)} masks, {count} tokens"
        return joined_masks(self._positions[:count])


def joined_masks(positions: "Sequence[np.ndarray | None]") -> SamplingMask | None:
    """Return one mask for each of ``positions``, empty where it is None; None if nobody asked for any."""
    if positions and all(ids is None for ids in positions):
        return None
    known = [np.empty(0, "<i4") if ids is None else ids for ids in positions]
    offsets = np.zeros(len(positions) + 1, "<i4")
    np.cumsum([len(ids) for ids in known], out=offsets[1:])
    ids = np.concatenate([np.empty(0, "<i4"), *known]).tobytes()
    return SamplingMask(ids=ids, offsets=offsets.tobytes())


class SamplingColumns:
    def __init__(self, slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.ones(slots, np.float32)
        self.greedy = np.zeros(slots, np.bool_)
        self.top_k = np.full(slots, vocab_size, np.int64)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.filtered = np.zeros(slots, np.bool_)
        self.stream = np.zeros(slots, np.uint64)
        """Noise of the slot's sample, of which a position is the counter."""
        self.want_raw = np.zeros(slots, np.bool_)
        self.want_sampled = np.zeros(slots, np.bool_)
        self.special = np.zeros(slots, np.bool_)
        self.repetition = np.ones(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.penalised = np.zeros(slots, np.bool_)
        self.counter = np.zeros(slots, np.int64)
        self.counted = np.zeros(slots, np.int64)
        self.may_stop_at = np.zeros(slots, np.int64)
        self.output_start = np.zeros(slots, np.int64)
        """Position of the first token that penalties count as output."""
        self.stops = _Ids(slots)
        self.bias = _Ids(slots)
        self.allowed = _Ids(slots)
        self.words: dict[int, np.ndarray] = {}
        """Words of the slots that have any, int64 [words, tokens of the longest]; -1 before shorter ones."""
        self.grammars: dict[int, GrammarState] = {}
        self.constrained = np.zeros(slots, np.bool_)
        """True for the slots with a grammar."""
        self.top = np.zeros(slots, np.int64)
        self.token_ids = _Ids(slots)
        self.masked = np.zeros(slots, np.bool_)
        """True for slots that want the tokens that the filters keep."""
        self.num_counters = 0
        self._free_counters: list[int] = []  # a heap

    def bind(self, slot: int, request: "Request") -> None:
        """Set the parameters of ``slot``; allocates before it changes what a step reads."""
        self.release(slot)  # an earlier bind that raised may have left its counter behind
        params, record, prompt_len = request.params, request.record, len(request.prompt)
        bias = params.logit_bias or {}
        stops = request.early_stops if params.min_new_tokens else ()
        self.stops.put(slot, stops, -np.inf)
        self.bias.put(slot, list(bias), list(bias.values()))
        allowed = params.allowed_token_ids or ()
        self.allowed.put(slot, allowed, 0.0)
        self.token_ids.put(slot, () if record is None else record.token_ids, 0.0)
        self.may_stop_at[slot] = prompt_len + params.min_new_tokens
        self.output_start[slot] = prompt_len - request.continued
        self.greedy[slot] = greedy = params.temperature < GREEDY_BELOW
        self.temperature[slot] = 1.0 if greedy else params.temperature
        most = self.vocab_size if request.masks is None else min(self.vocab_size, MAX_SAMPLING_MASK)
        self.top_k[slot] = top_k = most if params.top_k <= 0 else min(params.top_k, most)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        filters = top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        self.filtered[slot] = filters and not greedy
        self.stream[slot : slot + 1] = noise_stream(request.seed, request.index)
        self.want_raw[slot] = request.return_raw
        self.want_sampled[slot] = request.return_sampled
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self.top[slot] = record.top if record is not None else 0
        self.masked[slot] = masked = request.masks is not None
        self.counted[slot] = 0
        penalties = params.frequency_penalty, params.presence_penalty, params.repetition_penalty - 1.0
        self.penalised[slot] = penalised = any(penalties)
        if penalised:
            self.counter[slot] = self._take_counter()
        words = params.bad_words_ids or ()
        if words:
            longest = max(map(len, words))
            self.words[slot] = np.array([[-1] * (longest - len(word)) + word for word in words], np.int64)
        self.constrained[slot] = constrained = request.grammar is not None
        if request.grammar is not None:
            self.grammars[slot] = request.grammar
        wanting = masked or (record is not None and record.wants_outputs)
        edited = penalised or bias or allowed or words or stops or constrained
        self.special[slot] = bool(edited or wanting)

    def release(self, slot: int) -> None:
        if self.penalised[slot]:
            heapq.heappush(self._free_counters, int(self.counter[slot]))
        self.penalised[slot] = self.special[slot] = self.constrained[slot] = False
        self.words.pop(slot, None)
        self.grammars.pop(slot, None)

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

    def first_padded(self, slots: np.ndarray) -> np.ndarray:
        """Return the ids of ``slots`` as :meth:`of`, but padded with the first of a list."""
        ids, _ = self.of(slots)
        return np.where(np.arange(ids.shape[1]) < self.count[slots, None], ids, ids[:, :1])


def sampling_batch(table: "RequestTable", slots: np.ndarray, positions: np.ndarray) -> SamplingBatch:
    """Return the inputs of ``slots``, int64 [S]; ``positions`` are those of the tokens to sample."""
    columns = table.sampling
    filtered = slots[columns.filtered[slots]]
    any_filtered = bool(len(filtered))
    greedy, min_p = columns.greedy[slots], columns.min_p[slots]
    return SamplingBatch(
        temperature=torch.from_numpy(columns.temperature[slots]),
        greedy=torch.from_numpy(greedy),
        top_k=torch.from_numpy(columns.top_k[slots]),
        top_p=torch.from_numpy(columns.top_p[slots]),
        uniforms=torch.from_numpy(uniforms_of(table, slots, positions)),
        any_sampled=not bool(greedy.all()),
        any_filtered=any_filtered,
        want_raw=bool(columns.want_raw[slots].any()),
        want_sampled=bool(columns.want_sampled[slots].any()),
        min_p=torch.from_numpy(min_p) if any_filtered and min_p.any() else None,
        largest_top_k=int(columns.top_k[filtered].max()) if any_filtered else None,
        special=_special_rows(table, slots, positions),
        given=_given(table, slots, positions),
    )


def uniforms_of(table: "RequestTable", slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return noise(table.sampling.stream[slots], positions)


def _given(table: "RequestTable", slots: np.ndarray, positions: np.ndarray) -> Tensor | None:
    replays = table.replays[slots]
    if not replays.any():
        return None
    return torch.from_numpy(np.where(replays, table.tokens[slots, positions], np.int64(-1)))


def _special_rows(table: "RequestTable", slots: np.ndarray, positions: np.ndarray) -> SpecialRows | None:
    columns = table.sampling
    rows = np.flatnonzero(columns.special[slots])
    if not len(rows):
        return None
    rows = rows[np.argsort(~columns.penalised[slots[rows]], kind="stable")]
    slots, positions = slots[rows], positions[rows]
    penalised = slots[columns.penalised[slots]]
    out_of_date = columns.counted[penalised] != positions[: len(penalised)]
    restarted = penalised[out_of_date]
    assert (table.length[restarted] == positions[: len(penalised)][out_of_date]).all(), "a token is in flight"
    prompts, outputs = _history(table, restarted)
    too_early = positions < columns.may_stop_at[slots]
    bias_ids, bias = _biases(columns, slots, too_early)
    allowed = columns.allowed.first_padded(slots)
    ends = _word_ends(table, slots, positions) if columns.words else None
    grammar = _grammar_masks(table, slots, positions) if columns.grammars else None
    top, num_token_ids, masked = columns.top[slots], columns.token_ids.count[slots], columns.masked[slots]
    wants = np.flatnonzero((top > 0) | (num_token_ids > 0) | masked)
    edited = columns.penalised[slots] | (columns.bias.count[slots] > 0) | (columns.allowed.count[slots] > 0)
    edited |= too_early & (columns.stops.count[slots] > 0)
    in_one_call = ends is None and grammar is None and not edited[wants].any()
    return SpecialRows(
        rows=torch.from_numpy(rows),
        repetition=torch.from_numpy(columns.repetition[penalised]),
        frequency=torch.from_numpy(columns.frequency[penalised]),
        presence=torch.from_numpy(columns.presence[penalised]),
        counters=torch.from_numpy(columns.counter[penalised]),
        restarted=torch.from_numpy(columns.counter[restarted]),
        prompt_at=prompts,
        output_at=outputs,
        bias_ids=torch.from_numpy(bias_ids),
        bias=torch.from_numpy(bias),
        allowed_ids=torch.from_numpy(allowed) if allowed.shape[1] else None,
        restricted=torch.from_numpy(columns.allowed.count[slots] > 0) if allowed.shape[1] else None,
        word_ends=None if ends is None else torch.from_numpy(ends),
        grammar=None if grammar is None else torch.from_numpy(grammar),
        constrained=None if grammar is None else torch.from_numpy(columns.constrained[slots]),
        wants=torch.from_numpy(wants),
        wants_host=wants,
        top=int(top.max(initial=0)),
        masked=torch.from_numpy(masked[wants]),
        num_masked=int(masked.sum()),
        token_ids=torch.from_numpy(columns.token_ids.of(slots[wants])[0]),
        num_counters=columns.num_counters,
        edited=edited,
        in_one_call=in_one_call,
        repeats=in_one_call and not (len(restarted) or too_early.any() or columns.words),
    )


def _biases(
    columns: SamplingColumns, slots: np.ndarray, too_early: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(token ids, values to add to their logits)``, [E, B]: biases, and -inf for early stops."""
    ids, values = columns.bias.of(slots)
    stop_ids, forbidden = columns.stops.of(slots)
    if not too_early.any():
        return ids, values
    forbidden = np.where(too_early[:, None], forbidden, np.float32(0.0))
    return np.concatenate([ids, stop_ids], 1), np.concatenate([values, forbidden], 1)


def _word_ends(table: "RequestTable", slots: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
    """Return the last two tokens of words whose other tokens end the output before them, [E, W, 2].

    The token before the sampled one may be in flight: the sampler compares it. None if there is no such word.
    """
    columns, found = table.sampling, {}
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        words, start = columns.words.get(slot), int(columns.output_start[slot])
        if words is None or position <= start:
            continue
        begins = words[:, :-2]
        output = np.full(begins.shape[1], -1)
        known = table.tokens[slot, max(start, position - 1 - len(output)) : position - 1]
        output[len(output) - len(known) :] = known
        ends = words[((begins == output) | (begins == -1)).all(1), -2:]
        if len(ends):
            found[row] = ends
    if not found:
        return None
    padded = np.full((len(slots), max(map(len, found.values())), 2), -1)
    for row, ends in found.items():
        padded[row, : len(ends)] = ends
    return padded


def _grammar_masks(table: "RequestTable", slots: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
    """Return the tokens that grammars allow, int32 [E, W]: a bit each, all set in rows without a grammar."""
    columns = table.sampling
    if not columns.constrained[slots].any():
        return None
    masks = np.full((len(slots), -(-columns.vocab_size // 32)), -1, np.int32)
    for row in np.flatnonzero(columns.constrained[slots]):
        slot = slots[row]
        state = columns.grammars[slot]
        state.follow(table.tokens[slot, columns.output_start[slot] : positions[row]])
        masks[row] = state.mask
    return masks


def _history(table: "RequestTable", slots: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return ``counter * vocab_size + token`` for the known tokens of ``slots``: of prompts, of outputs."""
    prompts, outputs = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for slot in slots:
        base = table.sampling.counter[slot] * table.vocab_size
        tokens = table.tokens[slot, : table.length[slot]] + base
        start = table.sampling.output_start[slot]
        prompts.append(tokens[:start])
        outputs.append(tokens[start:])
    return torch.from_numpy(np.concatenate(prompts)), torch.from_numpy(np.concatenate(outputs))


@dataclass(frozen=True, slots=True)
class InputSpan:
    request: "Request"
    record: LogprobRecord
    first: int
    count: int


def input_spans(chunks: "list[tuple[Request, int]]", table: "RequestTable") -> list[InputSpan]:
    spans = []
    for request, taken in chunks:
        if request.record is not None:
            start = int(table.scheduled[request.slot])
            first, end = request.record.inputs_within(start, start + taken)
            if first < end:
                spans.append(InputSpan(request, request.record, first, end - first))
    return spans


def input_tokens(spans: list[InputSpan], slots: np.ndarray, offsets: np.ndarray) -> InputTokens | None:
    """Return the runner's inputs for ``spans``; ``offsets`` [R] are query tokens' indices minus positions."""
    if not spans:
        return None
    offset_of = dict(zip(slots.tolist(), offsets.tolist(), strict=True))
    tokens, targets, token_ids = [], [], []
    width = max(len(span.record.token_ids) for span in spans)
    for span in spans:
        positions = np.arange(span.first, span.first + span.count)
        ids = span.record.token_ids.astype(np.int64)
        tokens.append(positions + offset_of[span.request.slot])
        targets.append(span.request.prompt[positions + 1].astype(np.int64))
        token_ids.append(np.tile(np.pad(ids, (0, width - len(ids))), (span.count, 1)))
    return InputTokens(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        targets=torch.from_numpy(np.concatenate(targets)),
        top=max(span.record.top for span in spans),
        token_ids=torch.from_numpy(np.concatenate(token_ids)),
    )
