"""Names of torch and Triton that the engine's modules use, and those of their oldest allowed versions.

``torch_floor.json`` lists the names of those versions. It is written by them, in an environment that has
them, when the floor in ``pyproject.toml`` moves or something is used whose names are not in it yet:

    python tests/support/torch_floor.py
"""

import ast
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("torch_floor.json")
ROOT = Path(__file__).parents[2]
_LIBRARIES = ("torch", "triton")
_METHODS = "torch.Tensor"


def sources() -> list[Path]:
    return sorted([*ROOT.glob("scheduler/**/*.py"), *ROOT.glob("client/trainer/**/*.py")])


def used(source: str) -> tuple[set[str], set[str]]:
    tree = ast.parse(source)
    known: dict[str, str] = {}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in _LIBRARIES:
                    names.add(alias.name)
                    known[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] in _LIBRARIES
            and not node.level
        ):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                names.add(f"{node.module}.{alias.name}")
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in attributes:
        first, _, rest = ast.unparse(node).partition(".")
        if first in known and all(part.isidentifier() for part in rest.split(".")):
            names.add(f"{known[first]}.{rest}")
    return names, {node.attr for node in attributes}


def recorded() -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the versions, and the names in each module, class or value."""
    read = json.loads(RECORDED.read_text(encoding="utf-8"))
    names = {owner: set(found.split()) for owner, found in read.pop("names").items()}
    return read, names


def missing(source: str, known: dict[str, set[str]]) -> Iterator[str]:
    """Yield the names that a module uses and the recorded versions do not have, or that are not recorded."""
    names, attributes = used(source)
    for name in sorted(names):
        owner, _, last = name.rpartition(".")
        if owner and last not in known.get(owner, set()):
            yield name
    import torch

    # Of which type a value is nobody knows here: what this torch's tensors have, the oldest one's have, too.
    for name in sorted(attributes - known[_METHODS]):
        if not name.startswith("__") and hasattr(torch.Tensor, name):
            yield f"{_METHODS}.{name}"


def _found(name: str) -> Any:
    owner, _, last = name.rpartition(".")
    if not owner:
        return import_module(name)
    try:
        return getattr(_found(owner), last)
    except AttributeError:
        return import_module(name)  # of a package that does not import it


def main() -> None:
    import torch
    import triton

    names = {name for path in sources() for name in used(path.read_text(encoding="utf-8"))[0]}
    owners = {_METHODS} | {name.rpartition(".")[0] for name in names} - {""}
    found = {}
    for owner in sorted(owners):
        value = _found(owner)
        its = {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == owner}
        all_ = {name for name in dir(value) if not name.startswith("__")} | {
            name for name in its if hasattr(value, name)
        }
        found[owner] = " ".join(sorted(all_))
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    RECORDED.write_text(json.dumps({**versions, "names": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
