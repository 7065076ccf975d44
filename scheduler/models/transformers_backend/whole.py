"""A recorded decoder in one call of the kernel that computes all layers, where its calls are those of such layers.

Invariant: each tensor of the kernel is that of a call whose place in the chain of calls is known, and no call is left over
between the first norm and the result.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.attention_form import HeadNorms
from ...kernels.decoder import DecoderKernel
from ...kernels.decoder_layers import LayerKind, LayerShape, LayerTensors
from .fusion import FusedAttention, Sizes
from .norms import Norm
from .recording import Call, Recording, Value

_ADDITIONS = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)


class _OtherCallsError(Exception):
    """The calls are not those of the kernel's layers."""


@dataclass(slots=True)
class Whole:
    """What computes all layers, and what it begins with."""

    kernel: DecoderKernel
    attention: list[FusedAttention]
    """Of each layer."""
    embedded: Value
    """Hidden states before the first layer."""


def whole(recording: Recording, sizes: Sizes) -> Whole | None:
    """The kernel for a recording whose norms, gates and attention are kernels' already. None: its calls are others."""
    try:
        return _Chain(recording).whole(sizes)
    except (_OtherCallsError, ValueError):
        return None


class _Chain:
    """Follows hidden states from the end of a recording to its beginning."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._makers = {out: call for call in recording.calls for out in call.outs}
        self._norms: list[Norm] = []

    def whole(self, sizes: Sizes) -> Whole:
        """See :func:`whole`.

        Raises:
            _OtherCallsError: a call is another one than a layer has.
            ValueError: the kernel does not take a tensor.
        """
        last, stream = self._norm(self._recording.out)
        layers: list[tuple[LayerTensors, LayerKind, FusedAttention]] = []
        while (before := self._layer(stream)) is not None:
            layer, stream = before
            layers.append(layer)
        layers.reverse()
        attention = [each for _, _, each in layers]
        count = sum(call.kind == "layer" for call in self._recording.calls)
        if not layers or [each.layer for each in attention] != list(range(count)):
            raise _OtherCallsError
        heads, angles = {_form_of(each.norm) for each in attention}, {each.angles.half for each in attention}
        forms = {(norm.eps, norm.from_one) for norm in self._norms}
        if len(heads) > 1 or len(angles) > 1 or len(forms) > 1:
            raise _OtherCallsError
        (eps, from_one), head = forms.pop(), heads.pop()
        if head is not None and head[1] != from_one:
            raise _OtherCallsError
        shape = LayerShape(
            hidden=last.weight.shape[0],
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_size=sizes.head_size,
            rotated=2 * angles.pop(),
            from_one=from_one,
        )
        kernel = DecoderKernel(
            [tensors for tensors, _, _ in layers],
            [kind for _, kind, _ in layers],
            last.weight,
            shape,
            eps=eps,
            head_eps=None if head is None else head[0],
        )
        if len(stream.shape) < 2 or not stream.contiguous or stream.dtype != last.weight.dtype:
            raise _OtherCallsError
        return Whole(kernel, attention, stream)

    def _layer(self, stream: Value) -> tuple[tuple[LayerTensors, LayerKind, FusedAttention], Value] | None:
        """What made ``stream`` of an earlier one. None: no layer made it."""
        made = self._made(stream)
        if made.target not in _ADDITIONS:
            return None
        middle, mlp = self._addends(stream, "gate")
        behind_mlp, mlp = self._behind(mlp)
        down, gated = self._product(mlp)
        gate = self._of("gate", gated)
        gate_up, normalised = self._product(gate.args[0])
        mlp_norm, at = self._norm(normalised)
        before, attended = self._addends(middle, "fused")
        behind_attention, attended = self._behind(attended)
        o, rows = self._product(attended)
        fused = self._of("fused", rows)
        qkv, normalised = self._product(fused.args[1])
        input_norm, begin = self._norm(normalised)
        if at is not middle or begin is not before or (behind_mlp is None) != (behind_attention is None):
            raise _OtherCallsError
        if (
            None in (qkv.packed, o.packed, gate_up.packed, down.packed)
            or gate_up.bias is not None
            or down.bias is not None
        ):
            raise _OtherCallsError
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
        kind = LayerKind(
            intermediate=gate_up.out_features // 2, bend=gate.detail, attention=attention.form.kind
        )
        return (tensors, kind, attention), before

    def _made(self, value: Value) -> Call:
        """What made a value, views aside."""
        return self._makers[self._source(value)]

    def _source(self, value: Value) -> Value:
        while (maker := self._makers.get(value)) is not None and maker.reshapes:
            value = maker.args[0]
        if value not in self._makers:
            raise _OtherCallsError
        return value

    def _of(self, kind: str, value: Value) -> Call:
        made = self._made(value)
        if made.kind != kind:
            raise _OtherCallsError
        return made

    def _norm(self, value: Value) -> tuple[Norm, Value]:
        """The norm that made a value, and of what."""
        made = self._of("norm", value)
        self._norms.append(made.detail)
        return made.detail, self._source(made.args[0])

    def _behind(self, value: Value) -> tuple[Norm | None, Value]:
        """The same, where there is one."""
        return self._norm(value) if self._made(value).kind == "norm" else (None, value)

    def _product(self, value: Value) -> tuple[Any, Value]:
        made = self._of("product", value)
        return made.detail, made.args[0]

    def _addends(self, stream: Value, kind: str) -> tuple[Value, Value]:
        """The stream before an addition, and what a block whose product takes a ``kind`` added."""
        made = self._made(stream)
        if made.target not in _ADDITIONS or len(made.args) != 2 or made.kwargs:
            raise _OtherCallsError
        one, other = made.args
        for before, update in ((one, other), (other, one)):
            if isinstance(before, Value) and isinstance(update, Value) and self._ends(update, kind):
                return self._source(before), update
        raise _OtherCallsError

    def _ends(self, update: Value, kind: str) -> bool:
        """Whether a block's product, with a norm behind it or without, made a value."""
        made = self._made(update)
        if made.kind == "norm":
            made = self._made(made.args[0])
        return made.kind == "product" and self._made(made.args[0]).kind == kind


def _form_of(norm: HeadNorms | None) -> tuple[float, bool] | None:
    return None if norm is None else (norm.eps, norm.from_one)
