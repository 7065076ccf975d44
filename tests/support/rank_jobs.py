"""Jobs that ranks compute for tests of several of them."""

import os
import signal
from dataclasses import replace
from time import monotonic

import numpy as np
import torch
from support.edited_logits import bound
from support.forward_batches import (
    PagedModel,
    Row,
    Sequence,
    build_attention,
    forward_batch,
    greedy_sampling,
    load_model,
)
from torch import Tensor

from caesura.io_struct import GenerateReqInput
from caesura.scheduler.execution.build import build_components, build_runner
from caesura.scheduler.execution.logit_edits import SpecialSampler
from caesura.scheduler.execution.sampler import Sampler
from caesura.scheduler.layers.logits_processor import SharedLogits
from caesura.scheduler.memory.residency import ComponentResidencyManager
from caesura.scheduler.parallel.group import RankLostError, TensorParallel
from caesura.scheduler.runtime.engine_config import EngineConfig
from caesura.scheduler.scheduling.sampling import sampling_batch


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
        kind, rows, width = (int(torch.randint(0, n, (), generator=choice)) for n in (7, 7, 900))
        dtype = (torch.float32, torch.bfloat16, torch.float16)[int(torch.randint(0, 3, (), generator=choice))]
        counts = torch.randint(0, 5, (group.size, group.size), generator=choice).tolist()
        given = {4: counts[0][group.rank], 5: sum(counts[0]), 6: sum(counts[group.rank])}
        x = torch.randn((given.get(kind, rows + 1), width + 1), generator=own).to(dtype)
        if kind == 0:
            group.all_reduce(x)
        elif kind == 1:
            x = group.all_gather(x)
        elif kind == 2:
            narrow = group.size * (width + 1) - int(torch.randint(0, width + 1, (), generator=choice))
            x = group.all_gather(x, torch.empty((rows + 1, narrow), dtype=dtype))
        elif kind == 4:
            x = group.gather_rows(x, counts[0])
        elif kind == 5:
            x = group.reduce_scatter(x, counts[0])
        elif kind == 6:
            x = group.all_to_all(x, counts)
        else:
            group.broadcast(x, int(torch.randint(0, group.size, (), generator=choice)))
        found.append(bytes(x.reshape(-1).view(torch.uint8).numpy()))
    group.barrier()
    return found


def large_sum(group: TensorParallel, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(elements, generator=generator).to(dtype)
    group.all_reduce(x)
    return x


def large_rows(
    group: TensorParallel, counts: list[list[int]], width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the first ``counts``, sum over all ranks and keep them, and exchange rows by all ``counts``."""
    rows = counts[0][group.rank], sum(counts[0]), sum(counts[group.rank])
    own, whole, sent = (numbered_rows(group.rank, each, width, dtype) for each in rows)
    return (
        group.gather_rows(own, counts[0]),
        group.reduce_scatter(whole, counts[0]).clone(),
        group.all_to_all(sent, counts),
    )


def numbered_rows(seed: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed)).to(dtype)


def use_for_ever(group: TensorParallel, method: str) -> tuple[float, str]:
    """Call a collective until a rank is lost; return the seconds of the last call, and the error."""
    counts = [[1 + rank + other for other in range(group.size)] for rank in range(group.size)]
    first, own = counts[0], counts[group.rank]
    rows, arguments = {
        "all_reduce": (4, ()),
        "gather_rows": (first[group.rank], (first,)),
        "reduce_scatter": (sum(first), (first,)),
        "all_to_all": (sum(own), (counts,)),
    }[method]
    x = torch.ones((rows, 1024))
    while True:
        began = monotonic()
        try:
            getattr(group, method)(x, *arguments)
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


def prompts_of(owners: list[int], pages: int) -> list[Row]:
    """Return prompts whose KV the ``owners`` have, in pools of ``pages`` each."""
    taken = [1 + pages * owner for owner in owners]
    return [
        Row([(5 * i + number) % 97 for i in range(3 + 4 * number)], 0, [page + owners[:number].count(owner)])
        for number, (owner, page) in enumerate(zip(owners, taken, strict=True))
    ]


@torch.inference_mode()
def rows_each_way(
    group: TensorParallel, path: str, ep: int, owners: list[int], pages: int
) -> tuple[int, Tensor, Tensor]:
    """Return in how many layers rows were exchanged, and logits of prompts with exchanges and without."""
    model = load_model(path, torch.float32, 1 << 20, group, ep=ep, dp_attention=group.size)
    _, backend = build_attention(model, torch.float32, 1 + pages)
    batch, rows, found, exchanged = forward_batch(prompts_of(owners, pages), 0), model.rank_rows, [], []
    exchange = rows.exchange
    rows.exchange = lambda goes: exchanged.append(goes) or exchange(goes)
    for may_exchange in (True, False):
        own = rows.divide(batch, pages)
        if own is not None:
            backend.plan(own)
        rows.may_exchange &= may_exchange
        found.append(model.logits(model.forward(batch, backend)).clone())
    return len(exchanged), *found


@torch.inference_mode()
def sampled_each_way(
    group: TensorParallel, path: str, messages: list[GenerateReqInput]
) -> tuple[int, list[list[Tensor | None]], list[list[Tensor | None]]]:
    """Return the rows that this rank sampled, and results from shared logits and from whole ones."""
    model = load_model(path, torch.float32, 1 << 20, group, dp_attention=group.size)
    vocab = model.config.vocab_size
    table, _ = bound(messages, vocab)
    slots = np.arange(len(messages))
    batch = sampling_batch(table, slots, table.length[slots])
    hidden = torch.randn(len(messages), model.config.hidden_size, generator=torch.Generator().manual_seed(4))
    found = []
    for head in (model.logits_to_sample, model.logits):
        logits = head(hidden)
        if isinstance(logits, SharedLogits):
            own = len(logits.own)
        ordinary = Sampler(vocab, len(messages), "cpu", torch.float32)
        if batch.special is None:
            out = ordinary.sample(logits, batch)
        else:
            out = SpecialSampler(ordinary, vocab, torch.device("cpu")).sample(logits, batch, batch.special)
        more = [] if out.further is None else [out.further.top_ids, out.further.top, out.further.kept]
        found.append([out.token_ids, out.logprobs, out.raw_logprobs, out.sampled_logprobs, *more])
    return own, *found


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
