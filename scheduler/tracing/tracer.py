"""Traces of functions of torch: flat lists of calls that are repeated without the Python around them.

Invariants:
- Parameters and buffers are noted as the tensors that they are: a trace computes with the weights of the
  moment.
- A function that looks at values on its way (``item()``, ``bool()``) is not traceable, nor one that makes
  other calls for another number of tokens.
"""

from collections.abc import Callable, Mapping, Sequence
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

    Raises:
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
