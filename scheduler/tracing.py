"""Traces of functions of torch: flat lists of calls that are repeated without the Python around them.

Invariants:
- Parameters and buffers are noted as the tensors that they are: a trace computes with the weights of the
  moment.
- A function that looks at values on its way (``item()``, ``bool()``) is not traceable, nor one that makes
  other calls for another number of tokens.
- No pass changes a bit of the result. Left out are calls whose results nobody takes, copies of a call with
  the same arguments (unless some call writes to its arguments), and views of views.
- A compiled function holds no result longer than the calls that take it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_METADATA = frozenset({
    "__len__", "dim", "dtype", "device", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_cpu", "is_cuda", "is_floating_point", "is_inference", "is_meta", "is_mps", "is_quantized",
    "is_sparse", "is_xla", "itemsize", "layout", "names", "nbytes", "ndim", "ndimension", "nelement",
    "numel", "requires_grad", "shape", "size", "storage_offset", "stride", "type",
})  # fmt: skip
"""Functions of a tensor that do not depend on its values."""


class NotTraceableError(Exception):
    """No list of calls repeats the function; the message says why."""


@dataclass(frozen=True, slots=True)
class Affine:
    """An integer that follows from the number of tokens T: ``scale * T + offset``."""

    scale: int
    offset: int


@dataclass(eq=False, slots=True)
class Value:
    name: str
    shape: tuple[int | Affine, ...] = ()
    dtype: torch.dtype | None = None
    contiguous: bool = False
    """Contiguous for every T."""


@dataclass(eq=False, slots=True)
class Call:
    """One call; arguments are :class:`Value`, :class:`Affine`, the model's tensors and constants."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value]
    several: bool = False
    mutates: bool = False
    reshapes: bool = False
    """The one result is the first argument, or its memory in another shape, both contiguous."""
    kind: str = ""
    """Part of the engine: ``product``, ``norm``, ``attend``, ``layer`` (a stop before one) and so on."""
    detail: Any = None

    def inputs(self) -> list[Value]:
        return [each for each in leaves((self.args, self.kwargs)) if isinstance(each, Value)]


@dataclass(slots=True)
class Trace:
    inputs: list[Value]
    calls: list[Call]
    out: Value


class Tracer(TorchFunctionMode):
    """Notes the calls that are made within the block, and makes them."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tensors: dict[Value, Tensor] = {}
        """Every tensor that was noted. They are kept: identities are of living objects."""
        self._values: dict[int, Value] = {}
        self._calls: list[Call] = []
        self._inputs = [self._add(tensor, name) for name, tensor in inputs.items()]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in leaves((args, kwargs)) if isinstance(each, Tensor)]
        before = [_version(each) for each in tensors]
        result = func(*args, **kwargs)
        mutates = before != [_version(each) for each in tensors]
        made = leaves((result,))
        some = any(isinstance(each, Tensor) for each in made)
        if not tensors and not some:
            return result  # gradients off and on again
        if not made or not all(isinstance(each, Tensor) for each in made):
            if some or _name(func) not in _METADATA:
                raise NotTraceableError(f"it calls {_name(func)}")
            return result
        reshapes = (
            len(made) == 1 and bool(args) and isinstance(args[0], Tensor) and _is_view(made[0], args[0])
        )
        call = Call(func, args, kwargs, [], not isinstance(result, Tensor), mutates, reshapes and not mutates)
        self._note(call, made)
        return result

    def leaf(
        self, target: Callable[..., Any], *args: Any, like: Tensor, shape: Sequence[int], kind: str,
        detail: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Note a call of a part of the engine; return one ``like`` another, in ``shape``, for its result."""
        with torch._C.DisableTorchFunction():
            made = like.new_ones(tuple(shape))
        self._note(Call(target, args, kwargs, [], kind=kind, detail=detail), [made])
        return made

    def mark(self, kind: str, detail: Any) -> None:
        """Note a place between calls."""
        self._note(Call(Tracer.mark, (), {}, [], kind=kind, detail=detail), [])

    def trace(self, out: Tensor) -> Trace:
        """Return the calls so far as a function of ``out``; NotTraceableError: no call has made it."""
        value = self._values.get(id(out))
        if value is None:
            raise NotTraceableError("its result is not made by a function of torch")
        return Trace(self._inputs, self._calls, value)

    def _note(self, call: Call, made: Sequence[Tensor]) -> None:
        call.args, call.kwargs = mapped(self._value, (call.args, call.kwargs))
        call.outs = [self._add(each, f"v{len(self.tensors)}") for each in made]
        self._calls.append(call)

    def _value(self, leaf: Any) -> Any:
        return self._values.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf

    def _add(self, tensor: Tensor, name: str) -> Value:
        value = Value(name, tuple(tensor.shape), tensor.dtype, tensor.is_contiguous())
        self.tensors[value] = tensor
        self._values[id(tensor)] = value
        return value


def merge(traces: Sequence[Trace], sizes: Sequence[int]) -> Trace:
    """Return one trace for every number of tokens, of those of one function for ``sizes``.

    NotTraceableError: calls differ in more than integers that are linear in the number of tokens.
    """
    if len({len(each.calls) for each in traces}) > 1:
        raise NotTraceableError("the calls that it makes depend on the number of tokens")
    merger = _Merger(sizes)
    inputs = [merger.value(each) for each in zip(*(each.inputs for each in traces), strict=True)]
    calls = [merger.call(each) for each in zip(*(each.calls for each in traces), strict=True)]
    return Trace(inputs, calls, merger.leaf([each.out for each in traces]))


class _Merger:
    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._values: dict[str, Value] = {}

    def call(self, found: Sequence[Call]) -> Call:
        one = found[0]
        alike = {(each.kind, *(out.name for out in each.outs), each.several, each.mutates) for each in found}
        if len(alike) > 1 or any(each.target != one.target for each in found):
            raise NotTraceableError("the calls that it makes depend on the number of tokens")
        args, kwargs = self._arguments([(each.args, each.kwargs) for each in found])
        outs = [self.value(each) for each in zip(*(each.outs for each in found), strict=True)]
        reshapes = all(each.reshapes for each in found)
        return Call(one.target, args, kwargs, outs, one.several, one.mutates, reshapes, one.kind, one.detail)

    def value(self, found: Sequence[Value]) -> Value:
        shape, contiguous = self._arguments([each.shape for each in found]), all(v.contiguous for v in found)
        made = self._values[found[0].name] = Value(found[0].name, shape, found[0].dtype, contiguous)
        return made

    def leaf(self, found: Sequence[Any]) -> Any:
        one = found[0]
        if any(type(each) is not type(one) for each in found):
            raise NotTraceableError("an argument is of one type or another")
        if isinstance(one, Value):
            if any(each.name != one.name for each in found):
                raise NotTraceableError("where tensors go depends on the number of tokens")
            return self._values[one.name]
        if isinstance(one, int) and not isinstance(one, bool):
            return _linear(found, self._sizes)
        if any(each is not one and (isinstance(one, Tensor) or each != one) for each in found):
            raise NotTraceableError(f"an argument of {type(one).__name__} depends on the number of tokens")
        return one

    def _arguments(self, found: Sequence[Any]) -> Any:
        forms = [mapped(lambda _: 0, each) for each in found]
        if any(form != forms[0] for form in forms):
            raise NotTraceableError("arguments depend on the number of tokens")
        made = iter([self.leaf(each) for each in zip(*map(leaves, found), strict=True)])
        return mapped(lambda _: next(made), found[0])


def _linear(found: Sequence[int], sizes: Sequence[int]) -> int | Affine:
    if len(set(found)) == 1:
        return found[0]
    scale = (found[1] - found[0]) // (sizes[1] - sizes[0])
    fitted = Affine(scale, found[0] - scale * sizes[0])
    if any(scale * size + fitted.offset != each for size, each in zip(sizes, found, strict=True)):
        raise NotTraceableError("an integer is not linear in the number of tokens")
    return fitted


def mapped(change: Callable[[Any], Any], structure: Any) -> Any:
    """Return ``structure`` with other leaves: what tuples, lists, dicts and slices hold, in order."""
    if isinstance(structure, dict):
        return {name: mapped(change, each) for name, each in structure.items()}
    if isinstance(structure, slice):
        return slice(*mapped(change, (structure.start, structure.stop, structure.step)))
    if isinstance(structure, (tuple, list)):
        found = [mapped(change, each) for each in structure]
        return found if isinstance(structure, list) else tuple(found)
    return change(structure)


def leaves(structure: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, structure)
    return found


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", repr(func))
    return func.__self__.__name__ if name == "__get__" else name  # of a property: its descriptor knows it


def _is_view(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.dtype == b.dtype
        and a.data_ptr() == b.data_ptr()
        and a.numel() == b.numel()
        and a.is_contiguous()
        and b.is_contiguous()
    )


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

    ``stops``: yield each layer's number before its calls. ``constants``: replacements by identity.
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
