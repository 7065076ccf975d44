"""Incremental detokenization of one sample, of any tokenizer or of a byte-level one.

Invariants:
- All pieces together are the text of all output ids, decoded after the last :data:`CONTEXT` tokens of the
  prompt, which decide for instance if the first word keeps its space. A character that begins in the prompt
  belongs to the output that completes it.
- A piece never ends within a character: what may be the beginning of one waits for a token or ``flush``.
- Work per token is bounded: only the last tokens are decoded again, of a byte-level tokenizer none.
"""

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence

from .tokenizer import TextTokenizer

CONTEXT = 8
"""Tokens kept when the window is cut: of a character's at most four bytes the first three tokens may be
decoded wrongly and the last three may change."""

WINDOW = 24
"""Maximum tokens that are kept. A larger window is cut less often; a smaller one has less to decode again."""

_HALF = "\ufffd"


class ByteDetokenizer:
    """Text of one sample, piece by piece: the UTF-8 of its tokens' bytes."""

    __slots__ = ("_bytes", "_inherited", "_rest", "_skipped")

    def __init__(
        self, token_bytes: Mapping[int, bytes], prompt_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._bytes = token_bytes
        self._skipped = skipped
        self._rest = b""  # the beginning of a character
        self._inherited = ""
        self.feed(prompt_ids)
        self._inherited = self._rest.decode("utf-8", "replace")  # the prompt's, if it makes no character

    @property
    def settled(self) -> bool:
        """True if the returned text contains all ids that were fed."""
        return not self._rest

    def copy(self) -> "ByteDetokenizer":
        """Return an independent copy in the same state."""
        twin = ByteDetokenizer(self._bytes, (), self._skipped)
        twin._rest, twin._inherited = self._rest, self._inherited
        return twin

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is certain now, which is empty while a character is incomplete."""
        table, skipped = self._bytes, self._skipped
        data = self._rest + b"".join([table[token] for token in ids if token not in skipped])
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return self._own(text) if self._inherited and text else text

    def peek(self) -> str:
        """Return the text that :meth:`flush` would return now."""
        return self.copy().flush()

    def flush(self) -> str:
        """Return the text that is held back. Nothing may be fed afterwards."""
        text, self._rest = self._rest.decode("utf-8", "replace"), b""
        return self._own(text)

    def _own(self, text: str) -> str:
        inherited, self._inherited = self._inherited, ""
        return text.removeprefix(inherited)


class Detokenizer:
    """Text of one sample, piece by piece: the last tokens decoded again with each new one."""

    __slots__ = ("_open", "_prompt_text", "_sent", "_skipped", "_tokenizer", "_window", "settled")

    def __init__(
        self, tokenizer: TextTokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = _skipped(tokenizer, skip_special_tokens)
        self._window = _context(tokenizer, prompt_ids, self._skipped)
        self._prompt_text: str | None = self._decode(self._window)  # None once the output has begun
        self._sent = len(self._prompt_text or "")
        self._open = 0  # tokens at the window's end whose bytes may go on, not decoded yet
        self.settled = True
        """True if the returned text contains all ids that were fed."""

    def copy(self) -> "Detokenizer":
        """Return an independent copy in the same state."""
        twin = Detokenizer.__new__(Detokenizer)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._window = list(self._window)
        return twin

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is certain now, which is empty while a character is incomplete."""
        skipped, size = self._skipped, self._tokenizer.size
        shown = [token for token in ids if token not in skipped and token < size]
        if not shown:
            return ""
        self._window += shown
        self._open = self._count_open(len(shown))
        return self._advance(len(self._window) - self._open, final=False)

    def peek(self) -> str:
        """Return the text that :meth:`flush` would return now."""
        return self.copy().flush()

    def flush(self) -> str:
        """Return the text that is held back. Nothing may be fed afterwards."""
        self._open = 0
        return self._advance(len(self._window), final=True)

    def _count_open(self, new: int) -> int:
        """Return the number of byte tokens at the end: their text is known when another token follows."""
        byte_ids = self._tokenizer.byte_ids
        if not byte_ids:
            return 0
        run = 0
        while run < new and self._window[-1 - run] in byte_ids:
            run += 1
        return run + self._open if run == new else run

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)  # those to skip never enter the window

    def _advance(self, end: int, *, final: bool) -> str:
        known = self._window[:end]
        text = self._decode(known)
        if self._prompt_text is not None:
            self._sent = _common(self._prompt_text, text)
        settled = len(text) - (not final and text.endswith(_HALF))
        piece = text[self._sent : settled]
        if piece:
            self._prompt_text = None
            self._sent = settled
        self.settled = settled == len(text) and not self._open
        if end > WINDOW and self._prompt_text is None:
            known = known[-CONTEXT:]
            self._window = self._window[end - CONTEXT :]
            self._sent = len(self._decode(known)) - (len(text) - self._sent)
        return piece


def detokenizer(
    tokenizer: TextTokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
) -> ByteDetokenizer | Detokenizer:
    """Return the cheaper one that the tokenizer allows."""
    if tokenizer.token_bytes is None:
        return Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
    skipped = _skipped(tokenizer, skip_special_tokens)
    return ByteDetokenizer(tokenizer.token_bytes, _context(tokenizer, prompt_ids, skipped), skipped)


def output_text(
    tokenizer: TextTokenizer,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
    """Return the text of a complete output, decoded after the end of its prompt."""
    text = detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
    return text.feed(output_ids) + text.flush()


def _skipped(tokenizer: TextTokenizer, skip_special_tokens: bool) -> frozenset[int]:
    return tokenizer.skipped if skip_special_tokens else frozenset()


def _common(first: str, second: str) -> int:
    shorter = min(len(first), len(second))
    return next((at for at in range(shorter) if first[at] != second[at]), shorter)


def _context(tokenizer: TextTokenizer, prompt_ids: Sequence[int], skipped: frozenset[int]) -> list[int]:
    kept: list[int] = []
    for token in reversed(prompt_ids):
        if token not in skipped and token < tokenizer.size:
            kept.append(token)
            if len(kept) == CONTEXT:
                break
    return kept[::-1]
