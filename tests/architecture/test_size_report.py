"""The size report counts what it says it counts."""

import pytest
import report_sizes
from report_sizes import Sizes, report

SOURCE = '''"""A module."""

from typing import Protocol


class Reads(Protocol):
    """Of a reader."""

    def read(self) -> str: ...


class Reader:
    def __init__(self, path, *, size=1):
        self._path = path
        self.size = size

    def read(self):
        """Return the text."""
        other = Reader("a")
        return other._path + "%s"
''' % ("x" * 120)


@pytest.fixture
def sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(report_sizes, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    sizes = Sizes()
    sizes.read(path)
    return sizes


def test_lines_are_counted_by_kind(sizes):
    assert (sizes.files, sizes.docstring, sizes.wordy) == ([20], 3, 1)
    assert sizes.blank == 7


def test_the_widest_line_is_found(sizes):
    assert sizes.wide == 1
    assert sizes.widest == (151, "module.py:20")


def test_a_signature_and_a_docstring_do_not_make_a_function_long(sizes):
    assert sorted(sizes.functions)[-2:] == [(2, "module.py:13 __init__"), (2, "module.py:17 read")]


def test_constructors_protocols_and_private_accesses_are_counted(sizes):
    assert sizes.constructors == [(2, "module.py:12 Reader")]
    assert (sizes.protocols, sizes.private) == (1, 1)


@pytest.mark.slow
def test_the_report_has_a_row_for_each_tree():
    rows = "\n".join(report())
    for tree in ("product", *report_sizes.TREES):
        assert f"| {tree} |" in rows
