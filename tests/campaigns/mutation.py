"""Mutation testing: make small changes in a copy of the tree, one at a time, and run the nearest tests.

    make mutation MUTATION_ARGS="--per-module 40 --seed 1 --json mutants.json"
    make mutation MUTATION_ARGS="--module scheduler/cache/manager.py --again mutants.json"   # its survivors

Changes are cosmic-ray's, drawn by seed; docs/contributing/testing.md says what is never drawn and how a
mutant is judged. Nothing is written to the tree itself.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.machine import describe, machine_facts
from harness.script import markdown, parser, write_json

TREE = Path(__file__).resolve().parents[2]
EQUIVALENTS = Path(__file__).with_name("equivalents.json")
KILLED, SURVIVED, TIMEOUT, EQUIVALENT = "killed", "survived", "timeout", "equivalent"
COLUMNS = ("module", "drawn", "killed", "of these by time", "survived", "equivalent", "score")
PATIENCE, LEAST_S = 5.0, 30.0
"""The limit of a run: so many times what its tests take without a mutant, and this."""
LEFT_OUT = (".git", ".venv", ".check", "__pycache__", ".*_cache", ".hypothesis", "build", "demo_out")


def _tests(names: str, folder: str = "loop") -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names.split())


_LIFECYCLE = _tests("lifecycle_figures sessions empty_cache scripted_loop restarts lifecycle_table")
_MEMORY = "unit/scheduler/memory"
MODULES = {
    "scheduler/control/engine_state.py": _LIFECYCLE,
    "scheduler/control/pause.py": _LIFECYCLE,
    "scheduler/control/weight_updates.py": _tests(
        "updates sessions restarts scripted_loop guard empty_cache lifecycle_table"
    ),
    "scheduler/memory/device_memory.py": _tests("device_memory", _MEMORY) + _tests("empty_cache"),
    "scheduler/memory/residency.py": _tests("residency", _MEMORY) + _tests("occupation"),
    "scheduler/scheduling/outputs.py": _tests(
        "result_figures scripted_loop failures input_logprobs routing guard"
    ),
    "scheduler/cache/manager.py": _tests("cache_manager", "unit/scheduler/cache") + _tests("scripted_loop"),
}
"""Mutated modules, each with the tests of it, the nearest first."""

Span = tuple[tuple[int, int], tuple[int, int]]
"""Line from 1 and column from 0 of the start and the end."""


class Place(NamedTuple):
    """One change that can be made to a source."""

    start: tuple[int, int]
    operator: str
    occurrence: int
    """Index of the place among the operator's places in this source."""


@dataclass(frozen=True, slots=True)
class Mutant:
    module: str
    place: Place
    function: str
    """Qualified name of the function or class around it; empty at module level."""
    before: str
    after: str
    source: str
    """The whole changed module."""
    diff: str

    @classmethod
    def of(cls, module: str, source: str, changed: str, place: Place) -> "Mutant":
        lines = source.splitlines(), changed.splitlines()
        diff = list(difflib.unified_diff(*lines, f"a/{module}", f"b/{module}", lineterm=""))
        removed, added = (
            " ".join(line[1:].strip() for line in diff[2:] if line.startswith(sign)) for sign in "-+"
        )
        function = ".".join(_names_around(ast.parse(source), place.start[0]))
        return cls(module, place, function, removed, added, changed, "\n".join(diff))

    def reason(self, equivalents: Iterable[dict[str, str]]) -> str | None:
        """Return why it changes nothing, or None if it may."""
        key = {"module": self.module, "function": self.function, "line": self.before, "becomes": self.after}
        return next((entry["reason"] for entry in equivalents if key.items() <= entry.items()), None)


def all_places(source: str) -> list[Place]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    tree = get_ast(source)
    found = []
    for name in operator_names():
        kind = get_operator(name)
        if not kind.arguments():
            operator = kind()
            starts = (start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node))
            found += [Place(tuple(start), name, number) for number, start in enumerate(starts)]
    return found


def changed_source(source: str, place: Place) -> str | None:
    """Return ``source`` with the change at ``place``, or None where the operator finds nothing to change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    changed: str | None = mutate_code(source, get_operator(place.operator)(), place.occurrence)
    return changed


def places_of_interest(source: str, places: Iterable[Place]) -> list[Place]:
    """Return the ``places`` that no rule excludes, in the order of the source."""
    tree = ast.parse(source)
    excluded, defaults = list(_excluded(tree)), list(_defaults(tree))

    def inside(place: Place, spans: Iterable[Span]) -> bool:
        return any(start <= place.start < end for start, end in spans)

    return sorted(place for place in places if inside(place, defaults) or not inside(place, excluded))


def draw(
    module: str,
    source: str,
    places: Sequence[Place],
    count: int,
    seed: int,
    apply: Callable[[str, Place], str | None] = changed_source,
) -> list[Mutant]:
    """Return at most ``count`` mutants, each place as likely as any other, in the order of the source."""
    drawn: dict[str, Mutant] = {}
    for place in random.Random(seed).sample(places, len(places)):
        if len(drawn) == count:
            break
        changed = apply(source, place)
        if changed is not None and changed not in (source, *drawn) and _compiles(changed):
            drawn[changed] = Mutant.of(module, source, changed, place)
    return sorted(drawn.values(), key=lambda mutant: mutant.place)


def _excluded(tree: ast.Module) -> Iterator[Span]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[0]
            yield (node.lineno, node.col_offset), (body.lineno, body.col_offset)
        if isinstance(node, ast.AnnAssign):
            yield _span(node.annotation)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield _span(node.test)
        for decorator in getattr(node, "decorator_list", []):
            start, end = _span(decorator)
            yield (start[0], 0), end
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript):
            yield _span(statement.value)


def _defaults(tree: ast.Module) -> Iterator[Span]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (_span(part) for part in [*node.args.defaults, *node.args.kw_defaults] if part)


def _span(node: ast.expr) -> Span:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _names_around(node: ast.AST, line: int) -> list[str]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([inner.lineno, *(each.lineno for each in inner.decorator_list)])
            if first <= line <= (inner.end_lineno or 0):
                return [inner.name, *_names_around(inner, line)]
    return []


def _compiles(source: str) -> bool:
    """Return True if ``source`` compiles without a warning: any test that imports it would find one."""
    with warnings.catch_warnings(), suppress(SyntaxError):
        warnings.simplefilter("error")
        return bool(compile(source, "mutant", "exec", dont_inherit=True))
    return False


class Sandbox:
    """A copy of ``tree`` in ``folder``, and the seconds that its tests take without a mutant."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.root = folder.resolve() / "caesura"
        self._seconds: dict[Sequence[str], float] = {}
        shutil.copytree(tree, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))

    def attempt(self, mutant: Mutant, tests: Sequence[str], limit_s: float | None = None) -> dict[str, Any]:
        """Put ``mutant`` in its place, and run ``tests`` until one fails or ``limit_s`` are over."""
        if tests not in self._seconds:
            started = time.monotonic()
            verdict, failure = self._test(tests, 3600.0)
            if verdict != SURVIVED:
                raise RuntimeError(f"{verdict} without a mutant: {failure or tests}")
            self._seconds[tests] = time.monotonic() - started
        path = self.root / mutant.module
        source = path.read_text(encoding="utf-8")
        path.write_text(mutant.source, encoding="utf-8")
        try:
            return outcome(mutant, *self._test(tests, limit_s or LEAST_S + PATIENCE * self._seconds[tests]))
        finally:
            path.write_text(source, encoding="utf-8")

    def _test(self, tests: Sequence[str], limit_s: float) -> tuple[str, str]:
        """Run ``tests`` up to the first failure; return the verdict, and what failed."""
        options = ("-x", "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0")
        # No bytecode: versions of a module that are written within a second look alike.
        environment = {"PYTHONPATH": str(self.root.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.root,
            env=os.environ | {"HYPOTHESIS_PROFILE": "short"} | environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return TIMEOUT, ""
            finally:
                with suppress(ProcessLookupError):  # at the limit, or what the tests have left behind
                    os.killpg(process.pid, signal.SIGKILL)
        failures = re.findall(r"^(?:FAILED|ERROR) \S.*", output, re.MULTILINE)
        return KILLED if process.returncode else SURVIVED, "".join(failures[:1])


def outcome(mutant: Mutant, verdict: str, by: str = "") -> dict[str, Any]:
    """Return a mutant's row; ``by`` is a failure, or why it is equivalent."""
    place = {"module": mutant.module, "line": mutant.place.start[0], "operator": mutant.place.operator}
    return place | {"verdict": verdict, "by": by, "diff": mutant.diff}


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """Return a row for each module and one for all. The score is killed / (drawn - equivalent)."""
    rows = []
    for name in [*dict.fromkeys(each["module"] for each in outcomes), "all"]:
        verdicts = [each["verdict"] for each in outcomes if name in (each["module"], "all")]
        timeouts, survived = verdicts.count(TIMEOUT), verdicts.count(SURVIVED)
        equivalent, killed = verdicts.count(EQUIVALENT), verdicts.count(KILLED) + timeouts
        score = killed / (killed + survived) if killed + survived else 1.0
        counts = [len(verdicts), killed, timeouts, survived, equivalent]
        rows.append([name if name == "all" else f"`{name}`", *map(str, counts), f"{score:.1%}"])
    return markdown(COLUMNS, rows)


def run(options: argparse.Namespace, folder: Path, outcomes: list[dict[str, Any]]) -> None:
    equivalents, again = json.loads(EQUIVALENTS.read_text(encoding="utf-8")), None
    if options.again is not None:
        found = json.loads(options.again.read_text(encoding="utf-8"))["mutants"]
        again = {entry["diff"] for entry in found if entry["verdict"] == SURVIVED}
    sandbox = Sandbox(TREE, folder)
    for module in options.module:
        source = (TREE / module).read_text(encoding="utf-8")
        places = places_of_interest(source, all_places(source))
        for mutant in draw(module, source, places, options.per_module, options.seed):
            if again is not None and mutant.diff not in again:
                continue
            if (reason := mutant.reason(equivalents)) is not None:
                outcomes.append(outcome(mutant, EQUIVALENT, reason))
            else:
                outcomes.append(sandbox.attempt(mutant, MODULES[module]))
            row = outcomes[-1]
            if options.verbose:
                print(f"{module}:{row['line']} {row['verdict']} {row['by']}", flush=True)
            if row["verdict"] == SURVIVED:
                print(f"survived:\n{mutant.diff}\n", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--per-module", type=int, default=40, help="how many are drawn (%(default)s)")
    made.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    made.add_argument("--module", action="append", choices=tuple(MODULES), help="again for more (all)")
    made.add_argument("--again", type=Path, help="run only what survived in this JSON file's run")
    made.add_argument("--verbose", action="store_true", help="a line for each mutant")
    options = made.parse_args(argv)
    options.module = options.module or list(MODULES)
    if options.per_module < 1:
        made.error("--per-module must be at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outcomes: list[dict[str, Any]] = []
    print(describe(machine_facts()), flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="caesura-mutation-") as folder:
            run(options, Path(folder), outcomes)
    except KeyboardInterrupt:
        print("interrupted; this is what there is")
    finally:
        if outcomes:
            print(table(outcomes), flush=True)
        drawn = {"seed": options.seed, "per_module": options.per_module, "machine": machine_facts()}
        write_json(options.json, {**drawn, "mutants": outcomes})
    return 0


if __name__ == "__main__":
    sys.exit(main())
