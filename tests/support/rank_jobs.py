"""Jobs that ranks compute for tests of several of them."""

import os
import signal
from dataclasses import replace
from time import monotonic

import numpy as np
import torch
from support.forward_batches import PagedModel, Row, Sequence, forward_batch, greedy_sampling, load_model
from torch import Tensor

from caesura.scheduler.execution.build import build_components, build_runner
from caesura.scheduler.memory.residency import ComponentResidencyManager
from caesura.scheduler.parallel.group import RankLostError, TensorParallel
from caesura.scheduler.runtime.engine_config import EngineConfig


def logits_of(
    group: TensorParallel, path: str, dtype: torch.dtype, tokens: list[int], compiled: bool, ep: int = 1
) -> Tensor:
    """Return logits [T, vocab] of a prompt in two chunks and then token by token, beside a second request."""
    model = load_model(path, dtype, 4096, group, ep=ep)
    paged = PagedModel(model, dtype, parallel=group, compiled=compiled)
    sequence, other = Sequence(tokens), Sequence(tokens[::-1])
    found = paged.step([], [(sequence, 9), (other, 5)])[:1]
    found += paged.step([], [(sequence, len(tokens) - 13), (other, 9)])[:1]
    found += [paged.step([sequence, other])[0] for _ in range(4)]
    return torch.cat(found)


def rounds(group: TensorParallel, seed: int, count: int) -> list[bytes]:
    """Run random collectives, the same kinds and sizes on every rank, other values on each."""
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
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(elements, generator=generator).to(dtype)
    group.all_reduce(x)
    return x


def reduce_for_ever(group: TensorParallel) -> tuple[float, str]:
    """Reduce until a rank is lost; return the seconds of the last collective, and the error."""
    x = torch.ones(4096)
    while True:
        began = monotonic()
        try:
            group.all_reduce(x)
        except RankLostError as error:
            return monotonic() - began, f"{error.rank} {error.lost} {error.reason}"


def wait_once(group: TensorParallel) -> str | None:
    """Return the error of a barrier, or None without one."""
    try:
        group.barrier()
    except RankLostError as error:
        return f"{error.lost} {error.reason}"
    return None


def give_up(group: TensorParallel, rank: int) -> str | None:
    """Let one rank give up, and then try; the others wait for it."""
    if group.rank == rank:
        group.abort()
    return wait_once(group)


def begin_anew(group: TensorParallel) -> float:
    group.reset()
    x = torch.full((3,), float(group.rank))
    group.all_reduce(x)
    return float(x[0])


def lose_and_begin_anew(group: TensorParallel) -> str:
    """Return the error of beginning anew while another rank, which is taken for lost, does not."""
    group.lose()
    try:
        group.reset()
    except RankLostError as error:
        return error.reason
    return "nothing"


def leave(group: TensorParallel) -> None:
    group.close()


def barrier(group: TensorParallel) -> None:
    group.barrier()


def bits_each_way(
    group: TensorParallel, path: str, dtype: torch.dtype, length: int, ep: int = 1
) -> list[Tensor]:
    """Return logits of a prompt and two tokens: all layers in one call, by three threads, layer by layer."""
    found = []
    for threads, at_once in ((1, True), (3, True), (1, False)):
        model = load_model(path, dtype, 1 << 20, group, ep=ep)
        assert model._kernel is not None
        if not at_once:
            model._kernel = None
        paged = PagedModel(model, dtype, parallel=group, compiled=True)
        sequence = Sequence([(11 * i) % 97 for i in range(length + 2)])
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            parts = [paged.step([], [(sequence, length)])[0], *(paged.step([sequence])[0] for _ in range(2))]
        finally:
            torch.set_num_threads(before)
        found.append(torch.cat(parts))
    return found


def alone_and_beside_others(
    group: TensorParallel, path: str, dtype: torch.dtype, ep: int = 1
) -> list[Tensor]:
    """Return logits of a request alone, with its prompt in other chunks, and beside other requests."""
    model = load_model(path, dtype, 1 << 20, group, ep=ep)
    found = []
    for chunks, others in (((30,), 0), ((1, 16, 13), 0), ((7, 23), 5)):
        paged = PagedModel(model, dtype, parallel=group, compiled=True)
        sequence = Sequence([(5 * i) % 97 for i in range(33)])
        beside = [Sequence([(3 * i + other) % 97 for i in range(40)]) for other in range(others)]
        for other in beside:
            paged.step([], [(other, 30)])
        parts = [paged.step(beside, [(sequence, count)])[others] for count in chunks]
        parts += [paged.step([*beside, sequence])[others] for _ in range(3)]
        found.append(torch.cat(parts))
    return found


def lost_within_a_step(group: TensorParallel, path: str) -> tuple[str, str]:
    """Rank 1 is killed where it would begin its call of all layers."""
    model = load_model(path, torch.float32, 1 << 20, group)
    paged = PagedModel(model, torch.float32, parallel=group, compiled=True)
    sequence = Sequence([7] * 50)
    paged.step([], [(sequence, 40)])
    if group.rank == 1:
        model._kernel = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for _ in range(2):
        try:
            paged.step([sequence])
        except RankLostError as error:
            errors.append(str(error))
    return errors[0], errors[1]


def sampled(group: TensorParallel, path: str, steps: int) -> tuple[int, np.ndarray, np.ndarray]:
    config = EngineConfig(model_path=path, device="cpu", dtype="float32", kv_pool_tokens=1024).resolve()
    loaded, pool, routing, _ = build_components(config, ComponentResidencyManager("cpu"), parallel=group)
    runner = build_runner(config, loaded, pool, routing)
    prompts = [list(range(1 + 9 * row, 8 + 11 * row)) for row in range(3)]
    pages = [[1 + 4 * row + page for page in range(4)] for row in range(3)]
    tokens, logprobs = [], []
    lengths = [0, 0, 0]
    for step in range(steps):
        new = prompts if step == 0 else [[0], [0], [0]]
        rows = [Row(new[row], lengths[row], pages[row]) for row in range(3)]
        lengths = [length + len(each) for length, each in zip(lengths, new, strict=True)]
        batch = forward_batch(rows, 0 if step == 0 else 3)
        last = torch.tensor([len(each) for each in new]).cumsum(0) - 1
        uniforms = torch.rand(3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        batch.sample_tokens, batch.sample_slots = last, torch.arange(3)
        batch.sampling = replace(
            greedy_sampling(3),
            greedy=torch.tensor([True, False, False]),
            temperature=torch.tensor([1.0, 1.0, 0.7]),
            top_k=torch.tensor([loaded.config.vocab_size, 40, loaded.config.vocab_size]),
            top_p=torch.tensor([1.0, 1.0, 0.9]),
            uniforms=uniforms,
            any_sampled=True,
            any_filtered=True,
        )
        output = runner.execute(batch).fetch()
        tokens.append(output.token_ids)
        logprobs.append(output.logprobs)
    keys = pool.layer(0)
    return keys[0].shape[1] if isinstance(keys, tuple) else 1, np.stack(tokens), np.stack(logprobs)
