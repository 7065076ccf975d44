"""Limits on the size of a generation, checked before a call with many prompts copies them.

Invariants:
- What the wire bounds is bounded here by the same numbers; what only the front end knows (stop strings, keys
  of the prefix cache) has its bounds here.
- Only sizes are compared, in constant time; values are the engine's to check.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...io_struct import MAX_LOGIT_BIAS, MAX_TOKEN_IDS_LOGPROB
from ...io_struct.base import MAX_ID_LENGTH
from ..exceptions import InvalidRequest

if TYPE_CHECKING:
    from ..text.tokenizer_manager import GenerationRequest

MAX_STOP_CHARACTERS = 2048
"""Of all stop strings of a prompt. What looks for them takes some 300 bytes for each."""
MAX_SALT_CHARACTERS = 1024
"""Of what keeps cached prefixes apart: it goes to the engine with every prompt."""
MAX_STOP_TOKEN_IDS = 64


def check_limits(request: "GenerationRequest") -> None:
    """Refuse a request with a field over its limit.

    Raises:
        InvalidRequest: ``field`` and ``value`` (the size) in its detail.
    """
    params, token_ids = request.sampling_params, request.token_ids_logprob
    check_size("rid", len(request.rid or ""), MAX_ID_LENGTH, "characters")
    check_size("stop", characters(request.stop), MAX_STOP_CHARACTERS, "characters in all")
    check_size("cache_salt", len(request.cache_salt), MAX_SALT_CHARACTERS, "characters")
    check_size("token_ids_logprob", 0 if token_ids is None else len(token_ids), MAX_TOKEN_IDS_LOGPROB, "ids")
    check_size("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    check_size("logit_bias", len(params.logit_bias or {}), MAX_LOGIT_BIAS, "tokens")


def check_size(field: str, size: int, limit: int, what: str) -> None:
    """Refuse ``size`` over ``limit``; ``what`` is counted."""
    if size > limit:
        raise InvalidRequest(f"{field}: {size} {what} are over the limit of {limit}", field=field, value=size)


def characters(texts: Sequence[str]) -> int:
    """Characters of all texts together."""
    return sum(len(text) for text in texts if isinstance(text, str))
