"""Drift checks: samples scored again, and how far their log-probabilities are from those they came with."""

from typing import Annotated, ClassVar, Literal

import msgspec

from .base import Identifier, Record, Reply, ReplyRecord, Request
from .generate import MAX_SEQUENCES, TokenId

DriftState = Literal["ok", "warn", "limit", "unhealthy"]
"""Ascending: ``warn`` and ``limit`` are over these thresholds, ``unhealthy`` over the limit of an engine that
counts as unhealthy then."""


class DriftSample(Record, kw_only=True, frozen=True):
    """A sample with the log-probabilities that a trainer has computed; ``worst`` names it by its ``rid``."""

    token_ids: list[TokenId]
    """Prompt and output."""
    prompt_len: Annotated[int, msgspec.Meta(ge=1)]
    """Number of the prompt's tokens."""
    logprobs: bytes
    """float32, finite, of each output token: log-softmax over the vocabulary after ``temperature``."""
    temperature: float = 1.0
    """Logits are divided by it; below 1e-6 they are used as they are."""
    adapter: Identifier | None = None
    """Name of a loaded adapter. None means the model itself."""
    rid: str = ""


class CheckDriftReqInput(Request, kw_only=True):
    """Score a trainer's samples with the engine's weights, or get the report of the last self-check."""

    samples: Annotated[list[DriftSample], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)] | None = None
    """Samples to score. None: the report is the self-check's, which needs ``enable_drift_check``."""
    return_samples: Annotated[int, msgspec.Meta(ge=0, le=MAX_SEQUENCES)] = 0
    """Most samples to return with the self-check's report."""


class DriftFigures(ReplyRecord, kw_only=True, frozen=True):
    """Log-probabilities of tokens, as scored minus as they came; r is the exponential of one difference."""

    tokens: int = 0
    """Number of tokens. All figures are 0, and ``ess`` 1, without any."""
    mean_abs: float = 0.0
    """Mean absolute difference."""
    p99: float = 0.0
    """99th percentile of the absolute differences; of several engines the largest."""
    max_abs: float = 0.0
    """Largest absolute difference."""
    k1: float = 0.0
    """Mean of -log r, an estimate of the KL divergence of the scores from the sampling distribution."""
    k3: float = 0.0
    """Mean of r - 1 - log r, an estimate with less variance, which is never negative."""
    ess: float = 1.0
    """Effective sample size over ``tokens``, with r as importance weights."""
    clip_share: float = 0.0
    """Share of tokens with r outside of [1/2, 2]."""


class DriftUpdate(DriftFigures, kw_only=True, frozen=True):
    """Scores of the same tokens by the weights after a commit minus those by the weights before."""


class DriftPart(DriftFigures, kw_only=True, frozen=True):
    """Figures of some tokens."""

    by: Literal["span", "position", "adapter"]
    """Property by which the tokens were chosen."""
    name: str
    """``clean``: of a sample of one epoch; ``across_update``: after an update within the sample, over KV of
    the new weights; ``stale_kv``: over KV of older ones. Position in the sequence: ``0-255``, … Adapter."""


class DriftToken(ReplyRecord, kw_only=True, frozen=True):
    """A token with a large difference."""

    rid: str
    index: int
    position: int
    """Index of the token in prompt and output."""
    token: int
    """Id of the token."""
    given: float
    """Log-probability that it came with."""
    scored: float
    """Log-probability by which it was scored again."""


class DriftReport(DriftFigures, kw_only=True, frozen=True):
    """Figures of all tokens that the weights that sampled them have scored again, without ``stale_kv``."""

    weights_epoch: int
    weight_version: str
    samples: int = 0
    """Samples that were scored."""
    dropped: int = 0
    """Samples that were chosen, and ended by an abort or a flush before they were scored."""
    state: DriftState = "ok"
    """The highest threshold that was exceeded."""
    parts: list[DriftPart] = []
    worst: list[DriftToken] = []
    """The largest differences first, at most eight."""
    update: DriftUpdate | None = None
    """Effect of the last commit; a ``max_abs`` of 0 is an update that changed nothing. None: nothing was
    scored by both weights."""


class CheckedSample(ReplyRecord, kw_only=True, frozen=True):
    """A sample of the self-check."""

    token_ids: list[int]
    """Prompt and output."""
    prompt_len: int
    """Number of the prompt's tokens."""
    temperature: float
    """Temperature that it was sampled with."""
    adapter: str | None = None
    """Name of its adapter. None means the model itself."""
    rid: str


class CheckDriftReqOutput(Reply, kw_only=True):
    """The report."""

    OF_GROUP: ClassVar = {"report": "drift", "samples": "first"}
    report: DriftReport
    samples: list[CheckedSample] = []
    """Samples that the present weights have scored, the newest first, of ``drift_samples`` that are kept."""
