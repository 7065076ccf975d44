"""Passes over a :class:`~.tracer.Trace`, and its compilation to a function of Python.

Invariants:
- No pass changes a bit of the result. Left out are calls whose results nobody takes, copies of a call with
  the same arguments (unless some call writes to its arguments), and views of views.
- A compiled function holds no result longer than the calls that take it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .tracer import Affine, Call, Trace, Value, leaves, mapped

TOKENS = "tokens"
EFFECTS = frozenset({"attend", "experts", "layer"})
"""Kinds of calls that do something beside their results."""
_IN_PLACE: dict[Any, Any] = {
    Tensor.mul: Tensor.mul_, Tensor.__mul__: Tensor.mul_, torch.mul: Tensor.mul_,
    Tensor.div: Tensor.div_, Tensor.__truediv__: Tensor.div_, torch.div: Tensor.div_,
    Tensor.tanh: Tensor.tanh_, torch.tanh: Tensor.tanh_,
}  # fmt: skip
_LITERALS = (bool, int, float, str, type(None), type(Ellipsis))

Makers = dict[Value, tuple[int, Call]]
"""Place of the call that makes each value, and that call."""


def tidy(trace: Trace) -> None:
    """Leave out the calls that no result needs."""
    for call in trace.calls:
        _unsqueeze(call)
    _merge_views(trace)
    if not any(call.mutates for call in trace.calls):
        _merge_equal(trace)
    drop_unused(trace)


def drop_unused(trace: Trace) -> None:
    needed, kept = {trace.out}, []
    for call in reversed(trace.calls):
        if call.mutates or call.kind in EFFECTS or any(out in needed for out in call.outs):
            needed.update(call.inputs())
            kept.append(call)
    trace.calls = kept[::-1]


def fold_constants(trace: Trace, tensors: Mapping[Value, Tensor], weights: Iterable[Tensor]) -> None:
    """Replace values that follow from neither inputs nor ``weights`` by the tensors that tracing has made."""
    changing = {id(each) for each in weights}
    constants: dict[Any, Any] = {}
    if any(call.mutates for call in trace.calls):
        return
    for call in trace.calls:
        if not any(
            id(leaf) in changing or (isinstance(leaf, Value) and leaf not in constants)
            for leaf in leaves((call.args, call.kwargs))
        ):
            constants.update((out, tensors[out]) for out in call.outs)
    replace(trace, constants)
    drop_unused(trace)


def replace(trace: Trace, values: Mapping[Value, Any]) -> None:
    if not values:
        return

    def changed(leaf: Any) -> Any:
        while isinstance(leaf, Value) and leaf in values:
            leaf = values[leaf]
        return leaf

    for call in trace.calls:
        call.args, call.kwargs = mapped(changed, (call.args, call.kwargs))
    trace.out = changed(trace.out)


def write_in_place(trace: Trace, value: Value) -> None:
    """Have what is computed from ``value`` by element overwrite it, as long as nothing else takes it."""
    takers = takers_of(trace)
    while value is not trace.out and len(takers.get(value, [])) == 1:
        (call,) = takers[value]
        if call.several or call.args[0] is not value or len(call.inputs()) > 1:
            return
        (out,) = call.outs
        if not call.reshapes:
            in_place = _IN_PLACE.get(call.target)
            if in_place is None or call.kwargs or (out.shape, out.dtype) != (value.shape, value.dtype):
                return
            if any(isinstance(each, Tensor) for each in call.args):
                return
            call.target, call.mutates = in_place, True
        value = out


def _unsqueeze(call: Call) -> None:
    """Have indexing that adds one axis do no more: parsing an index takes as long as a small product."""
    if call.target is Tensor.__getitem__ and isinstance(call.args[1], tuple):
        value, index = call.args
        axes = [place for place, each in enumerate(index) if each is None]
        if len(axes) == 1 and all(
            type(each) is slice and each == slice(None) for each in index if each is not None
        ):
            call.target, call.args = Tensor.unsqueeze, (value, axes[0])


def _merge_views(trace: Trace) -> None:
    """Take a tensor itself where something is a view of a view of it in the tensor's shape."""
    chains: dict[Value, list[Value]] = {}
    same: dict[Value, Value] = {}
    for call in trace.calls:
        if call.reshapes and isinstance(call.args[0], Value):
            (out,), source = call.outs, call.args[0]
            before = chains.get(source, [source])
            found = next((each for each in before if each.shape == out.shape), None)
            if found is not None:
                same[out] = found
            chains[out] = [*before, out]
    replace(trace, same)


def _merge_equal(trace: Trace) -> None:
    first: dict[Any, Call] = {}
    same: dict[Value, Value] = {}

    def key(leaf: Any) -> Any:
        leaf = same.get(leaf, leaf) if isinstance(leaf, Value) else leaf
        try:
            hash(leaf)
        except TypeError:
            return id(leaf)
        return id(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf)

    for call in trace.calls:
        if not call.kind:
            arguments = (call.args, tuple(call.kwargs.items()))
            form = repr(mapped(lambda _: None, arguments))
            known = first.setdefault((call.target, form, *map(key, leaves(arguments))), call)
            if known is not call:
                same.update(zip(call.outs, known.outs, strict=True))
    replace(trace, same)


def takers_of(trace: Trace) -> dict[Value, list[Call]]:
    takers: dict[Value, list[Call]] = {}
    for call in trace.calls:
        for value in dict.fromkeys(call.inputs()):
            takers.setdefault(value, []).append(call)
    return takers


def makers_of(trace: Trace) -> Makers:
    return {out: (place, call) for place, call in enumerate(trace.calls) for out in call.outs}


def slice_of(makers: Makers, outs: Iterable[Value], borders: set[Value]) -> tuple[list[Call], set[Value]]:
    """Return the calls that make ``outs`` from ``borders`` and inputs, and those of both they take."""
    wanted: dict[int, Call] = {}
    begin: set[Value] = set()
    waiting = list(outs)
    while waiting:
        value = waiting.pop()
        if value in borders or value not in makers:
            begin.add(value)
            continue
        place, maker = makers[value]
        if place not in wanted:
            wanted[place] = maker
            waiting += maker.inputs()
    return [wanted[place] for place in sorted(wanted)], begin


def by_position(trace: Trace, positions: Value) -> set[Value]:
    """Return the values that follow from positions alone, and no other property of a step."""
    known = {positions}
    for call in trace.calls:
        arguments = leaves((call.args, call.kwargs))
        if call.kind or call.mutates or any(isinstance(each, torch.Generator) for each in arguments):
            continue
        inputs = call.inputs()
        affine = any(isinstance(each, Affine) for each in arguments)
        if all(value in known for value in inputs) and (inputs or not affine):
            known.update(call.outs)
    return known


class _Source:
    """Expressions for arguments, and the objects that they name."""

    def __init__(self, constants: Mapping[int, Any]) -> None:
        self.objects: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._constants = constants

    def constant(self, value: Any) -> str:
        value = self._constants.get(id(value), value)
        name = self._names.setdefault(id(value), f"k{len(self._names)}")
        self.objects[name] = value
        return name

    def text(self, argument: Any) -> str:
        return repr(mapped(self._leaf, argument))

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return _Expression(leaf.name)
        if isinstance(leaf, Affine):
            return _Expression(f"{leaf.scale} * {TOKENS} + {leaf.offset}")
        if type(leaf) in _LITERALS and (not isinstance(leaf, float) or leaf - leaf == 0.0):
            return leaf
        return _Expression(self.constant(leaf))


class _Expression(str):
    """Text that a structure's ``repr`` holds as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def compiled(
    calls: Sequence[Call],
    inputs: Sequence[Value],
    outs: Sequence[Value],
    *,
    stops: bool = False,
    constants: Mapping[int, Any] | None = None,
) -> Callable[..., Any]:
    """Return a function of ``inputs`` and T that makes the calls and returns ``outs``, one as it is.

    Args:
        stops: make a generator, which yields each layer's number before the layer's calls.
        constants: other tensors, by the identity of those that they stand for.
    """
    source = _Source(constants or {})
    last = {value: number for number, call in enumerate(calls) for value in call.inputs()}
    lines = []
    for number, call in enumerate(calls):
        if call.kind == "layer":
            lines += [f"yield {call.detail}"] if stops else []
            continue
        named = (f"{name}={source.text(each)}" for name, each in call.kwargs.items())
        line = f"{source.constant(call.target)}({', '.join([*map(source.text, call.args), *named])})"
        if call.outs:
            line = f"{', '.join(out.name for out in call.outs)}{',' if call.several else ''} = {line}"
        lines.append(line)
        gone = [each for each in dict.fromkeys(call.inputs()) if last[each] == number and each not in outs]
        gone += [each for each in call.outs if each not in last and each not in outs]
        if gone and call is not calls[-1]:
            lines.append(f"del {', '.join(value.name for value in gone)}")
    lines.append(f"return {', '.join(out.name for out in outs)}")
    head = f"def run({', '.join([*(value.name for value in inputs), TOKENS])}):\n    "
    # Of names and literals that are made here; what a call is given by the model are constants with a name.
    exec(compile(head + "\n    ".join(lines), "<trace>", "exec"), source.objects)  # noqa: S102
    function: Callable[..., Any] = source.objects["run"]
    return function
