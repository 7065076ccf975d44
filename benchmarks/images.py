"""Images of a diffusion policy: speed beside diffusers' own pipeline, pauses, updates, and memory over them.

Both read the same checkpoint of random weights, use as many threads, make the same images (Euler steps, no
noise added) and take turns. ``one`` is one request after the other, ``eight`` eight at a time, and ``mixed``
requests that arrive one by one, a third of an image's time apart: diffusers takes those that wait as its next
batch, of eight at most, and Caesura lets them join between two steps. Processor time is that of the engine's
process, and of this one: it compares them also where other processes use the cores.

    python benchmarks/images.py
    python benchmarks/images.py --shape tiny small --threads 2 1 --cycles 0 --seconds 100 --json images.json
    python benchmarks/images.py --shape tiny small --dtype bfloat16 --cycles 0

With ``--residency`` it measures something else: bytes of weights on the device by the strategies of the
components, at their peak and between stages, and what an image and its stages take then.

    python benchmarks/images.py --shape even --residency
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from harness.cycles import ALLOWANCE_MS, distribution
from harness.image_pipelines import SHAPES, write_pipeline
from harness.process_memory import MB, read_memory
from harness.script import begin, parser, table, write_json
from psutil import Process
from rich.console import Console

from caesura.client import SchedulerClient, launch_scheduler
from caesura.io_struct import Residency
from caesura.process.engine_options import DtypeName

PROMPT = "a red circle"
STEPS = 10
BATCH = 8
PATIENCE_S = 300.0
WARM_S = 2.5
"""Seconds of images before the first round, for each engine: small steps are traced meanwhile."""
GAP_SAMPLES = 3
"""Number of images whose median says how far apart requests arrive."""
WAITED_FOR = ("encode", "denoise", "decode", "pause")
"""Stages that a pause may meet, and its own."""
WAYS = ("one", "eight", "mixed")
IMAGES = {"tiny": 24, "small": 8, "even": 8}
"""Images of one round of one way."""
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
LONG = 1000
"""Steps of an image that is paused."""

Rates = dict[str, dict[str, list[float]]]
"""Images per second by way and engine, one figure per round; or per second of a processor."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Images that every engine makes."""

    side: int
    """Pixels of an image's side."""
    dtype: DtypeName = "float32"
    """Data type of all components."""
    images: int
    """Images of one round of one way; one after the other a quarter of them."""
    rounds: int
    """Most rounds."""
    seconds: float = 3600.0
    """Seconds after which no round begins."""


def _pipeline(folder: Path, workload: Workload) -> Any:
    return StableDiffusion3Pipeline.from_pretrained(
        folder,
        local_files_only=True,
        text_encoder_3=None,
        tokenizer_3=None,
        torch_dtype=getattr(torch, workload.dtype),
    )


class Diffusers:
    """The pipeline of diffusers in this process."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        self._pipeline = _pipeline(folder, workload)
        self._pipeline.set_progress_bar_config(disable=True)
        self._workload = workload

    def images(self, count: int, seed: int) -> None:
        """Make ``count`` images as one batch."""
        self._pipeline(
            [PROMPT] * count,
            width=self._workload.side,
            height=self._workload.side,
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            max_sequence_length=0,
            generator=[torch.Generator().manual_seed(seed + number) for number in range(count)],
            output_type="np",
        )

    def arriving(self, count: int, gap_s: float) -> None:
        """Make images for requests that arrive ``gap_s`` apart, batched as they wait."""
        began, done = time.perf_counter(), 0
        while done < count:
            here = min(count, 1 + int((time.perf_counter() - began) / gap_s))
            if here == done:
                time.sleep(max(0.0, began + done * gap_s - time.perf_counter()))
                continue
            batch = min(here - done, BATCH)
            self.images(batch, done)
            done += batch


class Caesura:
    """An engine in its own process."""

    def __init__(self, client: SchedulerClient, workload: Workload) -> None:
        self._client = client
        self._workload = workload

    def images(self, count: int, seed: int, steps: int = STEPS) -> None:
        """Ask for ``count`` images at once."""
        self._client.generate_images(
            PROMPT,
            n=count,
            seed=seed,
            width=self._workload.side,
            height=self._workload.side,
            num_inference_steps=steps,
            max_sequence_length=0,
            return_embeds=False,
            sde={"type": "ode"},
            timeout=PATIENCE_S,
        )

    def arriving(self, count: int, gap_s: float) -> None:
        """Send requests of a caller each, ``gap_s`` apart."""
        with ThreadPoolExecutor(count) as threads:
            began, futures = time.perf_counter(), []
            for number in range(count):
                time.sleep(max(0.0, began + number * gap_s - time.perf_counter()))
                futures.append(threads.submit(self.images, 1, number))
            for future in futures:
                future.result()


def measure_rates(
    engines: dict[str, Diffusers | Caesura], pid: int, workload: Workload
) -> tuple[Rates, Rates]:
    """Measure every way, the engines in turns; the second rates are per second of a processor."""
    for engine in engines.values():
        began = time.perf_counter()
        for count in itertools.cycle((1, BATCH)):
            engine.images(count, 0)
            if time.perf_counter() - began > WARM_S:
                break
    gap_s = median(_seconds(lambda: engines["diffusers"].images(1, 1)) for _ in range(GAP_SAMPLES)) / 3
    alone = -(-workload.images // 4)
    ways: dict[str, tuple[int, Callable[[Diffusers | Caesura], object]]] = {
        "one": (alone, lambda engine: [engine.images(1, number) for number in range(alone)]),
        "eight": (
            workload.images,
            lambda engine: [engine.images(BATCH, 100 * n) for n in range(workload.images // BATCH)],
        ),
        "mixed": (workload.images, lambda engine: engine.arriving(workload.images, gap_s)),
    }
    clocks = {"caesura": lambda: sum(Process(pid).cpu_times()[:2]), "diffusers": time.process_time}
    rates: Rates = {way: {name: [] for name in engines} for way in ways}
    of_processor: Rates = {way: {name: [] for name in engines} for way in ways}
    began = time.perf_counter()
    for number in range(workload.rounds):
        if time.perf_counter() - began > workload.seconds:
            break
        for way, (images, work) in ways.items():
            for name in sorted(engines, reverse=bool(number % 2)):
                before = clocks[name]()
                seconds = _seconds(lambda work=work, engine=engines[name]: work(engine))  # type: ignore[misc]
                rates[way][name].append(images / seconds)
                of_processor[way][name].append(images / (clocks[name]() - before))
    return rates, of_processor


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Pauses in the middle of trajectories, updates of the whole transformer, and what they leave behind."""

    pause_ms: dict[str, float]
    update_ms: dict[str, float]
    stage_ms: dict[str, dict[str, float]]
    """Median and longest of each of :data:`WAITED_FOR`, in the engine."""
    rss_mb: list[float]
    """Resident memory of the engine's process, ten times over the cycles."""
    reserved_mb: list[float]


def measure_cycles(client: SchedulerClient, pid: int, folder: Path, workload: Workload, count: int) -> Cycles:
    """Pause in place, update, continue, ``count`` times, with ``BATCH`` images always on their way."""
    transformer = _pipeline(folder, workload).transformer.requires_grad_(False)
    weight = transformer.proj_out.weight
    engine, stop, pauses, updates, rss, reserved = Caesura(client, workload), False, [], [], [], []

    def push(version: str) -> None:
        weight.mul_(-1)  # no update leaves everything as it was
        tensors = transformer.state_dict()
        client.update_weights_from_ipc(tensors, weight_version=version, flush_cache=False, timeout=PATIENCE_S)

    def load(number: int) -> None:
        while not stop:
            engine.images(1, number)

    with ThreadPoolExecutor(BATCH) as threads:
        futures = [threads.submit(load, number) for number in range(BATCH)]
        try:
            for cycle in range(count):
                time.sleep(0.001 * (cycle % 17))  # at any phase of a step
                pauses.append(_seconds(lambda: client.pause("in_place", timeout=PATIENCE_S)))
                updates.append(_seconds(lambda version=str(cycle): push(version)))  # type: ignore[misc]
                resumed = client.continue_generation(timeout=PATIENCE_S)
                if cycle % max(1, count // 10) == 0:
                    rss.append(read_memory(pid).resident / MB)
                    reserved.append((resumed.reserved_after or 0) / MB)
        except BaseException:
            stop = True
            client.abort(abort_all=True, timeout=PATIENCE_S)  # what waits in a pause would keep the threads
            raise
        stop = True
        for future in futures:
            future.result()
    stages = {stage.name: stage for stage in client.status(timeout=PATIENCE_S).stages}
    return Cycles(
        pause_ms=distribution([1e3 * value for value in pauses]),
        update_ms=distribution([1e3 * value for value in updates]),
        stage_ms={
            name: {"median": 1e3 * stages[name].median_s, "longest": 1e3 * stages[name].longest_s}
            for name in WAITED_FOR
            if name in stages
        },
        rss_mb=rss,
        reserved_mb=reserved,
    )


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


def measure_occupation(folder: Path, workload: Workload, threads: int) -> list[Occupation]:
    """Measure an engine for each of :data:`STRATEGIES`, one after the other."""
    return [_measure(folder, workload, threads, *each) for each in STRATEGIES]


def _measure(
    folder: Path, workload: Workload, threads: int, frozen: Residency, transformer: Residency
) -> Occupation:
    with launch_scheduler(
        folder,
        dtype=workload.dtype,
        device="cpu",
        num_threads=threads,
        log_level="WARNING",
        frozen_residency=frozen,
        transformer_residency=transformer,
        prompt_cache_bytes=0,
    ) as client:
        engine, images = Caesura(client, workload), workload.images

        def image(steps: int = STEPS) -> None:
            engine.images(1, 0, steps)

        image()
        before = _stage_seconds(client)
        took = [_seconds(image) for _ in range(images)]
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


def tables(console: Console, title: str, rates: Rates, of_processor: Rates, cycles: Cycles | None) -> None:
    rows = []
    for way in WAYS:
        ours, theirs = rates[way]["caesura"], rates[way]["diffusers"]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        by_time = [a / b for a, b in zip(*of_processor[way].values(), strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        figures = [f"{median(each):.2f}" for each in (ours, theirs, ratios)]
        rows.append([way, *figures, spread, f"{median(by_time):.2f}"])
    headings = (
        "requests|Caesura, images/s|diffusers, images/s|ratio, median of rounds|least and most|"
        "ratio by processor time"
    )
    console.print(table(title, headings.split("|"), rows))
    if cycles is None:
        return
    steps = ", ".join(
        f"{name} {times['median']:.1f} ms (longest {times['longest']:.1f})"
        for name, times in cycles.stage_ms.items()
    )
    console.print(
        f"pause p50 {cycles.pause_ms['p50']:.1f}, p99 {cycles.pause_ms['p99']:.1f}, "
        f"max {cycles.pause_ms['max']:.1f} ms; "
        f"in the engine: {steps}; allowed beyond a step {ALLOWANCE_MS:.0f}; "
        f"update p50 {cycles.update_ms['p50']:.1f}, p99 {cycles.update_ms['p99']:.1f} ms",
        soft_wrap=True,
    )
    console.print("resident MB over the cycles: " + " ".join(f"{value:.0f}" for value in cycles.rss_mb))
    console.print("reserved MB over the cycles: " + " ".join(f"{value:.0f}" for value in cycles.reserved_mb))


def residency(options: argparse.Namespace, console: Console) -> None:
    shape, threads, sizes, times = SHAPES[options.shape[0]], options.threads[0], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = write_pipeline(Path(folder) / "pipeline", shape)
        workload = Workload(side=shape.side, dtype=options.dtype, images=options.rounds, rounds=1)
        found = measure_occupation(path, workload, threads)
    for each in found:
        names, ratio = [each.frozen, each.transformer], each.seconds / found[0].seconds
        bytes_ = [f"{nbytes / MB:.1f}" for nbytes in (each.peak, each.denoising, each.idle)]
        sizes.append([*names, *bytes_, f"{each.seconds:.3f}", f"{ratio:.2f}"])
        times.append([*names, *(f"{each.stage_ms[name]:.1f}" for name in STAGES)])
    headings = [
        "encoders, VAE",
        "transformer",
        "peak, MB",
        "denoising, MB",
        "idle, MB",
        "one image, s",
        "ratio",
    ]
    console.print(table(None, headings, sizes, words=2))
    console.print(table(None, [*headings[:2], *(f"{name}, ms" for name in STAGES)], times, words=2))
    write_json(options.json, [asdict(each) for each in found])


def main() -> None:
    options = parse()
    console = Console()
    facts = begin(console)
    if options.residency:
        residency(options, console)
        return
    found = [
        beside_diffusers(console, options, name, threads)
        for name in options.shape
        for threads in options.threads
    ]
    write_json(options.json, {"machine": facts, "options": vars(options), "found": found})


def beside_diffusers(
    console: Console, options: argparse.Namespace, name: str, threads: int
) -> dict[str, Any]:
    """Measure one shape with so many threads, print it, and return it."""
    torch.set_num_threads(threads)
    shape = SHAPES[name]
    images = options.images or IMAGES[name]
    workload = Workload(
        side=shape.side,
        dtype=options.dtype,
        images=images,
        rounds=options.rounds,
        seconds=options.seconds,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = write_pipeline(Path(folder) / "pipeline", shape)
        launched = launch_scheduler(
            path, dtype=options.dtype, device="cpu", num_threads=threads, log_level="WARNING"
        )
        with launched as client:
            assert launched.pid is not None
            pair: dict[str, Diffusers | Caesura] = {
                "caesura": Caesura(client, workload),
                "diffusers": Diffusers(path, workload),
            }
            rates, of_processor = measure_rates(pair, launched.pid, workload)
            cycles = (
                measure_cycles(client, launched.pid, path, workload, options.cycles)
                if options.cycles
                else None
            )
    tables(console, f"{name}, {options.dtype}, threads: {threads}", rates, of_processor, cycles)
    return {
        "shape": name,
        "threads": threads,
        "images_per_s": rates,
        "images_per_processor_s": of_processor,
        "cycles": None if cycles is None else asdict(cycles),
    }


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--shape", choices=SHAPES, default=["tiny"], nargs="+")
    made.add_argument(
        "--threads", type=int, default=[2], nargs="+", help="of each engine, one of which works at a time (2)"
    )
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all engines")
    made.add_argument(
        "--images", type=int, help="of one round of one way; a multiple of 8 (24, of large images 8)"
    )
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument(
        "--seconds", type=float, default=3600.0, help="of each shape, after which no round begins (3600)"
    )
    made.add_argument(
        "--cycles", type=int, default=1000, help="of pause, update and continue (1000); 0: none"
    )
    made.add_argument("--residency", action="store_true", help="bytes on the device by strategy instead")
    return made.parse_args()


if __name__ == "__main__":
    main()
