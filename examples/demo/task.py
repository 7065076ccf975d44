"""The task: spell a word backwards, one character per token. An exact checker, no torch.

Adapters learn other spellings of the same words, by the name of a *target*.

Words have five to eight letters, no letter twice (so that a letter names its place).

Invariants:
- A word is held out or a training word, never both: :func:`is_held_out` is a function of the word alone, so
  the split needs no list that two processes would have to agree on.
- :func:`training_word` cannot return a held-out word, and :func:`held_out_words` returns nothing else.
"""

import hashlib
import random
import string
from collections.abc import Callable, Sequence
from typing import Final

PAD: Final = 0
END: Final = 1
EQUALS: Final = 2
ALPHABET: Final = string.ascii_lowercase
TOKENS: Final = ("<pad>", "\n", "=", *ALPHABET)
"""Vocabulary by token id."""
VOCAB_SIZE: Final = len(TOKENS)

MIN_LETTERS: Final = 5
MAX_LETTERS: Final = 8
MAX_NEW_TOKENS: Final = MAX_LETTERS + 3
"""Limit with room to be too long: a policy has to learn to end its answer."""
CONTEXT_LEN: Final = 32

BACKWARDS: Final = "backwards"
TARGETS: Final[dict[str, Callable[[str], str]]] = {
    BACKWARDS: lambda word: word[::-1],
    "ascending": lambda word: "".join(sorted(word)),
    "copied": lambda word: word,
}
"""Right spelling of a word by the name of the target."""

SHOWCASE: Final = ("pause", "policy", "weights", "gradient", "tokens", "update", "poetry", "metric")
"""Words held out by name and shown in the report; every other word is a random string."""

_ID: Final = {token: index for index, token in enumerate(TOKENS)}


def encode(text: str) -> list[int]:
    """Return token ids of ``text``; raise KeyError for a character outside the vocabulary."""
    return [_ID[character] for character in text]


def decode(ids: Sequence[int]) -> str:
    """Return the text of ``ids`` up to the end token."""
    letters = []
    for token in ids:
        if token == END:
            break
        letters.append(TOKENS[token])
    return "".join(letters)


def prompt_ids(word: str) -> list[int]:
    """Return ``word=`` as tokens."""
    return [*encode(word), EQUALS]


def answer_ids(word: str, target: str = BACKWARDS) -> list[int]:
    """Return the only right answer: the word as ``target`` spells it, and the end token."""
    return [*encode(TARGETS[target](word)), END]


def is_held_out(word: str) -> bool:
    """Return True if no training may see ``word``: one word in sixteen, by its hash, and the showcase."""
    return word in SHOWCASE or hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % 16 == 0


def random_word(rng: random.Random) -> str:
    """Draw a uniform length, then uniform letters without repetition."""
    return "".join(rng.sample(ALPHABET, k=rng.randint(MIN_LETTERS, MAX_LETTERS)))


def training_word(rng: random.Random) -> str:
    """Return a random word that is not held out."""
    while is_held_out(word := random_word(rng)):
        pass
    return word


def held_out_words(count: int, seed: int) -> list[str]:
    """Return ``count`` distinct held-out words: the showcase first, then random ones."""
    rng = random.Random(f"held-out {seed}")
    words = dict.fromkeys(SHOWCASE[:count])
    while len(words) < count:
        if is_held_out(word := random_word(rng)):
            words[word] = None
    return list(words)


def is_exact(word: str, output_ids: Sequence[int], target: str = BACKWARDS) -> bool:
    """Return True if the whole answer is right, its end included: the reward that is reported."""
    return list(output_ids) == answer_ids(word, target)


def token_rewards(word: str, output_ids: Sequence[int], target: str = BACKWARDS) -> list[float]:
    """Return the trained reward per output token: ``1 / len(answer)`` while all is right, then 0.

    They sum to 1 exactly when :func:`is_exact`. The first wrong token forfeits the rest, so the place where a
    policy fails is the place with the most to gain. (Credit for every right place, whatever came before, does
    worse: a policy can settle for answers with one hole that it never learns to fill.)
    """
    answer = answer_ids(word, target)
    right = next(
        (place for place, pair in enumerate(zip(output_ids, answer)) if pair[0] != pair[1]),
        min(len(output_ids), len(answer)),
    )
    return [1.0 / len(answer) if place < right else 0.0 for place in range(len(output_ids))]
