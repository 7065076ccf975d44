"""Mutation testing of a tiny tree: what becomes of a mutant, and the list of equivalents."""

import json

from campaigns import mutation
from campaigns.mutation import KILLED, MODULES, SURVIVED, TIMEOUT, Mutant, Place

SOURCE = """
LIMIT = 3 + 4


def twice(number):
    return (
        number
        + number
    )


def bounded(number):
    if number > LIMIT:
        return LIMIT
    return number
"""
TESTS = """
from caesura.thing import bounded, twice

def test_twice():
    assert twice(3) == 6

def test_bounded():
    assert bounded(100) == 7
"""


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
