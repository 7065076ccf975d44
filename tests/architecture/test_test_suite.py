"""Rules for every test file: what is left to ``tests/conftest.py``."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("*.py") if path.name != "conftest.py")
PROFILE = {"deadline", "derandomize", "database", "print_blob"}


def settings_of_the_profile(tree: ast.Module) -> list[str]:
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


def limits_of_waits(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            given += node.args[:1] if name in ("wait", "join", "result") else []
            numbers = [value.value for value in given if isinstance(value, ast.Constant)]
            found += [f"line {node.lineno}: {n}" for n in numbers if isinstance(n, int | float) and n >= 10]
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("thread.join(20)\nclient.generate([1], timeout=60.0)", ["line 1: 20", "line 2: 60.0"]),
        ("client.generate([1], timeout=0.1)\nclient.flush_cache(timeout_s=60)\n','.join(x)", []),
    ],
)
def test_the_rule_about_waits_itself(source, found):
    assert limits_of_waits(ast.parse(source)) == found


def test_no_wait_that_is_meant_to_succeed_has_a_limit_of_its_own():
    words = ("timeout=", ".wait(", ".join(", ".result(")
    found = {
        name: limits_of_waits(tree) for name, tree in trees_of(words) if not name.startswith("packaging/")
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def trees_of(words: Iterable[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the syntax tree of each file whose text has one of ``words``: to parse all takes seconds."""
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        if any(word in source for word in words):
            yield str(path.relative_to(TESTS)), ast.parse(source)


def test_the_profile_alone_says_how_hypothesis_runs():
    found = {name: settings_of_the_profile(tree) for name, tree in trees_of(PROFILE)}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert "architecture/test_test_suite.py" in found


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


def unpickling(tree: ast.Module) -> list[str]:
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
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name) and full(node) in UNPICKLERS
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle\npickle.loads(b'')", ["line 2"]),
        ("import pickle as p\np.load(f)", ["line 2"]),
        ("from pickle import Unpickler as U\nU(f)", ["line 2"]),
        ("import pickle\nread = pickle.loads", ["line 2"]),
        ("import pickle\nclass Mine(pickle.Unpickler): ...", ["line 2"]),
        ("import pickle\npickle.dumps(1)\njson.loads('1')\nloads = 1\nloads", []),
    ],
)
def test_the_rule_about_pickles(source, found):
    assert unpickling(ast.parse(source)) == found


def test_nothing_is_unpickled_but_as_the_oracle_of_the_restricted_reader():
    modules = {name.rpartition(".")[0] for name in UNPICKLERS}
    assert {name for name, tree in trees_of(modules) if unpickling(tree)} == {
        "unit/io_struct/test_legacy_pickle.py"
    }
