"""A fleet of a thousand engines of which a hundred die, in every phase of an update and while they generate.

The engines speak the real wire and have no model (``support/light_engines.py``), in a process of their own.
In each round requests are submitted, some of them before the pause of an update and some after it; some
engines die at the message of a phase chosen for them, and are started again with their first weights while
the update goes on; and others that the fleet has never seen join. Counted is what must not be: requests
that were not answered whole (lost), tokens of another label than their epoch has, or of older weights than
the fleet had when they were asked for (wrong), updates that nobody committed (failed), and engines that do
not serve the last weights at the end (left). Exit status 1 if there is any.

    PYTHONPATH=tests:benchmarks python -m campaigns.light_fleet --engines 1000 --deaths 100 --json light.json
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness.machine import machine_facts
from harness.script import markdown, parser, write_json
from support.light_engines import EnginesProcess

from caesura.client import GenerateOutput, SamplingParams
from caesura.client.group import Fleet, FleetUpdateFailed
from caesura.client.group.members import Member

PHASES = {
    "generate": "GenerateReqInput",
    "pause": "PauseGenerationReqInput",
    "begin": "BeginWeightUpdateReqInput",
    "load": "UpdateWeightFromDiskReqInput",
    "verify": "GetStatusReqInput",
    "commit": "EndWeightUpdateReqInput",
    "continue": "ContinueGenerationReqInput",
}
"""The message of which an engine dies, by phase."""
HARMS = ("lost", "wrong", "failed", "left")
PARAMS = SamplingParams(max_new_tokens=16)
LOOK_S = 0.2


@dataclass
class Found:
    engines: int
    deaths: dict[str, int] = field(default_factory=Counter)
    """Engines that have died, by phase."""
    requests: int = 0
    moved: int = 0
    updates: int = 0
    lost: int = 0
    wrong: int = 0
    failed: int = 0
    left: int = 0
    update_s: list[float] = field(default_factory=list)
    heal_s: list[float] = field(default_factory=list)
    """Seconds from the start of each engine that had died until it serves."""
    join_s: list[float] = field(default_factory=list)
    """Seconds from :meth:`Fleet.add` of each new engine until it serves."""

    @property
    def harm(self) -> int:
        return sum(getattr(self, name) for name in HARMS)


class Campaign:
    def __init__(self, fleet: Fleet, engines: EnginesProcess, newcomers: Sequence[int], seed: int) -> None:
        self.fleet, self.engines, self.newcomers = fleet, engines, list(newcomers)
        self.found = Found(len(fleet.members))
        self._random = random.Random(seed)
        self._labels = {fleet.weights_epoch: fleet.weight_version}
        self._healing: set[asyncio.Task[None]] = set()
        self._before: dict[int, str | None] = {}
        """Incarnations of engines before they died, by number."""

    async def play(self, deaths: int, joining: int) -> None:
        """Carry out one round."""
        requests = [asyncio.ensure_future(self._generate()) for _ in range(len(self.fleet.members))]
        doomed = self._random.sample(range(self.found.engines), deaths)
        plan = {number: self._random.choice(list(PHASES)) for number in doomed}
        self._before |= {number: self._member(number).client.incarnation for number in doomed}
        await self._tell("arm", {number: PHASES[phase] for number, phase in plan.items()})
        over = asyncio.Event()
        reviving = asyncio.ensure_future(self._revive(plan, over))
        joins = [asyncio.ensure_future(self._join()) for _ in range(joining)]
        requests += [asyncio.ensure_future(self._generate()) for _ in range(len(self.fleet.members))]
        await self._update()
        requests += [asyncio.ensure_future(self._generate()) for _ in range(len(self.fleet.members))]
        await asyncio.gather(*requests, *joins)
        over.set()
        await reviving

    async def end(self) -> None:
        """Wait until all serve, and look at every engine."""
        await asyncio.gather(*self._healing)
        await self._until(lambda: all(member.serves for member in self.fleet.members))
        status = await self.fleet.status()
        self.found.moved = status.moved_requests
        for member in status.members:
            engine = member.engine
            self.found.left += not (
                engine is not None
                and (engine.generation, engine.weights, engine.session) == ("running", "valid", None)
                and engine.weight_version == status.weight_version
                and member.load == 0
            )

    async def _generate(self) -> None:
        self.found.requests += 1
        least = self.fleet.weights_epoch
        key = str(self._random.random()) if self._random.random() < 0.5 else None
        try:
            output: GenerateOutput = await self.fleet.generate(
                [self._random.randrange(1 << 15) for _ in range(40)], PARAMS, routing_key=key
            )
        except Exception as error:  # noqa: BLE001  whatever it is, the request is lost
            self.found.lost += 1
            print(f"lost: {error!r}", file=sys.stderr)
            return
        whole = list(output.output_ids) == list(range(PARAMS.max_new_tokens or 0))
        self.found.lost += not whole
        self.found.wrong += any(
            span.epoch < least or self._labels.get(span.epoch) != span.version
            for span in output.weight_versions
        )

    async def _update(self) -> None:
        label, began = f"update-{self.found.updates}", time.monotonic()
        self._labels[self.fleet.weights_epoch + 1] = label
        try:
            await self.fleet.update(model_path=Path.cwd(), weight_version=label)
        except FleetUpdateFailed as error:
            self.found.failed += 1
            print(f"failed: {error}", file=sys.stderr)
        self.found.updates += 1
        self.found.update_s.append(time.monotonic() - began)

    async def _revive(self, plan: dict[int, str], over: asyncio.Event) -> None:
        """Start engines of ``plan`` again; those that got no message of their phase end when all is over."""
        left = dict(plan)
        while left:
            await asyncio.sleep(0.05)
            if over.is_set():
                await self._tell("arm", {})
                await self._tell("end", left)
            for number in await self._tell("start", {}):
                self.found.deaths[left.pop(number)] += 1
                self._healing.add(asyncio.ensure_future(self._healed(number)))

    async def _healed(self, number: int) -> None:
        began = time.monotonic()
        member, before = self._member(number), self._before[number]
        await self._until(lambda: member.serves and member.client.incarnation != before)
        self.found.heal_s.append(time.monotonic() - began)

    def _member(self, number: int) -> Member:
        return self.fleet.dispatcher.members[self.engines.endpoints[number]]

    async def _join(self) -> None:
        if self.newcomers:
            began = time.monotonic()
            await self.fleet.add(self.engines.endpoints[self.newcomers.pop()])
            self.found.join_s.append(time.monotonic() - began)

    async def _tell(self, what: str, told: dict[int, str]) -> list[int]:
        found: list[int] = await asyncio.to_thread(self.engines.tell, what, told)
        return found

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110 (a fleet tells nobody)
            await asyncio.sleep(0.01)


async def run(number: int, deaths: int, joining: int, rounds: int, seed: int) -> Found:
    """Play ``rounds`` with ``deaths`` and ``joining`` engines in all."""
    with EnginesProcess(number + joining) as engines:
        first = engines.endpoints[:number]
        async with Fleet(first, patience_s=None, look_interval_s=LOOK_S) as fleet:
            campaign = Campaign(fleet, engines, range(number, number + joining), seed)
            for turn in range(rounds):
                share = [each * (turn + 1) // rounds - each * turn // rounds for each in (deaths, joining)]
                await campaign.play(*share)
            await campaign.end()
        return campaign.found


def table(found: Found) -> str:
    def seconds(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} s, {max(values):.2f} s" if values else ""

    counts = [str(getattr(found, name)) for name in ("engines", "requests", "moved", "updates", *HARMS)]
    rows = [[*counts, *(seconds(each) for each in (found.update_s, found.heal_s, found.join_s))]]
    headings = ["engines", "requests", "moved", "updates", *HARMS, "update p50, max", "heal", "join"]
    return markdown(headings, rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--engines", type=int, default=1000, help="(default: %(default)s)")
    made.add_argument("--deaths", type=int, default=100, help="of them, in all rounds (default: %(default)s)")
    made.add_argument("--joining", type=int, default=20, help="new engines (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=10, help="(default: %(default)s)")
    made.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    found = asyncio.run(run(options.engines, options.deaths, options.joining, options.rounds, options.seed))
    facts = machine_facts()
    write_json(options.json, {"machine": facts, "found": asdict(found)})
    print(json.dumps(facts))
    print(f"died in: {dict(found.deaths)}")
    print(table(found))
    return int(found.harm > 0)


if __name__ == "__main__":
    sys.exit(main())
