"""Every public name of the Python client says what it is, down to fields and attributes."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from caesura import client
from caesura.client import group, text
from caesura.client import trainer as tensors


def public_objects(module: Any) -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, type) or inspect.isroutine(value):
            yield name, value


PUBLIC = sorted(
    {(name, value) for module in (client, tensors, text, group) for name, value in public_objects(module)},
    key=lambda each: (each[0], each[1].__module__),
)


def documented(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the names that ``body`` assigns, as attributes of ``owner`` where one is given."""
    for statement, below in pairwise([*body, ast.Pass()]):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
        said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        for target in targets:
            before, _, name = ast.unparse(target).rpartition(".")
            if before == owner:
                yield name, said


def values(cls: type) -> dict[str, bool]:
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    (definition,) = (
        node for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__
    )
    constructors = (
        each for each in definition.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
    )
    lines = {line.partition(":")[0].strip() for line in (cls.__doc__ or "").splitlines() if ":" in line}
    found = dict(documented(definition.body))
    for constructor in constructors:
        found |= documented(constructor.body, "self")
    return {name: said or name in lines for name, said in found.items() if not name.startswith("_")}


def members(cls: type) -> dict[str, bool]:
    return {
        name: bool(inspect.getdoc(member))
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property | classmethod | staticmethod))
    }


def silent(kind: type) -> list[str]:
    """Return the public members of ``kind`` without a docstring."""
    explained: dict[str, bool] = {}
    for cls in reversed(kind.__mro__):
        if cls.__module__.startswith("caesura."):
            for name, said in (values(cls) | members(cls)).items():
                explained[name] = said or explained.get(name, False)
    return [name for name, said in explained.items() if not said]


def test_public_names_and_members_have_docstrings():
    for name, value in PUBLIC:
        own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        assert own, f"{name} has no docstring of its own"
        assert not isinstance(value, type) or silent(value) == [], name


@pytest.mark.parametrize("module", [client, tensors], ids=lambda module: module.__name__)
def test_other_names_are_documented_where_they_are_made(module):
    for name in set(module.__all__) - dict(public_objects(module)).keys():
        found = {}
        for made_in in {value.__module__ for _, value in public_objects(module)}:
            tree = ast.parse(inspect.getsource(importlib.import_module(made_in)))
            found |= {key: said for key, said in documented(tree.body) if key == name}
        assert found == {name: True}, f"{name} has no docstring"
