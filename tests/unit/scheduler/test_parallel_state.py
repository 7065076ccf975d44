"""One rank, and a clear word about more."""

import dataclasses

import pytest

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.distributed import ParallelState


def test_collectives_of_one_rank_return_their_argument():
    state = ParallelState()
    assert (state.rank, state.world_size) == (0, 1)
    assert state.all_reduce_min(7) == 7


def test_the_state_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ParallelState().rank = 1


def test_more_than_one_rank_is_refused():
    with pytest.raises(CaesuraError, match="tensor parallelism is not built") as caught:
        ParallelState(rank=0, world_size=2)
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert caught.value.detail == {"world_size": 2}


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 1), (0, 0)])
def test_impossible_ranks_are_refused(rank, world_size):
    with pytest.raises(CaesuraError) as caught:
        ParallelState(rank=rank, world_size=world_size)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
