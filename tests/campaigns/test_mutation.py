"""Mutation testing of a tiny tree: what may be drawn, which tests a mutant meets, and what becomes of it."""

import json

import pytest
from campaigns import mutation
from campaigns.mutation import KILLED, MODULES, SURVIVED, TIMEOUT, Mutant, Place, draw, places_of_interest

SOURCE = '''"""Arithmetic."""
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

Pair = tuple[int | None, int]
LIMIT = 3 + 4


@cache
def twice(number: int | None = 1 + 1) -> int | None:
    found: int | None = (
        number
        + number
    )
    return found


def bounded(number, *, _=None):
    if number > LIMIT:
        return LIMIT
    return number
'''
TESTS = """
from caesura.thing import bounded, twice

def test_twice():
    assert twice(3) == 6

def test_bounded():
    assert bounded(100) == 7
"""


def places_of(text):
    """Return every place of ``text`` in the source, for an operator of that name."""
    found = []
    for number, line in enumerate(SOURCE.splitlines(), 1):
        start = line.find(text)
        while start >= 0:
            found.append(Place((number, start), text, len(found)))
            start = line.find(text, start + 1)
    return found


def replaced(source, place):
    """Make a change without cosmic-ray: ``operator`` names the old text, ``NEW`` the new one."""
    line, column = place.start
    lines = source.splitlines(keepends=True)
    old = lines[line - 1]
    lines[line - 1] = old[:column] + NEW[place.operator] + old[column + len(place.operator) :]
    return "".join(lines)


NEW = {"+": "-", ">": ">=", " number": " 1 1", "LIMIT": "LIMIT"}


def test_annotations_and_signatures_are_never_drawn():
    assert len(places_of("|")) == 4
    for text in ("|", "@cache", "TYPE_CHECKING:", "*,"):
        assert places_of(text)
        assert places_of_interest(SOURCE, places_of(text)) == []


def test_values_defaults_and_conditions_are_drawn():
    places = places_of_interest(SOURCE, [*places_of("+"), *places_of(" > ")])
    assert [place.start[0] for place in places] == [9, 13, 16, 22]


def test_equal_seeds_draw_equal_mutants():
    places = places_of_interest(SOURCE, places_of("+"))
    first, again = (draw("thing.py", SOURCE, places, 2, 5, replaced) for _ in range(2))
    assert first == again
    assert len(first) == 2
    drawn = {tuple(draw("thing.py", SOURCE, places, 1, seed, replaced)) for seed in range(20)}
    assert len(drawn) == 3


def test_equivalent_invalid_and_equal_mutants_are_never_drawn():
    places = places_of_interest(SOURCE, [*places_of(" number"), *places_of("LIMIT"), *places_of(">")])
    places.append(Place((22, 14), ">", 1))  # another way to the same text
    (drawn,) = draw("thing.py", SOURCE, places, 100, 1, replaced)
    assert (drawn.function, drawn.before) == ("bounded", "if number > LIMIT:")
    assert drawn.after == "if number >= LIMIT:"
    assert drawn.diff.startswith("--- a/thing.py\n+++ b/thing.py\n")
    # and none with a warning of the compiler
    assert draw("thing.py", "x = 1 == 1\n", [Place((1, 6), "==", 0)], 1, 1, lambda *_: "x = 1 is 1\n") == []


def test_an_equivalent_is_known_by_function_and_lines():
    mutant = Mutant.of(
        "thing.py", SOURCE, SOURCE.replace("number > LIMIT", "number >= LIMIT"), Place((22, 14), ">", 0)
    )
    lines = {"line": "if number > LIMIT:", "becomes": "if number >= LIMIT:"}
    entry = {"module": "thing.py", "function": "bounded", **lines}
    assert mutant.reason([{**entry, "reason": "both give the limit"}]) == "both give the limit"
    for key in entry:
        assert mutant.reason([{**entry, "reason": "", key: "another"}]) is None


def test_the_list_of_equivalents_speaks_of_lines_that_are_there():
    for entry in json.loads(mutation.EQUIVALENTS.read_text()):
        assert set(entry) == {"module", "function", "line", "becomes", "reason"}, entry
        assert entry["reason"]
        lines = [line.strip() for line in (mutation.TREE / entry["module"]).read_text().splitlines()]
        assert entry["line"] in lines, entry
        assert entry["module"] in MODULES


def test_every_path_of_the_table_is_there():
    for module, tests in MODULES.items():
        for path in (module, *tests):
            assert (mutation.TREE / path).is_file(), path


def test_the_score_leaves_equivalents_out():
    mutant = Mutant.of("thing.py", SOURCE, SOURCE.replace("3 + 4", "3 - 4"), Place((9, 10), "+", 0))
    verdicts = [KILLED, KILLED, TIMEOUT, SURVIVED, mutation.EQUIVALENT]
    outcomes = [mutation.outcome(mutant, verdict) for verdict in verdicts]
    assert mutation.table(outcomes).splitlines()[-2:] == [
        "| `thing.py` | 5 | 3 | 1 | 1 | 1 | 75.0% |",
        "| all | 5 | 3 | 1 | 1 | 1 | 75.0% |",
    ]


def test_one_mutant_is_killed_and_one_survives(tmp_path):
    tree, folder = tmp_path / "tree", tmp_path / "sandbox"
    (tree / "tests").mkdir(parents=True)
    folder.mkdir()
    for name, text in (("__init__.py", ""), ("thing.py", SOURCE), ("tests/test_thing.py", TESTS)):
        (tree / name).write_text(text)
    ini = '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib -ra"\n'
    (tree / "pyproject.toml").write_text(ini)
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    sandbox = mutation.Sandbox(tree, folder)

    def attempt(old, new, limit_s=None):
        mutant = Mutant.of("thing.py", SOURCE, SOURCE.replace(old, new), Place((9, 0), "-", 0))
        found = sandbox.attempt(mutant, ("tests/test_thing.py",), limit_s)
        return found["verdict"], found["by"].partition(" - ")[0]

    killed = KILLED, "FAILED tests/test_thing.py::test_twice"
    assert attempt("        + number", "        - number") == killed
    assert attempt("    if number >", "    while True:\n        pass\n    if number >", 3.0) == (TIMEOUT, "")
    assert attempt("number > LIMIT", "number >= LIMIT") == (SURVIVED, ""), "without those before"
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before


def test_cosmic_rays_changes_are_listed_and_made():
    pytest.importorskip("cosmic_ray")
    from campaigns.mutation import all_places, changed_source

    places = places_of_interest(SOURCE, all_places(SOURCE))
    assert {place.start[0] for place in places} == {9, 13, 16, 22}
    changed = {changed_source(SOURCE, place) for place in places}
    assert SOURCE.replace("number > LIMIT", "number >= LIMIT") in changed
    assert SOURCE.replace("LIMIT = 3 + 4", "LIMIT = 3 - 4") in changed
