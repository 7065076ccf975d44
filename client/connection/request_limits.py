"""Limits on the size of a generation, checked before a call with many prompts copies them.

Invariants: what the wire bounds has the same bounds here; sizes are compared in constant time, values are the
engine's to check.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...io_struct import MAX_LOGIT_BIAS, MAX_TOKEN_IDS_LOGPROB
from ...io_struct.base import MAX_ID_LENGTH
from ..exceptions import InvalidRequest

if TYPE_CHECKING:
    from ..text.tokenizer_manager import GenerationRequest

MAX_STOP_CHARACTERS = 2048
"""Maximum of all stop strings of a prompt; the automaton takes some 300 bytes for each character."""
MAX_SALT_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64


def check_limits(request: "GenerationRequest") -> None:
    """Raise InvalidRequest, with ``field`` and ``value`` (the size), for a field over its limit."""
    params, token_ids = request.sampling_params, request.token_ids_logprob
    check_size("rid", len(request.rid or ""), MAX_ID_LENGTH, "characters")
    check_size("stop", characters(request.stop), MAX_STOP_CHARACTERS, "characters in all")
    check_size("cache_salt", len(request.cache_salt), MAX_SALT_CHARACTERS, "characters")
    check_size("token_ids_logprob", 0 if token_ids is None else len(token_ids), MAX_TOKEN_IDS_LOGPROB, "ids")
    check_size("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    check_size("logit_bias", len(params.logit_bias or {}), MAX_LOGIT_BIAS, "tokens")


def check_size(field: str, size: int, limit: int, what: str) -> None:
    if size > limit:
        raise InvalidRequest(f"{field}: {size} {what} are over the limit of {limit}", field=field, value=size)


def characters(texts: Sequence[str]) -> int:
    return sum(len(text) for text in texts if isinstance(text, str))
