"""Measurements of an engine that can pause: the same code for every such engine.

Invariants:
- All times are taken in the process that uses the engine, around calls a trainer would make, with one clock.
- "Under load" means that one request per prompt is live; a request that ends is replaced at once. The request
  submitted last is watched token by token: when it produces, all others are past their prefill.
- A pause is asked for at a random phase of a step, so its latency includes the rest of the step in flight.

Standard library only, like everything that peers share.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

Prompt = list[int]

SETTLE_S = 0.02
"""Seconds after a pause in which tokens count as late: longer than any client's delivery."""


class PausableEngine(Protocol):
    """Operations that this module needs of an engine's client."""

    @property
    def resume_variants(self) -> Sequence[str]:
        """Return the names of the ways to resume, the engine's default first."""

    async def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        greedy: bool = False,
        on_tokens: Callable[[], None] | None = None,
    ) -> list[int]:
        """Generate exactly ``max_new_tokens`` tokens; call ``on_tokens`` as soon as some arrive."""

    async def rollout(self, prompts: Sequence[Prompt], max_new_tokens: int, samples: int) -> list[list[int]]:
        """Generate ``samples`` outputs of all prompts at once, as the engine's users would."""

    async def pause(self) -> None:
        """Freeze every request with its KV; returns when the engine has acknowledged."""

    async def resume(self, variant: str) -> None:
        pass

    async def update(self, path: str) -> None:
        """Load a checkpoint folder in place while paused, keeping the frozen requests."""

    async def abort_all(self) -> None:
        """End every request whose ``generate`` was cancelled."""

    async def close(self) -> None:
        pass


class Watch:
    """Arrival times of one request's tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._arrived = asyncio.Event()

    def __call__(self) -> None:
        self.times.append(time.perf_counter())
        self._arrived.set()

    async def next_after(self, count: int) -> float:
        """Wait for arrival number ``count`` (from 0) and return its time."""
        while len(self.times) <= count:
            self._arrived.clear()
            await self._arrived.wait()
        return self.times[count]

    async def some_more(self, count: int) -> None:
        """Wait for ``count`` arrivals from now on."""
        await self.next_after(len(self.times) + count - 1)


class Load:
    """An async context in which one request per prompt is live."""

    def __init__(self, engine: PausableEngine, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        self.watch = Watch()
        self._engine = engine
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Watch:
        *others, watched = self._prompts
        self._tasks = [asyncio.create_task(self._keep_running(prompt, None)) for prompt in others]
        self._tasks.append(asyncio.create_task(self._keep_running(watched, self.watch)))
        await self.watch.some_more(4)
        return self.watch

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine.abort_all()

    async def _keep_running(self, prompt: Prompt, on_tokens: Callable[[], None] | None) -> None:
        while True:
            await self._engine.generate(prompt, self._max_new_tokens, on_tokens=on_tokens)


async def measure_rollout(
    engine: PausableEngine, prompts: Sequence[Prompt], max_new_tokens: int, samples: int = 1
) -> dict[str, Any]:
    """Return ``seconds`` and ``tokens`` of a run of all prompts."""
    start = time.perf_counter()
    outputs = await engine.rollout(prompts, max_new_tokens, samples)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(len(output) for output in outputs)}


async def measure_pauses(
    engine: PausableEngine, prompts: Sequence[Prompt], max_new_tokens: int, cycles: int, seed: int
) -> dict[str, Any]:
    """Pause and resume under load.

    Returns:
        ``pause_s``: call to acknowledgement, per cycle. ``resume_s``: variant to a list of times from the
        resume call to the next token of a live request. ``step_s``: intervals between tokens while running.
        ``late_tokens``: deliveries of the watched request after an acknowledgement.
    """
    rng = random.Random(seed)
    pause_s: list[float] = []
    resume_s: dict[str, list[float]] = {variant: [] for variant in engine.resume_variants}
    step_s: list[float] = []
    late = 0
    async with Load(engine, prompts, max_new_tokens) as watch:
        for cycle in range(cycles):
            begin = len(watch.times)
            await watch.some_more(4)
            span = watch.times[begin:]
            step_s += [after - before for before, after in itertools.pairwise(span)]
            await asyncio.sleep(rng.random() * max(step_s[-3:]))
            start = time.perf_counter()
            await engine.pause()
            pause_s.append(time.perf_counter() - start)
            seen = len(watch.times)
            await asyncio.sleep(SETTLE_S)
            late += len(watch.times) - seen
            seen = len(watch.times)
            variant = engine.resume_variants[cycle % len(engine.resume_variants)]
            start = time.perf_counter()
            resumed = asyncio.create_task(engine.resume(variant))
            resume_s[variant].append(await watch.next_after(seen) - start)
            await resumed
    return {"pause_s": pause_s, "resume_s": resume_s, "step_s": step_s, "late_tokens": late}


async def measure_updates(
    engine: PausableEngine,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    current: str,
    other: str,
    repeats: int,
) -> dict[str, Any]:
    """Update a paused engine with frozen requests from disk, alternating between two checkpoints.

    Returns:
        ``update_s``: call to reply, per update. ``gap_s``: pause call to the next token after the update,
        that is, how long a trainer keeps generation stopped. ``changed`` and ``restored``: greedy output
        differs under the other weights, and is the same again under the first ones.
    """
    update_s: list[float] = []
    gap_s: list[float] = []
    probe = prompts[0][:8]
    before = await engine.generate(probe, 8, greedy=True)
    odd = repeats + 1 - repeats % 2  # ends on the other checkpoint
    async with Load(engine, prompts, max_new_tokens) as watch:
        for number in range(odd):
            await watch.some_more(4)
            stopped = time.perf_counter()
            await engine.pause()
            seen = len(watch.times)
            start = time.perf_counter()
            await engine.update(current if number % 2 else other)
            update_s.append(time.perf_counter() - start)
            resumed = asyncio.create_task(engine.resume(engine.resume_variants[0]))
            gap_s.append(await watch.next_after(seen) - stopped)
            await resumed
    after = await engine.generate(probe, 8, greedy=True)
    await engine.pause()
    await engine.update(current)
    await engine.resume(engine.resume_variants[0])
    restored = await engine.generate(probe, 8, greedy=True)
    return {
        "update_s": update_s,
        "gap_s": gap_s,
        "changed": before != after,
        "restored": before == restored,
    }
