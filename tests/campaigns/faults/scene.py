"""Scene of one fault: requests in flight, a trainer or client at work, and the expected end of each.

Everything is drawn from the fault's own random numbers, so that one fault can be repeated alone.
"""

import os
import random
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from caesura.client.connection.blocking import GenerationHandle

from .actors import Errand
from .ledger import Problem, check_tokens
from .life import Actor, Life
from .witness import LONG_TOKENS, draw_prompt, greedy

PHASES = {
    "update": ("pause", "update", "update", "continue"),
    "pause": ("pause", "paused", "continue"),
    "release": ("pause", "release", "released", "resume", "update", "continue"),
    "stream": ("submitted", "streaming"),
    "write": ("update",),
    "http": ("streaming",),
    "http-update": ("pause", "update", "continue"),
}
"""Phases of each errand in which a fault may meet it; a phase that stands twice is met twice as often."""
UPDATING = ("update", "release", "write", "http-update")
DELAYS_S = (0.0001, 0.1)
"""Seconds after the beginning of a phase, drawn evenly by their logarithms."""
HOLDS_S = (0.05, 0.2, 0.5, 2.5)
"""Seconds that something stands still; the longest exceeds leases and session deadlines."""
HOLD_WEIGHTS = (4, 4, 2, 1)


@dataclass(frozen=True)
class SpanFacts:
    """A weight-version span as an actor reports it."""

    version: str
    start: int
    end: int


@dataclass
class Scene:
    """One fault on one life of an engine."""

    life: Life
    number: int
    rng: random.Random
    problems: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts for the report: what was drawn, and how the actors ended."""
    ends_engine: bool = False
    """The fault is expected to end the engine."""
    answers_all: bool = False
    """True if every request must have been answered even so."""
    cleared_at: float = 0.0
    """Monotonic second at which the fault was over; recovery is measured from there."""
    short: list[str] = field(default_factory=list)
    """Requests of the witness that end by themselves."""
    handles: list[GenerationHandle] = field(default_factory=list)
    """Handles of the client library."""
    prompts: dict[str, int] = field(default_factory=dict)
    """Last token of the prompt of each handle, by rid."""

    def load(self) -> None:
        for index in range(4):
            rid, prompt = f"{self.number}.{index}", draw_prompt(self.rng)
            long = index < 2
            self.life.witness.generate(
                rid,
                prompt,
                LONG_TOKENS if long else self.rng.randrange(1, 120),
                stream=self.rng.random() < 0.5,
                samples=self.rng.choice((1, 1, 3)),
            )
            if not long:
                self.short.append(rid)
        for stream in (False, True):
            prompt = draw_prompt(self.rng)
            params = greedy(self.rng.randrange(1, 200))
            handle = self.life.client.submit(prompt, params, stream=stream)
            self.handles.append(handle)
            self.prompts[handle.rid] = prompt[-1]
        arrived = self.life.witness.arrived
        self.life.wait(lambda: self.life.witness.arrived > arrived, 1.0)

    def trainer(self, **fields: Any) -> Actor:
        """Start a trainer that updates, pauses or releases, drawn unless given."""
        version = self.rng.choice(self.life.versions)
        drawn: dict[str, Any] = {
            "endpoint": self.life.endpoint,
            "work": self.rng.choice(("update", "update", "update", "pause", "release")),
            "transport": self.rng.choice(("disk", "tensor", "ipc", "distributed")),
            "mode": self.rng.choice(("in_place", "retract", "abort", None)),
            "explicit": self.rng.random() < 0.25,
            "hold_s": self.rng.choice((0.0, 0.05, 0.2)),
            "folder": version.folder,
            "label": version.label,
            "seed": self.rng.randrange(1 << 30),
        } | fields
        errand = Errand(**drawn)
        if errand.work != "update" or errand.transport == "disk":
            errand = replace(errand, explicit=False)
        if errand.work == "release" and errand.mode not in ("retract", "abort"):
            errand = replace(errand, mode="retract")
        if errand.work == "pause" and errand.mode is None:
            errand = replace(errand, mode="in_place")
        return self._start(errand)

    def client(self, **fields: Any) -> Actor:
        drawn: dict[str, Any] = {
            "endpoint": self.life.endpoint,
            "work": "stream",
            "prompt": tuple(draw_prompt(self.rng)),
            "new_tokens": self.rng.choice((40, 200, 1500)),
            "samples": self.rng.choice((1, 3)),
        } | fields
        return self._start(Errand(**drawn))

    def http_client(self, url: str) -> Actor:
        """Start a streaming client of a front end, or a trainer that pauses and updates through it."""
        version = self.rng.choice(self.life.versions)
        return self._start(
            Errand(
                endpoint=url,
                work=self.rng.choice(("http", "http", "http-update")),
                prompt=tuple(draw_prompt(self.rng)),
                new_tokens=self.rng.choice((200, 1500)),
                mode=self.rng.choice(("in_place", "retract", "abort")),
                folder=version.folder,
                label=version.label,
            )
        )

    def somebody(self, **fields: Any) -> Actor:
        return self.client(**fields) if self.rng.random() < 0.3 else self.trainer(**fields)

    def meet(self, actor: Actor, phases: Iterable[str] | None = None) -> None:
        """Wait until ``actor`` is somewhere in one of its phases, drawn."""
        phase = self.rng.choice(list(phases or PHASES[actor.errand.work]))
        least, most = DELAYS_S
        delay = least * (most / least) ** self.rng.random()
        self.facts |= {"phase": phase, "delay_ms": round(delay * 1000, 1)}
        if not self.life.wait(lambda: actor.reached(phase)):
            self.problem("stuck", f"the {actor.errand.work} never came to {phase}")
        time.sleep(delay)  # not taking in what comes, which may take longer

    def hold(self) -> None:
        seconds = self.rng.choices(HOLDS_S, HOLD_WEIGHTS)[0]
        self.facts["hold_s"] = seconds
        self.life.sleep(seconds)

    def signal(self, pid: int, number: int) -> None:
        """Send it; an actor that came to its end before that was missed."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            self.facts["missed"] = True

    def stop_and_continue(self, pid: int) -> None:
        self.signal(pid, signal.SIGSTOP)
        try:
            self.hold()
        finally:
            self.signal(pid, signal.SIGCONT)

    def must_end(self, actor: Actor, *, well: bool = False) -> None:
        """Wait until ``actor`` tells its end; with ``well`` it must be without an error."""
        self.life.wait(lambda: actor.outcome is not None or not actor.alive())
        outcome = actor.outcome
        self.facts["outcome"] = outcome_text(actor)
        work = f"the {actor.errand.work} by {actor.errand.transport}"
        if outcome is None:
            self.problem("stuck" if actor.alive() else "failed", f"{work} did not end, or without a word")
        elif outcome[0] == "crashed" or (well and outcome[0] != "done"):
            self.problem("failed", f"{work}: {' '.join(map(str, outcome))}")
        elif outcome[0] == "done":
            self._check_done(actor, outcome[1])

    def problem(self, harm: Any, text: str) -> None:
        self.problems.append(Problem(harm, text))

    def cleared(self) -> None:
        self.cleared_at = time.monotonic()

    def _start(self, errand: Errand) -> Actor:
        names = ("work", "transport", "mode", "explicit") if errand.work != "stream" else ("work",)
        self.facts |= {name: getattr(errand, name) for name in names}
        return self.life.actor(errand)

    def _check_done(self, actor: Actor, facts: dict[str, Any]) -> None:
        errand = actor.errand
        for tokens, spans, reason in facts.get("samples", ()):
            found = [SpanFacts(*span) for span in spans]
            self.problems += check_tokens(
                f"{self.number} stream", errand.prompt[-1], tokens, found, self.life.by_label
            )
            if reason == "length" and len(tokens) != errand.new_tokens:
                self.problem("failed", f"a stream of {len(tokens)} of {errand.new_tokens} tokens")
        if errand.work in UPDATING and not self.ends_engine:
            label = self.life.status().weight_version
            if label != errand.label:
                self.problem("failed", f"the trainer was told {errand.label!r} serves, status says {label!r}")


def outcome_text(actor: Actor) -> str:
    outcome = actor.outcome
    if outcome is None:
        return "still there" if actor.alive() else "gone without a word"
    if outcome[0] == "crashed":
        return f"crashed {str(outcome[1]).strip().splitlines()[-1]}"
    return f"refused {outcome[1]}" if outcome[0] == "refused" else str(outcome[0])
