"""What every test file has to leave to ``tests/conftest.py``, so that a run is repeatable on a busy machine, too."""

import ast
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("*.py") if path.name != "conftest.py")
PROFILE = {"deadline", "derandomize", "database", "print_blob"}


def settings_of_the_profile(tree: ast.Module) -> list[str]:
    """Keywords of ``settings(...)`` that belong into the profile."""
    return [
        f"line {node.lineno}: {keyword.arg}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "settings"
        for keyword in node.keywords
        if keyword.arg in PROFILE
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("@settings(max_examples=examples(3), deadline=None)\ndef f(): ...", ["line 1: deadline"]),
        ("\nx = hypothesis.settings(derandomize=True)", ["line 2: derandomize"]),
        ("@settings(max_examples=examples(3))\ndef f(): ...", []),
    ],
)
def test_the_rule_itself(source, found):
    assert settings_of_the_profile(ast.parse(source)) == found


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(TESTS)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def test_the_profile_alone_says_how_hypothesis_runs(trees):
    assert {name: found for name, tree in trees.items() if (found := settings_of_the_profile(tree))} == {}


def test_no_example_has_a_time_limit():
    assert settings().deadline is None


def test_no_two_files_have_one_name():
    """``--import-mode=importlib`` would take them; people who search, and ``pytest -k``, would not."""
    names = [path.name for path in FILES]
    assert sorted({name for name in names if names.count(name) > 1 and name != "__init__.py"}) == []


def unpickling(tree: ast.Module) -> list[str]:
    """Calls of ``pickle.load``, ``pickle.loads`` and ``pickle.Unpickler``, however imported."""
    names = {"load", "loads", "Unpickler"}
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "pickle"
        for alias in node.names
        if alias.name in names
    }
    calls = {f"pickle.{name}" for name in names} | imported
    return [
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls
    ]


def test_the_rule_about_pickles():
    assert unpickling(ast.parse("import pickle\npickle.loads(b'')")) == ["line 2"]
    assert unpickling(ast.parse("from pickle import Unpickler as U\nU(f)\npickle.dumps(1)")) == ["line 2"]


def test_nothing_is_unpickled_but_as_the_oracle_of_the_restricted_reader(trees):
    """What a stranger sends is never unpickled, and no test may need it: the one file compares our reader with pickle's."""
    assert {name for name, tree in trees.items() if unpickling(tree)} <= {
        "unit/io_struct/test_legacy_pickle.py"
    }
