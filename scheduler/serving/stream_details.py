"""What a stream says of its tokens beyond ids and log-probabilities (``stream_details``): made per token, merged per message.

Invariant: a column has one entry per token of its delta, in the order of the tokens; entries of rows that did not ask are -1 or NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...io_struct import DeltaDetails, DeltaWeights, StreamDelta
from ..batching.request import Request


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Details of one token."""

    weights: DeltaWeights
    raw: float
    sampled: float

    @staticmethod
    def of(request: Request, raw: float, sampled: float) -> "TokenDetails | None":
        """Of the newest token of ``request``, with its log-probabilities; None if the request did not ask for details."""
        if not request.details:
            return None
        stamp, stale, _ = request.spans[-1]
        return TokenDetails(
            DeltaWeights(
                version=stamp.version, epoch=stamp.epoch, incarnation=stamp.incarnation, stale_kv=stale
            ),
            raw if request.return_raw else np.nan,
            sampled if request.return_sampled else np.nan,
        )


def details_of(tokens: Sequence[TokenDetails | None]) -> DeltaDetails | None:
    """The details of a delta whose rows have one token each; None if nobody asked for them."""
    if not any(tokens):
        return None
    numbers: dict[DeltaWeights, int] = {}
    sampled_by = [
        -1 if token is None else numbers.setdefault(token.weights, len(numbers)) for token in tokens
    ]
    nan = float("nan")
    return DeltaDetails(
        weights=list(numbers),
        sampled_by=np.asarray(sampled_by, "<i4").tobytes(),
        raw_logprobs=np.asarray([nan if token is None else token.raw for token in tokens], "<f4").tobytes(),
        sampled_logprobs=np.asarray(
            [nan if token is None else token.sampled for token in tokens], "<f4"
        ).tobytes(),
    )


def merge_details(deltas: Sequence[StreamDelta], places: np.ndarray) -> DeltaDetails | None:
    """The details of the tokens ``places`` of all tokens of ``deltas`` together; None if nobody asked for them."""
    if not any(delta.details for delta in deltas):
        return None
    numbers: dict[DeltaWeights, int] = {}
    sampled_by, raw, sampled = [], [], []
    for delta in deltas:
        count = len(delta.tokens) // 4
        if delta.details is None:
            sampled_by.append(np.full(count, -1, "<i4"))
            raw.append(np.full(count, np.nan, "<f4"))
            sampled.append(np.full(count, np.nan, "<f4"))
            continue
        known = [numbers.setdefault(weights, len(numbers)) for weights in delta.details.weights]
        renumbered = np.asarray([*known, -1], "<i4")  # the last entry is that of -1
        sampled_by.append(renumbered[np.frombuffer(delta.details.sampled_by, "<i4")])
        raw.append(np.frombuffer(delta.details.raw_logprobs, "<f4"))
        sampled.append(np.frombuffer(delta.details.sampled_logprobs, "<f4"))
    return DeltaDetails(
        weights=list(numbers),
        sampled_by=np.concatenate(sampled_by)[places].tobytes(),
        raw_logprobs=np.concatenate(raw)[places].tobytes(),
        sampled_logprobs=np.concatenate(sampled)[places].tobytes(),
    )


def details_bytes(details: DeltaDetails | None) -> int:
    """Estimated memory of keeping ``details``."""
    if details is None:
        return 0
    return len(details.sampled_by) + len(details.raw_logprobs) + len(details.sampled_logprobs)
