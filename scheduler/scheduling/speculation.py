"""Drafts of next tokens: from outputs of the same prompt, the request's own text, recent ones, and corpora.

Invariants:
- Drafts change no result: a drafted token is computed as one more decode row of its request, sampled with the
  noise of its own position, and recorded only if every draft before it was what was sampled.
- Texts belong to prompts, not to weights: they outlive updates, pauses and retractions. Those of one
  ``cache_salt`` are drafted from for no other.
- Drafts are added while the expected tokens per second rise, by the measured times of steps. A step that
  tries whether they would is one of many, and small. Searches that save less than they take get 1 % of the
  time.
- Rows of drafts in vain are at most 64, one of a hundred rows, and 16 for each accepted token.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from math import log2
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .corpora import END, LONGEST_MATCH, Corpora, lengthened

if TYPE_CHECKING:
    from .request import Request, RequestTable

LONGEST_DRAFT = 15
"""Drafted tokens of a row: less than a page, so that a window keeps what the next token sees."""
_CANDIDATES, _SIBLINGS, _SEARCHES, _PROBED = 8, 8, 16, 4
"""Places, running samples of a prompt, and rows of a step, or of one that probes, that are looked at."""
_TEXT_TOKENS, _CORPUS_TOKENS, _RECENT_TOKENS = 1 << 16, 1 << 22, 1 << 15
"""Tokens that are kept of a prompt's outputs, and of all prompts, and those that all prompts draft from."""
PROMPT_TOKENS = 64
"""Tokens that a prompt counts beside those of its outputs, for what it takes."""
_GAIN = 1.1
"""Least ratio of the expected rates with and without drafts."""
_FASTER, _SLOWER = 0.3, 0.03
"""Weights of a step that took less or more time than others of its size: what disturbs a step adds time."""
_BELIEVED = 3
"""Steps of a size after which its time counts: at first that of the fastest."""
_AGREED = 4
"""Kinds of agreement of the places where a match stands: none, of one, of two, of more."""
_PRIOR = np.tile(np.repeat(1 - 0.7 ** np.arange(LONGEST_MATCH + 1), _AGREED), 2)
"""Probability, by length of a match and agreement, that the token behind is sampled, before any is tried.

First in texts of the prompt, then in others.
"""
_LEAST_CHANCE = 0.05
"""Estimated probability below which a token is not drafted."""
_PRIOR_TRIES, _FADING = 4.0, 0.998
_LOOK_STEPS, _MOST_PROBE = 8, 512
"""Steps of a size between two that look for drafts which seem not to pay; most after one that tried some."""
_BOUND_STEPS = 64
_AT_FIRST, _OF_ROW, _OF_ACCEPTED, _MOST_ALLOWED = 64.0, 0.01, 16.0, 256.0
"""Rows that may be drafted in vain: at the start, more for each row and each accepted token, and most."""
_SEARCHING, _MOST_SAVED = 0.01, 16.0
"""Share of the time that searches for nothing may take, and most that may be saved up, in steps."""
_MOST_DRAFTING = 32
"""Steps of which one has no drafts where they pay: its time is what theirs are compared with."""
_MOST_REST = 8
"""Tokens that a request without luck goes on for before it is looked at again."""


class Texts:
    """Outputs by prompt; those of the prompt that was used least recently are forgotten first."""

    def __init__(self, most: int = _CORPUS_TOKENS, most_recent: int = _RECENT_TOKENS) -> None:
        self.num_tokens = 0
        self._most, self._most_recent = most, most_recent
        self._texts: OrderedDict[int, np.ndarray] = OrderedDict()
        self._recent: deque[tuple[str, np.ndarray]] = deque()
        self._num_recent = 0
        self._joined: dict[str, np.ndarray] = {}

    def add(self, key: int, salt: str, output: np.ndarray) -> None:
        before = self._texts.pop(key, END)
        # A copy: a view would keep all of the longest output.
        text = np.concatenate([before, output, END])[-_TEXT_TOKENS:].copy()
        self._texts[key] = text
        self.num_tokens += len(text) - (-PROMPT_TOKENS if before is END else len(before))
        while self.num_tokens > self._most:
            _, forgotten = self._texts.popitem(last=False)
            self.num_tokens -= len(forgotten) + PROMPT_TOKENS
        self._add_recent(salt, output[-self._most_recent :])

    def _add_recent(self, salt: str, output: np.ndarray) -> None:
        self._joined.clear()
        self._recent.append((salt, np.concatenate([output, END])))
        self._num_recent += len(output) + 1
        while self._num_recent > self._most_recent + 1:
            self._num_recent -= len(self._recent.popleft()[1])

    def of(self, key: int) -> np.ndarray:
        """Return all outputs, oldest first, with -1 between them."""
        if key not in self._texts:
            return END
        self._texts.move_to_end(key)
        return self._texts[key]

    def recent(self, salt: str) -> np.ndarray:
        """Return the last outputs of all prompts with ``salt``, as :meth:`of` does."""
        if salt not in self._joined:
            self._joined[salt] = np.concatenate([END, *(text for own, text in self._recent if own == salt)])
        return self._joined[salt]


@dataclass(slots=True)
class Average:
    """A running average that follows shorter times faster than longer ones; the least of the first three."""

    seconds: float = float("inf")
    rows: float = 0.0
    count: int = 0

    @property
    def expected(self) -> float:
        return self.seconds if self.count else 0.0

    def observe(self, seconds: float, rows: int = 0) -> None:
        self.count += 1
        weight = _FASTER if seconds < self.seconds else _SLOWER
        if self.count <= _BELIEVED:
            weight = float(seconds < self.seconds)
        if weight:
            self.seconds = seconds if weight == 1.0 else self.seconds + weight * (seconds - self.seconds)
            self.rows += weight * (rows - self.rows)


class StepTimes:
    """Seconds of decode steps by their number of rows, as running averages."""

    def __init__(self) -> None:
        self._known: dict[int, Average] = {}

    def observe(self, rows: int, seconds: float) -> Average:
        """Record a step; return the average of steps of its size."""
        found = self._known.setdefault(_size(rows), Average())
        found.observe(seconds, rows)
        return found

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return the expected seconds: between two sizes in proportion, beyond them as the last two rise."""
        known = sorted((each.rows, each.seconds) for each in self._known.values() if each.count >= _BELIEVED)
        if not known:
            return rows.astype(np.float64)
        counts, seconds = np.asarray(known).T
        seconds = np.minimum.accumulate(seconds[::-1])[::-1]  # no step takes longer than a larger one
        slope = seconds[-1] / counts[-1]
        if len(known) > 1:
            slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        found: np.ndarray = np.interp(rows, counts, seconds) + np.maximum(rows - counts[-1], 0) * slope
        return found


def _size(rows: int) -> int:
    """Return the number of a step's size, of which there are four for each doubling of its rows."""
    return int(4 * log2(rows))


@dataclass(slots=True)
class Draft:
    row: int
    """Index of the request among the decoding ones."""
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    """Estimated probability of each token to be sampled, with all before it."""
    evidence: list[int] = field(default_factory=list)
    """Kind of evidence for each token, for which :attr:`Speculation._chances` has a probability."""


class Followed(NamedTuple):
    """A token with which most of some places go on."""

    token: int
    votes: int
    places: int


@dataclass(slots=True)
class Continuation:
    """How texts go on behind the longest end of a request's tokens that stands in them."""

    length: int
    """Number of the request's tokens then."""
    match: int
    """Number of them that stand there."""
    others: bool
    """True if the texts are not of the request's prompt."""
    tokens: list[Followed]

    def behind(self, known: np.ndarray) -> "Continuation | None":
        """Return the part behind ``known``.

        None if ``known`` differs from the foretold tokens, or less than half of them is left.
        """
        passed = len(known) - self.length
        left = self.tokens[passed:]
        if not 0 <= passed <= len(left) or any(
            each.token != token
            for each, token in zip(self.tokens, known[self.length :].tolist(), strict=False)
        ):
            return None
        return Continuation(len(known), self.match + passed, self.others, left)


@dataclass(slots=True)
class DraftRows:
    """A step's decode rows, some for drafted tokens: those of a request lie side by side, in order."""

    depth: np.ndarray
    """int64 [rows]: drafted tokens of the request up to the row's own, which is its input; 0 without."""
    evidence: np.ndarray
    """int64 [rows]: :attr:`Draft.evidence` of the row's own token; 0 without."""
    inputs: np.ndarray
    """int64 [rows]"""
    kept: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))
    """bool [rows], once all are sampled: the request's inputs up to the row's are what was sampled."""

    def verify(self, sampled: np.ndarray) -> np.ndarray:
        """Return :attr:`kept`, given the token that each row sampled."""
        wrong = self.depth > 0
        wrong[1:] &= sampled[:-1] != self.inputs[1:]
        count = np.cumsum(wrong)
        self.kept = count == count[np.arange(len(count)) - self.depth]
        return self.kept


class Speculation:
    def __init__(self, table: "RequestTable") -> None:
        self.times, self.texts, self.corpora = StepTimes(), Texts(), Corpora(table.vocab_size)
        self._table = table
        self._tried, self._hit = np.zeros(len(_PRIOR)), np.zeros(len(_PRIOR))
        self._of: list[Request | None] = [None] * table.slots
        """Request that the next four are of, by slot."""
        self._keys = np.zeros(table.slots, np.int64)
        self._continuations: list[Continuation | None] = [None] * table.slots
        self._misses = np.zeros(table.slots, np.int64)
        self._rests_until = np.zeros(table.slots, np.int64)
        self._searched_s = self._began = 0.0
        """Seconds of the step's search for drafts, and when the step began to be chosen."""
        self._search, self._beside = Average(), {False: Average(), True: Average()}
        """Searches, and what steps without drafts and with some take beside others of as many rows."""
        self._saved_s = 0.0
        """Seconds that drafts have saved, and a share of all, less those of searches."""
        self._until_plain = _MOST_DRAFTING
        """Steps until one without drafts, where they pay."""
        self._allowed = _AT_FIRST
        """Rows that may be drafted in vain now."""
        self._deepest = LONGEST_DRAFT
        """Most drafted tokens of a request in the last step with drafts."""
        self._bound = 0, 0, False
        self._probes: dict[int, tuple[int, int]] = {}
        """Steps until the next probe and between it and the one after, by size of a step."""

    def ended(self, request: "Request") -> None:
        """Keep the output of a request, which still has its slot."""
        self.texts.add(_key(request), _salt(request), self._table.outputs(request).tokens)

    def propose(self, slots: np.ndarray, room: int) -> list[Draft]:
        """Return drafts for decoding ``slots``, of at most ``room`` tokens; each step asks for them."""
        self._searched_s, self._began = 0.0, monotonic()
        room = int(min(room, self._allowed))
        if room <= 0 or self._saved_s < 0:
            return []
        pays = self._may_pay(len(slots), room)
        if pays:
            self._until_plain = (self._until_plain or _MOST_DRAFTING) - 1
        if not (self._until_plain if pays else self._may_probe(len(slots))):
            return []
        began = monotonic()
        drafts = self._chosen(slots, room, pays)
        self._searched_s = monotonic() - began
        self._search.observe(self._searched_s)
        return drafts

    def _chosen(self, slots: np.ndarray, room: int, pays: bool) -> list[Draft]:
        if not pays:
            room = min(room, max(3, len(slots) // 4 + 1))  # enough for another size
        candidates = self._candidates(slots)[: _SEARCHES if pays else _PROBED]
        texts: dict[int, np.ndarray] = {}
        known = self._chances.tolist()
        drafts = [draft for row, slot in candidates if (draft := self._draft(row, slot, texts, known))]
        if not drafts:
            return []
        if not pays:
            between = self._probes[_size(len(slots))][1]
            self._probes[_size(len(slots))] = between, min(2 * between, _MOST_PROBE)
        chances = np.concatenate([draft.chances for draft in drafts])
        order = np.argsort(-chances, kind="stable")[:room]
        count = self._best_count(len(slots), chances[order]) if pays else len(order)
        # Chances fall within a draft, so its chosen tokens are its first ones.
        chosen = np.zeros(len(chances), np.int64)
        chosen[order[:count]] = 1
        ends = np.cumsum([len(draft.tokens) for draft in drafts])
        for draft, taken in zip(drafts, np.split(chosen, ends[:-1]), strict=True):
            del draft.tokens[int(taken.sum()) :]
        self._deepest = max(len(draft.tokens) for draft in drafts)
        return [draft for draft in drafts if draft.tokens]

    def observe(self, slots: np.ndarray, rows: DraftRows | None, seconds: float) -> None:
        """Learn from a completed step of decode rows alone, when its tokens have been recorded."""
        alike = self.times.observe(len(slots), seconds)
        if alike.count > _BELIEVED:
            beside_s = monotonic() - self._began - self._searched_s - alike.seconds
            self._beside[rows is not None and len(rows.kept) > 0].observe(max(0.0, beside_s))
        saved_s = self._saved_s + _SEARCHING * seconds - self._searched_s  # the device waits for the search
        self._saved_s = min(max(saved_s, -seconds), _MOST_SAVED * seconds)
        self._allowed = min(self._allowed + _OF_ROW * len(slots), _MOST_ALLOWED)
        if rows is None or not len(rows.kept):
            return
        drafted = np.flatnonzero(rows.depth)
        accepted = int(rows.kept[drafted].sum())
        plain = len(slots) - len(drafted)
        plain_s, drafted_s = self._seconds(plain, np.asarray([0, len(drafted)]))
        self._saved_s += plain_s * (1 + accepted / plain) - drafted_s
        self._allowed = min(self._allowed + (1 + _OF_ACCEPTED) * accepted - len(drafted), _MOST_ALLOWED)
        tried, hit = rows.kept[drafted - 1], rows.kept[drafted]
        kinds, count = rows.evidence[drafted], len(_PRIOR)
        self._tried = _FADING * self._tried + np.bincount(kinds, tried, count)
        self._hit = _FADING * self._hit + np.bincount(kinds, hit, count)
        for slot in slots[drafted[(rows.depth[drafted] == 1) & ~hit]].tolist():
            self._missed(slot)
        lucky = slots[drafted[hit]]
        self._misses[lucky] = 0

    @property
    def _chances(self) -> np.ndarray:
        """Probability that the token behind a match is sampled, by evidence."""
        found: np.ndarray = (self._hit + _PRIOR_TRIES * _PRIOR) / (self._tried + _PRIOR_TRIES)
        return found

    def _best_count(self, rows: int, chances: np.ndarray, search_s: float = 0.0) -> int:
        """Return how many tokens of falling ``chances`` are worth drafting, and a search, beside ``rows``."""
        counts = np.arange(len(chances) + 1)
        seconds = self._seconds(rows, counts) + search_s * (counts > 0)
        rates = (rows + np.concatenate([np.zeros(1), np.cumsum(chances)])) / seconds
        best = int(rates.argmax())
        return best if rates[best] > _GAIN * rates[0] else 0

    def _seconds(self, rows: int, drafted: np.ndarray) -> np.ndarray:
        """Return the expected seconds of a step of ``rows`` beside numbers of ``drafted`` tokens."""
        plain, other = (each.expected for each in self._beside.values())
        return self.times.of(rows + drafted) + np.where(drafted > 0, max(plain, other), plain)

    def _may_pay(self, rows: int, room: int) -> bool:
        """Return True if the best of drafts would pay, by a calculation that is not made in each step."""
        of_rows, left, pays = self._bound
        if of_rows != rows or not left:
            chances = self._chances.max() ** (1 + np.arange(min(room, LONGEST_DRAFT * rows)) // rows)
            left, pays = _BOUND_STEPS, self._best_count(rows, chances, self._search.expected) > 0
        self._bound = rows, left - 1, pays
        return pays

    def _may_probe(self, rows: int) -> bool:
        left, between = self._probes.get(_size(rows), (_BELIEVED, 1))
        self._probes[_size(rows)] = left - 1 if left else _LOOK_STEPS, between
        return not left

    def _candidates(self, slots: np.ndarray) -> list[tuple[int, int]]:
        """Return rows and slots of requests that can have drafts, the longest outputs first."""
        table, columns = self._table, self._table.sampling
        for slot in slots.tolist():
            request = table.by_slot[slot]
            if request is not None and self._of[slot] is not request:
                self._of[slot], self._keys[slot], self._continuations[slot] = request, _key(request), None
                self._misses[slot] = self._rests_until[slot] = 0
        known = table.length[slots]
        may = (self._rests_until[slots] <= known) & (known + 1 < table.limit[slots])
        may &= ~(columns.penalised[slots] | columns.constrained[slots] | table.wants_hidden[slots])
        rows = np.flatnonzero(may)
        rows = rows[np.argsort(known[rows] - table.limit[slots[rows]], kind="stable")]
        return [(row, int(slots[row])) for row in rows.tolist()]

    def _draft(self, row: int, slot: int, texts: dict[int, np.ndarray], chances: list[float]) -> Draft | None:
        """Draft for ``slot``; ``texts`` has those of the prompts that the step has met."""
        known = self._table.tokens[slot, : self._table.length[slot]]
        most = min(LONGEST_DRAFT, 2 * self._deepest + 2, int(self._table.limit[slot]) - len(known) - 1)
        found = self._continuations[slot]
        if found is None or (found := found.behind(known)) is None:
            found = self._continued(slot, known, most, texts)
        self._continuations[slot] = found
        draft, chance = Draft(row), 1.0
        for depth, (token, votes, places) in enumerate(found.tokens[:most]):
            kind = _evidence(found.match + depth, votes, places) + found.others * len(_PRIOR) // 2
            chance *= chances[kind] * votes / places
            if chance < _LEAST_CHANCE:
                break
            draft.tokens.append(token)
            draft.chances.append(chance)
            draft.evidence.append(kind)
        if not draft.tokens:
            self._missed(slot)
            return None
        return draft

    def _continued(
        self, slot: int, known: np.ndarray, most: int, texts: dict[int, np.ndarray]
    ) -> Continuation:
        table, key = self._table, int(self._keys[slot])
        if key not in texts:
            parts = [self.texts.of(key)]
            for other in np.flatnonzero((self._keys == key) & table.live)[: _SIBLINGS + 1].tolist():
                if self._of[other] is table.by_slot[other]:
                    parts += [table.tokens[other, table.prompt_len[other] : table.length[other]], END]
            texts[key] = np.concatenate(parts)
        text = np.concatenate([texts[key], known, END])
        ends, match = _matches(text, known)
        others = False
        if match < LONGEST_MATCH:
            request = self._of[slot]
            assert request is not None
            recent = self.texts.recent(_salt(request))
            for other in ((recent, *_matches(recent, known)), self.corpora.longest(known)):
                if other[2] > match:
                    others, (text, ends, match) = True, other
        return Continuation(len(known), match, others, _vote(text, ends[-_CANDIDATES:], most))

    def _missed(self, slot: int) -> None:
        rest = min((1 << int(self._misses[slot])) - 1, _MOST_REST)  # none after the first
        self._rests_until[slot] = self._table.length[slot] + rest
        self._misses[slot] = min(self._misses[slot] + 1, _MOST_REST)


def draft_rows(table: "RequestTable", slots: np.ndarray, drafts: list[Draft]) -> tuple[np.ndarray, DraftRows]:
    """Write ``drafts`` behind the known tokens of ``slots``; return each row's slot, and the rows."""
    counts, evidence = np.ones(len(slots), np.int64), [np.zeros(1, np.int64)] * len(slots)
    for draft in drafts:
        slot, count = slots[draft.row], len(draft.tokens)
        known = table.length[slot]
        table.tokens[slot, known : known + count] = draft.tokens
        counts[draft.row], evidence[draft.row] = 1 + count, np.asarray([0, *draft.evidence[:count]])
    rows = np.repeat(slots, counts)
    depth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    inputs = table.tokens[rows, table.length[rows] - 1 + depth].astype(np.int64)
    return rows, DraftRows(depth, np.concatenate(evidence), inputs)


def _salt(request: "Request") -> str:
    return request.salt if isinstance(request.salt, str) else request.salt[1]


def _key(request: "Request") -> int:
    return hash((_salt(request), request.prompt.tobytes()))


def _matches(text: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, int]:
    """Return where ``text`` goes on behind the longest end of ``known`` that stands in it, and its length."""
    ends = np.flatnonzero((text[:-1] == known[-1]) & (text[1:] >= 0)) + 1
    return lengthened(text, ends, known) if len(ends) else (ends, 0)


def _vote(text: np.ndarray, ends: np.ndarray, most: int) -> list[Followed]:
    """Return the tokens with which most places of ``text`` go on."""
    lines = [text[end : end + most].tolist() for end in ends.tolist()]  # the last one ends with -1
    tokens: list[Followed] = []
    while lines and len(tokens) < most:
        heads = [line[len(tokens)] for line in lines]
        token = max(heads, key=heads.count)
        if token < 0:
            break
        votes = heads.count(token)
        if votes < len(lines):
            lines = [line for line in lines if line[len(tokens)] == token]
        tokens.append(Followed(token, votes, len(heads)))
    return tokens


def _evidence(match: int, votes: int, places: int) -> int:
    """Return the kind of a token of a draft: its match, and how many places agree on it."""
    return min(match, LONGEST_MATCH) * _AGREED + (0 if votes < places else min(votes, _AGREED - 1))
