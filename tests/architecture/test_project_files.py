"""Files that a contributor meets first agree: version, changelog, Python versions, hooks, workflow."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import report_sizes
import yaml

import caesura

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def workflow() -> dict:
    return yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))


def recipe(target: str) -> list[str]:
    (lines,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in lines.splitlines()]


def test_the_version_is_written_once(project):
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "caesura.__version__"}
    assert importlib.metadata.version("caesura") == caesura.__version__, "install it again: make lint"


def test_the_command_says_its_version():
    done = subprocess.run(
        [sys.executable, "-c", "from caesura.client.cli import main; main()", "--version"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == caesura.__version__


def test_the_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = [title for title in re.findall(r"^## \[(.+?)\]", text, re.MULTILINE) if title != "Unreleased"]
    assert versions[0] == caesura.__version__


def test_the_oldest_python_is_the_same_everywhere(project, workflow):
    floor = project["project"]["requires-python"].removeprefix(">=")
    named = [each.rpartition(" ")[2] for each in project["project"]["classifiers"] if ":: Python ::" in each]
    (setup,) = (step["with"] for step in workflow["jobs"]["test"]["steps"] if "with" in step)
    assert named == [floor] == [setup["python-version"]] == [project["tool"]["mypy"]["python_version"]]
    assert project["tool"]["ruff"]["target-version"] == "py" + floor.replace(".", "")
    assert f"sys.version_info < ({floor.replace('.', ', ')})" in MAKEFILE


def test_the_workflow_runs_what_a_fresh_clone_runs(workflow):
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert workflow[True].keys() == {"push", "pull_request"}  # YAML 1.1 reads the key "on" as true


def test_the_hooks_are_the_commands_of_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = config["repos"]
    assert local["repo"] == "local"
    assert all(
        hook["language"] == "system" and hook["pass_filenames"] is False and "files" not in hook
        for hook in local["hooks"]
    )
    *plain, mypy = (hook["entry"] for hook in local["hooks"])
    *commands, link, check = recipe("lint")
    assert plain == commands
    assert mypy == f"sh -c '{link} && {check}'"


def test_every_package_is_installed(project):
    named = set(project["tool"]["setuptools"]["packages"])
    tops = {ROOT / name.split(".")[1] for name in named if "." in name}
    folders = {file.parent for top in tops for file in top.rglob("*.py")}
    found = {".".join(("caesura", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert found - named == set()
    assert named - found == {"caesura"}


def test_an_image_is_built_from_every_package():
    """``.dockerignore`` lets through what it names and nothing else."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name.split(".")[1] for name in packages if "." in name}
    passed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert folders - passed == set()


def test_file_names_occur_twice_only_for_a_stated_reason():
    assert report_sizes.shared_names(*report_sizes.PRODUCT) == []
