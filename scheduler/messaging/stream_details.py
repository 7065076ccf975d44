"""``stream_details``: what a stream says of its tokens beyond ids and logprobs, made per token, merged per
message.

Invariant: a column has one entry per token of its delta, in the order of the tokens; entries of rows that did
not ask are -1 or NaN.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...io_struct import DeltaDetails, DeltaWeights, SamplingMask, StreamDelta
from ..scheduling.request import Request
from ..scheduling.sampling import joined_masks


@dataclass(frozen=True, slots=True)
class TokenDetails:
    weights: DeltaWeights
    raw: float
    sampled: float
    mask: np.ndarray | None
    """Ids that it was sampled from, int32, or None if not requested."""

    @staticmethod
    def of(request: Request, at: int, raw: float, sampled: float) -> "TokenDetails | None":
        """Return details of the newest token of ``request``, output token ``at``, or None if it asked for
        none.
        """
        if not request.details:
            return None
        stamp, stale, _ = request.spans[-1]
        return TokenDetails(
            DeltaWeights(
                version=stamp.version, epoch=stamp.epoch, incarnation=stamp.incarnation, stale_kv=stale
            ),
            raw if request.return_raw else np.nan,
            sampled if request.return_sampled else np.nan,
            None if request.masks is None else request.masks.at(at),
        )


def details_of(tokens: Sequence[TokenDetails | None]) -> DeltaDetails | None:
    """Return the details of a delta whose rows have one token each, or None if nobody asked for them."""
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
        sampling_mask=_masks([None if token is None else token.mask for token in tokens]),
    )


def _masks(positions: list[np.ndarray | None]) -> SamplingMask | None:
    if all(ids is None for ids in positions):
        return None
    return joined_masks([np.empty(0, "<i4") if ids is None else ids for ids in positions])


def merge_details(deltas: Sequence[StreamDelta], places: np.ndarray) -> DeltaDetails | None:
    """Return details of the tokens ``places`` among those of all ``deltas``, or None if nobody asked for
    them.
    """
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
    masks = [mask for delta in deltas for mask in _each_mask(delta.details, len(delta.tokens) // 4)]
    return DeltaDetails(
        weights=list(numbers),
        sampled_by=np.concatenate(sampled_by)[places].tobytes(),
        raw_logprobs=np.concatenate(raw)[places].tobytes(),
        sampled_logprobs=np.concatenate(sampled)[places].tobytes(),
        sampling_mask=_masks([masks[place] for place in places]),
    )


def _each_mask(details: DeltaDetails | None, count: int) -> list[np.ndarray | None]:
    """Return the mask of each of ``count`` tokens, None where nobody asked in their delta."""
    if details is None or details.sampling_mask is None:
        return [None] * count
    ids, offsets = (
        np.frombuffer(data, "<i4") for data in (details.sampling_mask.ids, details.sampling_mask.offsets)
    )
    return [ids[start:end] for start, end in itertools.pairwise(offsets.tolist())]


def details_bytes(details: DeltaDetails | None) -> int:
    if details is None:
        return 0
    mask = details.sampling_mask
    masks = 0 if mask is None else len(mask.ids) + len(mask.offsets)
    return len(details.sampled_by) + len(details.raw_logprobs) + len(details.sampled_logprobs) + masks
