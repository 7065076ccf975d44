"""Mutation testing: make small changes in a copy of the tree, one at a time, and run the nearest tests.

    make mutation MUTATION_ARGS="--per-module 40 --seed 1 --json mutants.json"
    make mutation MUTATION_ARGS="--module scheduler/cache/manager.py --again mutants.json"   # its survivors

Changes are cosmic-ray's (operators, comparisons, numbers, booleans, loops, exceptions, negated conditions),
drawn by seed. Never drawn: annotations, decorators, type aliases, tests of TYPE_CHECKING, signatures but for
defaults. A first run finds out which test executes which line; a mutant meets the tests that execute its
statement, the module's own ones first and the fastest of these first, then the wider ones, and is killed by
the first that fails or does not end. ``equivalents.json`` lists changes that no caller can see, each with the
reason. The score is killed / (drawn - equivalent).

Invariants:
- The work tree is never written to.
- A mutant is equivalent only if its module, function, old and new line are in the list; it is not run then.
- A test that fails on the unchanged tree kills nothing: it is named and left out.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.machine import describe, machine_facts
from harness.script import markdown, write_json

from .mutants import Apply, Mutant, Place, draw, places_of_interest, statement_lines
from .reach import Reached
from .sandbox import Sandbox

TREE = Path(__file__).resolve().parents[3]
EQUIVALENTS = Path(__file__).with_name("equivalents.json")
KILLED, SURVIVED, TIMEOUT, EQUIVALENT = "killed", "survived", "timeout", "equivalent"
COLUMNS = ("module", "drawn", "killed", "of these by time", "survived", "equivalent", "score")
WIDER_S = 40.0
"""Of the wider tests, the fastest that take so long together are run."""
PATIENCE, LEAST_S = 5.0, 30.0
"""The limit of a run: so many times what its tests take, and this."""


@dataclass(frozen=True, slots=True)
class Tests:
    """Where the tests of a module are."""

    near: tuple[str, ...]
    wide: tuple[str, ...]


MODULES = {
    "scheduler/control/engine_state.py": Tests(
        near=(
            "tests/loop/test_lifecycle_figures.py",
            "tests/loop/test_leases.py",
            "tests/loop/test_sessions.py",
            "tests/loop/test_empty_cache.py",
        ),
        wide=(
            "tests/loop/test_scripted_loop.py",
            "tests/loop/test_restarts.py",
            "tests/loop/test_lifecycle_table.py",
        ),
    ),
    "scheduler/control/pause.py": Tests(
        near=(
            "tests/loop/test_lifecycle_figures.py",
            "tests/loop/test_leases.py",
            "tests/loop/test_sessions.py",
            "tests/loop/test_empty_cache.py",
        ),
        wide=(
            "tests/loop/test_scripted_loop.py",
            "tests/loop/test_restarts.py",
            "tests/loop/test_lifecycle_table.py",
        ),
    ),
    "scheduler/control/weight_updates.py": Tests(
        near=(
            "tests/loop/test_update_figures.py",
            "tests/loop/test_sessions.py",
            "tests/loop/test_restarts.py",
            "tests/loop/test_leases.py",
        ),
        wide=(
            "tests/loop/test_scripted_loop.py",
            "tests/loop/test_failures_of_commands.py",
            "tests/loop/test_emptying_places.py",
            "tests/loop/test_lifecycle_table.py",
        ),
    ),
    "scheduler/memory/device_memory.py": Tests(
        near=("tests/unit/scheduler/memory/test_device_memory.py",),
        wide=("tests/loop/test_empty_cache.py", "tests/loop/test_emptying_places.py"),
    ),
    "scheduler/memory/residency.py": Tests(
        near=(
            "tests/unit/scheduler/memory/test_residency.py",
            "tests/unit/scheduler/memory/test_residency_strategies.py",
        ),
        wide=("tests/loop/test_occupation.py",),
    ),
    "scheduler/scheduling/outputs.py": Tests(
        near=(
            "tests/loop/test_result_figures.py",
            "tests/loop/test_accidents.py",
            "tests/loop/test_scripted_loop.py",
        ),
        wide=(
            "tests/loop/test_failures.py",
            "tests/loop/test_edited_sampling.py",
            "tests/loop/test_input_logprobs.py",
            "tests/loop/test_routing.py",
            "tests/loop/test_guard.py",
        ),
    ),
    "scheduler/cache/manager.py": Tests(
        near=("tests/unit/scheduler/cache/test_cache_manager.py",), wide=("tests/loop/test_scripted_loop.py",)
    ),
}
"""Which modules are mutated, and the tests that are run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    mutant: Mutant
    verdict: str
    seconds: float
    tests: int
    """How many execute its statement."""
    by: str
    """The first failure, or why it is equivalent."""

    def to_json(self) -> dict[str, Any]:
        mutant = self.mutant
        return {
            "module": mutant.module,
            "line": mutant.place.start[0],
            "operator": mutant.place.operator,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 2),
            "tests": self.tests,
            "by": self.by,
            "diff": mutant.diff,
        }


def reason_of(mutant: Mutant, equivalents: Iterable[dict[str, str]]) -> str | None:
    key = {
        "module": mutant.module,
        "function": mutant.function,
        "line": mutant.before,
        "becomes": mutant.after,
    }
    return next((entry["reason"] for entry in equivalents if key.items() <= entry.items()), None)


def drawn_mutants(
    module: str, source: str, places: Iterable[Place], apply: Apply, *, count: int, seed: int
) -> list[Mutant]:
    return draw(module, source, places_of_interest(source, places), apply, count, seed)


def attempt(sandbox: Sandbox, reached: Reached, mutant: Mutant, source: str, tests: Tests) -> Outcome:
    """Put ``mutant`` in the place of ``source``, and see whether a test fails."""
    lines = statement_lines(source, mutant.place.start[0])
    near = reached.tests(mutant.module, lines, tests.near)
    wide = at_most(reached.tests(mutant.module, lines, tests.wide), reached, WIDER_S)
    seconds = 0.0
    sandbox.write(mutant.module, mutant.source)
    try:
        for stage in (near, wide):
            if not stage:
                continue
            run = sandbox.test(stage, LEAST_S + PATIENCE * sum(reached.seconds[test] for test in stage))
            seconds += run.seconds
            if run.verdict != "passed":
                verdict = TIMEOUT if run.verdict == "timeout" else KILLED
                return Outcome(mutant, verdict, seconds, len(near) + len(wide), "".join(run.failures[:1]))
    finally:
        sandbox.write(mutant.module, source)
    return Outcome(mutant, SURVIVED, seconds, len(near) + len(wide), "")


def at_most(tests: Sequence[str], reached: Reached, seconds: float) -> list[str]:
    """The first of ``tests`` that take ``seconds`` together."""
    taken = []
    for test in tests:
        seconds -= reached.seconds[test]
        if seconds < 0:
            break
        taken.append(test)
    return taken


def score(outcomes: Collection[Outcome]) -> float:
    """Share of the killed among those that are not equivalent; 1 where there is none."""
    counted = [outcome for outcome in outcomes if outcome.verdict != EQUIVALENT]
    return sum(outcome.verdict != SURVIVED for outcome in counted) / len(counted) if counted else 1.0


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row for each module and one for all."""
    rows = []
    for name in [*dict.fromkeys(outcome.mutant.module for outcome in outcomes), "all"]:
        group = [outcome for outcome in outcomes if name in (outcome.mutant.module, "all")]
        verdicts = [outcome.verdict for outcome in group]
        timeouts = verdicts.count(TIMEOUT)
        counts = [len(group), verdicts.count(KILLED) + timeouts, timeouts, verdicts.count(SURVIVED)]
        counts.append(verdicts.count(EQUIVALENT))
        rows.append([name if name == "all" else f"`{name}`", *map(str, counts), f"{score(group):.1%}"])
    return markdown(COLUMNS, rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--per-module", type=int, default=40, help="how many are drawn (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    parser.add_argument("--module", action="append", choices=tuple(MODULES), help="again for more (all)")
    parser.add_argument("--again", type=Path, help="run only what survived in this JSON file's run")
    parser.add_argument("--json", type=Path, help="write every mutant there")
    parser.add_argument("--verbose", action="store_true", help="a line for each mutant")
    options = parser.parse_args(argv)
    options.module = options.module or list(MODULES)
    if options.per_module < 1:
        parser.error("--per-module must be at least 1")
    return options


def all_mutants(options: argparse.Namespace) -> dict[str, list[Mutant]]:
    from .operators import (  # the extra `mutation` is needed here only
        all_places,
        changed_source,
    )

    again = None
    if options.again is not None:
        found = json.loads(options.again.read_text(encoding="utf-8"))["mutants"]
        again = {entry["diff"] for entry in found if entry["verdict"] == SURVIVED}
    mutants = {}
    for module in options.module:
        source = (TREE / module).read_text(encoding="utf-8")
        every = drawn_mutants(
            module, source, all_places(source), changed_source, count=options.per_module, seed=options.seed
        )
        mutants[module] = [mutant for mutant in every if again is None or mutant.diff in again]
    return mutants


def run(options: argparse.Namespace, folder: Path, outcomes: list[Outcome]) -> None:
    """Every mutant, each of which goes to ``outcomes``."""
    equivalents = json.loads(EQUIVALENTS.read_text(encoding="utf-8"))
    mutants = {module: found for module, found in all_mutants(options).items() if found}
    sandbox = Sandbox(TREE, folder)
    paths = dict.fromkeys(path for module in mutants for path in MODULES[module].near + MODULES[module].wide)
    reached = sandbox.reach(list(paths), list(mutants), limit_s=3600)
    for test in reached.failed:
        print(f"fails without a mutant, and is left out: {test}", flush=True)
    for module, group in mutants.items():
        source = (TREE / module).read_text(encoding="utf-8")
        for number, mutant in enumerate(group, 1):
            reason = reason_of(mutant, equivalents)
            if reason is not None:
                outcome = Outcome(mutant, EQUIVALENT, 0.0, 0, reason)
            else:
                outcome = attempt(sandbox, reached, mutant, source, MODULES[module])
            outcomes.append(outcome)
            if options.verbose:
                what = f"{module}:{mutant.place.start[0]} {outcome.verdict}, {outcome.seconds:.1f} s"
                print(f"{number}/{len(group)} {what} {outcome.by}", flush=True)
            if outcome.verdict == SURVIVED:
                print(f"survived {outcome.tests} tests:\n{mutant.diff}\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, also when it is interrupted."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes: list[Outcome] = []
    print(describe(machine_facts()), flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="caesura-mutation-") as folder:
            run(options, Path(folder), outcomes)
    except KeyboardInterrupt:
        print("interrupted; this is what there is")
    finally:
        if outcomes:
            print(table(outcomes), flush=True)
        mutants = [outcome.to_json() for outcome in outcomes]
        drawn = {"seed": options.seed, "per_module": options.per_module}
        write_json(options.json, {**drawn, "machine": machine_facts(), "mutants": mutants})
    return 0


if __name__ == "__main__":
    sys.exit(main())
