"""Results in mappings of their own: equal to what was given, and part of nothing else."""

import mmap

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from caesura.scheduler.images.image_outputs import in_a_mapping


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_copies_are_equal_and_share_one_mapping(contents):
    arrays = [np.frombuffer(content, np.uint8) for content in contents]
    found = in_a_mapping(arrays)
    assert [bytes(each) for each in found] == contents
    assert len({id(each.obj) for each in found}) <= 1
    assert all(isinstance(each.obj, mmap.mmap) for each in found)


def test_given_buffers_may_change_afterwards():
    array = np.arange(10, dtype=np.uint8)
    (found,) = in_a_mapping([array])
    array[:] = 0
    assert bytes(found) == bytes(range(10))
