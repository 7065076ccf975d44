"""The pages for people: short lines, references that lead to files, and a definition for every invariant that is cited."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
FOLDERS = ("io_struct", "scheduler", "client", "integrations", "tests", "examples", "benchmarks", "docs")
MAX_LINE = 120
URL = re.compile(r"https?://\S+")
PATH = re.compile(r"`([\w./-]+\.(?:py|cpp))`")
INVARIANT = re.compile(r"\bI[0-9]+\b")
PROSE = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)
"""Docstrings and comments; the names of safetensors dtypes (I8, I16) stand in ordinary strings."""


def overlong(text: str) -> list[int]:
    """Numbers of the lines that a reader must scroll to see: tables and addresses cannot be broken."""
    lines = enumerate(text.splitlines(), 1)
    return [
        number
        for number, line in lines
        if len(line) > MAX_LINE and not line.lstrip().startswith("|") and not URL.search(line)
    ]


def missing(text: str, files: set[str]) -> list[str]:
    """Paths in backticks that end no path of ``files``; ``NAME.py`` stands for a file that a reader adds."""
    named = (path for path in PATH.findall(text) if not path.endswith("NAME.py"))
    return [path for path in named if not any(f"/{file}".endswith(f"/{path}") for file in files)]


def cited() -> Iterator[tuple[str, str]]:
    """Where a docstring or comment cites an invariant, and which."""
    for folder in ("scheduler", "client", "io_struct", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for prose in PROSE.findall(path.read_text(encoding="utf-8")):
                yield from ((str(path.relative_to(ROOT)), number) for number in INVARIANT.findall(prose))


@pytest.fixture(scope="module")
def files() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short(page):
    assert overlong(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page, files):
    assert missing(page.read_text(encoding="utf-8"), files) == []


def test_every_cited_invariant_is_defined():
    page = (ROOT / "docs" / "reference" / "lifecycle.md").read_text(encoding="utf-8")
    defined = set(re.findall(r"^\| (I[0-9]+) \|", page, re.MULTILINE))
    found = list(cited())
    assert {number for _, number in found} >= {"I1", "I4", "I11"}, (
        "the citations are looked for in the wrong place"
    )
    assert [(where, number) for where, number in found if number not in defined] == []


def test_what_these_checks_find(files):
    assert overlong("a\n" + "b" * 121 + "\n| " + "c" * 121 + "\nhttps://" + "d" * 121) == [2]
    text = "`loop.py` `scheduler/loop.py` `models/NAME.py` `cpu/linear.cpp` `circle.py` `heduler/loop.py`"
    assert missing(text, files) == ["circle.py", "heduler/loop.py"]
