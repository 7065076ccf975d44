"""Import rules beside the order of layers, which import-linter checks."""

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from caesura.client import AsyncSchedulerClient, SchedulerClient, launch_scheduler
from caesura.client.connection.client_options import GenerateOptions
from caesura.io_struct import GenerateReqInput
from caesura.scheduler.runtime.engine_config import EngineConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("io_struct", "process", "transfer", "client", "scheduler", "integrations")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("caesura", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    looked_at = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(node for node in ast.walk(tree_of(path)) if isinstance(node, looked_at))


def is_for_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def runtime_statements(tree: ast.Module):
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if is_for_typing(node):
            waiting += node.orelse
            continue
        yield node
        waiting += [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case))
        ]


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    """Return the modules that ``path`` imports when it runs, each with its line."""
    module = module_of(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = []
    for node in runtime_statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{name}.{alias.name}"
                found.append((full if full in MODULES else name, node.lineno))
    return tuple(found)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_says_what_it_is_for():
    named = (path for path in FILES if path.name != "__init__.py")
    assert [name_of(path) for path in named if not ast.get_docstring(tree_of(path))] == []


def test_every_module_of_the_engine_has_its_layer():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (each for each in config["tool"]["importlinter"]["contracts"] if "containers" in each)
    listed = {name.strip() for line in layers["layers"] for name in line.split(":")}
    scheduler = "caesura.scheduler."
    engine = [module.removeprefix(scheduler) for module in MODULES if module.startswith(scheduler)]
    packages = {name.split(".")[0] for name in engine if "." in name}
    lost = [
        name
        for name in engine
        if name not in packages and not {name, name.split(".")[0], ".".join(name.split(".")[:2])} & listed
    ]
    assert lost == []


def test_no_scheduler_file_imports_the_package_as_a_whole():
    """``from .. import x`` would hide where x comes from."""
    assert [path for path in FILES for target, _ in imports_of(path) if target == "caesura.scheduler"] == []


def test_no_file_is_part_of_an_import_cycle():
    graph = {
        module: {target for target, _ in imports_of(path) if target in MODULES and target != module}
        for module, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # names the cycle in its error


def test_imports_inside_the_package_are_relative():
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("caesura"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("caesura") for alias in node.names))
    ]
    assert wrong == []


ENGINE = {"click", "msgspec", "numpy", "safetensors", "torch", "zmq", "flashinfer", "triton"}
NEEDS = {
    "io_struct/": {"msgspec"},
    "scheduler/": ENGINE,
    "scheduler/scheduling/grammar_worker.py": {"llguidance"},
    "scheduler/images/": ENGINE | {"diffusers", "transformers"},
    "scheduler/models/transformers_backend/": ENGINE | {"huggingface_hub", "transformers"},
}
"""Packages of others that a folder's files import at most; the longest name that fits a file counts."""


def test_no_folder_needs_more_packages_than_it_may():
    seen = set()
    for path in FILES:
        names = {target.split(".")[0] for target, _ in imports_of(path)} - sys.stdlib_module_names
        folder = max((each for each in NEEDS if name_of(path).startswith(each)), key=len, default="")
        assert not folder or names - {"caesura"} <= NEEDS[folder], path
        if names & {"torch", "numpy", "transformers"} and name_of(path).startswith("client/"):
            assert name_of(path).startswith("client/trainer/"), path
        seen.add(folder)
    assert seen >= NEEDS.keys()


@pytest.mark.parametrize(
    ("module", "unused"),
    [
        pytest.param("caesura.scheduler.runtime.engine", ("caesura.scheduler.image",), id="text engine"),
        pytest.param("caesura.io_struct", ("torch", "numpy", "zmq", "safetensors"), id="wire"),
        pytest.param(
            "caesura.client.cli",
            ("torch", "numpy", "transformers", "caesura.scheduler", "caesura.client.group")
            + ("caesura.client.serve.app",),
            id="client",
        ),
    ],
)
def test_what_is_not_needed_is_not_loaded(module, unused):
    program = f"import sys, {module}\nprint([name for name in sys.modules if name.startswith({unused!r})])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_one_function_empties_the_device_cache():
    users = {
        name_of(path)
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("empty_cache", "malloc_trim")
    }
    assert "scheduler/memory/device_memory.py" in users
    modules = {"scheduler/memory/host.py", "scheduler/memory/device_module.py"}
    assert users <= {"scheduler/memory/device_memory.py", *modules}


PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
LOADERS = {"torch.load", "torch.save", "numpy.load", "np.load"}
LOADS = {name.rpartition(".")[2] for name in LOADERS}
PARSERS = {"pickletools"}
READER = "transfer/legacy_pickle.py"
METHODS = {"recv_pyobj", "send_pyobj", "recv_json", "recv_serialized"}


def test_only_one_module_writes_the_state_of_the_engine():
    facts = re.compile("generation|pause_mode|ownership|weights|weights_detail|stamp|released|step")
    writers = [
        f"{name_of(path)}:{node.lineno}"
        for path in (ROOT / "scheduler").rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and facts.fullmatch(node.attr)
        and ast.unparse(node.value).rpartition(".")[2] == "state"
    ]
    assert writers == [], "engine_state.py has a method for each change"


def test_nothing_is_ever_unpickled():
    wrong = []
    for path in FILES:
        modules = PICKLES if name_of(path) == READER else PICKLES | PARSERS
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names} & modules
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]} & modules if not node.level else set()
                names |= {f"{node.module}.{alias.name}" for alias in node.names} & LOADERS
            elif isinstance(node, ast.Attribute):
                names = {node.attr} & METHODS
                if node.attr in LOADS:
                    names |= {ast.unparse(node)} & LOADERS
            else:
                continue
            wrong += [f"{name_of(path)}:{node.lineno}: {name}" for name in names]
    assert wrong == []


def test_the_launcher_offers_every_option_of_the_engine():
    offered = set(inspect.signature(launch_scheduler).parameters)
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    of_the_launcher = {"startup_timeout", "log_path", "model", "curve_server_key", "curve_client_key_file"}
    assert offered - of_the_launcher == fields - {"model_path"}


def test_every_option_is_a_keyword_of_both_clients():
    explicit = {"id", "rid", "input_ids", "sampling_params", "stream"}
    assert set(GenerateReqInput.__struct_fields__) - explicit == set(GenerateOptions.__annotations__)
    for client in (SchedulerClient, AsyncSchedulerClient):
        for method in (client.generate, client.submit):
            given = inspect.signature(method).parameters
            assert given["options"].kind is inspect.Parameter.VAR_KEYWORD
            assert given.keys() & GenerateOptions.__annotations__.keys() == set()
