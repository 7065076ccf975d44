"""What lies between the products of a recorded decoder, by the engine's kernels where they are shown to compute the same.

Between two products, or between a product and attention, a decoder's calls are a function of the product and, with rotation,
of positions. Such a function is run on random values and compared with a kernel: a gate with ``gate_mul``, what makes queries,
keys and values with ``rope_store``. Where they agree, one call of the kernel takes the place of all.

Invariants:
- Nothing is recognised by its form: a rotation of neighbouring pairs, heads in another order or a scale in between give
  other values, and the calls stay.
- Weights of norms are random in the comparison, so what holds there holds for those of the moment.
- What a kernel overwrites is taken by no other call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...kernels.attention_form import AttentionForm, Bend, HeadNorms
from ...kernels.elementwise import gate_mul, rope_store
from ...runtime.config import PAGE_SIZE
from .angles import Angles
from .attention import attend_fused
from .norms import Norm, close
from .program import by_position, compiled, drop_unused, makers_of, replace, slice_of
from .recording import Along, Call, Recording, Value

_TOKENS = 5
_POSITIONS = 900
_BENDS: tuple[Bend, ...] = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of attention, the same in all layers."""

    heads: int
    kv_heads: int
    head_size: int

    @property
    def all_heads(self) -> int:
        """Of queries, keys and values."""
        return self.heads + 2 * self.kv_heads


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """What one call of :func:`~.attention.attend_fused` was made of: the detail of a call of kind ``fused``."""

    layer: int
    angles: Angles
    norm: HeadNorms | None
    form: AttentionForm


@dataclass(slots=True)
class Rotations:
    """Angles that kernels take, each with the inputs of the recording that they are."""

    angles: list[Angles] = field(default_factory=list)
    inputs: list[tuple[Value, Value]] = field(default_factory=list)
    """Cosines and sines of a step's tokens, [T, 1, half] each."""


def fuse_gates(recording: Recording, dtype: torch.dtype) -> None:
    """Have a kernel compute what gates the input of a product and follows from one other product."""
    products = {call.outs[0] for call in recording.calls if call.kind == "product"}
    borders = {out for call in recording.calls if call.kind for out in call.outs}
    makers, gates = makers_of(recording), dict[Value, Value]()
    calls: list[Call] = []
    for call in recording.calls:
        rows = call.args[0] if call.kind == "product" else None
        if isinstance(rows, Value) and rows not in borders and rows not in gates:
            region, begin = slice_of(makers, [rows], borders)
            source = next(iter(begin), None)
            if (
                len(begin) == 1
                and source in products
                and (bend := _bend(region, source, rows, dtype)) is not None
            ):
                gates[rows] = Value(f"g{len(gates)}", rows.shape, dtype, contiguous=True)
                calls.append(
                    Call(gate_mul, (source,), {"bend": bend}, [gates[rows]], kind="gate", detail=bend)
                )
        calls.append(call)
    recording.calls = calls
    replace(recording, gates)
    drop_unused(recording)


def _bend(region: Sequence[Call], source: Value, rows: Value, dtype: torch.dtype) -> Bend | None:
    """What ``rows`` are of ``source``; None: something else."""
    width = rows.shape[-1]
    if not isinstance(width, int) or source.dtype != dtype:
        return None
    if rows.shape != (Along(1, 0), width) or source.shape != (Along(1, 0), 2 * width):
        return None
    x = 3 * _random((_TOKENS, 2 * width), dtype)
    expected = compiled(region, [source], [rows])(x, _TOKENS)
    return next((bend for bend in _BENDS if close(gate_mul(x, bend=bend), expected)), None)


def fuse_attention(recording: Recording, sizes: Sizes, dtype: torch.dtype) -> Rotations:
    """Have the attention's kernel take products as they are, where what makes queries, keys and values is a rotation of heads,
    behind norms or not."""
    trial = _Trial(recording, sizes, dtype)
    fused: dict[Value, Value] = {}
    calls: list[Call] = []
    for call in recording.calls:
        found = trial.fused(call) if call.kind == "attend" else None
        if found is None:
            calls.append(call)
            continue
        rows = found.outs[0]
        viewed = Value(f"{rows.name}_heads", call.outs[0].shape, dtype, contiguous=True)
        fused[call.outs[0]] = viewed
        shape = (1, Along(1, 0), sizes.heads, sizes.head_size)
        calls += [found, Call(Tensor.view, (rows, shape), {}, [viewed], reshapes=True)]
    recording.calls = calls
    replace(recording, fused)
    drop_unused(recording)
    return trial.rotations


class _Trial:
    """Compares each attention of a recording with the kernel."""

    def __init__(self, recording: Recording, sizes: Sizes, dtype: torch.dtype) -> None:
        self.rotations = Rotations()
        self._makers, self._sizes, self._dtype = makers_of(recording), sizes, dtype
        self._positions = recording.inputs[1]
        self._follow = by_position(recording, self._positions)
        borders = {out for call in recording.calls if call.kind != "norm" and call.kind for out in call.outs}
        self._products = {call.outs[0] for call in recording.calls if call.kind == "product"}
        self._borders = borders | self._follow
        self._takers: dict[Value, list[Call]] = {}
        for call in recording.calls:
            for value in set(call.inputs()):
                self._takers.setdefault(value, []).append(call)

    def fused(self, attend: Call) -> Call | None:
        """One call that stores and attends from the product that queries, keys and values come from. None: they come otherwise."""
        backend, q, k, v, layer, form, _ = attend.args
        region, begin = slice_of(self._makers, [q, k, v], self._borders)
        products = [value for value in begin if value in self._products]
        angles = sorted((value for value in begin if value in self._follow), key=lambda value: value.name)
        sizes = self._sizes
        width = sizes.all_heads * sizes.head_size
        if len(products) != 1 or len(begin) != 3 or len(angles) != 2:
            return None
        (source,) = products
        if source.shape != (Along(1, 0), width) or not self._is_taken_by(region, attend, source):
            return None
        norms = [self._norms(value) for value in (q, k)]
        if any(len(each) > 1 for each in norms) or len(norms[0]) != len(norms[1]):
            return None
        norm = _head_norms(norms[0][0], norms[1][0], sizes.head_size) if norms[0] else None
        if norms[0] and norm is None:
            return None
        found = self._rotation(region, source, (q, k, v), angles, norm)
        if found is None:
            return None
        cos, sin = self._inputs(found)
        out = Value(f"a{layer}", (Along(1, 0), sizes.heads * sizes.head_size), self._dtype, contiguous=True)
        return Call(
            attend_fused,
            (backend, source, sizes.all_heads, cos, sin, layer, norm, form),
            {},
            [out],
            kind="fused",
            detail=FusedAttention(layer, found, norm, form),
        )

    def _is_taken_by(self, region: Sequence[Call], attend: Call, source: Value) -> bool:
        inside = {id(call) for call in (*region, attend)}
        values = [source, *(out for call in region for out in call.outs)]
        return all(id(taker) in inside for value in values for taker in self._takers.get(value, []))

    def _norms(self, value: Value) -> list[Norm]:
        calls, _ = slice_of(self._makers, [value], self._borders)
        return [call.detail for call in calls if call.kind == "norm"]

    def _inputs(self, angles: Angles) -> tuple[Value, Value]:
        rotations = self.rotations
        for known, inputs in zip(rotations.angles, rotations.inputs, strict=True):
            if known.same(angles):
                return inputs
        number = len(rotations.angles)
        shape = (Along(1, 0), 1, angles.half)
        cos, sin = (Value(f"{name}{number}", shape, self._dtype) for name in ("cos", "sin"))
        rotations.angles.append(angles)
        rotations.inputs.append((cos, sin))
        return cos, sin

    def _rotation(
        self,
        region: Sequence[Call],
        source: Value,
        made: tuple[Value, Value, Value],
        angles: Sequence[Value],
        norm: HeadNorms | None,
    ) -> Angles | None:
        """The angles with which the kernel makes the same of a product."""
        sizes, dtype = self._sizes, self._dtype
        width = _row_size(angles[0])
        if width is None or width != _row_size(angles[1]) or any(each.dtype != dtype for each in angles):
            return None
        replaced, trial = {}, None
        if norm is not None:
            weights = [_random((sizes.head_size,), dtype) + 0.5 for _ in range(2)]
            replaced = {id(weight): each for weight, each in zip(norm[:2], weights, strict=True)}
            if len(replaced) < 2:
                return None
            trial = norm._replace(q_weight=weights[0], k_weight=weights[1])
        positions = torch.randint(0, _POSITIONS, (_TOKENS,), generator=torch.Generator().manual_seed(1))
        x = _random((_TOKENS, sizes.all_heads * sizes.head_size), dtype)
        values = self._compute(angles)(positions, _TOKENS)
        run = compiled(region, [source, *angles], made, constants=replaced)
        expected = [each[0].transpose(0, 1) for each in run(x, *values, _TOKENS)]
        for half in (width // 2, width):
            for cos, sin in (angles, angles[::-1]):
                if 0 < 2 * half <= sizes.head_size:
                    tried = Angles(self._compute((cos, sin)), (cos, sin), width, half)
                    found = self._by_kernel(x, tried.of(positions, _POSITIONS), trial)
                    if all(close(*pair, cancels=True) for pair in zip(found, expected, strict=True)):
                        return tried
        return None

    def _compute(self, angles: Sequence[Value]) -> Callable[..., Any]:
        calls, _ = slice_of(self._makers, angles, {self._positions})
        return compiled(calls, [self._positions], angles)

    def _by_kernel(
        self, x: Tensor, angles: tuple[Tensor, Tensor], norm: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, head size] that the kernel makes of a product."""
        sizes, tokens = self._sizes, x.shape[0]
        pages = torch.zeros((2, 1, sizes.kv_heads, PAGE_SIZE, sizes.head_size), dtype=x.dtype)
        qkv = x.clone().view(tokens, sizes.all_heads, sizes.head_size)
        q = torch.empty((tokens, sizes.heads, sizes.head_size), dtype=x.dtype)
        rope_store(qkv, sizes.heads, *angles, torch.arange(tokens), pages[0], pages[1], out=q, norm=norm)
        k, v = pages[:, 0, :, :tokens].transpose(1, 2)
        return q, k, v


def _head_norms(q: Norm, k: Norm, size: int) -> HeadNorms | None:
    """Both as the kernel takes them; None: they differ in more than their weights, or are of other sizes."""
    if (q.eps, q.from_one) != (k.eps, k.from_one) or not q.weight.shape == k.weight.shape == (size,):
        return None
    return HeadNorms(q.weight, k.weight, q.eps, q.from_one)


def _row_size(value: Value) -> int | None:
    """Elements of a row, of a value that has one for each token."""
    if len(value.shape) < 2 or value.shape[-2] != Along(1, 0) or any(each != 1 for each in value.shape[:-2]):
        return None
    return value.shape[-1] if isinstance(value.shape[-1], int) else None


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
