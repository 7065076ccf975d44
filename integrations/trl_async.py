"""A rollout worker for ``trl.experimental.async_grpo.AsyncGRPOTrainer`` without vLLM or another process.

    worker = RolloutWorker(endpoint, dataset, [reward], tokenizer, args)
    AsyncGRPOTrainer(..., rollout_worker=worker, weight_transfer=WeightTransfer(SchedulerClient(endpoint)))

Invariants:
- A sample's ``model_version`` is that of its oldest token, so ``max_staleness`` bounds every token of it.
- A group of which one sample was aborted or failed is dropped whole: its advantages would be wrong.
- The queue is bounded; a trainer that is behind makes the worker wait, and ``stop`` ends every wait.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from ..client import AsyncSchedulerClient, GenerateOutput, SchedulerClient, oldest_epoch
from .trl import prompt_ids, sampling_params

RewardFunction = Callable[..., Sequence[float | None]]
POLL_S = 0.2
"""Seconds between looks whether a waiting worker shall end."""


class RolloutWorker:
    """TRL's ``RolloutWorkerProtocol`` in a thread: generates groups, scores them, queues samples."""

    def __init__(
        self,
        endpoint: str,
        dataset: Iterable[Mapping[str, Any]],
        reward_funcs: Sequence[RewardFunction],
        processing_class: Any,
        args: Any,
        *,
        groups_in_flight: int = 8,
    ) -> None:
        """
        Args:
            dataset: rows with a ``prompt``; gone through again and again.
            reward_funcs: called as TRL calls them, in a thread; the rewards of one completion are added up.
            processing_class: the tokenizer.
            args: the trainer's ``AsyncGRPOConfig``: sampling, ``num_generations``, ``queue_maxsize``.
            groups_in_flight: prompts that are generated at the same time.
        """
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(max(0, args.queue_maxsize))
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._endpoint = endpoint
        self._dataset = dataset
        self._reward_funcs = list(reward_funcs)
        self._tokenizer = processing_class
        self._params = sampling_params(args)
        self._samples = int(args.num_generations)
        self._in_flight = groups_in_flight
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._alive_at = time.monotonic()
        self._versions_ahead = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="caesura-trl-rollouts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, without waiting for generations in flight; the engine aborts what nobody waits for."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=15)

    def update_model_version(self, model_version: int) -> None:
        """Record that the engine's weights are the trainer's version ``model_version`` from now on."""
        with SchedulerClient(self._endpoint) as client:
            self._versions_ahead = model_version - client.status().weights_epoch

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if the worker has failed, or finished nothing for ``stale_after_s`` seconds."""
        if self._failure is not None:
            raise RuntimeError("the rollout worker has failed") from self._failure
        age = time.monotonic() - self._alive_at
        if age > stale_after_s and not self.rollout_buffer.full():
            raise RuntimeError(f"the rollout worker has finished no group for {age:.0f} s")

    def _run(self) -> None:
        try:
            asyncio.run(self._produce())
        # The edge of a thread: check_health raises the error in the trainer.
        except Exception as error:  # noqa: BLE001
            self._failure = error

    async def _produce(self) -> None:
        groups = enumerate(chain.from_iterable(repeat(self._dataset)))
        async with AsyncSchedulerClient(self._endpoint) as client:
            await asyncio.gather(*(self._work(client, groups) for _ in range(self._in_flight)))

    async def _work(
        self, client: AsyncSchedulerClient, groups: Iterable[tuple[int, Mapping[str, Any]]]
    ) -> None:
        for number, row in groups:
            if self._stop.is_set():
                return
            ids = prompt_ids(self._tokenizer, row["prompt"])
            params = msgspec.structs.replace(self._params, n=self._samples)
            outputs = await self._until_stopped(client.generate(ids, params, return_logprob=True))
            if outputs is None:
                return
            outputs = outputs if isinstance(outputs, list) else [outputs]
            if any(output.finish_reason.type in ("abort", "error") for output in outputs):
                continue
            for sample in await asyncio.to_thread(self._scored, number, row, ids, outputs):
                await asyncio.to_thread(self._put, sample)
            self._alive_at = time.monotonic()

    async def _until_stopped(self, generation: Any) -> Any:
        task = asyncio.ensure_future(generation)
        while not task.done():
            if self._stop.is_set():
                task.cancel()
                return None
            await asyncio.wait((task,), timeout=POLL_S)
        return task.result()

    def _scored(
        self, number: int, row: Mapping[str, Any], ids: list[int], outputs: list[GenerateOutput]
    ) -> list[RolloutSample]:
        prompt = row["prompt"]
        texts = [self._tokenizer.decode(output.output_ids, skip_special_tokens=True) for output in outputs]
        chat = not isinstance(prompt, str)
        completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        columns = {name: [value] * len(outputs) for name, value in row.items() if name != "prompt"}
        rewards = np.zeros(len(outputs))
        for function in self._reward_funcs:
            given = function(
                prompts=[prompt] * len(outputs),
                completions=completions,
                completion_ids=[output.output_ids for output in outputs],
                weight_versions=[output.weight_versions for output in outputs],
                **columns,
            )
            rewards += np.asarray([0.0 if value is None else value for value in given])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        return [
            RolloutSample(
                prompt=prompt,
                completion=completion,
                input_ids=np.asarray(ids + output.output_ids, np.int64),
                completion_mask=np.asarray([0] * len(ids) + [1] * len(output.output_ids), np.int64),
                old_log_probs=np.asarray([0.0] * len(ids) + (output.output_logprobs or []), np.float32),
                advantage=float(advantage),
                model_version=oldest_epoch(output) + self._versions_ahead,
                group_id=number,
                metrics={"reward": float(reward), "reward_std": float(rewards.std())},
                enqueued_at=time.time(),
            )
            for completion, output, reward, advantage in zip(
                completions, outputs, rewards, advantages, strict=True
            )
        ]

    def _put(self, sample: RolloutSample) -> None:
        while not self._stop.is_set():
            try:
                return self.rollout_buffer.put(sample, timeout=POLL_S)
            except queue.Full:
                continue
        return None
