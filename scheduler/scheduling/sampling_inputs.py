"""A step's sampling inputs, gathered from the arrays of its slots.

Invariants:
- All of it is array work; Python loops only over requests whose token counter is rebuilt, and over prompts
  whose log-probabilities are wanted.
- These functions change no state, so a step that is built and not launched leaves no trace.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..execution.forward import InputTokens, SamplingBatch, SpecialRows
from ..execution.sampler import noise
from .request import Request, RequestTable
from .sampling_extras import LogprobRecord


@dataclass(frozen=True, slots=True)
class InputSpan:
    """Prompt positions [first, first + count) of ``request`` whose log-probabilities a step computes."""

    request: Request
    record: LogprobRecord
    first: int
    count: int


def sampling_batch(table: RequestTable, slots: np.ndarray, positions: np.ndarray) -> SamplingBatch:
    """Return the inputs of ``slots``, int64 [S]; ``positions`` are those of the tokens to sample."""
    filtered = slots[table.filtered[slots]]
    any_filtered = bool(len(filtered))
    return SamplingBatch(
        temperature=torch.from_numpy(table.temperature[slots]),
        greedy=torch.from_numpy(table.greedy[slots]),
        top_k=torch.from_numpy(table.top_k[slots]),
        top_p=torch.from_numpy(table.top_p[slots]),
        uniforms=torch.from_numpy(noise(table.seed[slots], table.index[slots], positions)),
        any_sampled=not bool(table.greedy[slots].all()),
        any_filtered=any_filtered,
        want_raw=bool(table.want_raw[slots].any()),
        want_sampled=bool(table.want_sampled[slots].any()),
        min_p=_min_p(table, slots) if any_filtered else None,
        largest_top_k=int(table.top_k[filtered].max()) if any_filtered else None,
        special=_special_rows(table, slots, positions),
    )


def _min_p(table: RequestTable, slots: np.ndarray) -> Tensor | None:
    values = table.extras.min_p[slots]
    return torch.from_numpy(values) if values.any() else None


def _special_rows(table: RequestTable, slots: np.ndarray, positions: np.ndarray) -> SpecialRows | None:
    extras = table.extras
    rows = np.flatnonzero(extras.special[slots])
    if not len(rows):
        return None
    rows = rows[np.argsort(~extras.penalised[slots[rows]], kind="stable")]
    slots, positions = slots[rows], positions[rows]
    penalised = slots[extras.penalised[slots]]
    out_of_date = extras.counted[penalised] != positions[: len(penalised)]
    restarted = penalised[out_of_date]
    assert (table.length[restarted] == positions[: len(penalised)][out_of_date]).all(), "a token is in flight"
    prompts, outputs = _history(table, restarted)
    bias_ids, bias = _biases(table, slots, positions)
    top, num_token_ids, masked = extras.top[slots], extras.token_ids.count[slots], extras.masked[slots]
    wants = np.flatnonzero((top > 0) | (num_token_ids > 0) | masked)
    return SpecialRows(
        rows=torch.from_numpy(rows),
        repetition=torch.from_numpy(extras.repetition[penalised]),
        frequency=torch.from_numpy(extras.frequency[penalised]),
        presence=torch.from_numpy(extras.presence[penalised]),
        counters=torch.from_numpy(extras.counter[penalised]),
        restarted=torch.from_numpy(extras.counter[restarted]),
        prompt_at=prompts,
        output_at=outputs,
        bias_ids=torch.from_numpy(bias_ids),
        bias=torch.from_numpy(bias),
        wants=torch.from_numpy(wants),
        wants_host=wants,
        top=int(top.max(initial=0)),
        masked=torch.from_numpy(masked[wants]),
        num_masked=int(masked.sum()),
        token_ids=torch.from_numpy(extras.token_ids.of(slots[wants])[0]),
        num_counters=extras.num_counters,
    )


def _biases(table: RequestTable, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(token ids, values to add to their logits)``, [E, B]: logit biases, and -inf for early stop
    tokens.
    """
    extras = table.extras
    ids, values = extras.bias.of(slots)
    stop_ids, forbidden = extras.stops.of(slots)
    too_early = positions < extras.may_stop_at[slots]
    if not too_early.any():
        return ids, values
    forbidden = np.where(too_early[:, None], forbidden, np.float32(0.0))
    return np.concatenate([ids, stop_ids], 1), np.concatenate([values, forbidden], 1)


def _history(table: RequestTable, slots: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return ``counter * vocab_size + token`` for every known token of ``slots``: of the prompts, of the
    outputs.
    """
    prompts, outputs = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for slot in slots:
        base = table.extras.counter[slot] * table.vocab_size
        tokens = table.tokens[slot, : table.length[slot]] + base
        start = table.extras.output_start[slot]
        prompts.append(tokens[:start])
        outputs.append(tokens[start:])
    return torch.from_numpy(np.concatenate(prompts)), torch.from_numpy(np.concatenate(outputs))


def input_spans(chunks: list[tuple[Request, int]], table: RequestTable) -> list[InputSpan]:
    """Return the prompt positions of ``chunks`` (request, tokens) whose log-probabilities are wanted."""
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
