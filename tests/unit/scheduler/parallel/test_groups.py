"""Collectives over shared memory and over gloo, between real processes, against NumPy."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import rank_jobs
from support.checkpoints import make_checkpoint
from support.lanes import quick
from support.ranks import Ranks
from support.sanitized import run_sanitized
from support.waiting import PATIENCE_S
from torch import Tensor

from caesura.io_struct import CaesuraError, ErrorCode
from caesura.scheduler.kernels import native
from caesura.scheduler.parallel import host_group, torch_group
from caesura.scheduler.parallel.group import SINGLE, RankLostError

compiled = pytest.mark.skipif(native.why_not() is not None, reason="no compiled kernels")
both = pytest.mark.parametrize("gloo", [pytest.param(False, marks=compiled), True])

CPU = torch.device("cpu")
ROUNDS = 500


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    found = Ranks(request.param)
    yield found
    found.close()


@pytest.fixture
def mortal() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(size: int, timeout_s: float = PATIENCE_S, *, gloo: bool = False) -> Ranks:
        made.append(Ranks(size, timeout_s, gloo=gloo))
        return made[-1]

    yield make
    for group in made:
        group.close()


def summed(parts: list[Tensor]) -> bytes:
    total = parts[0].float().numpy().copy()
    for part in parts[1:]:
        total += part.float().numpy()
    return bits(torch.from_numpy(total).to(parts[0].dtype))


def bits(x: Tensor) -> bytes:
    return bytes(x.reshape(-1).view(torch.uint8).numpy())


def sent_rows(parts: list[Tensor], counts: list[list[int]], target: int) -> Tensor:
    """Return what ``target`` gets of all ranks' ``parts``."""
    return torch.cat([part.split(sent)[target] for part, sent in zip(parts, counts, strict=True)])


def expected_rounds(size: int, seed: int, count: int) -> Iterator[list[bytes]]:
    """Yield the results of all ranks."""
    choice = torch.Generator().manual_seed(seed)
    own = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(size)]

    def draw(limit: int) -> int:
        return int(torch.randint(0, limit, (), generator=choice))

    for _ in range(count):
        kind, rows, width = (draw(limit) for limit in (7, 7, 900))
        dtype = (torch.float32, torch.bfloat16, torch.float16)[draw(3)]
        counts = torch.randint(0, 5, (size, size), generator=choice).tolist()
        given = {4: counts[0], 5: [sum(counts[0])] * size, 6: list(map(sum, counts))}
        x = [
            torch.randn((rows, width + 1), generator=generator).to(dtype)
            for rows, generator in zip(given.get(kind, [rows + 1] * size), own, strict=True)
        ]
        if kind == 0:
            yield [summed(x)] * size
        elif kind == 3:
            yield [bits(x[draw(size)])] * size
        elif kind == 4:
            yield [bits(torch.cat(x))] * size
        elif kind == 5:
            yield [summed(list(parts)) for parts in zip(*(each.split(counts[0]) for each in x), strict=True)]
        elif kind == 6:
            yield [bits(sent_rows(x, counts, target)) for target in range(size)]
        else:
            joined = torch.cat(x, dim=1)
            yield [bits(joined[:, : joined.shape[1] - (draw(width + 1) if kind == 2 else 0)])] * size


@compiled
def test_many_rounds_are_those_of_numpy(ranks: Ranks) -> None:
    results = ranks.call(rank_jobs.rounds, 3, ROUNDS)
    for number, expected in enumerate(expected_rounds(len(results), 3, ROUNDS)):
        for rank, found in enumerate(results):
            assert found[number] == expected[rank], (number, rank)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_of_more_than_a_buffer_holds(ranks: Ranks, dtype: torch.dtype) -> None:
    elements = 700_001
    parts = [
        torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(len(ranks.processes))
    ]
    for found in ranks.call(rank_jobs.large_sum, elements, dtype):
        assert bits(found) == summed(parts)


@both
@pytest.mark.parametrize("dtype", quick([torch.bfloat16, torch.float32]))
def test_rows_are_more_than_a_buffer_holds(mortal, gloo, dtype):
    counts, width = [[130, 0, 71], [1, 300, 0], [0, 0, 260]], 5_001
    found = mortal(3, gloo=gloo).call(rank_jobs.large_rows, counts, width, dtype)

    def made(rows: list[int]) -> list[Tensor]:
        return [rank_jobs.numbered_rows(rank, each, width, dtype) for rank, each in enumerate(rows)]

    whole, sums = torch.cat(made(counts[0])), zip(*(x.split(counts[0]) for x in made([201] * 3)), strict=True)
    sent = made([sum(each) for each in counts])
    for rank, (parts, results) in enumerate(zip(sums, found, strict=True)):
        expected = bits(whole), summed(list(parts)), bits(sent_rows(sent, counts, rank))
        assert tuple(map(bits, results)) == expected, rank


@compiled
@pytest.mark.slow
def test_bits_over_gloo_are_those_over_shared_memory(mortal, tmp_path):
    gloo, shared = mortal(3, gloo=True), mortal(3)
    assert gloo.call(rank_jobs.rounds, 4, 150) == shared.call(rank_jobs.rounds, 4, 150)
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36}
    make_checkpoint(tmp_path, "qwen3", **sizes)
    arguments = str(tmp_path), torch.float32, list(range(20, 40)), False
    found = gloo.call(rank_jobs.logits_of, *arguments)
    for other in shared.call(rank_jobs.logits_of, *arguments):
        assert torch.equal(other, found[0])
    assert (found[0] - rank_jobs.logits_of(SINGLE, *arguments)).abs().max() <= 1e-4


@both
@pytest.mark.parametrize("method", ["all_reduce", "gather_rows", "reduce_scatter", "all_to_all"])
def test_waiters_for_a_killed_rank_are_told(mortal, gloo, method):
    ranks = mortal(3, gloo=gloo)
    ranks.call(rank_jobs.barrier)
    ranks.start(rank_jobs.use_for_ever, method)
    ranks.kill(1)
    for rank, (seconds, error) in zip((0, 2), ranks.results([0, 2]), strict=True):
        assert seconds < 30.0, "half of what it would wait for a rank that lives"
        told = error.startswith(f"{rank} 1 its process has ended") or "has seen another one fail" in error
        assert gloo or told
    ranks.processes[1].join()


def test_a_loss_ends_the_wait_to_begin_anew_over_gloo(mortal):
    ranks = mortal(2, gloo=True)
    ranks.start_on(0, rank_jobs.lose_and_begin_anew)
    (reason,) = ranks.results([0])
    assert "given up" in reason


@both
def test_all_ranks_see_one_give_up_and_can_begin_anew(mortal, gloo):
    ranks = mortal(3, gloo=gloo)
    for _ in range(3):
        for job in ((rank_jobs.give_up, 2), (rank_jobs.wait_once,)):
            errors = ranks.call(*job)
            assert all(errors), "until all begin anew"
            assert gloo or all("given up" in error for error in errors)
        assert ranks.call(rank_jobs.begin_anew) == [3.0, 3.0, 3.0]


@compiled
def test_waiters_for_a_rank_that_lives_or_left_are_told(mortal) -> None:
    ranks = mortal(2, timeout_s=10.0)  # a rank of a busy machine comes within that
    ranks.start_on(0, rank_jobs.wait_once)
    assert ranks.results([0]) == ["1 it did not come in time"]
    assert ranks.call(rank_jobs.begin_anew) == [1.0, 1.0]
    ranks.start_on(1, rank_jobs.leave)
    assert ranks.results([1]) == [None]
    ranks.start_on(0, rank_jobs.wait_once)
    assert ranks.results([0]) == ["1 it has left the group"]


@compiled
def test_a_memory_of_another_size_is_refused() -> None:
    fd, _ = host_group.found(3)
    with pytest.raises(CaesuraError, match="no shared memory for rank 0 of 2") as caught:
        host_group.join(fd, 0, 2)
    assert caught.value.code == ErrorCode.UNSUPPORTED
    with pytest.raises(CaesuraError, match="rank 1 of 2 cannot share memory"):
        host_group.join("/proc/self/fd/4095", 1, 2)


@compiled
def test_nobody_waits_for_a_rank_that_ended_before() -> None:
    fd, _ = host_group.found(2)
    with pytest.raises(RankLostError, match="has given up"):
        host_group.join(fd, 0, 2, on_made=host_group.HostGroup.abort)


def test_one_rank_alone_does_nothing() -> None:
    x = torch.arange(6.0).view(2, 3)
    before = x.clone()
    SINGLE.all_reduce(x)
    SINGLE.broadcast(x, 0)
    assert torch.equal(x, before)
    assert SINGLE.all_gather(x) is x
    assert torch.equal(SINGLE.all_gather(x, torch.empty(2, 2)), x[:, :2])
    assert SINGLE.gather_rows(x, [2]) is SINGLE.reduce_scatter(x, [2]) is SINGLE.all_to_all(x, [[2]]) is x


def test_a_rank_that_computes_otherwise_is_refused() -> None:
    store, address = torch_group.listen("127.0.0.1", 2)
    store.set("computes", "torch 2.0, something else")
    with pytest.raises(CaesuraError, match="would sample other tokens than rank 0") as caught:
        torch_group.join(address, 1, 2, CPU, torch.float32)
    assert caught.value.code == ErrorCode.UNSUPPORTED


def test_ranks_find_each_other_at_one_address_alone() -> None:
    _, address = torch_group.listen("127.0.0.1", 2)
    port = int(address.rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))  # of this host as well


def test_a_rank_without_the_others_gives_up_with_an_error() -> None:
    store, address = torch_group.listen("127.0.0.1", 2)
    with pytest.raises(RankLostError, match="rank 1 waits for rank 0"):
        torch_group.join(address, 1, 2, CPU, torch.float32, timeout_s=0.5)
    with pytest.raises(RankLostError, match="rank 0 waits for another rank"):
        torch_group.join(store, 0, 2, CPU, torch.float32, timeout_s=0.5)


SANITIZED = """
import os, threading
import torch
from support import rank_jobs
from support.kernels import instruction_sets
from caesura.scheduler.parallel import host_group

RANKS, first = 3, {}
for isa in instruction_sets():
    fd, _ = host_group.found(RANKS)
    own = [fd, *(os.open(f"/proc/self/fd/{fd}", os.O_RDWR) for _ in range(RANKS - 1))]
    found = {}

    def run(rank):
        group = host_group.join(own[rank], rank, RANKS, 60.0)
        sums = [rank_jobs.large_sum(group, 300_001, dtype) for dtype in (torch.float32, torch.bfloat16)]
        rounds = rank_jobs.rounds(group, 8, 60)
        found[rank] = rounds, sums, rank_jobs.give_up(group, 1), rank_jobs.begin_anew(group)
        group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for rank in range(RANKS):
        assert first.setdefault(rank, found[rank][0]) == found[rank][0]
        assert "given up" in found[rank][2] and found[rank][3] == 3.0
        assert all(torch.equal(a, b) for a, b in zip(found[rank][1], found[0][1]))
    print(isa, flush=True)
"""


@compiled
@pytest.mark.slow
@pytest.mark.long
def test_memory_is_accessed_within_bounds(tmp_path: Path) -> None:
    assert "avx2" in run_sanitized(SANITIZED, tmp_path, "collectives")
