"""Logprobs in OpenAI's format: tokens as text and as bytes, the most likely tokens, text offsets.

Invariants: the bytes of an output's tokens, joined, are those of its text (but for special tokens and a
leading space), even if a character is spread over several; bytes of no whole character are written U+FFFD.
JSON has no infinity: a token that cannot occur has the logprob -9999, as OpenAI's do.
"""

import codecs
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from ...connection.results import GenerateOutput, TokenDelta, TokenLogprobs
from ...text.tokenizer import TextTokenizer, bytes_of, decoder_state

LOWEST = -9999.0
Position = tuple[int, float | None, Sequence[tuple[float, int]]]
"""Token id, its logprob (None for the first of a prompt), and logprobs with ids of the most likely tokens."""


class Logprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(msgspec.Struct, kw_only=True):
    logprob: float
    rank: int
    """From 1; one more than the number of likeliest tokens that were asked for if it is below them."""
    decoded_token: str


ChatLogprobs = dict[str, list[dict[str, Any]]]
"""``logprobs`` of a chat's choice; ``token`` has U+FFFD for bytes of no whole character."""


class _TokenTable:
    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            id: token.content for id, token in tokenizer.backend.get_added_tokens_decoder().items()
        }
        state = decoder_state(tokenizer.backend)
        kinds = {part["type"] for part in state.get("decoders", [state]) if "type" in part}
        self._byte_level = "ByteLevel" in kinds
        self._metaspace = "Metaspace" in kinds or bool(tokenizer.byte_ids)
        self._known: dict[int, tuple[bytes, str]] = {}

    def __getitem__(self, token: int) -> tuple[bytes, str]:
        known = self._known.get(token)
        if known is None:
            data = self._find(token)
            known = self._known[token] = (data, data.decode("utf-8", "replace"))
        return known

    def _find(self, token: int) -> bytes:
        written = self._added.get(token)
        if written is not None:
            return written.encode()
        written = self._tokenizer.backend.id_to_token(token)
        if written is None:
            return b""  # the model's vocabulary may be padded
        if self._byte_level:
            return bytes_of(written)
        if token in self._tokenizer.byte_ids:
            return bytes([int(written[3:5], 16)])  # <0x0A>
        if self._metaspace:
            return written.replace("\u2581", " ").encode()
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()


@lru_cache(maxsize=8)
def _table_of(tokenizer: TextTokenizer) -> _TokenTable:
    return _TokenTable(tokenizer)


class TokenText:
    """Text and bytes of tokens; ``as_ids`` (and a missing tokenizer) write ``token_id:17``."""

    def __init__(self, tokenizer: TextTokenizer | None, *, as_ids: bool = False) -> None:
        self._table = None if tokenizer is None else _table_of(tokenizer)
        self._named = None if as_ids else self._table
        self.skipped: frozenset[int] = frozenset() if tokenizer is None else tokenizer.skipped
        """Ids left out of texts when special tokens are skipped."""

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._named is None else self._named[token][1]

    def data(self, token: int) -> bytes:
        """Return the exact bytes of a token; none for an id without text."""
        return b"" if self._table is None else self._table[token][0]


class Offsets:
    """Characters before each token of one choice, where its character begins; beyond the text after a stop
    string. With ``leading_space_cut`` the text lacks its first token's space.
    """

    def __init__(
        self, tokens: TokenText, *, skip_special_tokens: bool, leading_space_cut: bool = False
    ) -> None:
        self._tokens = tokens
        self._skipped = tokens.skipped if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = -1 if leading_space_cut else 0

    def advance(self, token: int) -> int:
        offset = max(self._count, 0)
        if token not in self._skipped:
            self._count += len(self._decoder.decode(self._tokens.data(token)))
        return offset


def output_positions(output: GenerateOutput | TokenDelta, count: int) -> list[Position]:
    """Return the output's tokens with the ``count`` likeliest and ``logprob_token_ids``, each once."""
    found = _positions(output.output_ids, output.output_logprobs, output.output_top_logprobs, count)
    given = output.output_token_ids_logprobs
    if given is None:
        return found
    positions: list[Position] = []
    for position, (token, logprob, top) in enumerate(found):
        values = {other: value for value, other in (*top, *given.at(position))}
        positions.append((token, logprob, [(value, other) for other, value in values.items()]))
    return positions


def input_positions(prompt_ids: Sequence[int], output: GenerateOutput, count: int) -> list[Position]:
    """Return the prompt's tokens; none if the sample ended before its prompt was computed."""
    logprobs = output.input_logprobs
    if logprobs is None:
        return []
    rest = _positions(prompt_ids[1:], logprobs[1:], output.input_top_logprobs, count)
    return [(prompt_ids[0], None, ()), *rest]


def _positions(
    ids: Sequence[int], logprobs: Sequence[float | None] | None, top: TokenLogprobs | None, count: int
) -> list[Position]:
    """Return the tokens; the ``top`` of each may have more than the ``count`` that are wanted."""
    values = [None] * len(ids) if logprobs is None else logprobs
    others = [()] * len(ids) if top is None else [top.at(position)[:count] for position in range(len(ids))]
    return list(zip(ids, values, others, strict=True))


def prompt_logprobs(
    prompt_ids: Sequence[int], output: GenerateOutput, count: int, tokens: TokenText
) -> list[dict[str, PromptToken] | None] | None:
    """Return vLLM's form: by id, each position's own token and then the ``count`` likeliest.

    None if the sample ended before its prompt was computed.
    """
    if output.input_logprobs is None:
        return None
    found: list[dict[str, PromptToken] | None] = [None]
    for token, logprob, top in input_positions(prompt_ids, output, count)[1:]:
        own = _prompt_token(token, -math.inf if logprob is None else logprob, len(top) + 1, tokens)
        entry = {str(token): own}
        for rank, (value, other) in enumerate(top, 1):
            if other == token:
                own.rank = rank
            else:
                entry[str(other)] = _prompt_token(other, value, rank, tokens)
        found.append(entry)
    return found


def _prompt_token(token: int, logprob: float, rank: int, tokens: TokenText) -> PromptToken:
    return PromptToken(logprob=max(logprob, LOWEST), rank=rank, decoded_token=tokens.text(token))


def completion_logprobs(positions: Iterable[Position], tokens: TokenText, offsets: Offsets) -> Logprobs:
    """Return columns over the positions; of several top tokens with one text the most likely stays."""
    columns = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, logprob, top in positions:
        name = tokens.text(token)
        columns.tokens.append(name)
        columns.text_offset.append(offsets.advance(token))
        if logprob is None:
            columns.token_logprobs.append(None)
            columns.top_logprobs.append(None)
            continue
        logprob = max(logprob, LOWEST)
        named: dict[str, float] = {}
        for value, other in top:
            named.setdefault(tokens.text(other), max(value, LOWEST))
        named.setdefault(name, logprob)
        columns.token_logprobs.append(logprob)
        columns.top_logprobs.append(named)
    return columns


def chat_logprobs(positions: Iterable[Position], tokens: TokenText) -> ChatLogprobs:
    def named(token: int, logprob: float | None) -> dict[str, Any]:
        value = LOWEST if logprob is None else max(logprob, LOWEST)
        return {"token": tokens.text(token), "logprob": value, "bytes": list(tokens.data(token))}

    return {
        "content": [
            {**named(token, logprob), "top_logprobs": [named(other, value) for value, other in top]}
            for token, logprob, top in positions
        ]
    }
