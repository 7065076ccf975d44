"""What every test file has to leave to ``tests/conftest.py``, so that a run is repeatable on a busy machine, too."""

import ast
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("*.py") if path.name != "conftest.py")
PROFILE = {"deadline", "derandomize", "database", "print_blob"}


def settings_of_the_profile(source: str) -> list[str]:
    """Keywords of ``settings(...)`` that belong into the profile."""
    return [
        f"line {node.lineno}: {keyword.arg}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "settings"
        for keyword in node.keywords
        if keyword.arg in PROFILE
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("@settings(max_examples=3, deadline=None)\ndef f(): ...", ["line 1: deadline"]),
        ("\nx = hypothesis.settings(derandomize=True)", ["line 2: derandomize"]),
        ("@settings(max_examples=3)\ndef f(): ...", []),
    ],
)
def test_the_rule_itself(source, found):
    assert settings_of_the_profile(source) == found


def test_the_profile_alone_says_how_hypothesis_runs():
    files = {str(path.relative_to(TESTS)): path.read_text(encoding="utf-8") for path in FILES}
    assert {name: found for name, text in files.items() if (found := settings_of_the_profile(text))} == {}


def test_no_example_has_a_time_limit():
    assert settings().deadline is None


def test_no_two_files_have_one_name():
    """``--import-mode=importlib`` would take them; people who search, and ``pytest -k``, would not."""
    names = [path.name for path in FILES]
    assert sorted({name for name in names if names.count(name) > 1 and name != "__init__.py"}) == []
