"""A step as bytes: what a forward batch of the host is on the way from rank 0 to its workers.

Invariants:
- A batch comes back as it was: every array with its dtype, shape and bytes.
- Wide elements come before narrow ones, so each array is aligned where the frame is.
- What the receiver can tell by itself is not sent: lengths that are there as an array, and the one query of a decode row.
"""

from collections.abc import Sequence
from dataclasses import fields
from math import prod
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from ..forward import ForwardBatch, InputTokens, SamplingBatch, SpecialRows

_LONG, _DOUBLE, _INT, _FLOAT, _BOOL = (np.dtype(code) for code in ("i8", "f8", "i4", "f4", "?"))
_SPECIAL = (
    *(("rows", _LONG), ("counters", _LONG), ("restarted", _LONG), ("prompt_at", _LONG), ("output_at", _LONG)),
    *(("bias_ids", _LONG), ("wants", _LONG), ("token_ids", _LONG)),
    *(("repetition", _FLOAT), ("frequency", _FLOAT), ("presence", _FLOAT), ("bias", _FLOAT)),
    ("masked", _BOOL),
)
_INPUTS = (("tokens", _LONG), ("targets", _LONG), ("token_ids", _LONG))


class Extras(msgspec.Struct, array_like=True):
    """Shapes of the optional arrays of one kind, in the order above, and its numbers."""

    shapes: list[list[int]]
    numbers: list[int]


class Plan(msgspec.Struct, array_like=True):
    """What the arrays of one frame are."""

    num_decode: int
    q_lens: list[int]
    """Of the rows that prefill."""
    sizes: tuple[int, int, int, int]
    """Rows, query tokens, sampled tokens, pages of the longest row."""
    flags: tuple[bool, bool, bool, bool, bool]
    """any_sampled, any_filtered, want_raw, want_sampled, and whether there is min_p."""
    largest_top_k: int | None
    special: Extras | None = None
    inputs: Extras | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Plan).decode


def encode_batch(batch: ForwardBatch) -> tuple[bytes, bytes]:
    """Header and arrays of a step whose tensors are on the host."""
    sampling, special, inputs = batch.sampling, batch.sampling.special, batch.inputs
    arrays = [
        *(batch.input_ids, batch.positions, batch.kv_slots, batch.slots),
        *(batch.sample_tokens, batch.sample_slots, sampling.top_k, sampling.uniforms),
    ]
    narrow = [batch.page_table, batch.kv_lens, sampling.temperature, sampling.top_p]
    if sampling.min_p is not None:
        narrow.append(sampling.min_p)
    extras: list[Extras | None] = []
    for owner, layout in ((special, _SPECIAL), (inputs, _INPUTS)):
        extras.append(None if owner is None else _extras_of(owner, layout, arrays, narrow))
    rows, tokens = len(batch.slots), len(batch.positions)
    plan = Plan(
        batch.num_decode,
        list(batch.q_lens_host[batch.num_decode :]),
        (rows, tokens, len(batch.sample_tokens), batch.page_table.shape[1]),
        (
            *(sampling.any_sampled, sampling.any_filtered, sampling.want_raw, sampling.want_sampled),
            sampling.min_p is not None,
        ),
        sampling.largest_top_k,
        *extras,
    )
    parts = [np.ascontiguousarray(tensor.numpy()).data for tensor in (*arrays, *narrow, sampling.greedy)]
    return _encode(plan), b"".join(parts)


def _extras_of(
    owner: Any, layout: Sequence[tuple[str, np.dtype[Any]]], wide: list[Tensor], narrow: list[Tensor]
) -> Extras:
    shapes = []
    for name, dtype in layout:
        tensor = getattr(owner, name)
        (wide if dtype.itemsize == _LONG.itemsize else narrow).append(tensor)
        shapes.append(list(tensor.shape))
    return Extras(shapes, [getattr(owner, field.name) for field in fields(owner) if field.type is int])


class _Reader:
    """Arrays of a frame, one behind the other."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = bytearray(data)  # the runner writes into the input ids
        self._offset = 0

    def take(self, dtype: np.dtype[Any], *shape: int) -> Tensor:
        count = prod(shape)
        array = np.frombuffer(self._data, dtype, count, self._offset)
        self._offset += count * dtype.itemsize
        return torch.from_numpy(array.reshape(shape) if len(shape) != 1 else array)


def decode_batch(header: bytes | msgspec.Raw, data: bytes | memoryview) -> ForwardBatch:
    """What :func:`encode_batch` was given, with arrays of its own."""
    plan, reader = _decode(header), _Reader(data)
    rows, tokens, samples, pages = plan.sizes
    any_sampled, any_filtered, want_raw, want_sampled, has_min_p = plan.flags
    take = reader.take
    input_ids, positions, kv_slots = (take(_LONG, tokens) for _ in range(3))
    slots = take(_LONG, rows)
    sample_tokens, sample_slots, top_k = (take(_LONG, samples) for _ in range(3))
    uniforms = take(_DOUBLE, samples)
    wide = [_wide(reader, extras, layout) for extras, layout in _both(plan)]
    page_table, kv_lens = take(_INT, rows, pages), take(_INT, rows)
    temperature, top_p = take(_FLOAT, samples), take(_FLOAT, samples)
    min_p = take(_FLOAT, samples) if has_min_p else None
    found = [
        _finish(reader, extras, layout, first)
        for (extras, layout), first in zip(_both(plan), wide, strict=True)
    ]
    sampling = SamplingBatch(
        temperature=temperature,
        greedy=take(_BOOL, samples),
        top_k=top_k,
        top_p=top_p,
        uniforms=uniforms,
        any_sampled=any_sampled,
        any_filtered=any_filtered,
        want_raw=want_raw,
        want_sampled=want_sampled,
        min_p=min_p,
        largest_top_k=plan.largest_top_k,
        special=None if plan.special is None else _special(found[0], plan.special.numbers),
    )
    return ForwardBatch(
        num_decode=plan.num_decode,
        input_ids=input_ids,
        positions=positions,
        kv_slots=kv_slots,
        page_table=page_table,
        kv_lens=kv_lens,
        q_lens_host=[1] * plan.num_decode + plan.q_lens,
        kv_lens_host=kv_lens.tolist(),
        slots=slots,
        sample_tokens=sample_tokens,
        sample_slots=sample_slots,
        sampling=sampling,
        inputs=None if plan.inputs is None else InputTokens(**found[1], top=plan.inputs.numbers[0]),
    )


def _both(plan: Plan) -> list[tuple[Extras | None, Sequence[tuple[str, np.dtype[Any]]]]]:
    return [(plan.special, _SPECIAL), (plan.inputs, _INPUTS)]


def _wide(
    reader: _Reader, extras: Extras | None, layout: Sequence[tuple[str, np.dtype[Any]]]
) -> dict[str, Tensor]:
    return _take_all(reader, extras, [entry for entry in layout if entry[1] == _LONG], layout)


def _finish(
    reader: _Reader,
    extras: Extras | None,
    layout: Sequence[tuple[str, np.dtype[Any]]],
    first: dict[str, Tensor],
) -> dict[str, Tensor]:
    return first | _take_all(reader, extras, [entry for entry in layout if entry[1] != _LONG], layout)


def _take_all(
    reader: _Reader,
    extras: Extras | None,
    wanted: Sequence[tuple[str, np.dtype[Any]]],
    layout: Sequence[tuple[str, np.dtype[Any]]],
) -> dict[str, Tensor]:
    if extras is None:
        return {}
    shapes = {name: shape for (name, _), shape in zip(layout, extras.shapes, strict=True)}
    return {name: reader.take(dtype, *shapes[name]) for name, dtype in wanted}


def _special(found: dict[str, Tensor], numbers: list[int]) -> SpecialRows:
    top, num_masked, num_counters = numbers
    return SpecialRows(
        **found, wants_host=found["wants"].numpy(), top=top, num_masked=num_masked, num_counters=num_counters
    )
