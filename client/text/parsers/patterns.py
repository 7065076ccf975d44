"""``Pattern``: the part of regular expressions that formats need, matched in linear time.

Invariants: a pattern is a row of literals, runs of one class of characters and named groups around such
runs. It is matched from left to right and never goes back, so a model's own pattern costs no more than its
text is long. Whatever else a regular expression can say is refused when it is compiled.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_CLASS = r"(?:\.|\\[wsSd]|\[\^?(?:\\.|[^\]\\])+\])"
_RUN = rf"{_CLASS}[*+]\??"
_LITERAL = r"(?:\\n|\\[^\w\s]|[^\\.^$*+?{}\[\]()|])(?![*+?{])"
_ATOM = re.compile(
    rf"\(\?P<(?P<name>\w+)>(?P<named>{_RUN})\)|(?P<run>{_RUN}|\\n\?)|(?P<literal>(?:{_LITERAL})+)"
)
_ESCAPED = re.compile(r"\\(.)")
_ALTERNATIVES = re.compile(rf"\(\?:((?:{_LITERAL})+(?:\|(?:{_LITERAL})+)*)\)|((?:{_LITERAL})+)")


class UnsupportedError(ValueError):
    """The pattern has more than literals, runs and groups."""


class _Atom(NamedTuple):
    name: str
    """Group, or empty."""
    literal: str
    """Text, or empty for a run."""
    run: re.Pattern[str] | None
    """Characters of a run; one that is ``lazy`` ends before the next literal."""
    lazy: bool
    source: str


class Pattern:
    def __init__(self, source: str) -> None:
        self._atoms: list[_Atom] = []
        at = 0
        while at < len(source):
            found = _ATOM.match(source, at)
            if found is None:
                raise UnsupportedError(f"{source[at:]!r} is more than literals, runs and groups")
            at = found.end()
            if found["literal"]:
                self._atoms.append(_Atom("", _unescaped(found["literal"]), None, False, ""))
            else:
                run = found["named"] or found["run"]
                lazy = run.endswith(("+?", "*?"))
                greedy = re.compile(run.removesuffix("?") if lazy else run, re.DOTALL)
                self._atoms.append(_Atom(found["name"] or "", "", greedy, lazy, run))
        self.names = frozenset(atom.name for atom in self._atoms if atom.name)
        self.literals = frozenset(atom.literal for atom in self._atoms if atom.literal)
        self.begin = self._atoms[0].literal if self._atoms else ""
        """Literal that begins every match, or empty."""

    def match(self, text: str, at: int = 0) -> tuple[dict[str, str], int] | None:
        """Return the groups of a match that begins at ``at``, and where it ends."""
        groups: dict[str, str] = {}
        rest = iter(self._atoms)
        for atom in rest:
            if atom.run is None:
                if not text.startswith(atom.literal, at):
                    return None
                at += len(atom.literal)
                continue
            following = None
            if atom.lazy:
                between, following = _until(rest)
                end = text.find(following, at) if following else len(text)
                run = text[at:end].removesuffix("\n") if between == r"\n?" else text[at:end]
                run = run.rstrip() if between == r"\s*" else run
                found = atom.run.fullmatch(run) if end >= 0 else None
            else:
                found = atom.run.match(text, at)
                end = at if found is None else found.end()
            if found is None:
                return None
            if atom.name:
                groups[atom.name] = found.group()
            at = end + len(following or "")
        return groups, at


def _until(rest: Iterator[_Atom]) -> tuple[str, str]:
    """Return the space before the literal that ends a lazy run, and the literal; both empty at the end."""
    between = ""
    for atom in rest:
        if atom.literal:
            return between, atom.literal
        between = atom.source
    return between, ""


def _unescaped(literal: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], literal)


def heads(source: str) -> tuple[tuple[str, ...], str]:
    """Return the literals one of which begins every match of a regular expression, and its rest."""
    found = _ALTERNATIVES.match(source)
    if found is None:
        raise UnsupportedError(f"{source!r} does not begin with a literal")
    alternatives = re.findall(rf"(?:{_LITERAL})+", found[1] or found[2])
    return tuple(map(_unescaped, alternatives)), source[found.end() :]
