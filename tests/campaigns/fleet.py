"""Replicas of a fleet that end: while they generate, and in every phase of an update.

Real engines, real clients. Generations run throughout; in each round one replica gets SIGTERM (it ends in
order, as after an eviction) or SIGKILL at the chosen point, its engine is started again, and the fleet brings
it back to its weights from another one. The checkpoints are such that the greedy successor of each token is
known for each version, so that a token of other weights than its span says is seen. Counted is what must not
be: requests that were not answered whole (lost), tokens that their span's weights do not give (wrong),
outputs that were begun after an update and have tokens of older weights, outputs with weights whose update
failed, and members that serve another label than the fleet (mixed). Exit status 1 if there is any.

    make kills KILLS_ARGS="--kills 100 --replicas 3 --seed 1 --json fleet.json"

With --ray the replicas are those of a RolloutFleet on a Ray of this machine, which notices the kill, starts
actor and engine again, and has the fleet admit them.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine import machine_facts
from harness.script import markdown, parser, write_json
from safetensors.torch import load_file
from support.intercepted import intercept, intercept_no_more

from caesura.client import (
    AsyncSchedulerClient,
    EngineError,
    GenerateOutput,
    LaunchedScheduler,
    SamplingParams,
    launch_scheduler,
)
from caesura.client.group import EngineAddress, Fleet, FleetUpdateFailed
from caesura.io_struct import (
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    EndWeightUpdateReqInput,
    PauseGenerationReqInput,
    PauseMode,
    Request,
    WeightsCheckerReqInput,
    WeightUpdateOptions,
)

from .faults.known import FIRST_TOKEN, VOCAB, Version, make_versions

if TYPE_CHECKING:
    from caesura.client.group.ray_fleet import RolloutFleet

PHASES = ("generate", "pause", "begin", "load", "verify", "commit", "continue")
CALLS: dict[str, type[Request]] = {
    "pause": PauseGenerationReqInput,
    "begin": BeginWeightUpdateReqInput,
    "load": WeightUpdateOptions,
    "verify": WeightsCheckerReqInput,
    "commit": EndWeightUpdateReqInput,
    "continue": ContinueGenerationReqInput,
}
"""The message to a member in which each phase of an update consists."""
TRANSPORTS = ("disk", "tensor", "ipc", "distributed", "chain")
HARMS = ("lost", "wrong", "mixed")
NEW_TOKENS = 120
UNDER_WAY = 8
"""Generations that run throughout."""
RECOVERY_S = 120.0
UPDATE_TRIES = 4
ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "kv_pool_tokens": 8192, "log_level": "ERROR"}


@dataclass
class Round:
    number: int
    phase: str
    transport: str
    signal: str
    moved: int = 0
    aborted_updates: int = 0
    """Updates that were aborted everywhere and sent again."""
    requests: int = 0
    recovery_s: float = 0.0
    """Seconds from the kill until the replica serves again."""
    lost: int = 0
    wrong: int = 0
    mixed: int = 0


class OwnReplicas:
    """Engines at fixed addresses, started again after a kill."""

    def __init__(self, folder: Path, model: Path, count: int) -> None:
        self.folder, self.model = folder, model
        self.engines: dict[str, LaunchedScheduler] = {}
        self._names = [f"replica-{number}" for number in range(count)]

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(self._launch, name) for name in self._names))

    @property
    def addresses(self) -> list[EngineAddress]:
        return [EngineAddress(self._endpoint(name), name=name) for name in self._names]

    def kill(self, name: str, number: signal.Signals) -> None:
        """Send ``number``; what comes after the first until the restart does nothing."""
        with suppress(ProcessLookupError):
            os.kill(self.engines[name].pid, number)

    async def restart(self, name: str) -> None:
        await asyncio.to_thread(self.engines[name].close)
        await asyncio.to_thread(self._launch, name)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}.sock"

    def _launch(self, name: str) -> None:
        self.engines[name] = launch_scheduler(self.model, endpoint=self._endpoint(name), **ENGINE)


class RayReplicas:
    """The engines of a fleet that Ray starts again."""

    def __init__(self, fleet: "RolloutFleet") -> None:
        self._fleet = fleet
        self._killed: dict[str, str] = {}

    def kill(self, name: str, number: signal.Signals) -> None:
        """Send ``number`` to the engine, not to its actor or to the engine that Ray starts in its place."""
        replica = self._fleet.replica(name)
        if replica is not None and name not in self._killed:
            self._killed[name] = replica.start
            with suppress(ProcessLookupError):
                os.kill(replica.pid, number)

    async def restart(self, name: str) -> None:
        before = self._killed.pop(name)
        async with asyncio.timeout(RECOVERY_S):
            # Ray's work is waited for.
            while (replica := self._fleet.replica(name)) is None or replica.start == before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


Replicas = OwnReplicas | RayReplicas


class Campaign:
    """The rounds, and the generations that run meanwhile."""

    def __init__(self, fleet: Fleet, replicas: Replicas, versions: list[Version], seed: int) -> None:
        self.fleet, self.replicas, self.versions = fleet, replicas, versions
        self.count = len(fleet.members)
        self.seed = seed
        self.random = random.Random(seed)
        self.failed_labels: set[str] = set()
        self._tensors = {v.label: load_file(next(Path(v.folder).glob("*.safetensors"))) for v in versions}
        self._round = Round(-1, "", "", "")
        self._under_way: set[asyncio.Task[None]] = set()
        self._armed: list[AsyncSchedulerClient] = []
        self._updates = 0

    async def play(self, number: int) -> Round:
        """Play one kill, until the fleet is whole again and every request has ended."""
        phase = PHASES[number % len(PHASES)]
        transport = TRANSPORTS[(number // len(PHASES)) % len(TRANSPORTS)]
        self.random = random.Random(f"{self.seed} {number}")
        ends = (signal.SIGTERM, signal.SIGKILL)
        end = ends[(number + self.seed) % 2]  # there is an odd number of phases: each gets both
        found = self._round = Round(number, phase, transport, end.name)
        moved = self.fleet.dispatcher.moved
        self._feed()
        await asyncio.sleep(self.random.random() * 0.1)
        serving = sorted(member.name for member in self.fleet.members if member.serves)
        victim = self.random.choice(serving)
        began = time.monotonic()
        if phase == "generate":
            self.replicas.kill(victim, end)
        else:
            self._arm(victim, phase, end)
        await self._update(found)
        after = [asyncio.ensure_future(self._request(begun_after=True)) for _ in range(UNDER_WAY)]
        await asyncio.gather(*after)
        self._disarm()
        self.replicas.kill(victim, end)  # where a broadcast failed before its phase came
        await self.replicas.restart(victim)
        await self._whole()
        found.recovery_s = time.monotonic() - began
        await asyncio.gather(*self._under_way)
        for status in (await self.fleet.status()).members:
            found.mixed += status.engine is None or status.engine.weight_version != self.fleet.weight_version
        found.moved = self.fleet.dispatcher.moved - moved
        return found

    def _arm(self, victim: str, phase: str, end: signal.Signals) -> None:
        member = next(each for each in self.fleet.members if each.name == victim)
        broadcast = phase == "load" and self._round.transport in ("distributed", "chain")
        early = self.random.random() < 0.5

        async def doomed(send: Callable[[], Awaitable[Any]]) -> Any:
            intercept_no_more(member.client)
            if broadcast:  # one call to all ranks, which follows the answers to this one
                answer = await send()
                asyncio.get_running_loop().call_later(
                    self.random.random() * 0.05, self.replicas.kill, victim, end
                )
                return answer
            if early:
                self.replicas.kill(victim, end)
                return await send()
            sent = asyncio.ensure_future(send())
            await asyncio.sleep(0)
            self.replicas.kill(victim, end)
            return await sent

        intercept(member.client, CALLS["begin"] if broadcast else CALLS[phase], doomed)
        self._armed.append(member.client)

    def _disarm(self) -> None:
        for client in self._armed:
            intercept_no_more(client)
        self._armed.clear()

    async def _update(self, found: Round) -> None:
        for _ in range(UPDATE_TRIES):
            self._updates += 1
            version = self.versions[self._updates % len(self.versions)]
            label = f"{version.label}{self._updates}"
            weights: dict[str, Any] = {"model_path": version.folder}
            if found.transport != "disk":
                tensors = self._tensors[version.label]
                weights = {"named_tensors": tensors, "transport": found.transport}
            modes: tuple[PauseMode, ...] = ("in_place", "retract")
            mode = self.random.choice(modes)
            try:
                await self.fleet.update(**weights, weight_version=label, pause_mode=mode, deadline_s=60.0)
            except FleetUpdateFailed:
                self.failed_labels.add(label)
                found.aborted_updates += 1
                if not self.fleet.dispatcher.serving:
                    continue
                await self.fleet.heal()
            else:
                return
        found.lost += 1

    def _feed(self) -> None:
        while len(self._under_way) < UNDER_WAY:
            task = asyncio.ensure_future(self._request())
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _request(self, *, begun_after: bool = False) -> None:
        found, label = self._round, self.fleet.weight_version
        prompt = [self.random.randrange(FIRST_TOKEN, VOCAB) for _ in range(3)]
        count = self.random.choice([1, 2])
        params = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, n=count, ignore_eos=True)
        found.requests += 1
        try:
            outputs = await self.fleet.generate([prompt], params, return_logprob=True, timeout=RECOVERY_S)
        except EngineError as error:
            print(f"round {found.number}: {error}", file=sys.stderr)
            found.lost += 1
            return
        found.lost += len(outputs) != count
        for output in outputs:
            found.lost += not len(output.output_ids) == len(output.output_logprobs or ()) == NEW_TOKENS
            found.wrong += self._wrong(prompt[-1], output)
            labels = [span.version for span in output.weight_versions]
            epochs = [span.epoch for span in output.weight_versions]
            found.mixed += epochs != sorted(epochs) or not self.failed_labels.isdisjoint(labels)
            found.mixed += begun_after and set(labels) != {label}

    def _wrong(self, token: int, output: GenerateOutput) -> int:
        successor = {version.label: version.successor for version in self.versions}
        wrong = 0
        for span in output.weight_versions:
            rule = successor["A" if span.version == "default" else span.version[:1]]
            for at in range(span.start, span.end):
                wrong += output.output_ids[at] != rule[token]
                token = output.output_ids[at]
        return wrong

    async def _whole(self) -> None:
        async with asyncio.timeout(RECOVERY_S):
            while sum(member.serves for member in self.fleet.members) < self.count:
                await self.fleet.heal()
                await asyncio.sleep(0.02)


def table(rounds: Sequence[Round]) -> str:
    parts: dict[str, list[Round]] = defaultdict(list)
    for each in rounds:
        for name in (each.phase, each.signal, "all"):
            parts[name].append(each)
    rows = []
    for name in (*PHASES, "SIGTERM", "SIGKILL", "all"):
        if part := parts[name]:
            counts = ("requests", "moved", "aborted_updates", *HARMS)
            sums = [str(sum(getattr(each, field) for each in part)) for field in counts]
            recovery = statistics.median(each.recovery_s for each in part)
            rows.append([name, str(len(part)), *sums, f"{recovery:.1f} s"])
    headings = "ended in|ends|requests|moved|updates aborted|lost|wrong tokens|mixed versions|recovery p50"
    return markdown(headings.split("|"), rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=100, help="how many (default: %(default)s)")
    made.add_argument("--first", type=int, default=0, help="number of the first kill (default: %(default)s)")
    made.add_argument("--replicas", type=int, default=3, help="(default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    made.add_argument("--ray", action="store_true", help="replicas that Ray starts and restarts")
    options = made.parse_args(argv)
    if options.replicas < 2:
        made.error("--replicas must be at least 2: the killed one's requests go to another")
    return options


async def run(options: argparse.Namespace, rounds: list[Round]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        versions = make_versions(Path(folder), 3)
        opened = _ray_fleet if options.ray else _own_fleet
        async with opened(Path(folder), Path(versions[0].folder), options.replicas) as (fleet, replicas):
            fleet.heals = False  # the rounds say when, so that the same seed does the same
            campaign = Campaign(fleet, replicas, versions, options.seed)
            for number in range(options.first, options.first + options.kills):
                rounds.append(await campaign.play(number))
                print(json.dumps(asdict(rounds[-1])), file=sys.stderr, flush=True)


@asynccontextmanager
async def _own_fleet(folder: Path, model: Path, count: int) -> AsyncIterator[tuple[Fleet, Replicas]]:
    replicas = OwnReplicas(folder, model, count)
    try:
        await replicas.start()
        async with Fleet(replicas.addresses, verify="checksums", look_interval_s=0.2) as fleet:
            yield fleet, replicas
    finally:
        replicas.close()


@asynccontextmanager
async def _ray_fleet(_: Path, model: Path, count: int) -> AsyncIterator[tuple[Fleet, Replicas]]:
    import ray

    from caesura.client.group.ray_fleet import Placement, RolloutFleet

    # by name: engines share what there is
    ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False)
    try:
        async with RolloutFleet(
            model,
            count,
            placement=Placement(num_cpus=1),
            engine_options=ENGINE,
            verify="checksums",
            look_interval_s=0.2,
        ) as fleet:
            yield fleet, RayReplicas(fleet)
    finally:
        ray.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    rounds: list[Round] = []
    with suppress(KeyboardInterrupt):  # what was found by then is told
        asyncio.run(run(options, rounds))
    facts = machine_facts()
    write_json(options.json, {"machine": facts, "rounds": [asdict(each) for each in rounds]})
    print(json.dumps(facts))
    print(table(rounds))
    return int(any(getattr(each, harm) for each in rounds for harm in HARMS))


if __name__ == "__main__":
    sys.exit(main())
