"""Kernels of the engine in the place of what a traced decoder calls between its products.

Between two products, or between a product and attention, a decoder's calls are a function of the product and,
with rotary embeddings, of positions. Such a function is run on random values and compared with a kernel: a
gate with ``gate_mul``, what makes queries, keys and values with ``rope_store``. Where they agree, one call of
the kernel takes the place of all. Norms are modules, and compared as such.

Invariants:
- Nothing is recognised by its form: a rotation of neighbouring pairs, heads in another order or a scale in
  between give other values, and the calls stay.
- Weights of norms are random in the comparison, so what holds there holds for those of the moment. What a
  module is called decides nothing: a norm that subtracts the mean differs.
- What a kernel overwrites is taken by no other call.
- Rotary tables grow by blocks of one size, so no bit of a position depends on which others share a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...kernels import Elementwise
from ...kernels.attention_form import AttentionForm, Bend, HeadNorms
from ...kernels.elementwise import gate_mul, rope_store
from ...runtime.config import PAGE_SIZE
from ...tracing import (
    Affine,
    Call,
    Trace,
    Value,
    by_position,
    compiled,
    drop_unused,
    makers_of,
    replace,
    slice_of,
    takers_of,
)
from .interfaces import attend_fused
from .probe import FOREIGN_FAILURES

_ROWS = 5
_SCALES = (1e-3, 1.0, 30.0)
_ROUNDINGS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 8}
"""Units in the last place; in float32 sums of another order differ in several."""
_NAMES = ("variance_epsilon", "eps", "epsilon", "rms_norm_eps")


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    compute: Callable[..., Tensor]
    weight: Tensor
    """[size]"""
    eps: float
    from_one: bool
    """The factor is ``1 + weight``, and the product is rounded once."""


def close(found: Tensor, expected: Tensor, *, cancels: bool = False) -> bool:
    """Return True if two tensors have the same form, and values that agree within rounding.

    Beside a value's own rounding, float32 loses what values of a row of any size cancel; with ``cancels`` the
    tensors' dtype does.
    """
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    wanted = expected.float()
    largest = wanted.abs().amax(dim=-1, keepdim=True)
    within = _precision(expected.dtype) * wanted.abs()
    within += _precision(expected.dtype if cancels else torch.float32) * largest
    return bool(((found.float() - wanted).abs() <= within).all())


def _precision(dtype: torch.dtype) -> float:
    return _ROUNDINGS[dtype] * torch.finfo(dtype).eps


def proven_norms(
    decoder: nn.Module, dtype: torch.dtype, device: torch.device, kernels: Elementwise
) -> dict[nn.Module, Norm]:
    found: dict[nn.Module, Norm] = {}
    known: dict[Any, bool | None] = {}
    for module in decoder.modules():
        sizes = _candidate(module, dtype)
        if sizes is None:
            continue
        size, eps = sizes
        kind = type(module), size, eps, hasattr(module, "weight")
        if kind not in known:
            known[kind] = _from_one(module, size, eps, dtype, device, kernels)
        from_one = known[kind]
        if from_one is not None:
            weight = getattr(module, "weight", None)
            weight = torch.ones(size, dtype=dtype, device=device) if weight is None else weight
            found[module] = Norm(kernels.rms_norm, weight, eps, from_one)
    return found


def _candidate(module: nn.Module, dtype: torch.dtype) -> tuple[int, float] | None:
    own = dict(module.named_parameters(recurse=False))
    if any(True for _ in module.children()) or own.keys() != {"weight"} or module._buffers:
        return None
    weight = own["weight"]
    eps = next((value for name in _NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if weight.dim() != 1 or weight.dtype != dtype or not weight.is_contiguous() or eps is None:
        return None
    return weight.shape[0], eps


def _from_one(
    module: nn.Module, size: int, eps: float, dtype: torch.dtype, device: torch.device, kernels: Elementwise
) -> bool | None:
    generator = torch.Generator().manual_seed(size)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    fits = {False: True, True: True}
    for scale in _SCALES:
        weight, x = random(size) + 0.5, scale * random(_ROWS, size)
        try:
            expected: Any = functional_call(module, {"weight": weight}, (x.unsqueeze(0),))
        except FOREIGN_FAILURES:
            return None
        if not isinstance(expected, Tensor) or expected.shape != (1, *x.shape) or expected.dtype != dtype:
            return None
        for form in fits:
            fits[form] &= close(kernels.rms_norm(x, weight, eps, from_one=form), expected[0])
    return next((form for form, fit in fits.items() if fit), None)


_TOKENS = 5
_POSITIONS = 900
_BENDS: tuple[Bend, ...] = ("silu", "gelu_tanh")
_BLOCK = 1024
"""Positions that a rotary table grows by."""


@dataclass(frozen=True, slots=True)
class Sizes:
    heads: int
    kv_heads: int
    head_size: int

    @property
    def all_heads(self) -> int:
        return self.heads + 2 * self.kv_heads


@dataclass(slots=True, eq=False)
class RopeTable:
    compute: Callable[..., Any]
    """Function of positions [T] and T: cosines and sines, a row of ``width`` elements for each."""
    values: tuple[Value, Value]
    width: int
    half: int
    """Elements of a row that are taken, its first."""
    inputs: tuple[Value, Value] = ()  # type: ignore[assignment]
    """Inputs of the kernel's calls: cosines and sines of a step's tokens, [T, 1, half] each."""
    _table: tuple[Tensor, Tensor] | None = None

    def table(self, longest: int) -> tuple[Tensor, Tensor]:
        """Return those of at least the positions [0, longest), each [P, 1, half], contiguous."""
        table = self._table
        while table is None or longest > table[0].shape[0]:
            start = 0 if table is None else table[0].shape[0]
            found = self.compute(torch.arange(start, start + _BLOCK), _BLOCK)
            block = [each.reshape(_BLOCK, self.width)[:, : self.half].unsqueeze(1) for each in found]
            if table is not None:
                block = [torch.cat(pair) for pair in zip(table, block, strict=True)]
            table = block[0].contiguous(), block[1].contiguous()
        self._table = table
        return table

    def rows(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return those of each token, int64 [T] below ``longest`` to [T, 1, half] each."""
        cosines, sines = self.table(longest)
        return cosines.index_select(0, positions), sines.index_select(0, positions)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    layer: int
    rope: RopeTable
    norm: HeadNorms | None
    form: AttentionForm


def fuse_gates(trace: Trace, dtype: torch.dtype) -> None:
    """Have a kernel compute what gates the input of a product and follows from one other product."""
    products = {call.outs[0] for call in trace.calls if call.kind == "product"}
    borders = {out for call in trace.calls if call.kind for out in call.outs}
    makers, gates = makers_of(trace), dict[Value, Value]()
    calls: list[Call] = []
    for call in trace.calls:
        rows = call.args[0] if call.kind == "product" else None
        if isinstance(rows, Value) and rows not in borders and rows not in gates:
            region, begin = slice_of(makers, [rows], borders)
            source = next(iter(begin), None)
            bend = _bend(region, source, rows, dtype) if len(begin) == 1 and source in products else None
            if bend is not None:
                gate = gates[rows] = Value(f"g{len(gates)}", rows.shape, dtype, contiguous=True)
                calls.append(Call(gate_mul, (source,), {"bend": bend}, [gate], kind="gate", detail=bend))
        calls.append(call)
    trace.calls = calls
    replace(trace, gates)
    drop_unused(trace)


def _bend(region: Sequence[Call], source: Value, rows: Value, dtype: torch.dtype) -> Bend | None:
    width = rows.shape[-1]
    if not isinstance(width, int) or source.dtype != dtype:
        return None
    if rows.shape != (Affine(1, 0), width) or source.shape != (Affine(1, 0), 2 * width):
        return None
    x = 3 * _random((_TOKENS, 2 * width), dtype)
    expected = compiled(region, [source], [rows])(x, _TOKENS)
    return next((bend for bend in _BENDS if close(gate_mul(x, bend=bend), expected)), None)


def fuse_attention(trace: Trace, sizes: Sizes, dtype: torch.dtype) -> list[RopeTable]:
    """Have the attention's kernel rotate and store products; return its tables, inputs of the trace."""
    matcher = _AttentionMatcher(trace, sizes, dtype)
    fused: dict[Value, Value] = {}
    calls: list[Call] = []
    for call in trace.calls:
        found = matcher.fused(call) if call.kind == "attend" else None
        if found is None:
            calls.append(call)
            continue
        rows = found.outs[0]
        viewed = fused[call.outs[0]] = Value(f"{rows.name}_heads", call.outs[0].shape, dtype, contiguous=True)
        shape = (1, Affine(1, 0), sizes.heads, sizes.head_size)
        calls += [found, Call(Tensor.view, (rows, shape), {}, [viewed], reshapes=True)]
    trace.calls = calls
    replace(trace, fused)
    drop_unused(trace)
    return matcher.tables


class _AttentionMatcher:
    def __init__(self, trace: Trace, sizes: Sizes, dtype: torch.dtype) -> None:
        self.tables: list[RopeTable] = []
        self._makers, self._sizes, self._dtype = makers_of(trace), sizes, dtype
        self._positions = trace.inputs[1]
        self._follow = by_position(trace, self._positions)
        self._products = {call.outs[0] for call in trace.calls if call.kind == "product"}
        borders = {out for call in trace.calls if call.kind != "norm" and call.kind for out in call.outs}
        self._borders = borders | self._follow
        self._takers = takers_of(trace)

    def fused(self, attend: Call) -> Call | None:
        """Return the call that stores and attends from the product of queries, keys and values, or None."""
        backend, q, k, v, layer, form, _ = attend.args
        region, begin = slice_of(self._makers, [q, k, v], self._borders)
        products = [value for value in begin if value in self._products]
        angles = sorted((value for value in begin if value in self._follow), key=lambda value: value.name)
        sizes = self._sizes
        if len(products) != 1 or len(begin) != 3 or len(angles) != 2:
            return None
        (source,) = products
        inside = {id(call) for call in (*region, attend)}
        made = [source, *(out for call in region for out in call.outs)]
        if source.shape != (Affine(1, 0), sizes.all_heads * sizes.head_size) or any(
            id(taker) not in inside for value in made for taker in self._takers.get(value, [])
        ):
            return None
        norms = [self._norms(value) for value in (q, k)]
        if any(len(each) > 1 for each in norms) or len(norms[0]) != len(norms[1]):
            return None
        norm = _head_norms(norms[0][0], norms[1][0], sizes.head_size) if norms[0] else None
        if norms[0] and norm is None:
            return None
        rope = self._rope(region, source, (q, k, v), angles, norm)
        if rope is None:
            return None
        out = Value(f"a{layer}", (Affine(1, 0), sizes.heads * sizes.head_size), self._dtype, contiguous=True)
        args = backend, source, sizes.all_heads, *rope.inputs, layer, norm, form
        return Call(
            attend_fused, args, {}, [out], kind="fused", detail=FusedAttention(layer, rope, norm, form)
        )

    def _norms(self, value: Value) -> list[Norm]:
        calls, _ = slice_of(self._makers, [value], self._borders)
        return [call.detail for call in calls if call.kind == "norm"]

    def _rope(
        self,
        region: Sequence[Call],
        source: Value,
        made: tuple[Value, Value, Value],
        angles: Sequence[Value],
        norm: HeadNorms | None,
    ) -> RopeTable | None:
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
                    tried = RopeTable(self._compute((cos, sin)), (cos, sin), width, half)
                    found = self._by_kernel(x, tried.rows(positions, _POSITIONS), trial)
                    if all(close(*pair, cancels=True) for pair in zip(found, expected, strict=True)):
                        return self._shared(tried)
        return None

    def _shared(self, table: RopeTable) -> RopeTable:
        for known in self.tables:
            if (known.values, known.half) == (table.values, table.half):
                return known
        number, shape = len(self.tables), (Affine(1, 0), 1, table.half)
        table.inputs = Value(f"cos{number}", shape, self._dtype), Value(f"sin{number}", shape, self._dtype)
        self.tables.append(table)
        return table

    def _compute(self, angles: Sequence[Value]) -> Callable[..., Any]:
        calls, _ = slice_of(self._makers, angles, {self._positions})
        return compiled(calls, [self._positions], angles)

    def _by_kernel(
        self, x: Tensor, angles: tuple[Tensor, Tensor], norm: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, tokens = self._sizes, x.shape[0]
        pages = torch.zeros((2, 1, sizes.kv_heads, PAGE_SIZE, sizes.head_size), dtype=x.dtype)
        qkv = x.clone().view(tokens, sizes.all_heads, sizes.head_size)
        q = torch.empty((tokens, sizes.heads, sizes.head_size), dtype=x.dtype)
        rope_store(qkv, sizes.heads, *angles, torch.arange(tokens), pages[0], pages[1], out=q, norm=norm)
        k, v = pages[:, 0, :, :tokens].transpose(1, 2)
        return q, k, v


def _head_norms(q: Norm, k: Norm, size: int) -> HeadNorms | None:
    if (q.eps, q.from_one) != (k.eps, k.from_one) or not q.weight.shape == k.weight.shape == (size,):
        return None
    return HeadNorms(q.weight, k.weight, q.eps, q.from_one)


def _row_size(value: Value) -> int | None:
    """Return the elements of a row of a value that has one row for each token, or None."""
    if len(value.shape) < 2 or value.shape[-2] != Affine(1, 0) or any(each != 1 for each in value.shape[:-2]):
        return None
    return value.shape[-1] if isinstance(value.shape[-1], int) else None


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
