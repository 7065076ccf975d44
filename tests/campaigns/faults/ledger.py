"""Ledger of requests and answers: every accepted request ends once, with the tokens that its spans promise.

Invariants:
- The ledger sees terminal messages as they arrive, before any client library has merged or dropped one.
- A request is *lost* when its time is up and the engine has nothing alive, *stuck* when the engine still has
  something alive, *doubled* when it ended more than once. A result or checksum is *torn* when no single known
  version explains it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np

from caesura.io_struct import ErrorReply, GenerateReqOutput, StreamDelta

Harm = Literal["lost", "doubled", "stuck", "torn", "leaked", "failed"]
HARMS: tuple[Harm, ...] = get_args(Harm)
"""Kinds of broken promises; ``failed`` is what fits nowhere else."""


class Successors(Protocol):
    """A version of the weights, as far as its tokens go."""

    @property
    def successor(self) -> Sequence[int]: ...


class Span(Protocol):
    @property
    def version(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(frozen=True)
class Problem:
    """One promise that was not kept."""

    harm: Harm
    text: str


@dataclass
class Account:
    """One sample that was asked for."""

    last_token: int
    """Last token of the prompt."""
    new_tokens: int
    ends: int = 0
    streamed: dict[int, int] = field(default_factory=dict)
    """Output position to token."""


def check_tokens(
    name: str,
    last_token: int,
    tokens: Sequence[int],
    spans: Sequence[Span],
    versions: Mapping[str, Successors],
) -> list[Problem]:
    """Check that ``spans`` cover ``tokens`` and each token follows the one before under its version."""
    covered = 0
    for span in spans:
        if span.start != covered or span.end < span.start:
            return [Problem("torn", f"{name}: a span starts at {span.start} where {covered} was due")]
        if span.version not in versions:
            return [Problem("torn", f"{name}: a span of the unknown version {span.version!r}")]
        successor = versions[span.version].successor
        for place in range(span.start, min(span.end, len(tokens))):
            before = tokens[place - 1] if place else last_token
            if tokens[place] != successor[before]:
                what = f"token {place} is {tokens[place]}"
                text = f"{name}: {what}, which does not follow {before} in {span.version!r}"
                return [Problem("torn", text)]
        covered = span.end
    if covered != len(tokens):
        return [Problem("torn", f"{name}: spans cover {covered} of {len(tokens)} tokens")]
    return []


class Ledger:
    """Accounts of one client's requests. ``versions`` are the known weights by label."""

    def __init__(self, versions: Mapping[str, Successors]) -> None:
        self._versions = versions
        self._accounts: dict[tuple[str, int], Account] = {}
        self._results: list[tuple[Account, GenerateReqOutput]] = []
        self._problems: list[Problem] = []

    def asked(self, rid: str, prompt: Sequence[int], new_tokens: int, samples: int = 1) -> None:
        """Record a greedy generate request without an end of its own; its message id is its rid."""
        for index in range(samples):
            self._accounts[rid, index] = Account(prompt[-1], new_tokens)

    def streamed(self, delta: StreamDelta) -> None:
        counts = np.frombuffer(delta.counts, "<i4").tolist()
        starts, indices = (
            np.frombuffer(delta.starts, "<i4").tolist(),
            np.frombuffer(delta.indices, "<i4").tolist(),
        )
        tokens = iter(np.frombuffer(delta.tokens, "<i4").tolist())
        for rid, index, start, count in zip(delta.rids, indices, starts, counts, strict=True):
            account = self._accounts.get((rid, index))
            for place in range(start, start + count):
                token = next(tokens)
                if account is not None and account.streamed.setdefault(place, token) != token:
                    self._add("torn", f"{rid}: token {place} was streamed twice, differently")

    def ended(self, result: GenerateReqOutput) -> None:
        account = self._end(result.rid, result.index)
        if account is None:
            return
        tokens = np.frombuffer(result.output_ids, "<i4").tolist()
        self._results.append((account, result))
        for place, token in account.streamed.items():
            if place >= len(tokens) or tokens[place] != token:
                self._add("torn", f"{result.rid}: what was streamed at {place} is not in its result")
                break
        reason = result.finish_reason
        if reason.type == "error" or (reason.type == "length" and len(tokens) != account.new_tokens):
            self._add(
                "failed", f"{result.rid}: ended as {reason} with {len(tokens)} of {account.new_tokens} tokens"
            )

    def refused(self, reply: ErrorReply) -> None:
        """Record an error; as the answer to a generate request it ends all of its samples."""
        samples = [index for rid, index in self._accounts if rid == reply.id]
        for index in samples:
            self._end(reply.id, index)
        if samples:
            self._add("failed", f"{reply.id}: refused as {reply.code}: {reply.message}")

    def open(self) -> list[str]:
        return sorted({rid for (rid, _), account in self._accounts.items() if not account.ends})

    def close(self, *, alive: int) -> list[Problem]:
        """Return all problems and empty the ledger; requests that are still open are overdue."""
        for account, result in self._results:
            tokens = np.frombuffer(result.output_ids, "<i4").tolist()
            self._problems += check_tokens(
                result.rid, account.last_token, tokens, result.weight_versions, self._versions
            )
        for (rid, index), account in self._accounts.items():
            if not account.ends:
                harm: Harm = "stuck" if alive else "lost"
                self._add(harm, f"{rid}[{index}]: no terminal message; the engine has {alive} live requests")
        found, self._problems, self._accounts, self._results = self._problems, [], {}, []
        return found

    def forget(self) -> None:
        """Forgive unanswered requests of a dead engine; what has ended more than once still counts."""
        self._accounts = {key: account for key, account in self._accounts.items() if account.ends}

    def _end(self, rid: str, index: int) -> Account | None:
        account = self._accounts.get((rid, index))
        if account is None:
            self._add(
                "doubled", f"{rid}[{index}]: a terminal message that nobody asked for, or asked for long ago"
            )
            return None
        account.ends += 1
        if account.ends > 1:
            self._add("doubled", f"{rid}[{index}]: terminal message number {account.ends}")
            return None
        return account

    def _add(self, harm: Harm, text: str) -> None:
        self._problems.append(Problem(harm, text))


def count_harms(problems: Sequence[Problem]) -> dict[Harm, int]:
    counted = Counter(problem.harm for problem in problems)
    return {harm: counted[harm] for harm in HARMS}
