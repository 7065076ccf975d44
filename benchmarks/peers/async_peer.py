"""Serves the benchmark's operations for an engine with an asyncio front end. Standard library only.

The event loop runs only while an operation does, so between operations an idle engine's client costs nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from json_lines import claim_stdout, serve
from measure import PausableEngine, Prompt, measure_pauses, measure_rollout, measure_updates


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Conditions that are the same for every engine."""

    model: str
    """Checkpoint folder."""
    threads: int
    """Threads for the model's arithmetic."""
    context_len: int
    kv_tokens: int
    """Capacity of the KV cache in tokens."""
    kv_bytes_per_token: int
    adapters: Sequence[str] = ()
    """Folders of LoRA adapters that the rows of a rollout have in turn; empty: none has one."""
    rank: int = 0
    """Rank of the adapters."""
    quantization: str = "auto"
    """Caesura's option, which the others have not."""


OpenEngine = Callable[[EngineOptions], Awaitable[tuple[PausableEngine, dict[str, Any]]]]
"""Starts an engine; the second value says what it is: ``versions``, and whatever else the report should keep.
"""


class AsyncPeer:
    """The handlers; ``start`` comes first."""

    def __init__(self, open_engine: OpenEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._open_engine = open_engine
        self._loop = loop
        self._engine: PausableEngine | None = None

    def start(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """Load the model and generate the first token."""

        async def first_token() -> tuple[PausableEngine, dict[str, Any]]:
            engine, facts = await self._open_engine(EngineOptions(**options))
            await engine.generate(prompt, 1)
            return engine, facts

        self._engine, facts = self._loop.run_until_complete(first_token())
        return facts

    def rollout(self, prompts: Sequence[Prompt], max_new_tokens: int, samples: int) -> dict[str, Any]:
        return self._loop.run_until_complete(measure_rollout(self.engine, prompts, max_new_tokens, samples))

    def pauses(self, **arguments: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(measure_pauses(self.engine, **arguments))

    def updates(self, **arguments: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(measure_updates(self.engine, **arguments))

    def update(self, path: str) -> dict[str, Any]:
        """Load the weights of a checkpoint folder."""

        async def paused() -> None:
            await self.engine.pause()
            await self.engine.update(path)
            await self.engine.resume(self.engine.resume_variants[0])

        self._loop.run_until_complete(paused())
        return {}

    def score(self, rows: Sequence[Prompt], start: int) -> dict[str, Any]:
        """Return the log-probabilities of each row's tokens from ``start`` on, by engines that can."""
        engine: Any = self.engine
        return {"logprobs": self._loop.run_until_complete(engine.score(rows, start))}

    def close(self) -> None:
        if self._engine is not None:
            self._loop.run_until_complete(self._engine.close())

    @property
    def engine(self) -> PausableEngine:
        assert self._engine is not None, "start comes first"
        return self._engine


def serve_engine(open_engine: OpenEngine) -> None:
    channel = claim_stdout()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # front ends create their tasks on the current loop
    peer = AsyncPeer(open_engine, loop)
    try:
        serve(
            channel,
            {
                "start": peer.start,
                "rollout": peer.rollout,
                "pauses": peer.pauses,
                "updates": peer.updates,
                "update": peer.update,
                "score": peer.score,
            },
        )
    finally:
        peer.close()
