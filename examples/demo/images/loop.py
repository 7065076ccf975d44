"""The run: trajectories to the learner, weights to the engine, until the last update.

One turn: take a batch, learn; before the last of its optimiser steps the next batch is requested, so the
pause finds it in the middle of its trajectories; pause in place, send the weights, continue.

Invariants:
- A paused trajectory keeps its latent, and goes on under the new weights from the step where it stopped; its
  spans say which step was made by which version.
- Noise is a function of seed, sample and step. Every update draws from a seed of its own; evaluations always
  from the same.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline

from caesura.client import ImageOutput, ImageTensor, SchedulerClient, SdeParams, launch_scheduler

from ..messages import Push
from ..sender import WeightSender
from .history import MB, Evaluation, ImageHistory, Update
from .learner import Batch, Learner
from .pipeline import build
from .pretraining import pretrain
from .settings import ImageSettings
from .world import HELD_OUT, PROMPTS, SIDE, TRAINED, Measures, measure

PATIENCE_S = 120.0
_EVALUATION_SEED = 999

Say = Callable[[str], None]
"""Tells whoever looks on."""


def run(settings: ImageSettings, history: ImageHistory, say: Say) -> None:
    """Run everything and fill ``history``."""
    began = time.perf_counter()
    torch.set_num_threads(settings.learner_threads)
    pipeline = build(settings.seed)
    history.parameters = sum(value.numel() for value in pipeline.transformer.parameters())
    say("pretraining: pictures, then shapes in mostly wrong colours")
    pretrain(pipeline, settings, lambda *loss: history.losses.append(loss))
    folder = settings.out_dir / "pipeline"
    pipeline.save_pretrained(folder)
    history.pretrain_s = time.perf_counter() - began
    say("starting the engine")
    launched = time.perf_counter()
    engine = launch_scheduler(
        folder,
        dtype="float32",
        device="cpu",
        num_threads=settings.engine_threads,
        log_path=settings.out_dir / "engine.log",
    )
    with engine as client, ThreadPoolExecutor(len(PROMPTS) + len(TRAINED)) as threads:
        history.engine_start_s = time.perf_counter() - launched
        Loop(client, threads, pipeline, settings, history, say).run()
    pipeline.save_pretrained(folder)
    history.wall_s = time.perf_counter() - began


def tensor(given: ImageTensor | None) -> torch.Tensor:
    """Return a tensor of a result in memory of its own."""
    assert given is not None, "the result has no such tensor"
    return torch.from_numpy(np.asarray(given).copy())


def picture(output: ImageOutput) -> torch.Tensor:
    """Return float32 [3, 32, 32] in [-1, 1]."""
    return tensor(output.image).permute(2, 0, 1).float() / 127.5 - 1


def step_versions(output: ImageOutput) -> list[int]:
    """Return the update whose weights made each step; 0 stands for the first checkpoint."""
    return [
        int(span.version) if span.version.isdigit() else 0
        for span in output.weight_versions
        for _ in range(span.start, span.end)
    ]


Pending = list[tuple[str, Future[list[ImageOutput]]]]
"""Prompts, and their samples to come."""


@dataclass
class Loop:
    """Reinforcement learning on a running engine, from version 0."""

    client: SchedulerClient
    threads: ThreadPoolExecutor
    pipeline: StableDiffusion3Pipeline
    settings: ImageSettings
    history: ImageHistory
    say: Say

    def __post_init__(self) -> None:
        self._learner = Learner(self.pipeline.transformer, self.settings)
        self._pending: Pending = []
        self._sender = WeightSender(self.settings.transport, self.client.endpoint, self._write)

    def run(self) -> None:
        """Run all updates, and the evaluations between them."""
        settings = self.settings
        self.say("reinforcement learning")
        self._evaluate(0)
        began = time.perf_counter()
        self._request(1)
        with self._sender:
            for number in range(1, settings.updates + 1):
                self._turn(number)
                self.history.rl_s = time.perf_counter() - began
                if number % settings.eval_every == 0 or number == settings.updates:
                    self._evaluate(number)

    def _turn(self, number: int) -> None:
        """Run one update."""
        times = [time.perf_counter()]
        outputs = [(prompt, each) for prompt, future in self._pending for each in future.result(PATIENCE_S)]
        prompts = [prompt for prompt, _ in outputs]
        measures = measure(torch.stack([picture(output) for _, output in outputs]), prompts)
        batch = self._batch([output for _, output in outputs], measures)
        times.append(time.perf_counter())
        last = number == self.settings.updates
        step = self._learner.update(number, batch, lambda: None if last else self._request(number + 1))
        self._learner.remember(number)
        self._sender.prepare()
        times.append(time.perf_counter())
        paused = self.client.pause("in_place", timeout=PATIENCE_S)
        times.append(time.perf_counter())
        tensors = self.pipeline.transformer.state_dict()
        self._sender.push(tensors, Push(version=number, flush_cache=False))
        times.append(time.perf_counter())
        resumed = self.client.continue_generation(timeout=PATIENCE_S)
        times.append(time.perf_counter())
        wait_s, learn_s, pause_s, update_s, continue_s = (after - before for before, after in pairwise(times))
        self.history.images += len(outputs)
        self.history.updates.append(
            Update(
                update=number,
                reward=measures.reward.mean().item(),
                right_colour=measures.right_colour.mean().item(),
                right_shape=measures.right_shape.mean().item(),
                step=step,
                wait_s=wait_s,
                learn_s=learn_s,
                pause_ms=1e3 * pause_s,
                update_ms=1e3 * update_s,
                continue_ms=1e3 * continue_s,
                held=paused.held_requests,
                crossed=sum(len(output.weight_versions) > 1 for _, output in outputs),
                reserved_before_mb=(resumed.reserved_before or 0) / MB,
                reserved_after_mb=(resumed.reserved_after or 0) / MB,
            )
        )

    def _request(self, number: int) -> None:
        """Request trajectories for update ``number``: some samples of all prompts that are trained on."""
        settings = self.settings
        sde = SdeParams(type="sde", noise_level=settings.noise_level, steps=list(range(settings.window)))

        def samples(place: int, prompt: str) -> list[ImageOutput]:
            outputs: list[ImageOutput] = self.client.generate_images(
                prompt,
                n=settings.samples_per_prompt,
                seed=1000 * (1000 * settings.seed + number) + place,
                width=SIDE,
                height=SIDE,
                sigmas=settings.sigmas,
                max_sequence_length=0,
                sde=sde,
                return_steps=list(range(settings.window)),
                timeout=PATIENCE_S,
            )
            return outputs

        self._pending = [
            (prompt, self.threads.submit(samples, place, prompt)) for place, prompt in enumerate(TRAINED)
        ]

    def _batch(self, outputs: list[ImageOutput], measures: Measures) -> Batch:
        window = self.settings.window
        return Batch(
            latents=torch.stack([tensor(output.latents) for output in outputs]),
            behaviour=torch.tensor([output.log_probs for output in outputs]),
            versions=torch.tensor([step_versions(output)[:window] for output in outputs]),
            embeds=torch.stack([tensor(output.embeds["prompt_embeds"]) for output in outputs]),
            pooled=torch.stack([tensor(output.embeds["pooled_prompt_embeds"]) for output in outputs]),
            rewards=measures.reward,
        )

    def _write(self) -> Path:
        """Write the transformer into one of two folders in turn: the engine may still hold the last one."""
        folder = self.settings.out_dir / f"transformer-{len(self.history.updates) % 2}"
        self.pipeline.transformer.save_pretrained(folder)
        return folder

    def _evaluate(self, update: int) -> None:
        """Evaluate all prompts without noise, from the same seeds each time."""

        def samples(place: int, prompt: str) -> list[ImageOutput]:
            outputs: list[ImageOutput] = self.client.generate_images(
                prompt,
                n=self.settings.eval_samples,
                seed=1000 * _EVALUATION_SEED + place,
                width=SIDE,
                height=SIDE,
                sigmas=self.settings.sigmas,
                max_sequence_length=0,
                sde=SdeParams(type="ode"),
                timeout=PATIENCE_S,
            )
            return outputs

        futures = [self.threads.submit(samples, place, prompt) for place, prompt in enumerate(PROMPTS)]
        pictures = {
            prompt: torch.stack([picture(output) for output in future.result(PATIENCE_S)])
            for prompt, future in zip(PROMPTS, futures, strict=True)
        }
        trained = _measured(pictures, TRAINED)
        held_out = _measured(pictures, list(HELD_OUT))
        evaluation = Evaluation(
            update=update,
            reward=trained.reward.mean().item(),
            right_colour=trained.right_colour.mean().item(),
            right_shape=trained.right_shape.mean().item(),
            held_out_reward=held_out.reward.mean().item(),
            held_out_colour=held_out.right_colour.mean().item(),
            pictures=pictures,
        )
        self.history.evals.append(evaluation)
        self.say(
            f"update {update:3d}  reward {evaluation.reward:.3f}  "
            f"right colour {evaluation.right_colour:.2f}  "
            f"right shape {evaluation.right_shape:.2f}  held-out reward {evaluation.held_out_reward:.3f}"
        )


def _measured(pictures: dict[str, torch.Tensor], prompts: list[str]) -> Measures:
    said = [prompt for prompt in prompts for _ in range(len(pictures[prompt]))]
    return measure(torch.cat([pictures[prompt] for prompt in prompts]), said)
