"""Sender and receivers read a call alike: which tensors come in one broadcast, and where they lie in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caesura.client.trainer.chain import tensors_per_bucket
from caesura.io_struct import (
    CaesuraError,
    SendWeightsReqInput,
    TensorSpec,
    UpdateWeightsFromDistributedReqInput,
)
from caesura.scheduler.weights.transports.broadcasts import batches_of, nbytes_of

SIZES = st.lists(st.integers(0, 40), max_size=30)


def specs_of(sizes: list[int]) -> list[TensorSpec]:
    return [
        TensorSpec(name=f"t{number}", dtype="BF16", shape=[size], nbytes=2 * size)
        for number, size in enumerate(sizes)
    ]


@given(sizes=SIZES.filter(bool), cut=st.integers(1, 100))
def test_broadcasts_have_every_tensor_once_in_order_and_without_gaps(sizes, cut):
    specs = specs_of(sizes)
    counts = tensors_per_bucket(specs, cut)
    fields = {"specs": specs, "load_format": "flattened_bucket", "tensors_per_broadcast": counts}
    sent, received = (
        batches_of(kind(**fields)) for kind in (SendWeightsReqInput, UpdateWeightsFromDistributedReqInput)
    )
    assert sent == received
    assert [spec.name for batch in sent for spec in batch] == [spec.name for spec in specs]
    for batch in sent:
        end = 0
        for spec in batch:
            assert spec.offset == end
            end += spec.nbytes
        assert nbytes_of(batch) == end
        assert end <= cut or len(batch) == 1


@given(sizes=SIZES.filter(bool), cut=st.integers(1, 100))
def test_buckets_are_as_few_as_their_order_allows(sizes, cut):
    """No tensor would have fitted into the bucket before its own."""
    specs = specs_of(sizes)
    counts = tensors_per_bucket(specs, cut)
    assert sum(counts) == len(specs)
    start = 0
    for count in counts[:-1]:
        with_the_next = specs[start : start + count + 1]
        assert sum(spec.nbytes for spec in with_the_next) > cut
        start += count


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
@given(sizes=SIZES)
def test_without_counts_it_is_one_broadcast_or_one_for_each(load_format, sizes):
    batches = batches_of(SendWeightsReqInput(specs=specs_of(sizes), load_format=load_format))
    assert [len(batch) for batch in batches] == ([1] * len(sizes) if load_format is None else [len(sizes)])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tensors_per_broadcast": [2]}, "needs load_format"),
        ({"tensors_per_broadcast": [1], "load_format": "flattened_bucket"}, "counts 1 tensors"),
        ({"tensors_per_broadcast": [2, 1], "load_format": "flattened_bucket"}, "specs has 2"),
    ],
)
def test_counts_that_do_not_add_up_are_refused(fields, said):
    with pytest.raises(CaesuraError, match=said) as caught:
        batches_of(UpdateWeightsFromDistributedReqInput(specs=specs_of([1, 2]), **fields))
    assert caught.value.code == "invalid_request"
