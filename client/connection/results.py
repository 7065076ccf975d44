"""Typed results of a generation, decoded once from the wire's byte arrays.

Invariant: tokens, logprobs, weight-version spans and routed experts of an output have matching lengths, or it
is refused with :class:`InternalError`: a trainer would pair tokens with the wrong values.
"""

import array
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import msgspec

from ...io_struct import (
    DeltaDetails,
    DeltaLogprobs,
    DeltaWeights,
    FinishReason,
    GenerateReqOutput,
    HiddenStates,
    LogprobRows,
    RoutedExperts,
    SamplingMask,
    WeightVersionSpan,
)
from ..exceptions import InternalError

ElementT = TypeVar("ElementT", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Logprobs of ``k`` tokens at each of several positions; ``len`` is the number of positions."""

    k: int
    """Tokens per position."""
    ids: list[int]
    """[positions * k] token ids."""
    logprobs: list[float]
    """[positions * k]; those of the most likely tokens in descending order."""

    def __len__(self) -> int:
        return len(self.logprobs) // self.k

    def at(self, position: int) -> list[tuple[float, int]]:
        """Return ``(logprob, token id)`` of the ``k`` tokens at ``position``."""
        part = slice(position * self.k, (position + 1) * self.k)
        return list(zip(self.logprobs[part], self.ids[part], strict=True))

    def cut(self, start: int, end: int | None = None) -> "TokenLogprobs":
        """Return the positions [start, end); None means to the last."""
        part = slice(start * self.k, None if end is None else end * self.k)
        return TokenLogprobs(k=self.k, ids=self.ids[part], logprobs=self.logprobs[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """One finished sample. Every list over tokens has ``len(output_ids)`` entries."""

    rid: str
    """Request id: ``rid`` of the request, else its message id."""
    index: int
    """Index of the sample, below ``n``."""
    output_ids: list[int]
    """Output tokens only, including the stop token that ended it."""
    output_logprobs: list[float] | None
    """Log-softmax over the full vocabulary after temperature; None unless ``return_logprob``."""
    raw_logprobs: list[float] | None
    """Log-softmax of the unmodified logits; None unless ``return_raw_logprob``."""
    sampled_logprobs: list[float] | None
    """Logprobs under the sampling distribution; None unless ``return_sampled_logprob``."""
    output_top_logprobs: TokenLogprobs | None = None
    """The most likely tokens at each position; None unless ``top_logprobs_num``."""
    output_token_ids_logprobs: TokenLogprobs | None = None
    """The tokens of ``token_ids_logprob``; None unless given."""
    input_logprobs: list[float | None] | None = None
    """Logprobs of the prompt from ``logprob_start_len`` on, without temperature and logit edits; the first is
    None. None unless requested, and if the sample ended before its prefill."""
    input_top_logprobs: TokenLogprobs | None = None
    """The most likely tokens at each position of ``input_logprobs`` but the first."""
    input_token_ids_logprobs: TokenLogprobs | None = None
    """The tokens of ``token_ids_logprob`` at each position of ``input_logprobs`` but the first."""
    sampling_mask: SamplingMask | None = None
    """Tokens that top-k, top-p and min-p kept for each output token; None unless ``return_sampling_mask``."""
    routed_experts: RoutedExperts | None
    """Experts of each position but the last: ``numpy.asarray`` gives [rows, layers, top_k] without a copy.
    None unless ``return_routed_experts``, and if an error ended the sample."""
    hidden_states: HiddenStates | None = None
    """Hidden states of each position but the last, bytes of [rows, layers, hidden size]; None unless
    ``return_hidden_states``, and without a token."""
    finish_reason: FinishReason
    """Why the sample ended: ``stop``, ``length``, ``abort`` or ``error``."""
    weight_versions: list[WeightVersionSpan]
    """Spans of tokens sampled with the same weights: contiguous, covering all tokens."""
    prompt_tokens: int
    """Length of the prompt, in tokens."""
    cached_tokens: int
    """Prompt tokens found in the prefix cache when the request was first scheduled."""
    seed: int
    """The seed that was used: the given one, or a random one of the engine."""
    num_retractions: int
    """Times that its KV cache was freed (by a pause, or because the KV cache was full) and recomputed."""
    drafted_tokens: int = 0
    """Tokens that speculation drafted."""
    accepted_tokens: int = 0
    """Drafted tokens that were sampled and became output; it took as many steps less."""
    queue_time: float
    """Seconds from arrival to the first scheduled step; to the end, if it was never scheduled."""
    e2e_latency: float
    """Seconds from arrival to the end."""

    def as_delta(self, start: int = 0) -> "TokenDelta":
        """Return the tokens from ``start`` to the end, as one delta."""
        return TokenDelta(
            index=self.index,
            start=start,
            output_ids=self.output_ids[start:],
            output_logprobs=cut(self.output_logprobs, start),
            output_top_logprobs=cut(self.output_top_logprobs, start),
            output_token_ids_logprobs=cut(self.output_token_ids_logprobs, start),
        )


def cut(values: Any, start: int, end: int | None = None) -> Any:
    """Return the tokens [start, end) of a list or of an object that can be cut; None stays None."""
    if values is None:
        return None
    return values[start:end] if isinstance(values, list) else values.cut(start, end)


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one streaming sample; deltas of one sample are contiguous and never overlap."""

    index: int
    """Index of the sample, below ``n``."""
    start: int
    """Position of the first of these tokens in the output."""
    output_ids: list[int]
    """The new tokens."""
    output_logprobs: list[float] | None
    """Logprob of each new token; None unless ``return_logprob``."""
    output_top_logprobs: TokenLogprobs | None = None
    """The most likely tokens at each position; None unless ``top_logprobs_num``."""
    output_token_ids_logprobs: TokenLogprobs | None = None
    """The tokens of ``token_ids_logprob``; None unless given."""
    details: "TokenDetails | None" = None
    """Weights and further logprobs of each token; None unless the request has ``stream_details``."""

    def cut(self, start: int, end: int | None = None) -> "TokenDelta":
        """Return the tokens [start, end) of this delta; None means to the last."""
        if start == 0 and end in (None, len(self.output_ids)):
            return self
        return msgspec.structs.replace(
            self,
            start=self.start + start,
            output_ids=self.output_ids[start:end],
            output_logprobs=cut(self.output_logprobs, start, end),
            output_top_logprobs=cut(self.output_top_logprobs, start, end),
            output_token_ids_logprobs=cut(self.output_token_ids_logprobs, start, end),
            details=cut(self.details, start, end),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetails:
    """Further properties of a delta's tokens; each list has one entry per token."""

    weights: list[DeltaWeights]
    """The weights that sampled each token."""
    raw_logprobs: list[float] | None
    """Same as in :class:`GenerateOutput`; None unless ``return_raw_logprob``."""
    sampled_logprobs: list[float] | None
    """Same as in :class:`GenerateOutput`; None unless ``return_sampled_logprob``."""
    sampling_mask: SamplingMask | None = None
    """Tokens that top-k, top-p and min-p kept at each position; None unless ``return_sampling_mask``."""

    def cut(self, start: int, end: int | None = None) -> "TokenDetails":
        """Return the tokens [start, end) of the delta; None means to the last."""
        return TokenDetails(
            weights=self.weights[start:end],
            raw_logprobs=cut(self.raw_logprobs, start, end),
            sampled_logprobs=cut(self.sampled_logprobs, start, end),
            sampling_mask=cut(self.sampling_mask, start, end),
        )


def read_ints(data: bytes) -> list[int]:
    """Read little-endian int32."""
    return _values(array.array("i"), data)


def read_floats(data: bytes | memoryview) -> list[float]:
    """Read little-endian float32."""
    return _values(array.array("f"), data)


def _values(values: "array.array[ElementT]", data: bytes | memoryview) -> list[ElementT]:
    if len(data) % values.itemsize:
        reason = f"an array of {len(data)} bytes is not a whole number of {values.itemsize}-byte values"
        raise InternalError(reason)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


_SAME = (
    "rid", "index", "sampling_mask", "routed_experts", "hidden_states", "finish_reason", "weight_versions",
    "prompt_tokens", "cached_tokens", "seed", "num_retractions", "drafted_tokens", "accepted_tokens",
    "queue_time", "e2e_latency",
)  # fmt: skip
"""Fields that need no decoding."""


def decode_output(wire: GenerateReqOutput) -> GenerateOutput:
    """Decode a terminal result; InternalError if lengths of its parts do not match."""
    inputs = _optional(wire.input_logprobs)
    output = GenerateOutput(
        output_ids=read_ints(wire.output_ids),
        output_logprobs=_optional(wire.output_logprobs),
        raw_logprobs=_optional(wire.raw_logprobs),
        sampled_logprobs=_optional(wire.sampled_logprobs),
        output_top_logprobs=_optional_rows(wire.output_top_logprobs),
        output_token_ids_logprobs=_optional_rows(wire.output_token_ids_logprobs),
        input_logprobs=None if inputs is None else [None, *inputs[1:]],
        input_top_logprobs=_optional_rows(wire.input_top_logprobs),
        input_token_ids_logprobs=_optional_rows(wire.input_token_ids_logprobs),
        **{name: getattr(wire, name) for name in _SAME},
    )
    _check_lengths(output)
    if output.sampling_mask is not None:
        _check_mask(output.rid, output.sampling_mask)
    if output.routed_experts is not None:
        _check_routing(output, output.routed_experts)
    return output


def _optional(data: bytes | None) -> list[float] | None:
    return None if data is None else read_floats(data)


def _optional_rows(wire: LogprobRows | None) -> TokenLogprobs | None:
    if wire is None:
        return None
    ids, logprobs = read_ints(wire.ids), read_floats(wire.logprobs)
    rows, rest = divmod(len(logprobs), wire.k)
    if len(ids) == wire.k:
        ids *= rows
    if rest or len(ids) != len(logprobs):
        raise InternalError(f"{len(ids)} ids and {len(logprobs)} logprobs in rows of {wire.k}")
    return TokenLogprobs(k=wire.k, ids=ids, logprobs=logprobs)


_PER_TOKEN = (
    "output_logprobs", "raw_logprobs", "sampled_logprobs", "output_top_logprobs",
    "output_token_ids_logprobs", "sampling_mask",
)  # fmt: skip
_PER_INPUT = ("input_top_logprobs", "input_token_ids_logprobs")


def _check_lengths(output: GenerateOutput) -> None:
    count = len(output.output_ids)
    inputs = len(output.input_logprobs or [None]) - 1
    for name, expected in (*((n, count) for n in _PER_TOKEN), *((n, inputs) for n in _PER_INPUT)):
        values: list[float] | TokenLogprobs | SamplingMask | None = getattr(output, name)
        if values is not None and len(values) != expected:
            raise _broken(output.rid, f"{expected} tokens but {len(values)} {name}")
    covered = 0
    for span in output.weight_versions:
        if span.start != covered or span.end < span.start:
            reason = f"weight-version span [{span.start}, {span.end}) does not continue at {covered}"
            raise _broken(output.rid, reason)
        covered = span.end
    if covered != count:
        raise _broken(output.rid, f"weight-version spans cover {covered} of {count} tokens")


def _broken(rid: str, reason: str) -> InternalError:
    return InternalError(f"{rid}: {reason}", rid=rid)


def joined_rows(parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
    """Concatenate the positions of all parts, or return None if there is none."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return TokenLogprobs(
        k=known[0].k,
        ids=list(chain.from_iterable(part.ids for part in known)),
        logprobs=list(chain.from_iterable(part.logprobs for part in known)),
    )


def joined_masks(masks: Sequence[SamplingMask | None]) -> SamplingMask | None:
    """Concatenate the positions of all masks, or return None if there is none."""
    known = [mask for mask in masks if mask is not None]
    if not known:
        return None
    offsets = array.array("i", [0])
    for mask in known:
        before = offsets[-1]
        offsets.extend(before + offset for offset in read_ints(mask.offsets)[1:])
    if sys.byteorder == "big":
        offsets.byteswap()
    return SamplingMask(ids=b"".join(mask.ids for mask in known), offsets=offsets.tobytes())


def _check_mask(rid: str, mask: SamplingMask) -> None:
    offsets = read_ints(mask.offsets)
    if offsets[:1] != [0] or offsets != sorted(offsets) or 4 * offsets[-1] != len(mask.ids):
        raise _broken(rid, f"{len(mask.ids)} bytes of sampling masks do not fit their offsets")


def _check_routing(output: GenerateOutput, routed: RoutedExperts) -> None:
    tokens = len(output.output_ids)
    rows = output.prompt_tokens + tokens - 1 - routed.start if tokens else 0
    if routed.shape[0] != rows or len(routed.data) != math.prod(routed.shape) * routed.itemsize:
        found = f"{len(routed.data)} bytes of routed experts in the shape {routed.shape}"
        raise _broken(output.rid, f"{found} for {rows} positions")


def known_logprobs(values: list[float]) -> list[float] | None:
    """Streamed logprobs, or None where the wire says "not requested" (NaN)."""
    return None if values and math.isnan(values[0]) else values


def further_logprobs(wire: DeltaLogprobs | None, counts: list[int]) -> list[TokenLogprobs | None]:
    """Return the logprobs of each row of a stream delta, or None if not asked; InternalError if broken."""
    if wire is None:
        return [None] * len(counts)
    ks, ids, logprobs = read_ints(wire.ks), read_ints(wire.ids), read_floats(wire.logprobs)
    if len(ks) != len(counts) or not len(ids) == len(logprobs) == sum(map(operator.mul, counts, ks)):
        raise InternalError("a stream delta has columns of further logprobs of different lengths")
    found: list[TokenLogprobs | None] = []
    offset = 0
    for k, count in zip(ks, counts, strict=True):
        part = slice(offset, offset := offset + k * count)
        found.append(TokenLogprobs(k=k, ids=ids[part], logprobs=logprobs[part]) if k else None)
    return found


def token_details(wire: DeltaDetails | None, counts: list[int]) -> list[TokenDetails | None]:
    """Return the details of each row of a stream delta, or None if not asked; InternalError if broken."""
    if wire is None:
        return [None] * len(counts)
    sampled_by = read_ints(wire.sampled_by)
    raw, sampled = read_floats(wire.raw_logprobs), read_floats(wire.sampled_logprobs)
    if not sum(counts) == len(sampled_by) == len(raw) == len(sampled):
        raise InternalError("a stream delta has columns of details of different lengths")
    masks = wire.sampling_mask
    if masks is not None and len(masks) != len(sampled_by):
        raise InternalError("a stream delta has sampling masks for another number of tokens")
    if max(sampled_by, default=-1) >= len(wire.weights):
        raise InternalError("a stream delta names weights that it does not list")
    found: list[TokenDetails | None] = []
    offset = 0
    for count in counts:
        part = slice(offset, offset := offset + count)
        if count == 0 or sampled_by[part.start] < 0:
            found.append(None)
            continue
        mask = None if masks is None else masks.cut(part.start, part.stop)
        found.append(
            TokenDetails(
                weights=[wire.weights[number] for number in sampled_by[part]],
                raw_logprobs=known_logprobs(raw[part]),
                sampled_logprobs=known_logprobs(sampled[part]),
                sampling_mask=mask if mask is not None and mask.ids else None,
            )
        )
    return found
