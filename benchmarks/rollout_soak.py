"""Half an hour of rollouts over HTTP with an update every second: is everything flat, and is every token what its span says?

Three processes: a scheduler, ``caesura serve`` in front of it, and this one, which sends rollouts over HTTP and trains: pause,
update by each transport in turn, continue. Every hundredth rollout is scored again by transformers under the versions
that its spans name (``harness/rescore.py``). Memory, descriptors and threads of all three are read in every pause.

    python benchmarks/rollout_soak.py --minutes 30 --json rollout_soak.json --plot rollout_soak.svg
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import write_checkpoint
from harness.http_load import Connection
from harness.machine import describe, machine_facts
from harness.process_memory import MB, read_memory
from harness.rescore import Rescorer
from harness.transports import Trainer, Transport
from memory_over_updates import LINE, STYLE
from rich.console import Console
from rich.table import Table

from caesura.client import launch_scheduler
from caesura.io_struct import PauseMode

TRANSPORTS: tuple[Transport, ...] = ("disk", "tensor", "ipc", "distributed", "ipc-shared")
MODES: tuple[PauseMode, ...] = ("in_place", "retract", "in_place", "abort")
CONNECTIONS = 16
VOCAB_SIZE, CONTEXT_LEN, KV_TOKENS = 4096, 512, 16384
RESCORED_EVERY = 100
UPDATE_EVERY_S = 1.0
SETTLED = 0.2
"""Share of the run after which growth is counted: the stores of answers and the allocators have filled by then."""
PROCESSES = ("scheduler", "front end", "trainer")


@dataclass
class Reading:
    """What a process holds."""

    resident: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> "Reading":
        """Process ``pid``, now."""
        threads = len(os.listdir(f"/proc/{pid}/task"))
        return cls(read_memory(pid).resident, len(os.listdir(f"/proc/{pid}/fd")), threads)


@dataclass
class Found:
    """All that a run has seen."""

    at: list[float] = field(default_factory=list)
    readings: dict[str, list[Reading]] = field(default_factory=lambda: {name: [] for name in PROCESSES})
    rollouts: int = 0
    tokens: int = 0
    endings: dict[str, int] = field(default_factory=dict)
    rescored: int = 0
    rescored_tokens: int = 0
    rescored_spans: int = 0
    largest_gap: float = 0.0
    updates: dict[str, int] = field(default_factory=dict)


class Rollouts:
    """Keeps :data:`CONNECTIONS` requests on their way; every hundredth answer is scored again."""

    def __init__(self, url: str, rescorer: Rescorer, found: Found) -> None:
        self._url, self._rescorer, self._found = url, rescorer, found
        self._numbers = itertools.count(1)
        self.stopping = False

    async def run(self) -> None:
        """Until ``stopping``; each answer is checked."""
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
        assert sum(span["end"] - span["start"] for span in spans) == len(output), (
            "spans do not cover the tokens"
        )
        found.rollouts += 1
        found.tokens += len(output)
        ending = meta["finish_reason"]["type"]
        found.endings[ending] = found.endings.get(ending, 0) + 1
        if number % RESCORED_EVERY or not output:
            return
        labelled = [{**span, "version": folder_of(span["version"])} for span in spans]
        again = self._rescorer.logprobs(prompt, output, labelled)
        gap = max(abs(mine - theirs[0]) for mine, theirs in zip(again, scored, strict=True))
        found.largest_gap = max(found.largest_gap, gap)
        found.rescored += 1
        found.rescored_tokens += len(output)
        found.rescored_spans += len(spans)


def folder_of(version: str) -> str:
    """Which checkpoint a label stands for: updates alternate between two."""
    return "0" if version == "default" else str(int(version) % 2)


@contextmanager
def serve(endpoint: str) -> Iterator[tuple[str, int]]:
    """``caesura serve`` over a scheduler that runs: its address and pid."""
    command = [sys.executable, "-c", "from caesura.client.cli import main; main()"]
    command += ["serve", "--endpoint", endpoint, "--port", "0", "--tokenizer", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.search(r"http://\S+", line)
            if address is None:
                raise RuntimeError(f"caesura serve did not start: {line}")
            yield address[0], process.pid
        finally:
            process.terminate()


def train(trainer: Trainer, client: Any, pids: dict[str, int], found: Found, until: float) -> None:
    """Pause, update, continue, about once a second; in a thread of its own."""
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
            found.readings[name].append(Reading.of(pid))
        time.sleep(max(0.0, min(UPDATE_EVERY_S, until - time.monotonic())))


async def soak(folders: Sequence[Path], minutes: float) -> Found:
    """One run on engines of its own."""
    found = Found()
    rescorer = Rescorer({str(number): folder for number, folder in enumerate(folders)})
    engine = launch_scheduler(
        folders[0], dtype="float32", num_threads=1, context_len=CONTEXT_LEN, kv_pool_tokens=KV_TOKENS,
        log_level="WARNING",
    )  # fmt: skip
    with (
        engine as client,
        Trainer(client, folders, TRANSPORTS, 4 << 20) as trainer,
        serve(client.endpoint) as front,
    ):
        url, front_pid = front
        pids = dict(zip(PROCESSES, (client.status().pid, front_pid, os.getpid()), strict=True))
        rollouts = Rollouts(url, rescorer, found)
        load = asyncio.create_task(rollouts.run())
        training = asyncio.to_thread(train, trainer, client, pids, found, time.monotonic() + 60 * minutes)
        await asyncio.wait({load, asyncio.create_task(training)}, return_when=asyncio.FIRST_COMPLETED)
        rollouts.stopping = True
        await load
        status = client.status()
        assert not status.running_requests + status.waiting_requests, "requests are left"
    return found


def as_table(found: Found) -> Table:
    """Growth of each process from :data:`SETTLED` of the run to its end."""
    table = Table(title=f"after {found.at[-1] / 60:.0f} minutes")
    table.add_column("process")
    for title in ("RSS settled, MB", "last, MB", "growth, MB", "descriptors", "threads"):
        table.add_column(title, justify="right")
    for name, readings in found.readings.items():
        first, last = readings[int(SETTLED * len(readings))], readings[-1]
        table.add_row(
            name,
            f"{first.resident / MB:.1f}",
            f"{last.resident / MB:.1f}",
            f"{(last.resident - first.resident) / MB:+.1f}",
            f"{first.descriptors} -> {last.descriptors}",
            f"{first.threads} -> {last.threads}",
        )
    return table


def plot(found: Found, path: Path) -> None:
    """Resident memory of the three processes over the run."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(9.6, 2.8), layout="constrained")
        panels = figure.subplots(1, len(PROCESSES), squeeze=False)[0]
        for panel, (name, readings) in zip(panels, found.readings.items(), strict=True):
            panel.plot(
                [at / 60 for at in found.at], [reading.resident / MB for reading in readings], color=LINE
            )
            panel.set_title(name, loc="left", fontsize=10)
            panel.set_xlabel("minutes")
            panel.set_ylim(0)
        panels[0].set_ylabel("resident, MB")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="write every reading there")
    parser.add_argument("--plot", type=Path, help="draw memory there (.svg or .png; needs matplotlib)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, facts = Console(width=120), machine_facts()
    console.print(describe(facts))
    with tempfile.TemporaryDirectory() as scratch:
        folders = [write_checkpoint(Path(scratch) / str(seed), "tiny", seed=seed) for seed in (0, 1)]
        found = asyncio.run(soak(folders, options.minutes))
    console.print(as_table(found))
    console.print(
        f"{found.rollouts:,} rollouts ({found.endings}), {found.tokens:,} tokens; "
        f"updates {found.updates}; {found.rescored:,} rollouts with {found.rescored_spans:,} spans and "
        f"{found.rescored_tokens:,} tokens scored again: largest gap {found.largest_gap:.1e}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": facts, "found": asdict(found)}) + "\n")
    if options.plot is not None:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
