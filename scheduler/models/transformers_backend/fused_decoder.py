"""All layers of a traced decoder in one call of the kernel, where its calls are those of the kernel's layers.

Invariant: each tensor of the kernel is that of a call whose place in the chain of calls is known, and no call
is left over between the first norm and the result.
"""

from typing import Any

import torch
from torch import Tensor

from ...execution.forward import AttentionBackend, ForwardBatch
from ...kernels.decoder import DecoderKernel
from ...kernels.decoder_layers import LayerKind, LayerShape, LayerTensors
from ...tracing.passes import compiled, makers_of, slice_of
from ...tracing.tracer import Call, Trace, Value
from .fusion import FusedAttention, Sizes
from .norms import Norm

_ADDITIONS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
_Layer = tuple[LayerTensors, LayerKind, FusedAttention]


class _OtherCallsError(Exception):
    pass


class FusedDecoder:
    def __init__(self, trace: Trace, sizes: Sizes) -> None:
        """``trace`` has kernels for norms, gates and attention; ValueError: the kernel refuses it."""
        chain = _Chain(trace)
        last, stream = chain.norm(trace.out)
        layers: list[_Layer] = []
        while (before := chain.layer(stream)) is not None:
            layer, stream = before
            layers.insert(0, layer)
        attention = [each for _, _, each in layers]
        count = sum(call.kind == "layer" for call in trace.calls)
        norms = {None if each.norm is None else (each.norm.eps, each.norm.from_one) for each in attention}
        halves = {each.rope.half for each in attention}
        forms = {(norm.eps, norm.from_one) for norm in chain.norms}
        _require(bool(layers) and [each.layer for each in attention] == list(range(count)))
        _require(len(norms) == len(halves) == len(forms) == 1)
        ((eps, from_one),), (head,) = forms, norms
        _require(head is None or head[1] == from_one)
        _require(len(stream.shape) > 1 and stream.contiguous and stream.dtype == last.weight.dtype)
        shape = LayerShape(
            hidden=last.weight.shape[0],
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_size=sizes.head_size,
            rotated=2 * halves.pop(),
            from_one=from_one,
        )
        self._kernel = DecoderKernel(
            [tensors for tensors, _, _ in layers],
            [kind for _, kind, _ in layers],
            last.weight,
            shape,
            eps=eps,
            head_eps=None if head is None else head[0],
        )
        ids, positions, _ = trace.inputs
        calls, _ = slice_of(makers_of(trace), [stream], {ids, positions})
        self._embed = compiled(calls, [ids, positions], [stream])
        self._ropes = [each.rope for each in attention]
        self._tables = list(dict.fromkeys(self._ropes))
        self._hidden = stream.shape[-1]

    def sampled(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Return hidden states of the sampled tokens, [S, hidden], valid until the next call."""
        assert backend.paged is not None
        longest, tokens = max(batch.kv_lens_host), batch.input_ids.shape[0]
        tables = {each: each.table(longest) for each in self._tables}
        embedded = self._embed(batch.input_ids, batch.positions, tokens).view(tokens, self._hidden)
        angles = [tables[each] for each in self._ropes]
        return self._kernel(embedded, angles, batch.positions, batch.sample_tokens, backend.paged)


def fused_decoder(trace: Trace, sizes: Sizes) -> FusedDecoder | None:
    try:
        return FusedDecoder(trace, sizes)
    except (_OtherCallsError, ValueError):
        return None


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
        _require(at is middle and begin is before and (behind_mlp is None) == (behind_attention is None))
        _require(None not in (qkv.packed, o.packed, gate_up.packed, down.packed))
        _require(gate_up.bias is None and down.bias is None)
        attention: FusedAttention = fused.detail
        norm = attention.norm
        tensors = LayerTensors(
            input_norm=input_norm.weight,
            qkv=qkv.packed,
            qkv_bias=qkv.bias,
            q_norm=None if norm is None else norm.q_weight,
            k_norm=None if norm is None else norm.k_weight,
            o=o.packed,
            o_bias=o.bias,
            mlp_norm=mlp_norm.weight,
            gate_up=gate_up.packed,
            down=down.packed,
            behind_attention=None if behind_attention is None else behind_attention.weight,
            behind_mlp=None if behind_mlp is None else behind_mlp.weight,
            sinks=attention.form.sinks,
        )
        size, kind = gate_up.out_features // 2, attention.form.kind
        return (tensors, LayerKind(intermediate=size, bend=gate.detail, attention=kind), attention), before

    def norm(self, value: Value) -> tuple[Norm, Value]:
        made = self._made(value, "norm")
        self.norms.append(made.detail)
        return made.detail, self._source(made.args[0])

    def _behind(self, value: Value) -> tuple[Norm | None, Value]:
        return self.norm(value) if self._made(value).kind == "norm" else (None, value)

    def _product(self, value: Value) -> tuple[Any, Value]:
        made = self._made(value, "product")
        return made.detail, made.args[0]

    def _made(self, value: Value, kind: str | None = None) -> Call:
        made = self._makers[self._source(value)]
        _require(kind is None or made.kind == kind)
        return made

    def _source(self, value: Value) -> Value:
        while (maker := self._makers.get(value)) is not None and maker.reshapes:
            value = maker.args[0]
        _require(value in self._makers)
        return value

    def _addends(self, stream: Value, kind: str) -> tuple[Value, Value]:
        """Return the stream before an addition, and what a block whose product takes a ``kind`` added."""
        made = self._made(stream)
        _require(made.target in _ADDITIONS and len(made.args) == 2 and not made.kwargs)
        for before, update in (made.args, made.args[::-1]):
            if isinstance(before, Value) and isinstance(update, Value):
                block = self._made(update)
                block = self._made(block.args[0]) if block.kind == "norm" else block
                if block.kind == "product" and self._made(block.args[0]).kind == kind:
                    return self._source(before), update
        raise _OtherCallsError


def _require(holds: bool) -> None:
    if not holds:
        raise _OtherCallsError
