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

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
        of_tensors = [isinstance(each, Tensor) for each in made]
        if made and all(of_tensors):
            reshapes = not mutates and len(made) == 1 and _is_view(made[0], *args[:1])
            self._note(Call(func, args, kwargs, [], not isinstance(result, Tensor), mutates, reshapes), made)
        elif any(of_tensors) or (tensors and _name(func) not in _METADATA):
            raise NotTraceableError(f"it calls {_name(func)}")
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
        self._note(Call(Tracer.mark, (), {}, [], kind=kind, detail=detail), [])

    def trace(self, out: Tensor) -> Trace:
        """Return the calls so far as a function of ``out``; NotTraceableError: no call has made it."""
        value = self._values.get(id(out))
        if value is None:
            raise NotTraceableError("its result is not made by a function of torch")
        return Trace(self._inputs, self._calls, value)

    def _note(self, call: Call, made: Sequence[Tensor]) -> None:
        arguments = call.args, call.kwargs
        call.args, call.kwargs = mapped(lambda leaf: self._values.get(id(leaf), leaf), arguments)
        call.outs = [self._add(each, f"v{len(self.tensors)}") for each in made]
        self._calls.append(call)

    def _add(self, tensor: Tensor, name: str) -> Value:
        value = Value(name, tuple(tensor.shape), tensor.dtype)
        self.tensors[value] = tensor
        self._values[id(tensor)] = value
        return value


def merge(traces: Sequence[Trace], sizes: Sequence[int]) -> Trace:
    """Return the first of the traces of one function for ``sizes``, made to hold for every number of tokens.

    NotTraceableError: calls differ in more than integers that are linear in the number of tokens.
    """
    calls = [
        [(each.target, each.kind, each.several, each.mutates, len(each.outs)) for each in trace.calls]
        for trace in traces
    ]
    if any(each != calls[0] for each in calls):
        raise NotTraceableError("the calls that it makes depend on the number of tokens")
    for same in zip(*(each.calls for each in traces), strict=True):
        one = same[0]
        one.args, one.kwargs = _merged([(each.args, each.kwargs) for each in same], sizes)
        one.reshapes = all(each.reshapes for each in same)
    values = [[*each.inputs, *(out for call in each.calls for out in call.outs)] for each in traces]
    for found in zip(*values, strict=True):
        found[0].shape = _merged([each.shape for each in found], sizes)
    _merged([each.out for each in traces], sizes)
    return traces[0]


def _merged(found: Sequence[Any], sizes: Sequence[int]) -> Any:
    if len(set(map(_form, found))) > 1:
        raise NotTraceableError("arguments depend on the number of tokens")
    made = iter([_merged_leaf(each, sizes) for each in zip(*map(leaves, found), strict=True)])
    return mapped(lambda _: next(made), found[0])


def _merged_leaf(found: Sequence[Any], sizes: Sequence[int]) -> Any:
    one = found[0]
    if any(type(each) is not type(one) for each in found):
        raise NotTraceableError("an argument is of one type or another")
    if type(one) is int:
        return _linear(found, sizes)
    if isinstance(one, Value):
        if any(each.name != one.name for each in found):
            raise NotTraceableError("where tensors go depends on the number of tokens")
    elif any(each is not one and (isinstance(one, Tensor) or each != one) for each in found):
        raise NotTraceableError(f"an argument of {type(one).__name__} depends on the number of tokens")
    return one


def _linear(found: Sequence[int], sizes: Sequence[int]) -> int | Affine:
    scale = (found[1] - found[0]) // (sizes[1] - sizes[0])
    offset = found[0] - scale * sizes[0]
    if any(scale * size + offset != each for size, each in zip(sizes, found, strict=True)):
        raise NotTraceableError("an integer is not linear in the number of tokens")
    return Affine(scale, offset) if scale else offset


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


def _form(structure: Any) -> str:
    return repr(mapped(lambda _: None, structure))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", repr(func))
    return func.__self__.__name__ if name == "__get__" else name  # of a property: its descriptor knows it


def _is_view(a: Tensor, b: Any = None) -> bool:
    return a is b or (
        isinstance(b, Tensor)
        and a.dtype == b.dtype
        and a.data_ptr() == b.data_ptr()
        and a.numel() == b.numel()
        and a.is_contiguous()
        and b.is_contiguous()
    )


_EFFECTS = frozenset({"attend", "experts", "layer"})
"""Kinds of calls that do something beside their results."""
_IN_PLACE: dict[Any, Any] = {
    Tensor.mul: Tensor.mul_, Tensor.__mul__: Tensor.mul_, torch.mul: Tensor.mul_,
    Tensor.div: Tensor.div_, Tensor.__truediv__: Tensor.div_, torch.div: Tensor.div_,
    Tensor.tanh: Tensor.tanh_, torch.tanh: Tensor.tanh_,
}  # fmt: skip
_LITERALS = (bool, int, float, str, type(None), type(Ellipsis))


def tidy(trace: Trace) -> None:
    """Leave out the calls that no result needs."""
    for call in trace.calls:
        _unsqueeze(call)
    _merge_views(trace)
    if not any(call.mutates for call in trace.calls):
        _merge_equal(trace)


def fold_constants(trace: Trace, tensors: Mapping[Value, Tensor], weights: Iterable[Tensor]) -> None:
    """Replace values that follow from neither inputs nor ``weights`` by the tensors that tracing has made."""
    if not any(call.mutates for call in trace.calls):
        replace(trace, {each: tensors[each] for each in following(trace, weights=weights)})


def following(trace: Trace, inputs: Iterable[Value] = (), weights: Iterable[Tensor] = ()) -> set[Value]:
    """Return ``inputs`` and the values that follow from them alone: not from ``weights``, T or chance."""
    known, changing = set(inputs), {id(each) for each in weights}
    for call in trace.calls:
        found, values = leaves((call.args, call.kwargs)), call.inputs()
        other = (torch.Generator,) if values else (torch.Generator, Affine)
        if (
            known.issuperset(values)
            and not (call.kind or call.mutates)
            and not any(isinstance(each, other) or id(each) in changing for each in found)
        ):
            known.update(call.outs)
    return known


def replace(trace: Trace, values: Mapping[Value, Any]) -> None:
    """Take others for some values, and leave out the calls that no result needs then."""

    def changed(leaf: Any) -> Any:
        while isinstance(leaf, Value) and leaf in values:
            leaf = values[leaf]
        return leaf

    for call in trace.calls:
        call.args, call.kwargs = mapped(changed, (call.args, call.kwargs))
    trace.out = changed(trace.out)
    needed, kept = {trace.out}, []
    for call in reversed(trace.calls):
        if call.mutates or call.kind in _EFFECTS or not needed.isdisjoint(call.outs):
            needed.update(call.inputs())
            kept.append(call)
    trace.calls = kept[::-1]


def write_in_place(trace: Trace, value: Value) -> None:
    """Have what is computed from ``value`` by element overwrite it, as long as nothing else takes it."""
    takers = takers_of(trace)
    while value is not trace.out and len(takers[value]) == 1:
        (call,) = takers[value]
        if call.several or call.args[0] is not value or len(call.inputs()) > 1:
            return
        (out,) = call.outs
        if not call.reshapes:
            plain = not call.kwargs and not any(isinstance(each, Tensor) for each in call.args)
            same = (out.shape, out.dtype) == (value.shape, value.dtype)
            if call.target not in _IN_PLACE or not (plain and same):
                return
            call.target, call.mutates = _IN_PLACE[call.target], True
        value = out


def _unsqueeze(call: Call) -> None:
    """Have indexing that adds one axis do no more: parsing an index takes as long as a small product."""
    if call.target is Tensor.__getitem__ and isinstance(call.args[1], tuple):
        value, index = call.args
        others = [each for each in index if each is not None]
        if len(others) == len(index) - 1 and all(
            type(each) is slice and each == slice(None) for each in others
        ):
            call.target, call.args = Tensor.unsqueeze, (value, index.index(None))


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
        if isinstance(leaf, Tensor) or not isinstance(leaf, Hashable):
            return id(leaf)
        return type(leaf), same.get(leaf, leaf) if isinstance(leaf, Value) else leaf

    for call in trace.calls:
        if not call.kind:
            arguments = call.args, call.kwargs
            known = first.setdefault((call.target, _form(arguments), *map(key, leaves(arguments))), call)
            if known is not call:
                same.update(zip(call.outs, known.outs, strict=True))
    replace(trace, same)


def takers_of(trace: Trace) -> defaultdict[Value, list[Call]]:
    takers: defaultdict[Value, list[Call]] = defaultdict(list)
    for call in trace.calls:
        for value in dict.fromkeys(call.inputs()):
            takers[value].append(call)
    return takers


def slice_of(trace: Trace, outs: Iterable[Value], borders: set[Value]) -> tuple[list[Call], set[Value]]:
    """Return the calls that make ``outs`` from ``borders`` and inputs, and those of both they take.

    ``borders`` are all results of some calls, and inputs.
    """
    needed, kept = set(outs), []
    for call in reversed(trace.calls):
        if not needed.isdisjoint(call.outs) and borders.isdisjoint(call.outs):
            needed.update(call.inputs())
            kept.append(call)
    return kept[::-1], needed.difference(*(call.outs for call in kept))


class _Expression(str):
    """Text that a structure's ``repr`` holds as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def compiled(
    calls: Sequence[Call], inputs: Sequence[Value], outs: Sequence[Value], *, stops: bool = False
) -> Callable[..., Any]:
    """Return a function of ``inputs`` and T that makes the calls and returns ``outs``, one as it is.

    ``stops``: yield each layer's number before its calls.
    """
    objects: dict[str, Any] = {}

    def constant(value: Any) -> _Expression:
        name = _Expression(f"k{id(value)}")
        objects[name] = value
        return name

    def expression(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return _Expression(leaf.name)
        if isinstance(leaf, Affine):
            return _Expression(f"{leaf.scale} * tokens + {leaf.offset}")
        literal = type(leaf) in _LITERALS and (not isinstance(leaf, float) or leaf - leaf == 0.0)
        return leaf if literal else constant(leaf)

    def text(argument: Any) -> str:
        return repr(mapped(expression, argument))

    last = {each: number for number, call in enumerate(calls) for each in (*call.outs, *call.inputs())}
    lines = []
    for number, call in enumerate(calls):
        if call.kind == "layer":
            lines += [f"yield {call.detail}"] if stops else []
            continue
        named = (f"{name}={text(each)}" for name, each in call.kwargs.items())
        line = f"{constant(call.target)}({', '.join([*map(text, call.args), *named])})"
        if call.outs:
            line = f"{', '.join(out.name for out in call.outs)}{',' if call.several else ''} = {line}"
        lines.append(line)
        known = dict.fromkeys((*call.inputs(), *call.outs))
        gone = [each.name for each in known if last[each] == number and each not in outs]
        if gone and call is not calls[-1]:
            lines.append(f"del {', '.join(gone)}")
    lines.append(f"return {', '.join(out.name for out in outs)}")
    head = f"def run({''.join(f'{value.name}, ' for value in inputs)}tokens):\n    "
    # Of names and literals that are made here; what a call is given by the model are constants with a name.
    exec(compile(head + "\n    ".join(lines), "<trace>", "exec"), objects)  # noqa: S102
    function: Callable[..., Any] = objects["run"]
    return function
