"""Joins and splits the deltas of one sample, for a reader that is slower or faster than the engine.

Invariant: a delta made here is like one of the engine: each list about tokens has one entry per token, and
``start`` is the position of the first token.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from ..connection.results import TokenDelta, TokenDetails, TokenLogprobs, joined_masks


def joined(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Contiguous deltas of one sample as one."""
    first = deltas[0]
    if len(deltas) == 1:
        return first
    logprobs = [delta.output_logprobs or () for delta in deltas]
    return replace(
        first,
        output_ids=list(chain.from_iterable(delta.output_ids for delta in deltas)),
        output_logprobs=None if first.output_logprobs is None else list(chain.from_iterable(logprobs)),
        output_top_logprobs=_joined_further([delta.output_top_logprobs for delta in deltas]),
        output_token_ids_logprobs=_joined_further([delta.output_token_ids_logprobs for delta in deltas]),
        details=_joined_details([delta.details for delta in deltas]),
    )


def _joined_further(parts: Sequence[TokenLogprobs | None]) -> TokenLogprobs | None:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return TokenLogprobs(
        k=known[0].k,
        ids=list(chain.from_iterable(part.ids for part in known)),
        logprobs=list(chain.from_iterable(part.logprobs for part in known)),
    )


def _joined_details(parts: Sequence[TokenDetails | None]) -> TokenDetails | None:
    """None unless every part has them: the last tokens of a sample come with its terminal result, which has
    them otherwise.
    """
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return TokenDetails(
        weights=list(chain.from_iterable(part.weights for part in known)),
        raw_logprobs=_flat([part.raw_logprobs for part in known]),
        sampled_logprobs=_flat([part.sampled_logprobs for part in known]),
        sampling_mask=joined_masks([part.sampling_mask for part in known]),
    )


def _flat(parts: Sequence[list[float] | None]) -> list[float] | None:
    return None if parts[0] is None else list(chain.from_iterable(part or () for part in parts))


def part(delta: TokenDelta, start: int, end: int | None) -> TokenDelta:
    """Return the tokens [start, end) of a delta."""
    return delta.cut(start, end)
