"""Texts that drafts are taken from for every prompt, added and removed by name.

Invariants:
- A corpus is searched by its pairs of tokens, sorted: what a draft costs hardly depends on its length.
- Corpora have tokens of the vocabulary only, for a drafted token is computed. They outlive updates.
"""

import numpy as np

from ...io_struct import CaesuraError, ErrorCode
from ...io_struct.field_errors import shown

MAX_CORPORA, MAX_CORPORA_TOKENS = 64, 1 << 22
"""Most corpora, in each of which drafts are looked for, and most tokens of all; a token takes 12 bytes."""
_POSITION_BITS = 22
_MOST_PLACES = 1 << 12
"""Places of a pair that are compared further, the last ones."""
_MANY = 256
"""Number of places from which on they are compared by one token after the other, as most differ early."""
LONGEST_MATCH = 8
END = np.full(1, -1, np.int32)
"""Stands between texts, and is no token."""


class Corpora:
    def __init__(
        self, vocab_size: int, most: int = MAX_CORPORA, most_tokens: int = MAX_CORPORA_TOKENS
    ) -> None:
        self.sizes: dict[str, int] = {}
        """Numbers of tokens by name."""
        self._vocab_size, self._most, self._most_tokens = vocab_size, most, most_tokens
        self._corpora: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Tokens, with -1 behind each text, and sorted int64: a pair of them and its position."""

    def add(self, name: str, texts: list[list[int]]) -> int:
        """Keep ``texts`` as ``name``; return how many tokens they have."""
        count = sum(map(len, texts))
        left = self._most_tokens - sum(self.sizes.values())
        if name in self.sizes:
            raise _refused(f"there is a corpus {shown(name)}: remove it first", "name", name)
        if len(self.sizes) == self._most:
            raise _refused(f"there are {self._most} corpora, the most there may be: remove one", "name", name)
        if not 0 < count <= left - len(texts):
            reason = f"{count} tokens in {len(texts)} texts: there must be some, and all corpora may have "
            reason += f"{left} more, a text one more than its tokens"
            raise _refused(reason, "token_ids", count)
        largest = max(max(text, default=0) for text in texts)
        if largest >= self._vocab_size:
            reason = f"token_ids has {largest}, the vocabulary ends at {self._vocab_size - 1}"
            raise _refused(reason, "token_ids", largest)
        tokens = np.concatenate([part for text in texts for part in (np.asarray(text, np.int32), END)])
        within = tokens >= 0
        places = np.flatnonzero(within[:-2] & within[1:-1] & within[2:])  # with a token behind the pair
        pairs = tokens[places].astype(np.int64) * self._vocab_size + tokens[places + 1]
        self._corpora[name] = tokens, np.sort(pairs << _POSITION_BITS | places)
        self.sizes[name] = count
        return count

    def remove(self, name: str) -> int:
        """Forget a corpus; return how many tokens it had."""
        if name not in self.sizes:
            known = ", ".join(map(shown, self.sizes)) or "none"
            raise _refused(f"there is no corpus {shown(name)}, but {known}", "name", name)
        del self._corpora[name]
        return self.sizes.pop(name)

    def longest(self, known: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return a corpus, where it goes on behind the longest end of ``known`` in it, and its length."""
        found = END, np.empty(0, np.int64), 0
        if len(known) < 2:
            return found
        pair = int(known[-2]) * self._vocab_size + int(known[-1])
        for tokens, pairs in self._corpora.values():
            low, high = np.searchsorted(pairs, [pair << _POSITION_BITS, (pair + 1) << _POSITION_BITS])
            if low < high:
                places = pairs[max(low, high - _MOST_PLACES) : high] & ((1 << _POSITION_BITS) - 1)
                ends, length = lengthened(tokens, places + 2, known)
                if length > found[2]:
                    found = tokens, ends, length
        return found


def lengthened(text: np.ndarray, ends: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, int]:
    """Return those of ``ends``, behind the last of ``known``, behind the longest end of it, and its length.

    ``text`` ends with -1.
    """
    most, length = min(LONGEST_MATCH, len(known)), 1
    while len(ends) > _MANY and length < most:
        longer = ends[text[np.maximum(ends - length - 1, -1)] == known[-length - 1]]
        if not len(longer):
            return ends, length
        ends, length = longer, length + 1
    back = np.arange(1, most + 1)
    same = text[np.maximum(ends[:, None] - back, -1)] == known[-back]
    lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1)
    longest = int(lengths.max())
    return ends[lengths == longest], longest


def _refused(reason: str, field: str, value: object) -> CaesuraError:
    return CaesuraError(ErrorCode.INVALID_REQUEST, reason, field=field, value=value)
