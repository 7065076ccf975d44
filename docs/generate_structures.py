"""Writes the generated parts of docs/contributing/structures.md from the source tree: the floors and the tables of modules.

Invariant: what a module is for is the first sentence of its docstring. Run ``python docs/generate_structures.py`` after adding
or renaming a module (``--check``: see :mod:`generated_parts`).
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from generated_parts import update

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "contributing" / "structures.md"

FLOORS = (
    (
        "runtime.files",
        "runtime.config",
        "runtime.dtypes",
        "runtime.background",
        "runtime.libraries",
        "runtime.shutdown",
    ),
    ("memory",),
    ("runtime.log", "runtime.watchdog", "observability", "runtime.guard", "runtime.timers"),
    ("cache",),
    ("kernels", "parallel", "execution.forward"),
    ("attention", "layers"),
    ("models",),
    ("weights",),
    ("execution",),
    (
        "scheduling.stepping",
        "scheduling",
        "images",
        "attention.backends",
        "execution.kernel_report",
        "execution.build",
        "executor",
    ),
    ("control", "scoring", "messaging"),
    ("runtime", "__main__"),
)
"""The modules and packages of ``scheduler/`` from the ground up. A file imports only from floors below its own, from modules
to its left, and from its own entry. ``package.module`` places one module apart from the rest of its package."""


def floors() -> str:
    """The table of floors, the highest first, as a reader comes in."""
    rows = ["| floor | modules and packages |", "|---|---|"]
    for number, names in reversed(list(enumerate(FLOORS, 1))):
        rows.append(f"| {number} | {' · '.join(map(_place, names))} |")
    return "\n".join(rows)


def modules(package: str) -> str:
    """A table of the modules of ``package``, folder by folder."""
    rows = ["| module | |", "|---|---|"]
    for path in _files(ROOT / package):
        name = path.relative_to(ROOT / package).as_posix()
        summary = summary_of(path)
        if path.name == "__init__.py" and not summary:
            continue
        rows.append(f"| `{name}` | {summary} |")
    return "\n".join(rows)


def summary_of(path: Path) -> str:
    """The first sentence of a module's docstring, as Markdown; empty without a docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    first = re.sub(r":\w+:`[~.]*([^`]+)`", r"`\1`", first).replace("``", "`").replace("|", "\\|")
    return first.rstrip(".")


def _place(name: str) -> str:
    path = name.replace(".", "/")
    return f"`{path}/`" if (ROOT / "scheduler" / path).is_dir() else f"`{path}`"


def _files(folder: Path) -> Iterator[Path]:
    """Modules of ``folder`` first, then those of its folders; of ``scheduler/`` in the order of its floors."""
    here = sorted(folder.glob("*.py"))
    below = sorted(path for path in folder.iterdir() if any(path.glob("*.py")))
    if folder == ROOT / "scheduler":
        order = {name: number for number, name in enumerate(name for names in FLOORS for name in names)}
        both = sorted([*here, *below], key=lambda path: order.get(path.stem, -1))
    else:
        both = [*here, *below]
    for path in both:
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


PARTS = {
    "floors": floors,
    "io_struct": lambda: modules("io_struct"),
    "process": lambda: modules("process"),
    "transfer": lambda: modules("transfer"),
    "scheduler": lambda: modules("scheduler"),
    "client": lambda: modules("client"),
    "integrations": lambda: modules("integrations"),
}


if __name__ == "__main__":
    sys.exit(update(DOCUMENT, PARTS))
