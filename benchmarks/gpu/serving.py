"""Sections through a scheduler process and its client."""

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from checkpoints import Shape
from gpu.limits import engine_lines
from gpu.plan import ITEMSIZE, step_bytes
from gpu.run import Run
from harness.limits import kv_bytes_per_token, prefill_flops

from caesura.client import AsyncSchedulerClient, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))  # where peers look for each other

from caesura_peer import CaesuraEngine
from measure import measure_pauses, measure_updates

FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


def serving(run: Run) -> dict[str, Any]:
    """Measure everything that one engine of the large shape is asked."""
    return asyncio.run(_serving(run))


def experts(run: Run) -> dict[str, Any]:
    return asyncio.run(_decode_only(run, "experts", run.plan.experts))


def fp8(run: Run) -> dict[str, Any]:
    """Measure decode steps with FP8 weights."""
    return asyncio.run(_decode_only(run, "fp8", run.plan.fp8))


async def _serving(run: Run) -> dict[str, Any]:
    plan, found = run.plan, {}
    folders = [run.large(seed) for seed in (0, 1)]
    start = time.perf_counter()
    async with _engine(run, folders[0]) as (engine, client):
        await client.generate([[1, 2, 3]], SamplingParams(max_new_tokens=1))
        found["cold_start_s"] = time.perf_counter() - start
        found["decode"] = await _decode(run, client, plan.shape, plan.batches)
        found["filtered"] = await _decode(run, client, plan.shape, plan.batches, **FILTERED)
        found["raw"] = await _with_logprobs(run, client)
        found["prefill"] = await _prefill(run, client)
        found["rollout"] = await _rollout(run, client)
        load = run.prompts(plan.requests, plan.prompt_tokens, 3)
        found["pauses"] = await measure_pauses(engine, load, plan.load_tokens, plan.cycles, seed=0)
        paths = [str(folder) for folder in folders]
        found["updates"] = await measure_updates(engine, load, plan.load_tokens, *paths, plan.large_updates)
    found["engine_says"] = engine_lines(run.log_of(folders[0]).read_text(encoding="utf-8"))
    return found


async def _decode_only(run: Run, name: str, shape: Shape) -> dict[str, Any]:
    folder = run.folder(name, shape)
    async with _engine(run, folder) as (_, client):
        rows = await _decode(run, client, shape, run.plan.batches)
    return {"decode": rows, "engine_says": engine_lines(run.log_of(folder).read_text(encoding="utf-8"))}


@asynccontextmanager
async def _engine(run: Run, folder: Path) -> AsyncIterator[tuple[CaesuraEngine, AsyncSchedulerClient]]:
    launched = await asyncio.to_thread(run.launch, folder)
    client = AsyncSchedulerClient(launched.endpoint)
    engine = CaesuraEngine(launched, client)
    try:
        yield engine, client
    finally:
        await engine.close()


async def _decode(
    run: Run, client: AsyncSchedulerClient, shape: Shape, batches: tuple[int, ...], **sampling: Any
) -> list[dict[str, Any]]:
    """Measure the mean step while all rows decode, by batch size, from one watched request's arrivals."""
    plan, rows = run.plan, []
    for batch in batches:
        *others, watched = run.prompts(batch, plan.prompt_tokens, batch, shape)
        longer = SamplingParams(max_new_tokens=4 * plan.steps, ignore_eos=True, **sampling)
        for prompt in others:  # submitted first: they decode all the time that the last one does
            await client.submit(prompt, longer)
        params = SamplingParams(max_new_tokens=plan.steps + 9, ignore_eos=True, **sampling)
        handle, times = await client.submit(watched, params, stream=True), []
        held = batch * (
            plan.prompt_tokens + plan.steps // 2
        )  # at least; a short run may end before status is read
        async for _ in handle:
            times.append(time.perf_counter())
            if len(times) == plan.steps // 2:
                held = max(held, (await client.status()).kv.held)
        await client.abort(abort_all=True)
        steps = times[8:]
        rows.append(_row(run, shape, batch, (steps[-1] - steps[0]) / (len(steps) - 1), held))
    return rows


async def _with_logprobs(run: Run, client: AsyncSchedulerClient) -> list[dict[str, Any]]:
    """Measure steps with all three kinds of logprobs, as a long run's time less a short one's."""
    plan, rows = run.plan, []
    wanted = dict.fromkeys(("return_logprob", "return_raw_logprob", "return_sampled_logprob"), True)
    for batch in plan.batches:
        prompts, seconds = run.prompts(batch, plan.prompt_tokens, batch), []
        for tokens in (4, plan.steps // 2, plan.steps // 2 + plan.steps):  # the first warms up
            params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            start = time.perf_counter()
            await client.generate(prompts, params, **wanted)
            seconds.append(time.perf_counter() - start)
        rows.append(
            _row(
                run,
                plan.shape,
                batch,
                (seconds[2] - seconds[1]) / plan.steps,
                batch * (plan.prompt_tokens + plan.steps),
            )
        )
    return rows


def _row(run: Run, shape: Shape, batch: int, step: float, held: int) -> dict[str, Any]:
    """Compare a decode step with the time of its reading: the weights, and the KV of ``held`` tokens."""
    read = step_bytes(shape, batch) + held * kv_bytes_per_token(shape, ITEMSIZE)
    limit = read / run.ceilings.bandwidth
    return {"batch": batch, "step_s": step, "limit_s": limit, "share": limit / step, "kv_tokens": held}


async def _prefill(run: Run, client: AsyncSchedulerClient) -> dict[str, Any]:
    """Measure the median of three prefills, after one that is not counted."""
    count, length = run.plan.prefill
    seconds = []
    for seed in range(4):
        prompts = run.prompts(count, length, 1000 + seed)
        start = time.perf_counter()
        await client.generate(prompts, SamplingParams(max_new_tokens=1, ignore_eos=True))
        seconds.append(time.perf_counter() - start)
    taken = statistics.median(seconds[1:])
    limit = prefill_flops(run.plan.shape, count, length) / run.ceilings.flops
    return {
        "prompts": count, "length": length, "seconds": taken, "limit_s": limit, "share": limit / taken,
        "tokens_per_s": count * length / taken,
    }  # fmt: skip


async def _rollout(run: Run, client: AsyncSchedulerClient) -> float:
    """Return the tokens per second of the second of two runs."""
    plan, seconds = run.plan, 0.0
    for seed in (1, 2):
        prompts = run.prompts(plan.requests, plan.prompt_tokens, seed)
        start = time.perf_counter()
        await client.generate(prompts, SamplingParams(max_new_tokens=plan.new_tokens, ignore_eos=True))
        seconds = time.perf_counter() - start
    return plan.requests * plan.new_tokens / seconds
