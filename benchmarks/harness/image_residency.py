"""Bytes of an image pipeline's weights on the device, by the strategies of its components."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from caesura.client import SchedulerClient, launch_scheduler
from caesura.io_struct import Residency

STRATEGIES: list[tuple[Residency, Residency]] = [
    ("resident", "resident"),
    ("offload", "resident"),
    ("layerwise", "resident"),
    ("offload", "offload"),
    ("offload", "layerwise"),
    ("layerwise", "layerwise"),
]
"""Strategies of the text encoders and the VAE, and of the transformer."""
STAGES = ("encode", "denoise", "decode", "components.arrive", "components.leave")
"""Stages of an image. The first three contain the coming and going of components before them."""
STEPS, LONG = 10, 1000
PATIENCE_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Occupation:
    """Bytes that an engine with these strategies has on the device, and the time of an image."""

    frozen: Residency
    transformer: Residency
    peak: int
    """Most bytes over whole images."""
    denoising: int
    """Bytes between two denoising steps."""
    idle: int
    """Bytes between two images."""
    seconds: float
    """Seconds of one image of :data:`STEPS` steps, all alone."""
    stage_ms: dict[str, float]
    """Milliseconds of each of :data:`STAGES` for one image, the mean over the images."""


def measure_occupation(folder: Path, side: int, threads: int, images: int) -> list[Occupation]:
    """Measure an engine for each of :data:`STRATEGIES`, one after the other."""
    return [_measure(folder, side, threads, images, *each) for each in STRATEGIES]


def _measure(
    folder: Path, side: int, threads: int, images: int, frozen: Residency, transformer: Residency
) -> Occupation:
    with launch_scheduler(
        folder,
        dtype="float32",
        device="cpu",
        num_threads=threads,
        log_level="WARNING",
        frozen_residency=frozen,
        transformer_residency=transformer,
        prompt_cache_bytes=0,
    ) as client:

        def image(steps: int = STEPS) -> None:
            client.generate_images(
                "a red circle",
                seed=0,
                width=side,
                height=side,
                num_inference_steps=steps,
                max_sequence_length=0,
                return_embeds=False,
                sde={"type": "ode"},
                timeout=PATIENCE_S,
            )

        image()
        before, took = _stage_seconds(client), []
        for _ in range(images):
            began = time.perf_counter()
            image()
            took.append(time.perf_counter() - began)
        stages = {name: after - before[name] for name, after in _stage_seconds(client).items()}
        idle, peak = _present(client), _present(client, peak=True)
        with ThreadPoolExecutor(1) as thread:
            made = client.status(timeout=PATIENCE_S).generated_tokens
            long = thread.submit(image, LONG)
            while client.status(timeout=PATIENCE_S).generated_tokens == made and not long.done():
                time.sleep(0.01)
            client.pause("in_place", timeout=PATIENCE_S)
            denoising = _present(client)
            client.abort(abort_all=True, timeout=PATIENCE_S)
            long.result()
        return Occupation(
            frozen=frozen,
            transformer=transformer,
            peak=peak,
            denoising=denoising,
            idle=idle,
            seconds=median(took),
            stage_ms={name: 1e3 * seconds / images for name, seconds in stages.items()},
        )


def _present(client: SchedulerClient, *, peak: bool = False) -> int:
    """Return the bytes of weights on the device: those that always are, and those that come and go."""
    status = client.status(timeout=PATIENCE_S)
    memory = status.device_memory
    always = memory.weights - sum(each.nbytes for each in status.components)
    return always + (memory.components_peak if peak else memory.components)


def _stage_seconds(client: SchedulerClient) -> dict[str, float]:
    """Return the seconds of each of :data:`STAGES` since the engine's start; 0 where it never ran."""
    totals = {stage.name: stage.total_s for stage in client.status(timeout=PATIENCE_S).stages}
    return {name: totals.get(name, 0.0) for name in STAGES}
