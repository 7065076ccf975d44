"""One ``Fleet`` in front of 20 to 1,000 engines: what the process that controls them pays.

The engines answer the real wire over tcp without a model (``tests/support/light_engines.py``), in a process
of their own, so the figures are those of connections, commands and routing alone. Columns:

    connect     open the fleet: every engine greeted, asked for its status and admitted
    pause, continue    one command to every engine
    update      pause, begin, load, verify, commit and continue of every engine, over ``disk``
    place       one submitted request of 64 tokens without a routing key, while paused; ``keyed`` with one
    generate    until 10 requests an engine, submitted at once, have ended, by request
    heal        10 engines ended and started again serve with the fleet's weights
    join        one more engine serves with the fleet's weights
    fds, threads, KiB    descriptors, threads and resident memory of this process for each engine

    python benchmarks/fleet.py --engines 20 100 300 1000 --json fleet.json
"""

import asyncio
import multiprocessing
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from harness.process_memory import read_memory
from harness.script import begin, parser, table, write_json
from rich.console import Console

from caesura.client import SamplingParams
from caesura.client.group import Fleet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.light_engines import EnginesProcess

PARAMS = SamplingParams(max_new_tokens=16)
DYING = 10
NAMES = (
    *("engines", "connect_s", "pause_ms", "continue_ms", "update_ms", "place_us", "keyed_us", "generate_us"),
    *("heal_s", "join_s", "fds", "threads", "KiB"),
)


@contextmanager
def timed(into: dict[str, float], name: str, scale: float = 1.0) -> Iterator[None]:
    began = perf_counter()
    yield
    into[name] = (perf_counter() - began) * scale


async def until_serving(fleet: Fleet, number: int) -> None:
    while len(fleet.dispatcher.serving) != number:  # noqa: ASYNC110 (a fleet tells nobody)
        await asyncio.sleep(0.01)


async def measure(engines: EnginesProcess, number: int, turns: int) -> dict[str, float]:
    found: dict[str, float] = {"engines": number}
    before = read_memory(os.getpid()).resident, len(os.listdir("/proc/self/fd")), threading.active_count()
    *first, last = engines.endpoints
    draw = random.Random(0)
    with timed(found, "connect_s"):
        fleet = await Fleet(first, patience_s=None).open()
    try:
        samples: list[dict[str, float]] = []
        for turn in range(turns):
            each: dict[str, float] = {}
            with timed(each, "pause_ms", 1e3):
                await fleet.pause()
            prompts = [[draw.randrange(1 << 15) for _ in range(64)] for _ in range(10 * number)]
            for name, keyed in (("keyed_us", True), ("place_us", False)):
                with timed(each, name, 1e6 / len(prompts)):
                    handles = [
                        await fleet.submit(prompt, PARAMS, routing_key=str(at) if keyed else None)
                        for at, prompt in enumerate(prompts)
                    ]
                if keyed:
                    await fleet.abort(abort_all=True)
                    await asyncio.gather(*(handle.result() for handle in handles), return_exceptions=True)
            with timed(each, "continue_ms", 1e3):
                await fleet.continue_generation()
            await asyncio.gather(*(handle.result() for handle in handles))
            with timed(each, "generate_us", 1e6 / len(prompts)):
                await asyncio.gather(*(fleet.generate(prompt, PARAMS) for prompt in prompts))
            with timed(each, "update_ms", 1e3):
                await fleet.update(model_path=Path.cwd(), weight_version=str(turn))
            samples.append(each)
        found |= {name: sorted(each[name] for each in samples)[turns // 2] for name in samples[0]}
        after = read_memory(os.getpid()).resident, len(os.listdir("/proc/self/fd")), threading.active_count()
        memory, descriptors, threads = (now - then for now, then in zip(after, before, strict=True))
        found |= {"fds": descriptors / number, "threads": threads / number, "KiB": memory / 1024 / number}
        engines.tell("end", range(DYING))
        await until_serving(fleet, len(first) - DYING)
        engines.tell("start", ())
        with timed(found, "heal_s"):
            await until_serving(fleet, len(first))
        with timed(found, "join_s"):
            await fleet.add(last)
    finally:
        await fleet.close()
    return found


def one(number: int, turns: int) -> dict[str, float]:
    with EnginesProcess(number + 1) as engines:
        return asyncio.run(measure(engines, number, turns))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--engines", type=int, nargs="+", default=[20, 100, 300, 1000])
    made.add_argument("--turns", type=int, default=5)
    options = made.parse_args()
    console = Console(width=160)
    facts, found = begin(console), []
    for number in options.engines:  # each in a fresh process, for its memory
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(one, (number, options.turns)))
    rows = [
        [f"{row[name]:,.3g}" if row[name] < 100 else f"{row[name]:,.0f}" for name in NAMES] for row in found
    ]
    console.print(table(None, NAMES, rows, words=0))
    write_json(options.json, {"machine": facts, "sizes": found})


if __name__ == "__main__":
    main()
