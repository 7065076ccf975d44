"""The report of sizes counts as it says, and every file name that occurs twice has its reason."""

import pytest
import report_sizes
from report_sizes import Sizes, report, shared_names

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


def test_sizes_of_a_file_are_counted_by_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(report_sizes, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    sizes = Sizes()
    sizes.read(path)
    assert (sizes.files, sizes.docstring, sizes.wordy, sizes.blank) == ([20], 3, 1, 7)
    assert (sizes.wide, sizes.widest) == (1, (151, "module.py:20"))
    # A signature and a docstring do not make a function long.
    assert sorted(sizes.functions)[-2:] == [(2, "module.py:13 __init__"), (2, "module.py:17 read")]
    assert sizes.constructors == [(2, "module.py:12 Reader")]
    assert (sizes.protocols, sizes.private) == (1, 1)


@pytest.mark.long
def test_the_report_has_a_row_for_each_tree():
    rows = "\n".join(report())
    for tree in ("product", *report_sizes.TREES):
        assert f"| {tree} |" in rows


def test_file_names_occur_twice_only_for_a_stated_reason():
    assert shared_names(*report_sizes.PRODUCT) == []


def test_a_name_in_two_unrelated_folders_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(report_sizes, "ROOT", tmp_path)
    for path in (
        "a/pool.py",
        "b/pool.py",
        "scheduler/layers/x.py",
        "scheduler/kernels/x.py",
        "a/x/__init__.py",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert shared_names("a", "b", "scheduler") == ["pool.py (a, b)"]
    (tmp_path / "a/x.py").touch()
    assert shared_names("a", "b", "scheduler") == [
        "pool.py (a, b)",
        "x.py (a, scheduler/kernels, scheduler/layers)",
    ]
