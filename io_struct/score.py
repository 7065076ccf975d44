"""Scoring: logprobs of given tokens under the reference model, a second checkpoint of an engine."""

from typing import Annotated

import msgspec

from .base import Reply, ReplyRecord, Request
from .generate import TokenId
from .residency import Residency

MAX_SEQUENCES = 65536
"""Maximum number of sequences in one message."""


class ScoreReqInput(Request, kw_only=True):
    """Compute logprobs under the reference model; the policy is not involved. ``unsupported`` by an engine
    without a reference model.
    """

    input_ids: Annotated[list[list[TokenId]], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
    """The sequences, each with prompt and output."""
    start: list[Annotated[int, msgspec.Meta(ge=1)]]
    """For each sequence: position of the first token to score, usually the length of its prompt; at most the
    length of the sequence. The token at position 0 has no logprob.
    """
    temperature: float = 1.0
    """Logits are divided by it, as in sampling; below 1e-6 they are used as they are, as in greedy decoding.
    """


class ScoreReqOutput(Reply, kw_only=True):
    """Logprobs of all sequences, in the order of the request."""

    logprobs: list[bytes]
    """Little-endian float32, one for each token from ``start`` on: log-softmax over the full vocabulary after
    temperature, given all previous tokens."""


class ReferenceStatus(ReplyRecord, kw_only=True, frozen=True):
    """State of the reference model."""

    model_path: str
    """Its checkpoint folder."""
    residency: Residency
    """Where its weights are: always on the device (``resident``), only during scoring (``offload``), or
    during scoring layer by layer (``layerwise``).
    """
    weights: int
    """Size of its weights in bytes."""
    device_bytes: int
    """Bytes of its weights that are on the device now."""
    pending_sequences: int
    """Accepted sequences that are not scored completely."""
    scored_tokens: int
    """Tokens scored since start."""
