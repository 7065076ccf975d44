"""A traced decoder computing steps.

Invariants:
- What a step computes with is chosen by its backend: all layers in one call where it is planned for that,
  products as they are where it rotates and stores them, else what the modules do.
- All ways read the same parameters, and stop before the same layers.
- For one call each tensor of the kernel is that of a call whose place in the chain of calls is known, and no
  call is left over between the first norm and the result.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...execution.forward import AttentionBackend, ForwardBatch
from ...kernels import elementwise_for
from ...kernels.attention_form import AttentionForm
from ...kernels.decoder import DecoderKernel
from ...kernels.decoder_layers import LayerKind, LayerShape, LayerTensors
from ...tracing import Call, Trace, Value, compiled, slice_of, tidy, write_in_place
from .decoder_tracing import trace_decoder, trace_head
from .fusion import Norm, OtherCallsError, RopeTable, Sizes, fuse_attention, fuse_gates, proven_norms, require
from .probe import Probe
from .products import Given, Head

_ADDITIONS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
_Layer = tuple[LayerTensors, LayerKind, int, RopeTable, tuple[float, bool] | None]
"""Parameters, form, number, angles, and eps and ``from_one`` of head norms."""


class FusedTrace:
    """Computes all layers of a trace in one call, as ``models/fused_decoder.py`` does those of the engine."""

    def __init__(self, trace: Trace, sizes: Sizes) -> None:
        """``trace`` has kernels for norms, gates and attention; ValueError: the kernel refuses it."""
        chain = _Chain(trace)
        last, stream = chain.norm(trace.out)
        layers: list[_Layer] = []
        while (before := chain.layer(stream)) is not None:
            layer, stream = before
            layers.insert(0, layer)
        require(bool(layers))
        tensors, kinds, numbers, self._ropes, norms = zip(*layers, strict=True)
        count = sum(call.kind == "layer" for call in trace.calls)
        heads, halves = set(norms), {each.half for each in self._ropes}
        forms = {(norm.eps, norm.from_one) for norm in chain.norms}
        require(numbers == tuple(range(count)))
        require(len(heads) == len(halves) == len(forms) == 1)
        ((eps, from_one),), (head,) = forms, heads
        require(head is None or head[1] == from_one)
        require(len(stream.shape) > 1 and stream.dtype == last.dtype)
        width, rotated = last.shape[0], 2 * halves.pop()
        shape = LayerShape(hidden=width, rotated=rotated, from_one=from_one, **asdict(sizes))
        self._kernel = DecoderKernel(tensors, kinds, last, shape, eps=eps, head_eps=head and head[0])
        ids, positions, _ = trace.inputs
        calls, _ = slice_of(trace, [stream], set())
        self._embed = compiled(calls, [ids, positions], [stream])
        self._tables = set(self._ropes)

    def sampled(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Return hidden states of the sampled tokens, [S, hidden], valid until the next call."""
        assert backend.paged is not None
        longest, tokens = max(batch.kv_lens_host), batch.input_ids.shape[0]
        tables = {each: each.table(longest) for each in self._tables}
        embedded = self._embed(batch.input_ids, batch.positions, tokens).reshape(tokens, -1).contiguous()
        angles = [tables[each] for each in self._ropes]
        return self._kernel(embedded, angles, batch.positions, batch.sample_tokens, backend.paged)


class _Chain:
    def __init__(self, trace: Trace) -> None:
        self.norms: list[Norm] = []
        self._makers = {out: call for call in trace.calls for out in call.outs}

    def layer(self, stream: Value) -> tuple[_Layer, Value] | None:
        """Return the layer that made ``stream``, and of which; None if no layer made it."""
        if self._made(stream).target not in _ADDITIONS:
            return None
        middle, mlp = self._addends(stream, "gate")
        behind_mlp, mlp = self._behind(mlp)
        down, gated = self._product(mlp)
        gate = self._made(gated, "gate")
        gate_up, normalised = self._product(gate.args[0])
        mlp_norm, at = self.norm(normalised)
        before, attended = self._addends(middle, "fused")
        behind_attention, attended = self._behind(attended)
        o, rows = self._product(attended)
        fused = self._made(rows, "fused")
        qkv, normalised = self._product(fused.args[1])
        input_norm, begin = self.norm(normalised)
        require(at is middle and begin is before and (behind_mlp is None) == (behind_attention is None))
        require(gate_up.bias is None and down.bias is None)
        *_, number, head_norms, form = fused.args
        q_norm, k_norm, *head = head_norms or (None, None)
        tensors = LayerTensors(
            input_norm=input_norm,
            qkv=qkv.packed,
            qkv_bias=qkv.bias,
            q_norm=q_norm,
            k_norm=k_norm,
            o=o.packed,
            o_bias=o.bias,
            mlp_norm=mlp_norm,
            gate_up=gate_up.packed,
            down=down.packed,
            behind_attention=behind_attention,
            behind_mlp=behind_mlp,
            sinks=form.sinks,
        )
        kind = LayerKind(intermediate=gate_up.out_features // 2, bend=gate.detail, attention=form.kind)
        return (tensors, kind, number, fused.detail, tuple(head) or None), before

    def norm(self, value: Value) -> tuple[Tensor, Value]:
        """Return the weight of the norm that made ``value``, and of which."""
        made = self._made(value, "norm")
        self.norms.append(made.detail)
        return made.detail.weight, self._source(made.args[0])

    def _behind(self, value: Value) -> tuple[Tensor | None, Value]:
        return self.norm(value) if self._made(value).kind == "norm" else (None, value)

    def _product(self, value: Value) -> tuple[Any, Value]:
        made = self._made(value, "product")
        return made.detail, made.args[0]

    def _made(self, value: Value, kind: str | None = None) -> Call:
        made = self._makers[self._source(value)]
        require(kind is None or made.kind == kind)
        return made

    def _source(self, value: Value) -> Value:
        while (maker := self._makers.get(value)) is not None and maker.reshapes:
            value = maker.args[0]
        require(value in self._makers)
        return value

    def _addends(self, stream: Value, kind: str) -> tuple[Value, Value]:
        """Return the stream before an addition, and what a block whose product takes a ``kind`` added."""
        made = self._made(stream)
        require(made.target in _ADDITIONS and len(made.args) == 2 and not made.kwargs)
        for before, update in (made.args, made.args[::-1]):
            if isinstance(before, Value) and isinstance(update, Value):
                block = self._made(update)
                block = self._made(block.args[0]) if block.kind == "norm" else block
                if block.kind == "product" and self._made(block.args[0]).kind == kind:
                    return self._source(before), update
        raise OtherCallsError


class _Program:
    def __init__(self, trace: Trace, tables: Sequence[RopeTable]) -> None:
        self.trace, self._tables = trace, tables
        self._inputs = [*trace.inputs, *(each for table in tables for each in table.inputs)]

    def arguments(self, batch: ForwardBatch, backend: AttentionBackend) -> list[Any]:
        positions, tables = batch.positions, self._tables
        longest = max(batch.kv_lens_host) if tables else 0
        found = [each for table in tables for each in table.rows(positions, longest)]
        return [batch.input_ids, positions, backend, *found, batch.input_ids.shape[0]]

    @cached_property
    def run(self) -> Callable[..., Tensor]:
        return compiled(self.trace.calls, self._inputs, [self.trace.out])

    @cached_property
    def run_by_layer(self) -> Callable[..., Generator[int, None, Tensor]]:
        return compiled(self.trace.calls, self._inputs, [self.trace.out], stops=True)


class TracedDecoder:
    def __init__(self, trace: Trace, sizes: Sizes, dtype: torch.dtype, *, kernels: bool) -> None:
        """``kernels``: compiled ones serve the model's dtype."""
        tidy(trace)
        if kernels:
            fuse_gates(trace, dtype)
        self.plain = _Program(trace, ())
        self.fused: _Program | None = None
        """Program whose attention takes products as they are, or None."""
        self.in_one_call: FusedTrace | None = None
        if kernels:
            fused = Trace(trace.inputs, [replace(call) for call in trace.calls], trace.out)
            tables = fuse_attention(fused, sizes, dtype)
            if tables:
                self.fused = _Program(fused, tables)
                with suppress(OtherCallsError, ValueError):
                    self.in_one_call = FusedTrace(fused, sizes)

    def sampled(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        if self.in_one_call is not None and backend.paged is not None:
            return self.in_one_call.sampled(batch, backend)
        program = self._serving(backend)
        return program.run(*program.arguments(batch, backend)).index_select(0, batch.sample_tokens)

    def by_layer(self, batch: ForwardBatch, backend: AttentionBackend) -> Generator[int, None, Tensor]:
        program = self._serving(backend)
        hidden = yield from program.run_by_layer(*program.arguments(batch, backend))
        return hidden.index_select(0, batch.sample_tokens)

    def _serving(self, backend: AttentionBackend) -> _Program:
        return self.plain if self.fused is None or backend.fused is None else self.fused


def traced_decoder(
    decoder: nn.Module, probe: Probe, forms: list[AttentionForm], dtype: torch.dtype, device: torch.device
) -> TracedDecoder | None:
    """Return ``decoder``, whose parameters are in place, traced; None if it cannot be."""
    if device.type != "cpu":
        return None  # graphs record there
    first = probe.attended[0]
    sizes = Sizes(first.num_heads, first.num_kv_heads, max(first.key_size, first.value_size))
    kernels = elementwise_for(device, dtype)
    norms = {} if kernels is None else proven_norms(decoder, dtype, kernels)
    trace = trace_decoder(decoder, probe, norms, forms, sizes.head_size)
    return None if trace is None else TracedDecoder(trace, sizes, dtype, kernels=kernels is not None)


def traced_head(
    headed: Any, given: Given, head: Head | None, dtype: torch.dtype, device: torch.device, hidden_size: int
) -> Callable[..., Tensor] | None:
    """Return a function from hidden states, memory and S to logits, or None if the head is not traceable."""
    if device.type != "cpu" or head is None:
        return None
    if (trace := trace_head(headed, given, head, dtype, hidden_size)) is None:
        return None
    tidy(trace)
    for call in trace.calls:
        if call.kind == "head":
            write_in_place(trace, call.outs[0])
    return compiled(trace.calls, trace.inputs, [trace.out])
