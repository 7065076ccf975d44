"""Report the size of the code and where it is hard to read, as Markdown: ``python docs/report_sizes.py``.

Invariant: nothing fails because of a size. A limit is met by bending the text; a reviewer reads this report
instead and asks of each long function whether two things want to be apart.
"""

import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("io_struct", "process", "transfer", "scheduler", "client", "integrations")
TREES = (*PRODUCT, "tests", "benchmarks", "examples", "docs")
WIDTH = 110
LONG = 60
"""Statements' lines from which a function is listed."""
WORDY = re.compile(r"(Of|What|Whether|Who|Whom|Whose|Those|Its|As|None(?=:)|Nobody|Nothing|See)\b")
"""First words of docstrings that have to be read twice."""

SAME_NAME = {
    "a part of the wire, and its routes in each dialect of HTTP": {
        "io_struct", "client/serve/openai", "client/serve/sglang", "client/serve/vllm",
    },
    "a layer, and its kernels": {"scheduler/layers", "scheduler/kernels"},
    "the decoder of layers, and its kernel": {"scheduler/models", "scheduler/kernels"},
    "the sampler, and its kernel": {"scheduler/execution", "scheduler/kernels"},
}  # fmt: skip
"""Reasons for a file name to occur more than once, and the folders for which each holds."""


@dataclass(slots=True)
class Sizes:
    """Measurements of one tree of Python files."""

    files: list[int] = field(default_factory=list)
    """Lines per file."""
    blank: int = 0
    docstring: int = 0
    """Lines of docstrings."""
    wide: int = 0
    """Lines of more than WIDTH characters."""
    widest: tuple[int, str] = (0, "")
    wordy: int = 0
    functions: list[tuple[int, str]] = field(default_factory=list)
    """Lines of statements, and place."""
    constructors: list[tuple[int, str]] = field(default_factory=list)
    """Arguments without self, and class."""
    protocols: int = 0
    private: int = 0
    """Accesses to a private name of another object."""
    monkeypatches: int = 0

    def read(self, path: Path) -> None:
        """Add one file."""
        text, place = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        lines = text.splitlines()
        self.files.append(len(lines))
        self.blank += sum(not line.strip() for line in lines)
        for number, line in enumerate(lines, 1):
            self.wide += len(line) > WIDTH
            self.widest = max(self.widest, (len(line), f"{place}:{number}"))
        for node in ast.walk(ast.parse(text)):
            self._read_node(node, place)

    def _read_node(self, node: ast.AST, place: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions.append((body_lines(node), f"{place}:{node.lineno} {node.name}"))
        elif isinstance(node, ast.ClassDef):
            self.protocols += any(ast.unparse(base).startswith("Protocol") for base in node.bases)
            for made in node.body:
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    count = len(made.args.posonlyargs + made.args.args + made.args.kwonlyargs) - 1
                    self.constructors.append((count, f"{place}:{node.lineno} {node.name}"))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                self.docstring += (node.end_lineno or node.lineno) - node.lineno + 1
                self.wordy += WORDY.match(node.value.value.strip()) is not None
        elif isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            self.private += private and ast.unparse(node.value) not in ("self", "cls")
            self.monkeypatches += ast.unparse(node.value) == "monkeypatch"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function's statements, without its signature and docstring."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def python_files(tree: str) -> list[Path]:
    """List the Python files of a tree."""
    return sorted((ROOT / tree).rglob("*.py"))


def measure(trees: Iterable[str]) -> Sizes:
    """Measure all Python files of these trees."""
    sizes = Sizes()
    for tree in trees:
        for path in python_files(tree):
            sizes.read(path)
    return sizes


def shared_names(*trees: str) -> list[str]:
    """List the file names in several folders that none of the reasons covers, with the folders."""
    folders = defaultdict(set)
    for path in (path for tree in trees for path in python_files(tree) if path.stem[0] != "_"):
        folders[path.name].add(path.parent.relative_to(ROOT).as_posix())
    return [
        f"{name} ({', '.join(sorted(found))})"
        for name, found in sorted(folders.items())
        if len(found) > 1 and not any(found <= covered for covered in SAME_NAME.values())
    ]


def report() -> Iterator[str]:
    """Yield the lines of the report."""
    yield "| tree | files | lines | median file | docstrings | blank | wider than 110 | to reword |"
    yield "|---|---|---|---|---|---|---|---|"
    rows = {"product": measure(PRODUCT), **{tree: measure([tree]) for tree in TREES}}
    for name, sizes in rows.items():
        yield (
            f"| {name} | {len(sizes.files)} | {sum(sizes.files):,} | {statistics.median(sizes.files):g} "
            f"| {sizes.docstring:,} | {sizes.blank:,} | {sizes.wide:,} | {sizes.wordy:,} |"
        )
    product, tests = rows["product"], rows["tests"]
    yield f"\nWidest line: {product.widest[0]} ({product.widest[1]}). Protocols: {product.protocols}."
    yield f"Tests: {tests.private} accesses to private names, {tests.monkeypatches} uses of monkeypatch."
    names = ", ".join(shared_names(*PRODUCT)) or "none"
    yield f"File names that occur more than once without a reason: {names}.\n"
    long = [each for each in product.functions if each[0] >= LONG]
    yield f"Functions of {LONG} lines or more: {len(long)}. The longest:\n"
    yield from (f"- {count} {place}" for count, place in sorted(product.functions, reverse=True)[:10])
    yield "\nConstructors with the most arguments:\n"
    yield from (f"- {count} {place}" for count, place in sorted(product.constructors, reverse=True)[:10])


if __name__ == "__main__":
    sys.stdout.write("\n".join(report()) + "\n")
