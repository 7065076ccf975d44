"""Caesura's side of the rollout benchmark, driven over stdin and stdout: a scheduler process and the asyncio
client.

Resuming is measured with its empty-cache step, which is the default, and without. The time from a process's
start to its first token includes this process's start, as it does for the other engines.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from async_peer import EngineOptions, serve_engine
from measure import Prompt

from caesura.client import AsyncSchedulerClient, LaunchedScheduler, SamplingParams, launch_scheduler

WITH_EMPTY_CACHE = "empty-cache"


class CaesuraEngine:
    """``measure.PausableEngine`` on top of AsyncSchedulerClient."""

    resume_variants = (WITH_EMPTY_CACHE, "plain")

    def __init__(self, launched: LaunchedScheduler, client: AsyncSchedulerClient) -> None:
        self._launched = launched
        self._client = client

    async def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        greedy: bool = False,
        on_tokens: Callable[[], None] | None = None,
    ) -> list[int]:
        params = _params(max_new_tokens, temperature=0.0 if greedy else 1.0)
        handle = await self._client.submit(prompt, params, stream=on_tokens is not None)
        if on_tokens is not None:
            async for _ in handle:
                on_tokens()
        return (await handle.result()).output_ids

    async def rollout(self, prompts: Sequence[Prompt], max_new_tokens: int, samples: int) -> list[list[int]]:
        outputs = await self._client.generate(prompts, _params(max_new_tokens, samples=samples))
        return [output.output_ids for output in outputs]

    async def pause(self) -> None:
        await self._client.pause("in_place")

    async def resume(self, variant: str) -> None:
        await self._client.continue_generation(torch_empty_cache=variant == WITH_EMPTY_CACHE)

    async def update(self, path: str) -> None:
        await self._client.update_weights_from_disk(path, flush_cache=False)

    async def abort_all(self) -> None:
        await self._client.abort(abort_all=True)

    async def close(self) -> None:
        await self._client.close()
        await asyncio.to_thread(self._launched.close)


def _params(max_new_tokens: int, temperature: float = 1.0, samples: int = 1) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, ignore_eos=True, n=samples)


async def open_engine(options: EngineOptions) -> tuple[CaesuraEngine, dict[str, Any]]:
    """Start the scheduler; its own defaults apply to everything that is not a matter of equal conditions."""
    launched = await asyncio.to_thread(
        launch_scheduler,
        options.model,
        num_threads=options.threads,
        context_len=options.context_len,
        kv_pool_tokens=options.kv_tokens,
        quantization=options.quantization,
    )
    facts = {
        "versions": {name: version(name) for name in ("caesura", "torch")},
        "settings": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "")},
    }
    return CaesuraEngine(launched, AsyncSchedulerClient(launched.endpoint)), facts


if __name__ == "__main__":
    serve_engine(open_engine)
