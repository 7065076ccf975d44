"""Mutants of one module: where a change says something about the tests, which are drawn, which can change
nothing.

Invariants:
- A place in an annotation, a decorator, a type alias, a test of ``TYPE_CHECKING``, or in a signature, but for
  its defaults, is never drawn: such a change is either a TypeError at import, which any test would see, or
  nothing at all.
- Equal source, seed and number draw equal mutants; every mutant compiles without a warning, and no two have
  the same text.
"""

import ast
import difflib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Position = tuple[int, int]
"""Line from 1, column from 0."""
Span = tuple[Position, Position]


class Place(NamedTuple):
    """One change that can be made to a source."""

    start: Position
    operator: str
    occurrence: int
    """Which of the operator's places in this source."""


Apply = Callable[[str, Place], str | None]
"""Source and place to changed source; None: there is nothing to change."""


@dataclass(frozen=True, slots=True)
class Mutant:
    module: str
    place: Place
    function: str
    """Qualified name of the function or class around it; empty at module level."""
    before: str
    """The changed line, stripped."""
    after: str
    """What it became."""
    source: str
    """The whole changed module."""
    diff: str


def places_of_interest(source: str, places: Iterable[Place]) -> list[Place]:
    """Those of ``places`` that are not excluded by rule, in the order of the source."""
    tree = ast.parse(source)
    excluded, defaults = list(_excluded(tree)), list(_defaults(tree))

    def inside(place: Place, spans: Iterable[Span]) -> bool:
        return any(start <= place.start < end for start, end in spans)

    return sorted(place for place in places if inside(place, defaults) or not inside(place, excluded))


def draw(
    module: str, source: str, places: Sequence[Place], apply: Apply, count: int, seed: int
) -> list[Mutant]:
    """At most ``count`` mutants, each place as likely as any other; in the order of the source."""
    drawn: dict[str, Mutant] = {}
    for place in random.Random(seed).sample(places, len(places)):
        if len(drawn) == count:
            break
        changed = apply(source, place)
        if changed is None or changed == source or changed in drawn or not _compiles(changed):
            continue
        drawn[changed] = mutant_of(module, source, changed, place)
    return sorted(drawn.values(), key=lambda mutant: mutant.place)


def mutant_of(module: str, source: str, changed: str, place: Place) -> Mutant:
    lines = source.splitlines(), changed.splitlines()
    diff = list(difflib.unified_diff(*lines, f"a/{module}", f"b/{module}", lineterm=""))
    removed = [line[1:].strip() for line in diff[2:] if line.startswith("-")]
    added = [line[1:].strip() for line in diff[2:] if line.startswith("+")]
    function = _function_around(ast.parse(source), place.start[0])
    return Mutant(module, place, function, " ".join(removed), " ".join(added), changed, "\n".join(diff))


def statement_lines(source: str, line: int) -> range:
    """Lines of the innermost statement at ``line``; of one with a body, those of its head."""
    best = range(line, line + 1)
    size = float("inf")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if line in lines and len(lines) < size:
                best, size = _head(node, lines), len(lines)
    return best


def _head(node: ast.AST, lines: range) -> range:
    body = getattr(node, "body", None)
    if not body or line_of(body[0]) <= lines.start:
        return lines
    return range(lines.start, line_of(body[0]))


def line_of(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return int(min([node.lineno, *(decorator.lineno for decorator in decorators)]))


def _excluded(tree: ast.Module) -> Iterator[Span]:
    for node in ast.walk(tree):
        found: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[0]
            yield (node.lineno, node.col_offset), (body.lineno, body.col_offset)
        if isinstance(node, ast.AnnAssign):
            found.append(node.annotation)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found.append(node.test)
        yield from (_span(part) for part in found if part is not None)
        for decorator in getattr(node, "decorator_list", []):
            start, end = _span(decorator)
            yield (start[0], 0), end
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript):
            yield _span(statement.value)


def _defaults(tree: ast.Module) -> Iterator[Span]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            yield from (
                _span(part) for part in [*arguments.defaults, *arguments.kw_defaults] if part is not None
            )


def _span(node: ast.AST) -> Span:
    assert isinstance(node, ast.expr)
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _function_around(tree: ast.Module, line: int) -> str:
    names: list[str] = []
    body: Sequence[ast.AST] = tree.body
    while True:
        for node in body:
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            if isinstance(node, kinds) and line_of(node) <= line <= (node.end_lineno or 0):
                names.append(node.name)
                body = list(ast.iter_child_nodes(node))
                break
        else:
            return ".".join(names)


def _compiles(source: str) -> bool:
    """Without a warning: where warnings are errors, ``is 1`` would be found by any test that imports it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            compile(source, "mutant", "exec", dont_inherit=True)
        except SyntaxError:
            return False
    return True
