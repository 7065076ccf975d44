"""The pages for people: short lines, references and links that lead somewhere."""

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import generate_python
import generate_routes
import pytest
import yaml
from generate_configuration import PARTS
from generated_parts import generate
from page_links import anchors, is_address, links, resolved

from caesura.client import GenerateOutput, ImageOutput, SamplingParams, SdeParams
from caesura.client.text import Sample
from caesura.io_struct import ErrorCode

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LINKED = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
PACKAGES = ["io_struct", "process", "transfer", "scheduler", "client", "integrations"]
FOLDERS = [*PACKAGES, "tests", "examples", "benchmarks", "docs"]
MAX_LINE = 120
URL = re.compile(r"https?://\S+")
PATH = re.compile(r"`([\w./-]+\.(?:py|cpp))`")
INVARIANT = re.compile(r"\bI[0-9]+\b")
PROSE = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)
"""Docstrings and comments; the names of safetensors dtypes (I8, I16) stand in ordinary strings."""


def overlong(text: str) -> list[int]:
    """Return the lines that a reader must scroll to see: tables and addresses cannot be broken."""
    lines = enumerate(text.splitlines(), 1)
    return [
        number
        for number, line in lines
        if len(line) > MAX_LINE and not line.lstrip().startswith("|") and not URL.search(line)
    ]


def missing(text: str, files: set[str]) -> list[str]:
    named = (path for path in PATH.findall(text) if not path.endswith("NAME.py"))
    return [path for path in named if not any(f"/{file}".endswith(f"/{path}") for file in files)]


def broken(page: str, text: str) -> list[str]:
    """Return links of ``page`` that lead to no file or heading, or to one of several with the same name."""
    found = []
    for link in links(text):
        target, _, anchor = link.partition("#")
        path = ROOT / resolved(page, target)
        if is_address(link):
            continue
        if target and not path.is_file():
            found.append(link)
        elif anchor:
            there = path.read_text(encoding="utf-8") if target else text
            found += [link] if Counter(anchors(there))[anchor] != 1 else []
    return found


def leaves(nav: list) -> Iterator[str]:
    for entry in nav:
        for value in [entry] if isinstance(entry, str) else entry.values():
            yield from [value] if isinstance(value, str) else leaves(value)


def cited() -> Iterator[tuple[str, str]]:
    for folder in PACKAGES:
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


def test_lines_are_short_and_files_and_links_are_there(files):
    for page in LINKED:
        text = page.read_text(encoding="utf-8")
        if page in PAGES:
            assert (overlong(text), missing(text, files)) == ([], []), page
        assert broken(page.relative_to(ROOT).as_posix(), text) == [], page


def test_the_tutorial_shows_all_of_its_example():
    page = (ROOT / "docs" / "tutorial" / "grpo.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "grpo_trainer.py").read_text(encoding="utf-8")
    pieces = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert "\n\n\n".join(pieces) + "\n" == example, "docs/tutorial/grpo.md quotes another version of the file"


def test_the_navigation_has_every_page_once():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    named = [path for path in leaves(nav) if not path.startswith("repository/")]
    assert sorted(named) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )


def test_the_options_are_those_of_the_commands():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert generate(page, PARTS) == page, "run: python docs/generate_configuration.py"


def test_the_routes_of_clients_are_those_that_tests_recorded():
    page = generate_routes.DOCUMENT.read_text(encoding="utf-8")
    assert generate(page, generate_routes.PARTS) == page, "run: python docs/generate_routes.py"
    for test in chain.from_iterable(known["tests"] for known in generate_routes.record().values()):
        file, _, name = test.partition("::")
        source = (ROOT / "tests" / "integrations" / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in source, f"{test} is recorded, and is not there any more"


def test_the_reference_lists_every_field():
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert generate(page, generate_python.PARTS) == page, "run: python docs/generate_python.py"
    generated = page.partition("<!-- generated: parameters -->")[2].partition("<!-- end of results -->")[0]
    for kind in (GenerateOutput, ImageOutput, SamplingParams, SdeParams, Sample):
        table = generated.partition(f"### {kind.__name__}\n")[2].partition("###")[0]
        listed = re.findall(r"^\| `(\w+)` \| `[^`]+`.* \| [^|]+ \|$", table.replace("\\|", "/"), re.MULTILINE)
        assert listed == list(inspect.get_annotations(kind))


def test_python_blocks_are_python_and_import_what_there_is():
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    for page in LINKED:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for node in ast.walk(compile(block, page.name, "exec", flags)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("caesura.client"):
                    module = importlib.import_module(node.module)
                    assert [each.name for each in node.names if not hasattr(module, each.name)] == [], page


def where(name: str, *folders: str) -> set[str]:
    word = re.compile(rf"\b{name}\b")
    return {
        path.name
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".sh", ".md") and word.search(path.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize(
    ("recipe", "name", "folders", "tests"),
    [
        ("sampling parameter", "min_p", PACKAGES, {"test_sampler.py"}),
        ("HTTP route", "weights_checker", ["client/serve"], {"test_http_auth.py", "test_http_control.py"}),
    ],
)
def test_a_recipe_names_the_files_of_its_example(recipe, name, folders, tests):
    page = (ROOT / "docs" / "contributing" / "structures.md").read_text(encoding="utf-8")
    text = page.partition(f"- **A new {recipe}.**")[2].partition("\n- **")[0]
    named = {Path(path).name for path in PATH.findall(text)}
    assert name in text
    assert where(name, *folders) <= named
    assert {file for file in named if file.startswith("test_")} == tests
    assert tests <= where(name, "tests")


def test_error_codes_have_remedies_and_log_lines_exist():
    page = (ROOT / "docs" / "howto" / "troubleshoot.md").read_text(encoding="utf-8")
    _, codes, lines = re.findall(r"\|---\|.*\n((?:\|.*\n)+)", page)
    named = [code for row in codes.splitlines() for code in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(ErrorCode)
    files = [path for folder in ("scheduler", "process") for path in (ROOT / folder).rglob("*.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    quoted = [text for row in lines.splitlines() for text in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(quoted) > 10
    assert [text for text in quoted if text not in source] == []


def test_every_cited_invariant_is_defined():
    page = (ROOT / "docs" / "contributing" / "recovery.md").read_text(encoding="utf-8")
    defined = set(re.findall(r"^\| (I[0-9]+) \|", page, re.MULTILINE))
    found = list(cited())
    assert {number for _, number in found} >= {"I1", "I4", "I11"}, (
        "the citations are looked for in the wrong place"
    )
    assert [(where, number) for where, number in found if number not in defined] == []


def test_these_checks_find_violations(files):
    assert overlong("a\n" + "b" * 121 + "\n| " + "c" * 121 + "\nhttps://" + "d" * 121) == [2]
    text = "`loop.py` `scheduler/runtime/loop.py` `models/NAME.py` `cpu/linear.cpp` "
    text += "`circle.py` `heduler/loop.py`"
    assert missing(text, files) == ["circle.py", "heduler/loop.py"]
    page = "# A `b`: c\n[1](#a-b-c) [2](#a) [3](../README.md) [4](README.md) `[5](x)` [6](https://x)\n"
    page += "```python\nhandlers[7](x)\n# no heading\n```\n[8](#no-heading) [9](#d)\n## D\n## D\n"
    assert broken("docs/x.md", page) == ["#a", "README.md", "#no-heading", "#d"]
