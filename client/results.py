"""Typed results of a generation, decoded once from the wire's byte arrays.

Invariant: tokens, logprobs, weight-version spans and routed experts of one output have matching lengths. A message that breaks this
is refused with :class:`InternalError` rather than handed on: a trainer would pair tokens with the wrong numbers.
"""

import array
import math
import sys
from dataclasses import dataclass

from ..io_struct import (
    FinishReason,
    GenerateReqOutput,
    RoutedExperts,
    WeightVersionSpan,
)
from .exceptions import InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    """One finished sample. Every list over tokens has ``len(output_ids)`` entries."""

    rid: str
    index: int
    """Which of the ``n`` samples of its prompt."""
    output_ids: list[int]
    """New tokens only, the stop token that ended it included."""
    output_logprobs: list[float] | None
    """Log-softmax over the full vocabulary after temperature; None unless ``return_logprob``."""
    raw_logprobs: list[float] | None
    """Log-softmax of the unedited logits; None unless ``return_raw_logprob``."""
    sampled_logprobs: list[float] | None
    """Under the distribution really sampled; None unless ``return_sampled_logprob``."""
    routed_experts: RoutedExperts | None
    """Which experts computed each position but the last: ``numpy.asarray`` gives [rows, layers, top_k] without a copy.
    None unless ``return_routed_experts``, and where an error ended the sample."""
    finish_reason: FinishReason
    weight_versions: list[WeightVersionSpan]
    """Which weights sampled which tokens: contiguous, covering all of them."""
    prompt_tokens: int
    cached_tokens: int
    seed: int
    """The seed used: the one given, or the one drawn by the engine."""
    num_retractions: int
    queue_s: float
    """Seconds from arrival to the first scheduled step."""
    e2e_latency: float
    """Seconds from arrival to the end."""

    def as_delta(self, start: int = 0) -> "TokenDelta":
        """The tokens from ``start`` to the end, as one delta."""
        logprobs = self.output_logprobs
        return TokenDelta(
            index=self.index,
            start=start,
            output_ids=self.output_ids[start:],
            output_logprobs=None if logprobs is None else logprobs[start:],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one streaming sample; deltas of one sample are contiguous and never overlap."""

    index: int
    """Which of the ``n`` samples."""
    start: int
    """Position of the first of these tokens in the output."""
    output_ids: list[int]
    output_logprobs: list[float] | None
    """None unless ``return_logprob``."""


def read_ints(data: bytes) -> list[int]:
    """Little-endian int32 bytes as a list."""
    values = array.array("i")
    _fill(values, data)
    return values.tolist()


def read_floats(data: bytes) -> list[float]:
    """Little-endian float32 bytes as a list."""
    values = array.array("f")
    _fill(values, data)
    return values.tolist()


def _fill(values: "array.array[int] | array.array[float]", data: bytes) -> None:
    if len(data) % values.itemsize:
        raise InternalError(
            f"an array of {len(data)} bytes is not a whole number of {values.itemsize}-byte values"
        )
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()


def decode_output(wire: GenerateReqOutput) -> GenerateOutput:
    """The typed form of a terminal result.

    Raises:
        InternalError: lengths of tokens, logprobs, spans and routed experts do not match.
    """
    output = GenerateOutput(
        rid=wire.rid,
        index=wire.index,
        output_ids=read_ints(wire.output_ids),
        output_logprobs=_optional(wire.output_logprobs),
        raw_logprobs=_optional(wire.raw_logprobs),
        sampled_logprobs=_optional(wire.sampled_logprobs),
        routed_experts=wire.routed_experts,
        finish_reason=wire.finish_reason,
        weight_versions=wire.weight_versions,
        prompt_tokens=wire.prompt_tokens,
        cached_tokens=wire.cached_tokens,
        seed=wire.seed,
        num_retractions=wire.num_retractions,
        queue_s=wire.queue_s,
        e2e_latency=wire.e2e_latency,
    )
    _check_lengths(output)
    if output.routed_experts is not None:
        _check_routing(output, output.routed_experts)
    return output


def _optional(data: bytes | None) -> list[float] | None:
    return None if data is None else read_floats(data)


def _check_lengths(output: GenerateOutput) -> None:
    count = len(output.output_ids)
    for name in ("output_logprobs", "raw_logprobs", "sampled_logprobs"):
        values: list[float] | None = getattr(output, name)
        if values is not None and len(values) != count:
            raise InternalError(f"{output.rid}: {count} tokens but {len(values)} {name}", rid=output.rid)
    covered = 0
    for span in output.weight_versions:
        if span.start != covered or span.end < span.start:
            raise InternalError(
                f"{output.rid}: weight-version span [{span.start}, {span.end}) does not continue at {covered}",
                rid=output.rid,
            )
        covered = span.end
    if covered != count:
        raise InternalError(
            f"{output.rid}: weight-version spans cover {covered} of {count} tokens", rid=output.rid
        )


def _check_routing(output: GenerateOutput, routed: RoutedExperts) -> None:
    tokens = len(output.output_ids)
    rows = output.prompt_tokens + tokens - 1 - routed.start if tokens else 0
    if routed.shape[0] != rows or len(routed.data) != math.prod(routed.shape) * routed.itemsize:
        raise InternalError(
            f"{output.rid}: {len(routed.data)} bytes of routed experts in the shape {routed.shape} for {rows} positions",
            rid=output.rid,
        )


def known_logprobs(values: list[float]) -> list[float] | None:
    """Streamed logprobs, or None where the wire says "not requested" (NaN)."""
    return None if values and math.isnan(values[0]) else values
