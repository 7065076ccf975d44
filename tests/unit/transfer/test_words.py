"""Elements that differ are found and overwritten by their bits, compiled or not."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.properties import examples

from caesura.transfer import words

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool)
WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(dtype, count, seed=0):
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed)).bool()
    octets = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return octets.to(torch.uint8).view(dtype)


def bits(tensor):
    return tensor.view(WIDTHS[tensor.element_size()])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=examples(60))
@given(drawn=st.integers(1, 400).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
@example(drawn=(0, set()))
@example(drawn=(2 * words._CHUNK + 5, {0, words._CHUNK - 1, words._CHUNK, 2 * words._CHUNK + 4}))
def test_changed_elements_are_found_and_written(dtype, drawn):
    count, places = drawn
    before, places = random_bits(dtype, count), sorted(places)
    after = before.clone()
    bits(after)[places] ^= 1
    positions, were, values = words.changed(before, after)
    assert positions.dtype == torch.int32 and were.dtype == values.dtype == dtype
    assert positions.tolist() == places
    was = before.clone()
    old = words.scatter(before, positions, values)
    assert torch.equal(bits(before), bits(after)) and torch.equal(bits(old), bits(were))
    words.scatter(before, positions, old)
    assert torch.equal(bits(before), bits(was))


def test_zeros_of_either_sign_and_nans_differ_by_bits():
    before = torch.tensor([0.0, float("nan"), 1.0])
    after = torch.tensor([-0.0, float("nan"), 1.0])
    assert words.changed(before, after)[0].tolist() == [0]


def test_wide_positions_are_those_of_large_tensors(monkeypatch):
    monkeypatch.setattr(words, "position_dtype", lambda elements: torch.int64)
    before, after = torch.zeros(300), torch.zeros(300)
    after[[3, 299]] = 1
    positions, _, values = words.changed(before, after)
    assert positions.dtype == torch.int64 and positions.tolist() == [3, 299]
    assert words.scatter(before, positions, values).tolist() == [0, 0] and torch.equal(before, after)


def test_a_library_of_other_sources_does_not_serve(monkeypatch, request):
    if "compiled" in request.node.name:
        monkeypatch.setattr(words, "_ABI", -1)
        words.library.cache_clear()
        try:
            assert words.library() is None
        finally:
            words.library.cache_clear()
