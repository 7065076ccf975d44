"""Collectives over gloo have the bits of those over shared memory, and fail as they do."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import rank_jobs
from support.checkpoints import make_checkpoint
from support.ranks import Ranks

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.kernels import native
from caesura.scheduler.parallel import torch_group
from caesura.scheduler.parallel.group import SINGLE, RankLostError

CPU = torch.device("cpu")


@pytest.fixture
def groups() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(size: int, *, gloo: bool = True) -> Ranks:
        made.append(Ranks(size, gloo=gloo))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.mark.slow
@pytest.mark.skipif(native.why_not() is not None, reason="no compiled kernels to compare with")
def test_bits_are_those_of_shared_memory(groups: Callable[..., Ranks], tmp_path: Path) -> None:
    gloo, shared = groups(3), groups(3, gloo=False)
    assert gloo.call(rank_jobs.rounds, 4, 150) == shared.call(rank_jobs.rounds, 4, 150)
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36}
    make_checkpoint(tmp_path, "qwen3", **sizes)
    arguments = str(tmp_path), torch.float32, list(range(20, 40)), False
    found = gloo.call(rank_jobs.logits_of, *arguments)
    for other in shared.call(rank_jobs.logits_of, *arguments):
        assert torch.equal(other, found[0])
    assert (found[0] - rank_jobs.logits_of(SINGLE, *arguments)).abs().max() <= 1e-4


def test_waiters_for_a_killed_rank_are_told(groups: Callable[..., Ranks]) -> None:
    ranks = groups(3)
    ranks.call(rank_jobs.barrier)
    ranks.start(rank_jobs.reduce_for_ever)
    ranks.kill(1)
    for seconds, _ in ranks.results([0, 2]):
        assert seconds < 30.0, "half of what it would wait for a rank that lives"


def test_all_are_told_of_one_that_gives_up_and_can_begin_anew(groups: Callable[..., Ranks]) -> None:
    ranks = groups(3)
    for _ in range(2):
        assert all(ranks.call(rank_jobs.give_up, 2))
        assert all(ranks.call(rank_jobs.wait_once)), "until all begin anew"
        assert ranks.call(rank_jobs.begin_anew) == [3.0, 3.0, 3.0]


def test_a_rank_that_computes_otherwise_is_refused() -> None:
    store, address = torch_group.listen("127.0.0.1", 0, 2)
    store.set("computes", "torch 2.0, something else")
    with pytest.raises(CaesuraError, match="would sample other tokens than rank 0") as caught:
        torch_group.join(address, 1, 2, CPU, torch.float32)
    assert caught.value.code == ErrorCode.UNSUPPORTED


def test_ranks_find_each_other_at_one_address_alone() -> None:
    _, address = torch_group.listen("127.0.0.1", 0, 2)
    port = int(address.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))  # of this host as well


def test_a_rank_whose_others_do_not_come_is_told() -> None:
    store, address = torch_group.listen("127.0.0.1", 0, 2)
    with pytest.raises(RankLostError, match="rank 1 waits for rank 0"):
        torch_group.join(address, 1, 2, CPU, torch.float32, timeout_s=0.5)
    with pytest.raises(RankLostError, match="rank 0 waits for another rank"):
        torch_group.join(store, 0, 2, CPU, torch.float32, timeout_s=0.5)
