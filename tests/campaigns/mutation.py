"""Mutation testing: make small changes in a copy of the tree, one at a time, and run the nearest tests.

    make mutation MUTATION_ARGS="--per-module 40 --seed 1 --json mutants.json"
    make mutation MUTATION_ARGS="--module scheduler/cache/manager.py --again mutants.json"   # its survivors

Changes are cosmic-ray's, drawn by seed; docs/contributing/testing.md says what is never drawn and how a
mutant is judged. The process never imports ``caesura``: each run is a fork that imports what the copy holds
then.
What is slow to import (torch, pytest, Hypothesis) is imported here, once.
"""

import argparse
import ast
import difflib
import gc
import importlib
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import hypothesis
import pytest
from harness.machine import describe, machine_facts
from harness.script import markdown, parser, write_json

TREE = Path(__file__).resolve().parents[2]
EQUIVALENTS = Path(__file__).with_name("equivalents.json")
KILLED, SURVIVED, TIMEOUT, EQUIVALENT = "killed", "survived", "timeout", "equivalent"
COLUMNS = ("module", "drawn", "killed", "of these by time", "survived", "equivalent", "score")
WIDER_S = 40.0
"""Seconds that the wider tests of a mutant may take together: the fastest are run."""
PATIENCE, LEAST_S = 5.0, 30.0
"""The limit of a run: so many times what its tests take, and this."""
LEFT_OUT = (".git", ".venv", ".check", "__pycache__", ".*_cache", ".hypothesis", "build", "demo_out")
PRELOADED = (
    "torch", "numpy", "zmq", "msgspec", "safetensors.torch", "tokenizers",
    "hypothesis.stateful", "pytest_timeout", "scipy.stats",
    *(f"transformers.models.{name}.modeling_{name}"
      for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")),
)  # fmt: skip


def _tests(names: str, folder: str = "loop") -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names.split())


_LIFECYCLE = (
    _tests("lifecycle_figures sessions empty_cache"),
    _tests("scripted_loop restarts lifecycle_table"),
)
_MEMORY = "unit/scheduler/memory"
MODULES = {
    "scheduler/control/engine_state.py": _LIFECYCLE,
    "scheduler/control/pause.py": _LIFECYCLE,
    "scheduler/control/weight_updates.py": (
        _tests("updates sessions restarts"),
        _tests("scripted_loop guard empty_cache lifecycle_table"),
    ),
    "scheduler/memory/device_memory.py": (_tests("device_memory", _MEMORY), _tests("empty_cache")),
    "scheduler/memory/residency.py": (_tests("residency", _MEMORY), _tests("occupation")),
    "scheduler/scheduling/outputs.py": (
        _tests("result_figures scripted_loop"),
        _tests("failures input_logprobs routing guard"),
    ),
    "scheduler/cache/manager.py": (_tests("cache_manager", "unit/scheduler/cache"), _tests("scripted_loop")),
}
"""Mutated modules, each with the tests that are near to it, and wider ones."""

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
        function = _function_around(ast.parse(source), place.start[0])
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


def statement_lines(source: str, line: int) -> range:
    """Return the lines of the innermost statement at ``line``, without the body of a compound one."""
    best, size = range(line, line + 1), float("inf")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if line in lines and len(lines) < size:
                best, size = lines, len(lines)
                body = getattr(node, "body", None)
                if body and _first_line(body[0]) > lines.start:
                    best = range(lines.start, _first_line(body[0]))
    return best


def _first_line(node: Any) -> int:
    return int(min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]))


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


def _function_around(tree: ast.Module, line: int) -> str:
    names: list[str] = []
    body: Sequence[ast.AST] = tree.body
    while True:
        for node in body:
            kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            if isinstance(node, kinds) and _first_line(node) <= line <= (node.end_lineno or 0):
                names.append(node.name)
                body = list(ast.iter_child_nodes(node))
                break
        else:
            return ".".join(names)


def _compiles(source: str) -> bool:
    """Return True if ``source`` compiles without a warning: any test that imports it would find one."""
    with warnings.catch_warnings(), suppress(SyntaxError):
        warnings.simplefilter("error")
        return bool(compile(source, "mutant", "exec", dont_inherit=True))
    return False


class Reach:
    """A pytest plugin that sees which test executes which line of some files."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files
        self.lines: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        """(module, line) by test, by file of tests (setups), and for the empty name (import)."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._seen = self.lines[""]

    def start(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename in self._files else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._seen.add((self._files[frame.f_code.co_filename], frame.f_lineno))
        return self._step

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._seen = self.lines[_file_of(item.nodeid)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._seen = self.lines[item.nodeid]
        sys.settrace(self._enter)  # a test may have set another

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def tests(self, module: str, lines: range, paths: Sequence[str]) -> list[str]:
        """Return tests in ``paths`` that pass and execute one of the ``lines``, the fastest first."""
        wanted = {(module, line) for line in lines}
        return [
            test
            for test in sorted(self.seconds, key=lambda test: (self.seconds[test], test))
            if test not in self.failed
            and _file_of(test) in paths
            and any(wanted & self.lines.get(name, set()) for name in ("", test, _file_of(test)))
        ]


def _file_of(test: str) -> str:
    return test.split("::", 1)[0]


class Sandbox:
    """A copy of ``tree`` in ``folder``; nothing is written to the tree itself."""

    def __init__(self, tree: Path, folder: Path, preloaded: Sequence[str] = PRELOADED) -> None:
        self.root = folder.resolve() / "caesura"
        self._output, self._found, self._versions = folder / "output", folder / "reach.json", 0
        shutil.copytree(tree, self.root, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        assert "caesura" not in sys.modules, "caesura is imported already: its mutants would not be"
        self._path = [entry for entry in sys.path if not Path(entry or ".").resolve().is_relative_to(tree)]
        before, sys.path[:] = sys.path[:], self._path
        for name in preloaded:  # from here alone: ours may have the name of an optional package
            importlib.import_module(name)
        sys.path[:] = before
        gc.freeze()
        # A failure is all that counts here: no shrinking, and nothing kept from one mutant for the next.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutation", phases=phases, database=None, deadline=None)

    def write(self, module: str, source: str) -> None:
        path = self.root / module
        path.write_text(source, encoding="utf-8")
        self._versions += 1  # each version has an mtime of its own, so that no run takes older bytecode
        os.utime(path, (self._versions, self._versions))

    def test(self, tests: Sequence[str], limit_s: float) -> tuple[str, float, str]:
        """Run ``tests`` up to the first failure; return the verdict, seconds, and what failed."""
        verdict, seconds, output = self._fork(lambda: _pytest(["-x", *tests]), limit_s)
        failures = re.findall(r"^(?:FAILED|ERROR) \S.*", output, re.MULTILINE)
        return verdict, seconds, "".join(failures[:1])

    def reach(self, paths: Sequence[str], modules: Sequence[str], limit_s: float) -> Reach:
        """Run all of ``paths``; RuntimeError if they do not come to their end."""
        plugin = Reach({str(self.root / module): module for module in modules})

        def traced() -> int:
            plugin.start()
            code = _pytest([*paths], plugin)
            sys.settrace(None)
            lines = {name: sorted(lines) for name, lines in plugin.lines.items()}
            self._found.write_text(json.dumps([lines, plugin.seconds, sorted(plugin.failed)]))
            return code

        verdict, _, output = self._fork(traced, limit_s)
        if not self._found.exists():
            raise RuntimeError(f"the tests did not run to their end ({verdict}):\n{output[-4000:]}")
        lines, seconds, failed = json.loads(self._found.read_text(encoding="utf-8"))
        plugin.lines.update({name: {(file, line) for file, line in each} for name, each in lines.items()})
        plugin.seconds.update(seconds)
        plugin.failed.update(failed)
        return plugin

    def _fork(self, work: Callable[[], int], limit_s: float) -> tuple[str, float, str]:
        started = perf_counter()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._be_child(work)
        watched = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([watched], [], [], limit_s)
        finally:
            os.close(watched)
            for kill in (os.killpg, os.kill):  # at the limit, or what the tests have left behind
                with suppress(ProcessLookupError):  # it has not come to its setsid, or all have ended
                    kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        output = self._output.read_text(encoding="utf-8", errors="replace")
        code = os.waitstatus_to_exitcode(status)
        if ended and code == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise RuntimeError(f"no tests were collected:\n{output[-4000:]}")
        return TIMEOUT if not ended else "failed" if code else "passed", perf_counter() - started, output

    def _be_child(self, work: Callable[[], int]) -> None:
        code = 70
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(self.root)
            with open(self._output, "wb") as output, open(os.devnull, "rb") as nothing:
                for number, file in enumerate((nothing, output, output)):
                    os.dup2(file.fileno(), number)
            sys.path[:] = [str(self.root.parent), *self._path]
            os.environ["PYTHONPATH"] = str(self.root.parent)
            hypothesis.settings.load_profile("mutation")
            code = work()
        except BaseException:  # noqa: BLE001  whatever it is, this process ends here
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(code))


def _pytest(arguments: list[str], *plugins: object) -> int:
    fixed = ["-q", "-p", "no:cacheprovider", "--tb=line", "--hypothesis-seed=0", "--no-header"]
    fixed += ["-p", "no:faker", "-p", "no:anyio"]  # plugins of others' packages, unused here, slow to import
    preloaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # its own asserts need no rewriting
    return int(pytest.main([*fixed, *preloaded, *arguments], plugins=list(plugins)))


def attempt(
    sandbox: Sandbox, reach: Reach, mutant: Mutant, source: str, stages: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Put ``mutant`` in the place of ``source``, and see whether a test of ``stages`` (near, wide) fails."""
    lines = statement_lines(source, mutant.place.start[0])
    near, wide = (reach.tests(mutant.module, lines, paths) for paths in stages)
    left = WIDER_S
    while wide and (left := left - reach.seconds[wide[0]]) >= 0:
        near, wide = [*near, wide[0]], wide[1:]
    if not near:
        return outcome(mutant, SURVIVED)
    sandbox.write(mutant.module, mutant.source)
    try:
        limit_s = LEAST_S + PATIENCE * sum(reach.seconds[test] for test in near)
        verdict, seconds, failure = sandbox.test(near, limit_s)
    finally:
        sandbox.write(mutant.module, source)
    verdict = {"passed": SURVIVED, "failed": KILLED}.get(verdict, verdict)
    return outcome(mutant, verdict, round(seconds, 2), len(near), failure)


def outcome(
    mutant: Mutant, verdict: str, seconds: float = 0.0, tests: int = 0, by: str = ""
) -> dict[str, Any]:
    """Return a mutant's row: ``tests`` that execute its statement; ``by``, a failure or equivalence."""
    place = {"module": mutant.module, "line": mutant.place.start[0], "operator": mutant.place.operator}
    return place | {"verdict": verdict, "seconds": seconds, "tests": tests, "by": by, "diff": mutant.diff}


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
    equivalents = json.loads(EQUIVALENTS.read_text(encoding="utf-8"))
    again = None
    if options.again is not None:
        found = json.loads(options.again.read_text(encoding="utf-8"))["mutants"]
        again = {entry["diff"] for entry in found if entry["verdict"] == SURVIVED}
    sources = {module: (TREE / module).read_text(encoding="utf-8") for module in options.module}
    mutants = {}
    for module, source in sources.items():
        places = places_of_interest(source, all_places(source))
        every = draw(module, source, places, options.per_module, options.seed)
        mutants[module] = [mutant for mutant in every if again is None or mutant.diff in again]
    sandbox = Sandbox(TREE, folder)
    paths = dict.fromkeys(path for module in mutants for stage in MODULES[module] for path in stage)
    reach = sandbox.reach(list(paths), list(mutants), limit_s=3600)
    for test in sorted(reach.failed):
        print(f"fails without a mutant, and is left out: {test}", flush=True)
    for module, group in mutants.items():
        for number, mutant in enumerate(group, 1):
            reason = mutant.reason(equivalents)
            found = (
                outcome(mutant, EQUIVALENT, by=reason)
                if reason is not None
                else attempt(sandbox, reach, mutant, sources[module], MODULES[module])
            )
            outcomes.append(found)
            if options.verbose:
                what = f"{module}:{found['line']} {found['verdict']}, {found['seconds']:.1f} s"
                print(f"{number}/{len(group)} {what} {found['by']}", flush=True)
            if found["verdict"] == SURVIVED:
                print(f"survived {found['tests']} tests:\n{mutant.diff}\n", flush=True)


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
