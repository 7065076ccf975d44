"""Limits on chat templates: time, output size, and the size of intermediate results.

Invariants:
- Every iteration of a loop and every call of a macro checks the time, so a template that would run for ever is stopped.
- The sizes of all results of operators, filters and calls are added up, and so is the prompt. Numbers that determine a size are
  checked before anything of that size is made.

This keeps a faulty template from blocking a server or filling its memory. It does not stop an attacker: a hostile template can
still use the whole allowance with every request.
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
MAX_CHARACTERS = 16 << 20
"""Of a prompt."""
MAX_MADE = 64 << 20
"""Characters and items that operators, filters and calls make on the way there."""
MAX_NUMBER = 1 << 20
"""For counts and widths."""
_MAX_BITS = 4096
_SIZED_FILTERS = frozenset(
    {"do_center", "do_indent", "do_batch", "sync_do_slice", "do_wordwrap", "do_truncate"}
)


_WIDE = re.compile(r"[0-9]{7}|%[-+ #0-9.]*\*|:[^{}]*\{")


class TemplateTooCostly(jinja2.TemplateError):
    """The template took too long or made too much text."""


class _Allowance(threading.local):
    """The remaining time and size for the template that this thread renders."""

    until: float | None = None
    made: int = 0


_allowance = _Allowance()


@contextmanager
def allowance() -> Iterator[None]:
    """Inside this block a template has :data:`MAX_SECONDS` and :data:`MAX_MADE`."""
    _allowance.until, _allowance.made = time.monotonic() + MAX_SECONDS, 0
    try:
        yield
    finally:
        _allowance.until = None


def rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text of ``template``.

    Raises:
        TemplateTooCostly: it is over its allowance.
    """
    pieces: list[str] = []
    size = 0
    with allowance():
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise TemplateTooCostly(f"the prompt is over the limit of {MAX_CHARACTERS} characters")
            pieces.append(piece)
    return "".join(pieces)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, whose templates are under :func:`allowance`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.next_round, self.joined = _next_round, _join

    def bound_filters(self) -> None:
        """Bound all filters that there are by now."""
        for name, each in self.filters.items():
            self.filters[name] = _bounded(each)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        _Checks().visit(tree)
        return tree

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """An operator between two values."""
        if operator == "**" or (operator == "*" and isinstance(left, int) and isinstance(right, int)):
            _check_power(operator, left, right)
        elif operator == "*":
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if hasattr(sized, "__len__") and isinstance(times, int):
                _spend(len(sized) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _spent(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call that a template makes."""
        _check_method(function, args, kwargs)
        return _spent(super().call(context, function, *args, **kwargs))


class _Checks(NodeTransformer):
    """Adds a check of the time to loops and macros, and replaces ``~`` by :func:`_join`."""

    def visit_For(self, node: jinja2.nodes.For) -> Any:  # noqa: N802  (Jinja's names)
        return self._begin(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> Any:  # noqa: N802
        return self._begin(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def _begin(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call("next_round", [], node.lineno), lineno=node.lineno))
        return node


def _call(name: str, arguments: list[jinja2.nodes.Expr], line: int) -> jinja2.nodes.Call:
    function = jinja2.nodes.EnvironmentAttribute(name, lineno=line)  # no variable can take its place
    return jinja2.nodes.Call(function, arguments, [], None, None, lineno=line)


def _next_round() -> str:
    if _allowance.until is not None and time.monotonic() > _allowance.until:
        raise TemplateTooCostly(f"the template takes longer than {MAX_SECONDS:g} s")
    return ""


def _join(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _spend(sum(map(len, texts)))
    return "".join(texts)


def _spend(size: int) -> None:
    _next_round()
    _allowance.made += size
    if _allowance.made > MAX_MADE:
        raise TemplateTooCostly(f"the template makes more than {MAX_MADE} characters on its way")


def _spent(value: Any) -> Any:
    if isinstance(value, str | list | tuple | dict):
        _spend(len(value))
    return value


def _check_power(operator: str, left: Any, right: Any) -> None:
    bits = left.bit_length() if isinstance(left, int) else 0
    more = right.bit_length() if isinstance(right, int) else 0
    if isinstance(left, int) and isinstance(right, int):
        size = bits + more if operator == "*" else bits * max(right, 0)
        if size > _MAX_BITS:
            raise TemplateTooCostly("a number is too large")


def _check_format(pattern: str) -> None:
    """Refuse widths and precisions of ``%``, ``format`` and the like that are not written as a few digits."""
    if _WIDE.search(pattern):
        raise TemplateTooCostly("a width in a format is too large, or computed")


def check_numbers(values: Iterable[Any]) -> None:
    """Refuse counts and widths that are too large."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateTooCostly(f"{value} is over the limit of {MAX_NUMBER}")


def _check_method(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    function = getattr(function, "__wrapped__", function)  # the sandbox wraps formatting
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, str | bytes | int):
        check_numbers((*args, *kwargs.values()))
    if isinstance(owner, str):
        if name in ("format", "format_map"):
            _check_format(owner)
        elif name == "replace" and len(args) > 1:
            _spend((owner.count(str(args[0])) + 1) * len(str(args[1])))
        elif name == "join" and args and hasattr(args[0], "__len__"):
            _spend(len(owner) * len(args[0]))


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with limited counts and widths, whose result is counted."""
    name = getattr(function, "__name__", "")

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        texts = [arg for arg in args if isinstance(arg, str)]
        if name in _SIZED_FILTERS:
            check_numbers((*args[1:], *kwargs.values()))
        elif name == "do_replace" and len(texts) > 2:
            _spend((texts[0].count(texts[1]) + 1) * len(texts[2]))
        elif name == "do_format" and texts:
            _check_format(texts[0])
        return _spent(function(*args, **kwargs))

    return checked
