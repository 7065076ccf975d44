"""One fault after the other, and what is checked after each.

Invariants:
- Fault number ``k`` of seed ``s`` is drawn from ``(s, k)`` alone, so it can be repeated without those before
  it.
- After a fault: the engine gets healthy; every request that it accepted ends once; what was generated and
  what the checksum says belongs to one known version; a new request is served; and the engine holds no more
  than before.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caesura.client import EngineDied, EngineError, ShuttingDown
from caesura.io_struct import AbortReq

from .footprint import shared_files_of, wait_until_within
from .kinds import KINDS
from .known import Version
from .ledger import Problem, check_tokens
from .life import DEADLINE_S, PATIENT_LEASE_S, Life, alive
from .scene import Scene
from .witness import draw_prompt

FOOTPRINT_S = 10.0
WARM_UP = ("disk", "tensor", "ipc", "distributed")


@dataclass
class Outcome:
    """One fault: what it was and what came of it."""

    number: int
    kind: str
    seconds: float = 0.0
    """Seconds of the whole fault, checks included."""
    recovery: float = 0.0
    """Seconds from the end of the fault until a healthy engine has answered a new request."""
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class Campaign:
    """Faults on one engine after the other; as an iterator-maker it yields each outcome as it is known."""

    def __init__(
        self,
        versions: list[Version],
        *,
        seed: int,
        kinds: Sequence[str] | None = None,
        log: Path | None = None,
    ) -> None:
        self._versions = versions
        self._seed = seed
        self._kinds = [KINDS[name] for name in kinds or KINDS]
        self._log = log
        self._life: Life | None = None
        self._known: dict[str, str] = {}
        """Checksum of each version, learned at the first start."""

    def run(self, first: int, count: int) -> Iterator[Outcome]:
        for number in range(first, first + count):
            yield self.one(number)

    def draw(self, number: int) -> tuple[str, random.Random]:
        """Return the kind of a fault, and the random numbers of its details."""
        rng = random.Random(f"{self._seed}:{number}")
        found = rng.choices(self._kinds, [kind.weight for kind in self._kinds])[0]
        return found.name, rng

    def one(self, number: int, name: str | None = None) -> Outcome:
        """Let fault ``number`` happen and check what it left; ``name``: of that kind."""
        drawn, rng = self.draw(number)
        outcome = Outcome(number, name or drawn)
        started = time.monotonic()
        life = self._life or self._begin()
        scene = Scene(life, number, rng, facts=outcome.facts)
        scene.cleared()
        try:
            scene.load()
            KINDS[outcome.kind].happen(scene)
            if scene.ends_engine:
                self._settle_end(scene)
            else:
                outcome.recovery = self._settle(scene)
        except EngineError as error:
            scene.problem("failed", f"{type(error).__name__}: {error}")
            self._give_up()
        if self._life is None:
            self._begin()
            outcome.recovery = time.monotonic() - scene.cleared_at
        outcome.problems = scene.problems
        outcome.seconds = time.monotonic() - started
        return outcome

    def close(self) -> None:
        self._give_up()

    def _begin(self) -> Life:
        life = self._life = Life(self._versions, self._known, log=self._log)
        for number, transport in enumerate(WARM_UP):
            scene = Scene(life, -1, random.Random(number))
            version = self._versions[number % len(self._versions)]
            how = {"transport": transport, "mode": "retract", "explicit": False, "lease_s": PATIENT_LEASE_S}
            actor = scene.trainer(work="update", folder=version.folder, label=version.label, **how)
            scene.must_end(actor, well=True)
            scene.problems += life.check_weights()
            if scene.problems:
                raise RuntimeError(f"the engine fails without a fault: {scene.problems}")
        scene = Scene(life, -1, random.Random(0))
        scene.load()
        self._settle(scene)
        if scene.problems:
            raise RuntimeError(f"the engine fails without a fault: {scene.problems}")
        life.baseline = life.footprint()
        return life

    def _give_up(self) -> None:
        if self._life is not None:
            self._life.close()
            self._life = None

    def _settle(self, scene: Scene) -> float:
        life = scene.life
        scene.problems += life.heal()
        self._serves(scene, "after")
        recovery = time.monotonic() - scene.cleared_at
        life.wait(lambda: not set(scene.short) & set(life.ledger.open()))
        life.wait(lambda: all(handle.done() for handle in scene.handles))
        life.witness.send(AbortReq(abort_all=True))
        life.wait(lambda: not life.ledger.open())
        pids = life.dismiss()
        life.leave_groups()
        life.wait(lambda: alive(life.status()) == 0 and life.status().kv.held == 0)
        status = life.status()
        scene.problems += life.ledger.close(alive=alive(status))
        if status.kv.held or alive(status):
            scene.problem("leaked", f"{status.kv.held} KV slots held, {alive(status)} requests alive")
        self._check_handles(scene, ())
        scene.problems += life.check_weights()
        for name in shared_files_of(pids | {life.pid}):
            scene.problem("leaked", name)
        if life.baseline is not None:
            over = wait_until_within(life.baseline, life.pid, FOOTPRINT_S, lambda: life.sleep(0.05))
            if over:
                scene.problem("leaked", "; ".join(over))
                life.baseline = life.footprint()  # said once
        return recovery

    def _serves(self, scene: Scene, name: str) -> None:
        life, rid = scene.life, f"{scene.number}.{name}"
        life.witness.generate(rid, draw_prompt(scene.rng), 3)
        if not life.wait(lambda: rid not in life.ledger.open()):
            scene.problem("stuck", "a healthy engine does not answer a new request")

    def _settle_end(self, scene: Scene) -> None:
        life = scene.life
        if not life.wait(lambda: life.engine.returncode is not None):
            scene.problem("stuck", "the engine did not end")
        life.witness.pump(0.2)
        if scene.answers_all:
            if life.engine.returncode != 0:
                scene.problem("failed", f"the engine ended with status {life.engine.returncode}")
        else:
            life.ledger.forget()
        scene.problems += life.ledger.close(alive=0)
        life.wait(lambda: all(handle.done() for handle in scene.handles))
        self._check_handles(scene, (EngineDied, ShuttingDown))
        pids = life.dismiss() | {life.pid}
        self._give_up()
        if life.directory.exists():
            scene.problem("leaked", f"{life.directory} is still there")
        for name in shared_files_of(pids):
            scene.problem("leaked", name)

    def _check_handles(self, scene: Scene, allowed: tuple[type[EngineError], ...]) -> None:
        for handle in scene.handles:
            if not handle.done():
                scene.problem("stuck", f"{handle.rid}: the client's caller still waits")
                continue
            try:
                output = handle.result(timeout=DEADLINE_S)
            except EngineError as error:
                if not isinstance(error, allowed):
                    scene.problem("failed", f"{handle.rid}: {error.code}: {error}")
                continue
            last, spans = scene.prompts[handle.rid], output.weight_versions
            scene.problems += check_tokens(handle.rid, last, output.output_ids, spans, scene.life.by_label)
