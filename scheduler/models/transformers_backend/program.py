"""A recorded list of calls as a function: made shorter where that changes nothing, then compiled from source.

Invariants:
- What is left out has no effect: calls whose results nobody takes, copies of a call with the same arguments, and views of
  views. Where some call writes to its arguments, calls are not taken for copies of each other.
- A function holds no result longer than the calls that take it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .recording import Along, Call, Recording, Value, flat

TOKENS = "tokens"
"""Of a compiled function: the argument T."""
EFFECTS = frozenset({"attend", "experts", "layer"})
"""Kinds of calls that do something beside their results."""
_IN_PLACE: dict[Any, Any] = {
    Tensor.mul: Tensor.mul_, Tensor.__mul__: Tensor.mul_, torch.mul: Tensor.mul_,
    Tensor.div: Tensor.div_, Tensor.__truediv__: Tensor.div_, torch.div: Tensor.div_,
    Tensor.tanh: Tensor.tanh_, torch.tanh: Tensor.tanh_,
}  # fmt: skip
_LITERALS = (bool, int, float, str, type(None), type(Ellipsis))


def tidy(recording: Recording) -> None:
    """Leave out of the calls what no result needs."""
    _merge_views(recording)
    if not any(call.mutates for call in recording.calls):
        _merge_equal(recording)
    drop_unused(recording)


def drop_unused(recording: Recording) -> None:
    """Leave out calls whose results nobody takes."""
    needed, kept = {recording.out}, []
    for call in reversed(recording.calls):
        if call.mutates or call.kind in EFFECTS or any(out in needed for out in call.outs):
            needed.update(call.inputs())
            kept.append(call)
    recording.calls = kept[::-1]


def replace(recording: Recording, values: dict[Value, Value]) -> None:
    """Have every call, and the result, take other values."""

    def changed(argument: Any) -> Any:
        if isinstance(argument, Value):
            while argument in values:
                argument = values[argument]
            return argument
        if isinstance(argument, dict):
            return {name: changed(each) for name, each in argument.items()}
        if isinstance(argument, slice):
            return slice(changed(argument.start), changed(argument.stop), changed(argument.step))
        if isinstance(argument, (tuple, list)):
            found = [changed(each) for each in argument]
            return found if isinstance(argument, list) else tuple(found)
        return argument

    if values:
        for call in recording.calls:
            call.args, call.kwargs = changed(call.args), changed(call.kwargs)
        recording.out = changed(recording.out)


def write_in_place(recording: Recording, value: Value) -> None:
    """Have what is computed of ``value``, element by element, overwrite it, as long as nothing else takes it."""
    takers: dict[Value, list[Call]] = {}
    for call in recording.calls:
        for each in call.inputs():
            takers.setdefault(each, []).append(call)
    while value is not recording.out and len(takers.get(value, [])) == 1:
        (call,) = takers[value]
        if call.several or call.args[0] is not value or len(call.inputs()) > 1:
            return
        (out,) = call.outs
        if not call.reshapes:
            there = _IN_PLACE.get(call.target)
            if there is None or call.kwargs or (out.shape, out.dtype) != (value.shape, value.dtype):
                return
            if any(isinstance(each, Tensor) for each in call.args):
                return
            call.target, call.mutates = there, True
        value = out


def _merge_views(recording: Recording) -> None:
    """Take a tensor itself where something is a view of a view of it in the tensor's shape."""
    chains: dict[Value, list[Value]] = {}
    same: dict[Value, Value] = {}
    for call in recording.calls:
        if call.reshapes and isinstance(call.args[0], Value):
            (out,), source = call.outs, call.args[0]
            before = chains.get(source, [source])
            found = next((each for each in before if each.shape == out.shape), None)
            if found is not None:
                same[out] = found
            chains[out] = [*before, out]
    replace(recording, same)


def _merge_equal(recording: Recording) -> None:
    """Take the first result of equal calls of torch."""
    first: dict[Any, Call] = {}
    same: dict[Value, Value] = {}
    for call in recording.calls:
        if call.kind:
            continue
        key = _key((call.target, call.args, call.kwargs), same)
        known = first.setdefault(key, call)
        if known is not call:
            same.update(zip(call.outs, known.outs, strict=True))
    replace(recording, same)


def _key(argument: Any, same: dict[Value, Value]) -> Any:
    if isinstance(argument, Value):
        while argument in same:
            argument = same[argument]
        return argument
    if isinstance(argument, dict):
        return tuple((name, _key(each, same)) for name, each in argument.items())
    if isinstance(argument, slice):
        return "slice", _key((argument.start, argument.stop, argument.step), same)
    if isinstance(argument, (tuple, list)):
        return type(argument), tuple(_key(each, same) for each in argument)
    try:
        hash(argument)
    except TypeError:
        return id(argument)
    return (type(argument), argument) if not isinstance(argument, Tensor) else id(argument)


Makers = dict[Value, tuple[int, Call]]
"""Of a value: the call that makes it, and that call's place among all."""


def makers_of(recording: Recording) -> Makers:
    """What makes each value of a recording."""
    return {out: (place, call) for place, call in enumerate(recording.calls) for out in call.outs}


def slice_of(makers: Makers, outs: Iterable[Value], borders: set[Value]) -> tuple[list[Call], set[Value]]:
    """The calls that make ``outs`` from ``borders`` and inputs, in order, and what of these they take."""
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


class _Writer:
    """Source of a function and the objects that it names."""

    def __init__(self, constants: dict[int, Any] | None) -> None:
        self.names: dict[str, Any] = {}
        self._known: dict[int, str] = {}
        self._constants = constants or {}

    def constant(self, value: Any) -> str:
        """A name for an object."""
        value = self._constants.get(id(value), value)
        name = self._known.get(id(value))
        if name is None:
            name = self._known[id(value)] = f"k{len(self.names)}"
            self.names[name] = value
        return name

    def text(self, argument: Any) -> str:
        """An expression for an argument."""
        if isinstance(argument, Value):
            return argument.name
        if isinstance(argument, Along):
            return f"{argument.scale} * {TOKENS} + {argument.offset}"
        if type(argument) is slice:
            return f"slice({', '.join(map(self.text, (argument.start, argument.stop, argument.step)))})"
        if isinstance(argument, dict):
            return f"{{{', '.join(f'{name!r}: {self.text(each)}' for name, each in argument.items())}}}"
        if isinstance(argument, list):
            return f"[{', '.join(map(self.text, argument))}]"
        if isinstance(argument, tuple):
            return f"({''.join(f'{self.text(each)}, ' for each in argument)})"
        if type(argument) in _LITERALS and (not isinstance(argument, float) or argument - argument == 0.0):
            return repr(argument)
        return self.constant(argument)

    def call(self, call: Call) -> str:
        """A statement."""
        arguments = [self.text(each) for each in call.args]
        arguments += [f"{name}={self.text(each)}" for name, each in call.kwargs.items()]
        made = f"{self.constant(call.target)}({', '.join(arguments)})"
        if not call.outs:
            return made
        names = ", ".join(out.name for out in call.outs)
        return f"{names}{',' if call.several else ''} = {made}"


def compiled(
    calls: Sequence[Call],
    inputs: Sequence[Value],
    outs: Sequence[Value],
    *,
    stops: bool = False,
    constants: dict[int, Any] | None = None,
) -> Callable[..., Any]:
    """A function of ``inputs`` and T that makes the calls and returns ``outs``, one as it is, several as a tuple.

    Args:
        stops: it is a generator, which yields each layer's number before the layer's calls.
        constants: other tensors, by the identity of those that they stand for.
    """
    writer = _Writer(constants)
    last = {value: number for number, call in enumerate(calls) for value in call.inputs()}
    lines = []
    for number, call in enumerate(calls):
        if call.kind == "layer":
            lines += [f"yield {call.detail}"] if stops else []
            continue
        lines.append(writer.call(call))
        gone = [
            value for value in dict.fromkeys(call.inputs()) if last[value] == number and value not in outs
        ]
        gone += [value for value in call.outs if value not in last and value not in outs]
        if gone and call is not calls[-1]:
            lines.append(f"del {', '.join(value.name for value in gone)}")
    lines.append(f"return {', '.join(out.name for out in outs)}")
    head = f"def run({', '.join([*(value.name for value in inputs), TOKENS])}):\n    "
    # Of names and literals that the writer made; what a call is given by the model are constants with a name.
    exec(compile(head + "\n    ".join(lines), "<recorded decoder>", "exec"), writer.names)  # noqa: S102
    function: Callable[..., Any] = writer.names["run"]
    return function


def at(shape: Sequence[int | Along], tokens: int) -> tuple[int, ...]:
    """A shape for so many tokens."""
    return tuple(each.scale * tokens + each.offset if isinstance(each, Along) else each for each in shape)


def by_position(recording: Recording, positions: Value) -> set[Value]:
    """Values that follow from positions alone, and no other property of a step."""
    known = {positions}
    for call in recording.calls:
        if call.kind or call.mutates or any(isinstance(each, torch.Generator) for each in flat(call.args)):
            continue
        inputs = call.inputs()
        along = any(isinstance(each, Along) for each in flat((call.args, call.kwargs)))
        if all(value in known for value in inputs) and (inputs or not along):
            known.update(call.outs)
    return known
