"""What ranks compute for tests of several of them."""

from time import monotonic

import torch
from support.forward_batches import PagedModel, Sequence, load_model
from torch import Tensor

from caesura.scheduler.parallel.group import RankLostError, TensorParallel


def logits_of(
    group: TensorParallel, path: str, dtype: torch.dtype, tokens: list[int], compiled: bool
) -> Tensor:
    """Of a prompt in two chunks and then one token at a time, beside a second request; [T, vocab]."""
    model = load_model(path, dtype, 4096, group)
    paged = PagedModel(model, dtype, parallel=group, compiled=compiled)
    sequence, other = Sequence(tokens), Sequence(tokens[::-1])
    found = paged.step([], [(sequence, 9), (other, 5)])[:1]
    found += paged.step([], [(sequence, len(tokens) - 13), (other, 9)])[:1]
    found += [paged.step([sequence, other])[0] for _ in range(4)]
    return torch.cat(found)


def rounds(group: TensorParallel, seed: int, count: int) -> list[bytes]:
    """Random collectives, the same kinds and sizes on every rank, other values on each; what each has left here."""
    choice = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(1000 * seed + group.rank)
    found = []
    for _ in range(count):
        kind, rows, width = (int(torch.randint(0, n, (), generator=choice)) for n in (4, 7, 900))
        dtype = (torch.float32, torch.bfloat16, torch.float16)[int(torch.randint(0, 3, (), generator=choice))]
        x = torch.randn((rows + 1, width + 1), generator=own).to(dtype)
        if kind == 0:
            group.all_reduce(x)
        elif kind == 1:
            x = group.all_gather(x)
        elif kind == 2:
            narrow = group.size * (width + 1) - int(torch.randint(0, width + 1, (), generator=choice))
            x = group.all_gather(x, torch.empty((rows + 1, narrow), dtype=dtype))
        else:
            group.broadcast(x, int(torch.randint(0, group.size, (), generator=choice)))
        found.append(bytes(x.view(torch.uint8).numpy()))
    group.barrier()
    return found


def large_sum(group: TensorParallel, elements: int, dtype: torch.dtype) -> Tensor:
    """More than a buffer holds."""
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(elements, generator=generator).to(dtype)
    group.all_reduce(x)
    return x


def reduce_for_ever(group: TensorParallel) -> tuple[float, str]:
    """Until a rank is lost: seconds that the last collective took, and the error."""
    x = torch.ones(4096)
    while True:
        began = monotonic()
        try:
            group.all_reduce(x)
        except RankLostError as error:
            return monotonic() - began, f"{error.rank} {error.lost} {error.reason}"


def wait_once(group: TensorParallel) -> str | None:
    """The error of a barrier. None: there is none."""
    try:
        group.barrier()
    except RankLostError as error:
        return f"{error.lost} {error.reason}"
    return None


def give_up(group: TensorParallel, rank: int) -> str | None:
    """One rank gives up, and then tries; the others wait for it."""
    if group.rank == rank:
        group.abort()
    return wait_once(group)


def begin_anew(group: TensorParallel) -> float:
    """After all have failed."""
    group.reset()
    x = torch.full((3,), float(group.rank))
    group.all_reduce(x)
    return float(x[0])


def leave(group: TensorParallel) -> None:
    """Go before the others do."""
    group.close()


def barrier(group: TensorParallel) -> None:
    """Return when all are here."""
    group.barrier()
