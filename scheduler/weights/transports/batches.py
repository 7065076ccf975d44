"""Which tensors come in one broadcast: the same reading of a call for who sends and who receives.

A tensor is whole, and lies in one broadcast, without padding. Everything that is wrong with a call is found
here, before a broadcast is entered.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import msgspec

from ....io_struct import (
    CaesuraError,
    ErrorCode,
    SendWeightsReqInput,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
)
from ...runtime.dtypes import DTYPES

_MAX_BYTES = 1 << 62  # beyond, neither torch nor a reply can hold the number

Batch = list[TensorSpec]
"""The tensors of one broadcast; ``offset`` and ``nbytes`` are within it."""


def batches_of(request: UpdateWeightsFromDistributedReqInput | SendWeightsReqInput) -> list[Batch]:
    """Return the broadcasts of ``request``.

    Raises CaesuraError ``invalid_request`` if a spec is not a whole tensor of a known dtype, or the
    broadcasts do not add up.
    """
    specs = [_whole(spec) for spec in request.specs]
    if sum(spec.nbytes for spec in specs) > _MAX_BYTES:
        raise CaesuraError(ErrorCode.INVALID_REQUEST, "the tensors are larger than any memory", field="specs")
    counts = request.tensors_per_broadcast
    if request.load_format is None:
        if counts is not None:
            raise _miscounted(
                "needs load_format=flattened_bucket: one broadcast per tensor has nothing to count"
            )
        return [[spec] for spec in specs]
    if counts is None:
        return [_placed(specs)]
    if sum(counts) != len(specs):
        raise _miscounted(f"counts {sum(counts)} tensors, and specs has {len(specs)}")
    return [_placed(part) for part in _parts(specs, counts)]


def nbytes_of(batch: Batch) -> int:
    return sum(spec.nbytes for spec in batch)


def _parts(specs: Sequence[TensorSpec], counts: Sequence[int]) -> Iterator[Sequence[TensorSpec]]:
    start = 0
    for count in counts:
        yield specs[start : start + count]
        start += count


def _placed(specs: Sequence[TensorSpec]) -> Batch:
    offsets = accumulate((spec.nbytes for spec in specs), initial=0)
    return [msgspec.structs.replace(spec, offset=at) for spec, at in zip(specs, offsets, strict=False)]


def _whole(spec: TensorSpec) -> TensorSpec:
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or spec.start_row:
        problem = "starts in its midst" if dtype is not None else f"has the unknown dtype {spec.dtype!r}"
        raise CaesuraError(
            ErrorCode.INVALID_REQUEST, f"tensor {spec.name!r} {problem}", field="specs", value=spec.name
        )
    return msgspec.structs.replace(spec, offset=0, nbytes=prod(spec.shape) * dtype.itemsize, buffer=0)


def _miscounted(problem: str) -> CaesuraError:
    return CaesuraError(
        ErrorCode.INVALID_REQUEST, f"tensors_per_broadcast {problem}", field="tensors_per_broadcast"
    )
