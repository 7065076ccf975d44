"""Scoring: log-probabilities of given tokens under the reference checkpoint that an engine may hold beside its policy."""

from typing import Annotated, Literal

import msgspec

from .base import Reply, ReplyRecord, Request
from .generate import TokenId

Residency = Literal["resident", "offload", "layerwise"]
"""Where the reference's weights are: on the device; there while something is scored; there layer by layer."""

MAX_SEQUENCES = 65536
"""Most sequences of one message."""


class ScoreReqInput(Request, kw_only=True):
    """Log-probabilities under the reference, the policy having no part in it. ``unsupported`` on an engine without one."""

    input_ids: Annotated[list[list[TokenId]], msgspec.Meta(min_length=1, max_length=MAX_SEQUENCES)]
    """The sequences, prompt and output together."""
    start: list[Annotated[int, msgspec.Meta(ge=1)]]
    """Per sequence: the position of the first token that is scored (the prompt's length, usually), at most the sequence's length.
    The token at position 0 follows nothing and has no log-probability."""
    temperature: float = 1.0
    """Logits are divided by it, as where a token is sampled; below 1e-6 they are taken as they are, as for greedy tokens."""


class ScoreReqOutput(Reply, kw_only=True):
    """All sequences of the message, in its order."""

    logprobs: list[bytes]
    """Little-endian float32, one for each token from ``start`` on: log-softmax over the full vocabulary after temperature, given
    all tokens before it."""


class ReferenceStatus(ReplyRecord, kw_only=True, frozen=True):
    """The reference checkpoint of an engine."""

    model_path: str
    """Folder of the reference checkpoint."""
    residency: Residency
    """Where its weights are: always on the device (``resident``), only while something is scored (``offload``), or then layer
    by layer (``layerwise``)."""
    weights: int
    """Bytes of its weights, wherever they are."""
    device_bytes: int
    """Bytes of these that are on the device now."""
    pending_sequences: int
    """Sequences that were accepted and are not scored to the end."""
    scored_tokens: int
    """Tokens scored since start."""
