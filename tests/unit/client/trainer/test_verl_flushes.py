"""Flushes of verl become deltas, or are refused by name."""

import pytest
import torch
from support.verl_flushes import flush

from caesura.client import InvalidRequest
from caesura.client.trainer import SparseTensor, WeightDelta, read_flush

ENTRIES = [
    ("a.weight", [4, 5], [17, 3], [1.5, -2.0]),
    ("b.weight", [7], [], []),
    ("a.weight", [4, 5], [0], [0.25]),  # slices of one parameter
]


def test_a_flush_is_a_delta():
    delta = read_flush(flush(ENTRIES))
    assert isinstance(delta, WeightDelta) and delta.base_digest is None
    assert delta["a.weight"].positions.tolist() == [0, 3, 17]
    assert delta["a.weight"].values.tolist() == [0.25, -2.0, 1.5]
    assert (delta["a.weight"].shape, delta["a.weight"].dtype) == ((4, 5), torch.bfloat16)
    assert isinstance(delta["b.weight"], SparseTensor) and delta["b.weight"].count == 0


def test_a_dense_flush_has_whole_tensors():
    found = read_flush(flush([("b", [2, 3], None, [1.0, 2, 3, 4, 5, 6])], encoding="dense"))
    assert found["b"].tolist() == [[1, 2, 3], [4, 5, 6]] and not isinstance(found, WeightDelta)


MISTAKES = [
    (flush(ENTRIES, checksum=3), "checksum"),
    (flush(ENTRIES, encoding="gaps"), "encoding"),
    (flush(ENTRIES, values_bytes=True), "values_bytes"),
    (flush(ENTRIES, width=8), "8 bytes"),
    (flush([("a", [4], [1, 1], [1.0, 2.0])]), "twice"),
    (flush([("a", [4], [4], [1.0])]), "outside"),
    (flush([("a", [4], [1, 2], [1.0])]), "1 values"),
    (flush(ENTRIES)[1:], "no manifest"),
]


@pytest.mark.parametrize(("named", "reason"), MISTAKES, ids=[reason for _, reason in MISTAKES])
def test_a_flush_that_is_none_is_refused(named, reason):
    with pytest.raises(InvalidRequest, match=reason):
        read_flush(named)
