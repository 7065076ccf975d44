"""The parts of a page that a program writes, between ``<!-- generated: NAME -->`` and ``<!-- end of NAME
-->``.

Invariant: nothing else of a page is ever changed. With ``--check`` nothing is written, and the exit status
says whether the page is up to date.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def generate(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return ``page`` with all its generated parts up to date.

    Raises:
        ValueError: a part's marks are missing.
    """
    for name, part in parts.items():
        marks = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
        before, begin, rest = page.partition(marks[0])
        _, end, after = rest.partition(marks[1])
        if not (begin and end):
            raise ValueError(f"the page lacks the marks of {name!r}")
        page = f"{before}{begin}\n\n{part()}\n\n{end}{after}"
    return page


def update(path: Path, parts: Mapping[str, Callable[[], str]]) -> int:
    """Write the parts of the page at ``path``; returns the exit status, 1 where ``--check`` finds it out of
    date.
    """
    old = path.read_text(encoding="utf-8")
    new = generate(old, parts)
    if "--check" in sys.argv[1:]:
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0
