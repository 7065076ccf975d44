"""Finds stop strings in text as it arrives.

Invariants:
- The first complete match counts; of several ending at one character, the longest, however text is divided.
- Text that could begin a stop string is held back until it cannot any more, or until the text ends.
- The time is linear in the text and does not depend on the number of stop strings (Aho and Corasick 1975).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..exceptions import InvalidRequest


class StopStrings:
    """The stop strings of one request: an automaton that all samples of the request share."""

    __slots__ = ("depth", "fail", "first", "longest", "next")

    def __init__(self, stops: Sequence[str]) -> None:
        _check(stops)
        self.next: list[dict[str, int]] = [{}]
        """By state: the state after each character that continues a stop string."""
        self.fail = [0]
        """By state: the state of the longest proper suffix that begins a stop string."""
        self.depth = [0]
        """By state: characters of a stop string that have been seen."""
        self.longest = [0]
        """By state: length of the longest stop string that ends, or 0."""
        for stop in stops:
            self._add(stop)
        self._link()
        self.first = re.compile("[" + re.escape("".join({stop[0] for stop in stops})) + "]")
        """Pattern of the characters that begin stop strings."""

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next[state].get(character)
            if following is None:
                following = self.next[state][character] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.longest.append(0)
            state = following
        self.longest[state] = len(stop)

    def _link(self) -> None:
        by_depth = list(self.next[0].values())
        for state in by_depth:  # grows while it is read: breadth first
            for character, following in self.next[state].items():
                self.fail[following] = self.step(self.fail[state], character)
                by_depth.append(following)
            self.longest[state] = self.longest[state] or self.longest[self.fail[state]]

    def find(self, text: str, at: int) -> tuple[int, str]:
        """Return where the first stop string after ``at`` begins, and it; or where one may, and nothing."""
        end, state = self.search(text, at)
        if length := self.longest[state]:
            return end - length, text[end - length : end]
        return end - self.depth[state], ""

    def search(self, text: str, at: int = 0, state: int = 0) -> tuple[int, int]:
        """Return where the first stop string ends, or the end of ``text``, and the state there."""
        while at < len(text):
            if not state:  # the common case: nothing has begun
                begin = self.first.search(text, at)
                if begin is None:
                    return len(text), 0
                at = begin.start()
            state = self.step(state, text[at])
            at += 1
            if self.longest[state]:
                break
        return at, state

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


def shared_stop_strings(stops: Sequence[str]) -> StopStrings:
    """Return the automaton of stop strings, shared by requests; InvalidRequest for empty ones."""
    _check(stops)
    return _built(tuple(stops))


def _check(stops: Sequence[str]) -> None:
    if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidRequest("stop strings must be strings that are not empty", field="stop")


_built = lru_cache(maxsize=8)(StopStrings)  # a batch has one or a few


@dataclass(frozen=True, slots=True)
class Match:
    stop: str
    end: int
    """Characters of the whole text up to and including the stop string."""


class StopMatcher:
    """A search in the text of one sample."""

    __slots__ = ("_held", "_seen", "_state", "_stops", "match")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self._seen = 0
        self.match: Match | None = None
        """The stop string that was found, or None."""

    def feed(self, text: str) -> str:
        """Add text; return what is before a :attr:`match`, or before where one can begin."""
        if self.match is not None:
            return ""
        stops = self._stops
        end, state = stops.search(text, 0, self._state)
        if length := stops.longest[state]:
            return self._found(text[:end], length)
        buffer = self._held + text
        clear = len(buffer) - stops.depth[state]
        self._state, self._held = state, buffer[clear:]
        self._seen += len(text)
        return buffer[:clear]

    def skip(self, text: str) -> str:
        """Add text without a search, and return it; only before the first :meth:`feed`."""
        self._seen += len(text)
        return text

    def flush(self) -> str:
        """Return the text that is held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _found(self, text: str, length: int) -> str:
        buffer = self._held + text
        start = len(buffer) - length
        self.match = Match(buffer[start:], self._seen + len(text))
        self._held = ""
        return buffer[:start]
