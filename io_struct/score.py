"""Scoring: logprobs of given tokens under the reference model, a second checkpoint of an engine."""

from typing import Annotated

import msgspec

from .base import Reply, Request
from .generate import TokenId

MAX_SEQUENCES = 65536
"""Maximum number of sequences in one message."""


class ScoreReqInput(Request, kw_only=True):
    """Compute logprobs under the reference model; ``unsupported`` by an engine without one."""

    input_ids: Annotated[list[list[TokenId]], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
    """The sequences, each with prompt and output."""
    start: list[Annotated[int, msgspec.Meta(ge=1)]]
    """For each sequence: first token to score, usually the prompt's length. Position 0 has no logprob."""
    temperature: float = 1.0
    """Logits are divided by it; below 1e-6 they are used as they are, as in greedy decoding."""


class ScoreReqOutput(Reply, kw_only=True):
    """Logprobs of all sequences, in the order of the request."""

    logprobs: list[bytes]
    """Little-endian float32 for each token from ``start`` on: log-softmax over the vocabulary after
    temperature."""
