"""Rollouts over HTTP with an update every second: three processes stay flat, and every token is what its span
says.

A scheduler, ``caesura serve`` in front of it, and this process, which sends rollouts over HTTP and trains:
pause, update by each transport in turn, continue. Every hundredth rollout is scored again by transformers
under the versions that its spans name (``rescore.py``). Memory, descriptors and threads of all three are read
in every pause.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from caesura.client import launch_scheduler
from caesura.io_struct import PauseMode

from .http_load import Connection
from .pictures import LINE, Panel, draw_grid
from .process_memory import MB, read_memory
from .rescore import Rescorer
from .script import markdown, two_checkpoints
from .serving import serve
from .transports import TRANSPORTS, Trainer

MODES: tuple[PauseMode, ...] = ("in_place", "retract", "in_place", "abort")
CONNECTIONS = 16
VOCAB_SIZE, CONTEXT_LEN, KV_TOKENS = 4096, 512, 16384
SETTLED = 0.2
"""Share of the run after which growth is counted: stores of answers have filled by then."""
PROCESSES = ("scheduler", "front end", "trainer")


@dataclass
class Found:
    """All that a run has seen."""

    at: list[float] = field(default_factory=list)
    """Seconds of each reading."""
    readings: dict[str, list[dict[str, int]]] = field(
        default_factory=lambda: {name: [] for name in PROCESSES}
    )
    rollouts: int = 0
    tokens: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    rescored: int = 0
    rescored_tokens: int = 0
    rescored_spans: int = 0
    largest_gap: float = 0.0
    updates: dict[str, int] = field(default_factory=dict)


def reading(pid: int) -> dict[str, int]:
    """Return what the process ``pid`` holds."""
    return {
        "resident": read_memory(pid).resident,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


class Rollouts:
    """Keeps :data:`CONNECTIONS` requests on their way; every ``rescored_every``-th answer is scored again."""

    def __init__(self, url: str, rescorer: Rescorer, found: Found, rescored_every: int) -> None:
        self._url, self._rescorer, self._found = url, rescorer, found
        self._rescored_every = rescored_every
        self._numbers = itertools.count(1)
        self.stopping = False

    async def run(self) -> None:
        """Send and check until ``stopping``."""
        await asyncio.gather(*(self._work() for _ in range(CONNECTIONS)))

    async def _work(self) -> None:
        connection = await Connection.open(self._url)
        while not self.stopping:
            number = next(self._numbers)
            rng = random.Random(number)
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4, 48))]
            sampling = {"max_new_tokens": rng.randrange(16, 400), "ignore_eos": True, "sampling_seed": number}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            answer = json.loads(await connection.post("/generate", json.dumps(body).encode()))
            self._check(number, prompt, answer)
        connection.close()

    def _check(self, number: int, prompt: list[int], answer: dict[str, Any]) -> None:
        found, meta, output = self._found, answer["meta_info"], answer["output_ids"]
        spans, scored = meta["weight_versions"], meta["output_token_logprobs"]
        assert [token for _, token, _ in scored] == output, "logprobs and tokens differ"
        covered = sum(span["end"] - span["start"] for span in spans)
        assert covered == len(output), "spans do not cover the tokens"
        found.rollouts += 1
        found.tokens += len(output)
        ending = meta["finish_reason"]["type"]
        found.endings[ending] = found.endings.get(ending, 0) + 1
        if number % self._rescored_every or not output:
            return
        labelled = [{**span, "version": folder_of(span["version"])} for span in spans]
        again = self._rescorer.logprobs(prompt, output, labelled)
        gap = max(abs(mine - theirs[0]) for mine, theirs in zip(again, scored, strict=True))
        found.largest_gap = max(found.largest_gap, gap)
        found.rescored += 1
        found.rescored_tokens += len(output)
        found.rescored_spans += len(spans)


def folder_of(version: str) -> str:
    """Return which checkpoint a label stands for: updates alternate between two."""
    return "0" if version == "default" else str(int(version) % 2)


def train(
    trainer: Trainer, client: Any, pids: dict[str, int], found: Found, until: float, every_s: float
) -> None:
    """Pause, update and continue about every ``every_s``; runs in a thread of its own."""
    turns = zip(itertools.count(1), itertools.cycle(MODES), itertools.cycle(TRANSPORTS), strict=False)
    began = time.monotonic()
    for turn, mode, transport in turns:
        if time.monotonic() >= until:
            return
        client.pause(mode)
        reply = trainer.push(transport, turn % 2, flush_cache=mode != "in_place", weight_version=str(turn))
        assert reply.committed and reply.changed_tensors, "the update changed nothing"
        found.updates[transport] = found.updates.get(transport, 0) + 1
        client.continue_generation()
        found.at.append(time.monotonic() - began)
        for name, pid in pids.items():
            found.readings[name].append(reading(pid))
        time.sleep(max(0.0, min(every_s, until - time.monotonic())))


async def soak(
    folders: Sequence[Path], minutes: float, *, rescored_every: int = 100, update_every_s: float = 1.0
) -> Found:
    """Run for ``minutes`` on processes of its own."""
    found = Found()
    rescorer = Rescorer({str(number): folder for number, folder in enumerate(folders)})
    engine = launch_scheduler(
        folders[0], dtype="float32", num_threads=1, context_len=CONTEXT_LEN, kv_pool_tokens=KV_TOKENS,
        log_level="WARNING",
    )  # fmt: skip
    with (
        engine as client,
        Trainer(client, folders, TRANSPORTS, 4 << 20) as trainer,
        serve(client.endpoint, "--tokenizer", "none") as (url, front_pid),
    ):
        pids = dict(zip(PROCESSES, (client.status().pid, front_pid, os.getpid()), strict=True))
        rollouts = Rollouts(url, rescorer, found, rescored_every)
        load = asyncio.create_task(rollouts.run())
        until = time.monotonic() + 60 * minutes
        training = asyncio.to_thread(train, trainer, client, pids, found, until, update_every_s)
        await asyncio.wait({load, asyncio.create_task(training)}, return_when=asyncio.FIRST_COMPLETED)
        rollouts.stopping = True
        await load
        status = client.status()
        assert not status.running_requests + status.waiting_requests, "requests are left"
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: %(default)s)")


def run(options: argparse.Namespace, console: Console, scratch: Path) -> dict[str, Any]:
    return asdict(asyncio.run(soak(two_checkpoints(scratch, "tiny"), options.minutes)))


def report(found: dict[str, Any]) -> str:
    """Return the growth of each process from :data:`SETTLED` of the run to its end, and the totals."""
    rows = []
    for name, readings in found["readings"].items():
        first, last = readings[int(SETTLED * len(readings))], readings[-1]
        resident = [each["resident"] / MB for each in (first, last)]
        sizes = [f"{value:.1f}" for value in resident] + [f"{resident[1] - resident[0]:+.1f}"]
        counts = [f"{first[key]} -> {last[key]}" for key in ("descriptors", "threads")]
        rows.append([name, *sizes, *counts])
    headings = "process|resident when settled, MB|last, MB|growth, MB|descriptors|threads"
    return (
        f"After {found['at'][-1] / 60:.0f} minutes:\n\n{markdown(headings.split('|'), rows)}\n"
        f"{found['rollouts']:,} rollouts ({found['endings']}), {found['tokens']:,} tokens; "
        f"updates {found['updates']}; {found['rescored']:,} rollouts with "
        f"{found['rescored_spans']:,} spans and {found['rescored_tokens']:,} tokens scored again: "
        f"largest gap {found['largest_gap']:.1e}\n"
    )


def plot(found: dict[str, Any], path: Path) -> None:
    """Draw the resident memory of the three processes over the run."""
    minutes = [at / 60 for at in found["at"]]
    by_name = {name: [each["resident"] / MB for each in all_] for name, all_ in found["readings"].items()}
    top = 1.1 * max(max(values) for values in by_name.values())
    panels = [
        Panel(name, "" if number else "resident, MB", (0, top), [(minutes, values, LINE, "")])
        for number, (name, values) in enumerate(by_name.items())
    ]
    draw_grid([panels], path, xlabel="minutes")
