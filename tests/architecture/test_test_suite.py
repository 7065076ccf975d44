"""Rules for every test file: what is left to ``tests/conftest.py``."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("*.py") if path.name != "conftest.py")
PROFILE = {"deadline", "derandomize", "database", "print_blob"}


def settings_of_the_profile(tree: ast.Module) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "settings"
        for keyword in node.keywords
        if keyword.arg in PROFILE
    ]


def limits_of_waits(tree: ast.Module) -> list[int]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            given += node.args[:1] if name in ("wait", "join", "result") else []
            numbers = [value.value for value in given if isinstance(value, ast.Constant)]
            found += [node.lineno for number in numbers if isinstance(number, int | float) and number >= 10]
    return found


def trees_of(words: Iterable[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the syntax tree of each file whose text has one of ``words``: to parse all takes seconds."""
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        if any(word in source for word in words):
            yield str(path.relative_to(TESTS)), ast.parse(source)


def test_no_example_has_a_time_limit():
    assert settings().deadline is None


ENTRY = ("__init__.py", "__main__.py")


def test_no_two_files_have_one_name():
    """``--import-mode=importlib`` would take them; people who search, and ``pytest -k``, would not."""
    names = [path.name for path in FILES]
    assert sorted({name for name in names if names.count(name) > 1 and name not in ENTRY}) == []


UNPICKLERS = {
    f"{module}.{name}"
    for module in ("pickle", "_pickle", "cPickle", "dill", "cloudpickle")
    for name in ("load", "loads", "Unpickler")
}


def unpickling(tree: ast.Module) -> list[int]:
    meant = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            meant.update({each.asname or each.name: f"{node.module}.{each.name}" for each in node.names})

    def full(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{full(node.value)}.{node.attr}"
        return meant.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name) and full(node) in UNPICKLERS
    ]


@pytest.mark.parametrize(
    ("rule", "words", "allowed"),
    [
        pytest.param(settings_of_the_profile, PROFILE, "", id="the profile alone says how Hypothesis runs"),
        pytest.param(
            limits_of_waits,
            ("timeout=", ".wait(", ".join(", ".result("),
            "packaging/",
            id="no wait that is meant to succeed has a limit of its own",
        ),
        pytest.param(
            unpickling,
            {name.rpartition(".")[0] for name in UNPICKLERS},
            "unit/io_struct/test_legacy_pickle.py",
            id="nothing is unpickled but as the oracle of the restricted reader",
        ),
    ],
)
def test_the_suite_keeps_the_rules(rule, words, allowed):
    lines = {name: rule(tree) for name, tree in trees_of(words)}
    assert "architecture/test_test_suite.py" in lines
    broken = {name: found for name, found in lines.items() if found}
    assert {name: broken[name] for name in broken if not (allowed and name.startswith(allowed))} == {}
    assert not allowed.endswith(".py") or lines[allowed]
