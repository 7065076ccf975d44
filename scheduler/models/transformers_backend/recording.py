"""What a decoder of transformers calls for a step of T tokens, noted once and fitted to every T.

The decoder runs a few times under a mode that notes each function of torch and each part of the engine's with its arguments.
Runs of different T must make the same calls; integers that differ between them must be linear in T. What comes out is a flat
list of calls that any step can repeat without the modules around them.

Invariants:
- Parameters and buffers are noted as the tensors that they are, so whoever repeats a call computes with the weights of the
  moment; nothing is computed ahead.
- A decoder that looks at values on its way (``item()``, ``bool()``), or makes other calls for another T, is not recorded.
- The engine's products and attention are noted, not computed: a recording costs what a model has in Python.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_METADATA = frozenset({
    "__len__", "dim", "dtype", "device", "element_size", "get_device", "is_complex", "is_contiguous", "is_cpu", "is_cuda",
    "is_floating_point", "is_inference", "is_meta", "is_mps", "is_quantized", "is_sparse", "is_xla", "itemsize", "layout",
    "names", "nbytes", "ndim", "ndimension", "nelement", "numel", "requires_grad", "shape", "size", "storage_offset",
    "stride", "type",
})  # fmt: skip
"""Of a tensor, what does not depend on its values."""


class NotRecordableError(Exception):
    """The decoder does what no list of calls repeats; the message says what."""


@dataclass(frozen=True, slots=True)
class Along:
    """An integer that follows from the number of tokens: ``scale * T + offset``."""

    scale: int
    offset: int


@dataclass(eq=False, slots=True)
class Value:
    """A tensor that a call makes, or an input."""

    name: str
    shape: tuple[int | Along, ...] = ()
    dtype: torch.dtype | None = None
    contiguous: bool = False
    """For every T."""


@dataclass(eq=False, slots=True)
class Call:
    """One call. Arguments hold :class:`Value`, :class:`Along`, tensors of the model, and anything that never changes."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value]
    several: bool = False
    """It returns a sequence."""
    mutates: bool = False
    """It writes to an argument."""
    reshapes: bool = False
    """Its one result is the memory of its first argument in another shape, both contiguous."""
    kind: str = ""
    """What the engine's parts are: ``product``, ``norm``, ``attend``, ``layer`` (a stop before one) and so on."""
    detail: Any = None
    """What belongs to the kind."""

    def inputs(self) -> list[Value]:
        """The values among its arguments."""
        return [each for each in flat((self.args, self.kwargs)) if isinstance(each, Value)]


@dataclass(slots=True)
class _Slot:
    """A tensor that was made while recording: its number among them."""

    number: int


@dataclass(slots=True)
class _Raw:
    """A call of one run."""

    target: Any
    args: Any
    kwargs: Any
    outs: list[Tensor]
    first: int
    """Number of the first of ``outs``."""
    several: bool
    mutates: bool
    reshapes: bool
    kind: str
    detail: Any


class Recorder(TorchFunctionMode):
    """Notes the calls of one run, made within the block."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[_Raw] = []
        self._tensors: list[Tensor] = []  # kept: identities are of living objects
        self._numbers: dict[int, int] = {}
        self.inputs = inputs
        self._add(inputs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in flat((args, kwargs)) if isinstance(each, Tensor)]
        before = [_version(each) for each in tensors]
        result = func(*args, **kwargs)
        mutates = before != [_version(each) for each in tensors]
        made = flat((result,))
        if not tensors and not any(isinstance(each, Tensor) for each in made):
            return result  # gradients off and on again
        if not made or not all(isinstance(each, Tensor) for each in made):
            name = _name(func)
            if name not in _METADATA or any(isinstance(each, Tensor) for each in made):
                raise NotRecordableError(f"it calls {name}")
            return result
        reshapes = len(made) == 1 and bool(args) and isinstance(args[0], Tensor) and _same(made[0], args[0])
        several = not isinstance(result, Tensor)
        self._note(func, args, kwargs, made, several, mutates, reshapes and not mutates, "", None)
        return result

    def leaf(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        result: Callable[[], Tensor] | None,
        kind: str,
        detail: Any = None,
    ) -> Any:
        """Note a call of the engine's and return, in its place, ``result()``, a tensor of the same form; None: it has none."""
        with torch._C.DisableTorchFunction():
            made = [] if result is None else [result()]
        self._note(target, args, kwargs or {}, made, False, False, False, kind, detail)
        return made[0] if made else None

    def number_of(self, tensor: Tensor) -> int | None:
        """Its number, if it was made while recording."""
        return self._numbers.get(id(tensor))

    def _note(
        self, target: Any, args: Any, kwargs: Any, made: list[Tensor], several: bool, mutates: bool,
        reshapes: bool, kind: str, detail: Any,
    ) -> None:  # fmt: skip
        noted, named = self._noted(args), self._noted(kwargs)
        first = self._add(made)
        self.calls.append(_Raw(target, noted, named, made, first, several, mutates, reshapes, kind, detail))

    def _add(self, tensors: Sequence[Tensor]) -> int:
        first = len(self._tensors)
        for each in tensors:
            self._numbers[id(each)] = len(self._tensors)
            self._tensors.append(each)
        return first

    def _noted(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            number = self._numbers.get(id(argument))
            return argument if number is None else _Slot(number)
        if isinstance(argument, dict):
            return {name: self._noted(each) for name, each in argument.items()}
        if isinstance(argument, (tuple, list)):
            noted = [self._noted(each) for each in argument]
            return noted if isinstance(argument, list) else tuple(noted)
        if isinstance(argument, slice):
            return slice(*(self._noted(each) for each in (argument.start, argument.stop, argument.step)))
        return argument


@dataclass(slots=True)
class Recording:
    """Calls in their order, what they begin with and the result."""

    inputs: list[Value]
    calls: list[Call]
    out: Value


@dataclass(slots=True)
class Fit:
    """Runs of the same calls at several T, made one."""

    sizes: Sequence[int]
    runs: Sequence[Recorder]
    values: list[Value] = field(default_factory=list)

    def recording(self, inputs: Sequence[str], outs: Sequence[Tensor]) -> Recording:
        """``inputs``: names of what the runs began with; ``outs``: each run's result.

        Raises:
            NotRecordableError: calls differ in more than T.
        """
        if len({len(run.calls) for run in self.runs}) > 1:
            raise NotRecordableError("the calls that it makes depend on the number of tokens")
        for name, tensors in zip(inputs, zip(*(run.inputs for run in self.runs), strict=True), strict=True):
            self._value(tensors).name = name
        calls = [self._call(each) for each in zip(*(run.calls for run in self.runs), strict=True)]
        numbers = {run.number_of(out) for run, out in zip(self.runs, outs, strict=True)}
        number = numbers.pop()
        if number is None or numbers:
            raise NotRecordableError("its result depends on the number of tokens")
        return Recording(self.values[: len(inputs)], calls, self.values[number])

    def _call(self, raws: Sequence[_Raw]) -> Call:
        one = raws[0]
        alike = {(each.kind, each.first, len(each.outs), each.several, each.mutates) for each in raws}
        if len(alike) > 1 or any(each.target != one.target for each in raws):
            raise NotRecordableError("the calls that it makes depend on the number of tokens")
        args = self._fitted([each.args for each in raws])
        kwargs = self._fitted([each.kwargs for each in raws])
        assert len(self.values) == one.first, "values are numbered as they come"
        outs = [self._value(tensors) for tensors in zip(*(each.outs for each in raws), strict=True)]
        reshapes = all(each.reshapes for each in raws)
        return Call(one.target, args, kwargs, outs, one.several, one.mutates, reshapes, one.kind, one.detail)

    def _value(self, tensors: Sequence[Tensor]) -> Value:
        value = Value(
            f"v{len(self.values)}",
            self._fitted([tuple(each.shape) for each in tensors]),
            tensors[0].dtype,
            all(each.is_contiguous() for each in tensors),
        )
        self.values.append(value)
        return value

    def _fitted(self, found: Sequence[Any]) -> Any:
        """What each run has in one place."""
        one = found[0]
        if any(type(each) is not type(one) for each in found):
            raise NotRecordableError("an argument is of one type or another")
        if isinstance(one, _Slot):
            if any(each.number != one.number for each in found):
                raise NotRecordableError("where tensors go depends on the number of tokens")
            return self.values[one.number]
        if isinstance(one, dict):
            if any(each.keys() != one.keys() for each in found):
                raise NotRecordableError("arguments depend on the number of tokens")
            return {name: self._fitted([each[name] for each in found]) for name in one}
        if isinstance(one, slice):
            parts = [(each.start, each.stop, each.step) for each in found]
            return slice(*self._fitted(parts))
        if isinstance(one, (tuple, list)):
            if len({len(each) for each in found}) > 1:
                raise NotRecordableError("arguments depend on the number of tokens")
            fitted = [self._fitted(each) for each in zip(*found)]
            return fitted if isinstance(one, list) else tuple(fitted)
        if isinstance(one, int) and not isinstance(one, bool):
            return self._linear(found)
        if any(each is not one and (isinstance(one, Tensor) or each != one) for each in found):
            raise NotRecordableError(f"an argument of {type(one).__name__} depends on the number of tokens")
        return one

    def _linear(self, found: Sequence[int]) -> "int | Along":
        if len(set(found)) == 1:
            return found[0]
        (a, b), (x, y) = self.sizes[:2], found[:2]
        scale = (y - x) // (b - a)
        fitted = Along(scale, x - scale * a)
        if any(scale * size + fitted.offset != each for size, each in zip(self.sizes, found, strict=True)):
            raise NotRecordableError("an integer is not linear in the number of tokens")
        return fitted


def flat(structure: Any) -> list[Any]:
    """What tuples, lists, dicts and slices hold, from left to right."""
    if isinstance(structure, dict):
        return flat(list(structure.values()))
    if isinstance(structure, (tuple, list)):
        return [found for each in structure for found in flat(each)]
    if isinstance(structure, slice):
        return flat([structure.start, structure.stop, structure.step])
    return [structure]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", repr(func))
    if name == "__get__":  # a property: its descriptor knows the name
        name = func.__self__.__name__
    return name


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.data_ptr() == b.data_ptr()
        and a.numel() == b.numel()
        and a.is_contiguous()
        and b.is_contiguous()
    )
