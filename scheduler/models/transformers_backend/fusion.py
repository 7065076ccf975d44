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

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...kernels import Elementwise
from ...kernels.attention_form import Bend, HeadNorms
from ...kernels.elementwise import gate_mul, rope_store
from ...runtime.engine_config import PAGE_SIZE
from ...tracing import Affine, Call, Trace, Value, compiled, following, mapped, replace, slice_of, takers_of
from .interfaces import attend_fused
from .probe import FOREIGN_FAILURES

_TOKENS = 5
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


def proven_norms(decoder: nn.Module, dtype: torch.dtype, kernels: Elementwise) -> dict[nn.Module, Norm]:
    found: dict[nn.Module, Norm] = {}
    known: dict[Any, bool | None] = {}
    for module, weight, eps in _candidates(decoder, dtype):
        kind = type(module), weight.shape, eps
        if kind not in known:
            known[kind] = _from_one(module, weight, eps, kernels)
        from_one = known[kind]
        if from_one is not None:
            found[module] = Norm(kernels.rms_norm, weight, eps, from_one)
    return found


def _candidates(decoder: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Tensor, float]]:
    for module in decoder.modules():
        own = dict(module.named_parameters(recurse=False))
        if own.keys() != {"weight"} or module._buffers or [*module.children()]:
            continue
        weight, found = own["weight"], (getattr(module, name, None) for name in _NAMES)
        eps = next((each for each in found if isinstance(each, float)), None)
        if weight.dim() == 1 and weight.dtype == dtype and weight.is_contiguous() and eps is not None:
            yield module, weight, eps


def _from_one(module: nn.Module, like: Tensor, eps: float, kernels: Elementwise) -> bool | None:
    (size,), dtype = like.shape, like.dtype
    generator = torch.Generator().manual_seed(size)
    fitting = [False, True]
    for scale in _SCALES:
        weight = _random((size,), dtype, generator) + 0.5
        x = scale * _random((_TOKENS, size), dtype, generator)
        try:
            expected: Any = functional_call(module, {"weight": weight}, (x.unsqueeze(0),))
        except FOREIGN_FAILURES:
            return None
        if not isinstance(expected, Tensor) or expected.shape != (1, *x.shape) or expected.dtype != dtype:
            return None
        fitting = [
            form for form in fitting if close(kernels.rms_norm(x, weight, eps, from_one=form), expected[0])
        ]
    return fitting[0] if fitting else None


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
    """Function of positions [T] and T: cosines and sines, a row for each token."""
    half: int
    """Elements of a row that are taken, its first."""
    inputs: tuple[Value, Value]
    """Inputs of the kernel's calls: cosines and sines of a step's tokens, [T, 1, half] each."""
    _table: tuple[Tensor, Tensor] | None = None

    def table(self, longest: int) -> tuple[Tensor, Tensor]:
        """Return those of at least the positions [0, longest), each [P, 1, half], contiguous."""
        table = self._table
        while table is None or longest > table[0].shape[0]:
            start = 0 if table is None else table[0].shape[0]
            found = self.compute(torch.arange(start, start + _BLOCK), _BLOCK)
            block = [each.reshape(_BLOCK, -1)[:, : self.half].unsqueeze(1) for each in found]
            if table is not None:
                block = [torch.cat(pair) for pair in zip(table, block, strict=True)]
            table = block[0].contiguous(), block[1].contiguous()
        self._table = table
        return table

    def rows(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return those of each token, int64 [T] below ``longest`` to [T, 1, half] each."""
        cosines, sines = self.table(longest)
        return cosines.index_select(0, positions), sines.index_select(0, positions)


class OtherCallsError(Exception):
    """No kernel computes the calls."""


def require(holds: bool) -> None:
    if not holds:
        raise OtherCallsError


def fuse_gates(trace: Trace, dtype: torch.dtype) -> None:
    """Have a kernel compute what gates the input of a product and follows from one other product."""
    products = {call.outs[0] for call in trace.calls if call.kind == "product"}
    borders = {out for call in trace.calls if call.kind for out in call.outs}
    gates: dict[Value, Value] = {}
    calls: list[Call] = []
    for call in trace.calls:
        if call.kind == "product" and (rows := call.args[0]) not in borders and rows not in gates:
            region, begin = slice_of(trace, [rows], borders)
            (source,) = begin if len(begin) == 1 and begin <= products else (None,)
            bend = None if source is None else _bend(region, source, rows, dtype)
            if bend is not None:
                gate = gates[rows] = Value(f"g{len(gates)}", rows.shape, dtype)
                calls.append(Call(gate_mul, (source,), {"bend": bend}, [gate], kind="gate", detail=bend))
        calls.append(call)
    trace.calls = calls
    replace(trace, gates)


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
    calls: list[Call] = []
    for call in trace.calls:
        try:
            calls += matcher.fused(call) if call.kind == "attend" else [call]
        except OtherCallsError:
            calls.append(call)
    trace.calls = calls
    replace(trace, matcher.replaced)
    return [*matcher.tables.values()]


class _AttentionMatcher:
    def __init__(self, trace: Trace, sizes: Sizes, dtype: torch.dtype) -> None:
        self.tables: dict[tuple[Value, Value, int], RopeTable] = {}
        self.replaced: dict[Value, Value] = {}
        """Results of attention, and those of the kernel in their place."""
        self._trace, self._sizes, self._dtype = trace, sizes, dtype
        self._positions = trace.inputs[1]
        self._follow = following(trace, [self._positions])
        self._products = {call.outs[0] for call in trace.calls if call.kind == "product"}
        borders = {out for call in trace.calls if call.kind != "norm" and call.kind for out in call.outs}
        self._borders = borders | self._follow
        self._takers = takers_of(trace)

    def fused(self, attend: Call) -> list[Call]:
        """Return calls that store and attend from the product of queries, keys and values."""
        backend, q, k, v, layer, form, _ = attend.args
        region, begin = slice_of(self._trace, [q, k, v], self._borders)
        angles = sorted(begin & self._follow, key=lambda value: value.name)
        require(len(begin) == 3 and len(angles) == 2)
        (source,) = begin.difference(angles)
        sizes = self._sizes
        require(source in self._products)
        require(source.shape == (Affine(1, 0), sizes.all_heads * sizes.head_size))
        inside = {id(call) for call in (*region, attend)}
        made = [source, *(out for call in region for out in call.outs)]
        require(all(id(taker) in inside for value in made for taker in self._takers[value]))
        norm = self._head_norms(q, k)
        rope = self._rope(region, source, [q, k, v], angles, norm)
        out = Value(f"a{layer}", (Affine(1, 0), sizes.heads * sizes.head_size), self._dtype)
        args = backend, source, sizes.all_heads, *rope.inputs, layer, norm, form
        heads = self.replaced[attend.outs[0]] = Value(f"a{layer}_heads", attend.outs[0].shape, self._dtype)
        shape = (1, Affine(1, 0), sizes.heads, sizes.head_size)
        return [
            Call(attend_fused, args, {}, [out], kind="fused", detail=rope),
            Call(Tensor.view, (out, shape), {}, [heads], reshapes=True),
        ]

    def _head_norms(self, *made: Value) -> HeadNorms | None:
        regions = [slice_of(self._trace, [value], self._borders)[0] for value in made]
        norms = [[call.detail for call in region if call.kind == "norm"] for region in regions]
        if not any(norms):
            return None
        require(all(len(each) == 1 for each in norms))
        (q,), (k,) = norms
        require((q.eps, q.from_one) == (k.eps, k.from_one))
        require(q.weight.shape == k.weight.shape == (self._sizes.head_size,))
        return HeadNorms(q.weight, k.weight, q.eps, q.from_one)

    def _rope(
        self, calls: list[Call], source: Value, made: list[Value], angles: list[Value], norm: HeadNorms | None
    ) -> RopeTable:
        sizes, dtype, number = self._sizes, self._dtype, len(self.tables)
        width = angles[0].shape[-1] if angles[0].shape else None
        rows = all(each.shape[-2:] == (Affine(1, 0), width) and {*each.shape[:-2]} <= {1} for each in angles)
        if not rows or not isinstance(width, int) or any(each.dtype != dtype for each in angles):
            raise OtherCallsError
        if norm is not None:
            trial = [_random((sizes.head_size,), dtype) + 0.5 for _ in range(2)]
            weights = {id(norm.q_weight): trial[0], id(norm.k_weight): trial[1]}
            require(len(weights) == 2)
            calls = [
                dataclasses.replace(call, args=mapped(lambda each: weights.get(id(each), each), call.args))
                for call in calls
            ]
            norm = norm._replace(q_weight=trial[0], k_weight=trial[1])
        positions = torch.randint(0, _POSITIONS, (_TOKENS,), generator=torch.Generator().manual_seed(1))
        x = _random((_TOKENS, sizes.all_heads * sizes.head_size), dtype)
        values = self._compute(angles)(positions, _TOKENS)
        run = compiled(calls, [source, *angles], made)
        expected = [each[0].transpose(0, 1) for each in run(x, *values, _TOKENS)]
        for half in (width // 2, width):
            shape = (Affine(1, 0), 1, half)
            inputs = Value(f"cos{number}", shape, dtype), Value(f"sin{number}", shape, dtype)
            for cos, sin in (angles, angles[::-1]):
                if 0 < 2 * half <= sizes.head_size:
                    tried = RopeTable(self._compute((cos, sin)), half, inputs)
                    found = self._by_kernel(x, tried.rows(positions, _POSITIONS), norm)
                    if all(close(*pair, cancels=True) for pair in zip(found, expected, strict=True)):
                        return self.tables.setdefault((cos, sin, half), tried)
        raise OtherCallsError

    def _compute(self, angles: Sequence[Value]) -> Callable[..., Any]:
        calls, _ = slice_of(self._trace, angles, {self._positions})
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


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None = None) -> Tensor:
    generator = generator or torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)
