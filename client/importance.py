"""Importance weights per token of a sample, and its age in epochs.

Invariant: a token's weight compares the learner with the weights that its span names.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import exp

from ..io_struct import WeightVersionSpan
from .connection.results import GenerateOutput

LARGEST_EXPONENT = 60.0
"""Beyond every reasonable ``clip_max``, and far from overflow."""


def importance_weights(
    learner_logprobs: Sequence[float],
    sampling_logprobs: Sequence[float],
    spans: Iterable[WeightVersionSpan] = (),
    *,
    epoch: int | None = None,
    max_staleness: int | None = None,
    mask_stale_kv: bool = False,
    clip_max: float = 2.0,
) -> list[float]:
    """Return per token the learner's probability over that of the sampling policy, at most ``clip_max``.

    A sampling log-probability was recorded under its span's weights, so every difference is corrected
    (truncated importance sampling: Espeholt et al., 2018, arXiv:1802.01561). ValueError if arguments do not
    fit.

    Args:
        learner_logprobs: [tokens], at the sampling temperature.
        sampling_logprobs: [tokens], the ``output_logprobs`` of the sample.
        spans: the ``weight_versions`` of the sample, for ``max_staleness`` and ``mask_stale_kv``.
        epoch: the learner's weights epoch.
        max_staleness: tokens more epochs behind ``epoch`` get weight 0; None means no limit.
        mask_stale_kv: give weight 0 to tokens sampled with KV cache of older weights.
        clip_max: the largest weight.
    """
    if len(learner_logprobs) != len(sampling_logprobs):
        raise ValueError(f"{len(learner_logprobs)} learner logprobs, {len(sampling_logprobs)} of the sampler")
    weights = [
        min(exp(min(new - old, LARGEST_EXPONENT)), clip_max)
        for new, old in zip(learner_logprobs, sampling_logprobs, strict=True)
    ]
    for masked in masked_tokens(
        spans, len(weights), epoch=epoch, max_staleness=max_staleness, mask_stale_kv=mask_stale_kv
    ):
        weights[masked] = [0.0] * (masked.stop - masked.start)
    return weights


def masked_tokens(
    spans: Iterable[WeightVersionSpan],
    count: int,
    *,
    epoch: int | None,
    max_staleness: int | None,
    mask_stale_kv: bool,
) -> Iterator[slice]:
    """Yield the tokens of a sample of ``count`` that get weight 0, as :func:`importance_weights`."""
    if max_staleness is not None and epoch is None:
        raise ValueError("max_staleness needs the learner's epoch")
    for span in spans:
        if span.end > count:
            raise ValueError(f"a span ends at token {span.end} of {count}")
        old = max_staleness is not None and epoch is not None and epoch - span.epoch > max_staleness
        if old or (mask_stale_kv and span.stale_kv):
            yield slice(span.start, span.end)


def oldest_epoch(output: GenerateOutput) -> int:
    """Return the weights epoch of the oldest token of a sample; -1 for a sample without tokens."""
    return min((span.epoch for span in output.weight_versions), default=-1)
