"""Writes the tables of docs/reference/python.md: parameters and results of the Python clients, field by
field.

Invariant: every struct and dataclass of ``caesura.client`` and ``caesura.client.text`` has a table, and a
field's meaning is the docstring below it. Run ``python docs/generate_python.py`` after a change of one
(``--check``: see :mod:`generated_parts`).
"""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from generate_wire import field_docs, markdown, wrapped
from generated_parts import update

from caesura import client, io_struct
from caesura.client import text
from caesura.client.connection.results import TokenDetails

DOCUMENT = Path(__file__).parent / "reference" / "python.md"
PARAMETERS = (client.SamplingParams, client.SdeParams, client.TensorSpec)
INSIDE = (TokenDetails, io_struct.SamplingMask, io_struct.RoutedExperts)
"""Public types that no module of a client exports: values of fields."""


def structs() -> Iterator[Any]:
    """Yield the values with fields that clients take and return, ordered by name."""
    for module in (client, text):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and (
                dataclasses.is_dataclass(value) or issubclass(value, msgspec.Struct)
            ):
                yield value


def section(cls: Any) -> Iterator[str]:
    """Yield the heading, docstring and table of fields, properties and methods."""
    yield f"### {cls.__name__}"
    yield wrapped(markdown(inspect.getdoc(cls)))
    docs = field_docs(cls)
    rows = ["| field | type | meaning |", "|---|---|---|"]
    plain = Plain(vars(sys.modules[cls.__module__]))
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    for each in definition.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            default = "" if each.value is None else f", default `{ast.unparse(each.value)}`"
            rows.append(
                f"| `{each.target.id}` | {plain.text(each.annotation)}{default} | {docs[each.target.id]} |"
            )
        elif isinstance(each, ast.FunctionDef) and not each.name.startswith("_") and is_method(each):
            assert each.returns is not None
            says = markdown(ast.get_docstring(each)).partition("\n\n")[0]
            rows.append(f"| `{named(each)}` | {plain.text(each.returns)} | {says} |")
    yield "\n".join(rows)


def named(function: ast.FunctionDef) -> str:
    """Return a property by its name, a method with the names of its arguments."""
    if any(ast.unparse(each) == "property" for each in function.decorator_list):
        return function.name
    arguments = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
    return f"{function.name}({', '.join(arguments)})"


def is_method(function: ast.FunctionDef) -> bool:
    """Return a property, or a method of an instance."""
    return all(ast.unparse(each) == "property" for each in function.decorator_list)


class Plain(ast.NodeTransformer):
    """Types as a caller needs them: the constraints of ``Annotated`` are the wire's to say, and names of
    unions are spelled out.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def text(self, node: ast.expr) -> str:
        """Return a type as a code span of a table."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        return f"`{ast.unparse(self.visit(node))}`".replace("|", "\\|")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Spell out an alias of the module."""
        kind = self._names.get(node.id)
        if get_origin(kind) is Annotated:
            return ast.Name(get_args(kind)[0].__name__)
        if get_origin(kind) is Literal:
            return ast.parse(f"Literal[{', '.join(map(repr, get_args(kind)))}]", mode="eval").body
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Return the type without its constraints."""
        self.generic_visit(node)
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return node


def parameters() -> str:
    """Return the parameters of requests."""
    return "\n\n".join(part for cls in PARAMETERS for part in section(cls))


def results() -> str:
    """Return the results."""
    found = [cls for cls in structs() if cls not in PARAMETERS]
    return "\n\n".join(part for cls in (*found, *INSIDE) for part in section(cls))


PARTS = {"parameters": parameters, "results": results}


if __name__ == "__main__":
    sys.exit(update(DOCUMENT, PARTS))
