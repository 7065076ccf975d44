"""Import rules beside the order of layers, which import-linter checks."""

import ast
import dataclasses
import inspect
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from caesura.client import AsyncSchedulerClient, SchedulerClient, launch_scheduler
from caesura.client.connection.options import GenerateOptions
from caesura.io_struct import GenerateReqInput
from caesura.scheduler.runtime.config import EngineConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("io_struct", "process", "transfer", "client", "scheduler", "integrations")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@dataclass(frozen=True)
class Import:
    target: str
    line: int


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
def imports_of(path: Path) -> tuple[Import, ...]:
    module = module_of(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = []
    for node in runtime_statements(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{name}.{alias.name}"
                found.append(Import(full if full in MODULES else name, node.lineno))
    return tuple(found)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_module_says_what_it_is_for():
    silent = [
        str(path.relative_to(ROOT))
        for path in FILES
        if path.name != "__init__.py" and not ast.get_docstring(tree_of(path))
    ]
    assert silent == []


def test_every_module_of_the_engine_has_its_layer():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (each for each in config["tool"]["importlinter"]["contracts"] if "containers" in each)
    listed = {name.strip() for line in layers["layers"] for name in line.split(":")}
    there = [module.removeprefix("caesura.scheduler.") for module in MODULES if module.count(".") >= 2]
    engine = [name for name in there if not name.startswith("caesura.")]
    packages = {name.split(".")[0] for name in engine if "." in name}
    lost = [
        name
        for name in engine
        if name not in packages and not {name, name.split(".")[0], ".".join(name.split(".")[:2])} & listed
    ]
    assert lost == []


def test_no_scheduler_file_imports_the_package_as_a_whole():
    """``from .. import x`` would hide where x comes from."""
    wrong = [
        where(path, found.line)
        for path in FILES
        for found in imports_of(path)
        if found.target == "caesura.scheduler"
    ]
    assert wrong == []


def test_no_file_is_part_of_an_import_cycle():
    graph = {
        module: {
            found.target for found in imports_of(path) if found.target in MODULES and found.target != module
        }
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for used in sorted(graph[module]):
            # A package's __init__ re-exports its own files; they import each other, never it.
            visit(used, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_imports_inside_the_package_are_relative():
    wrong = [
        where(path, node.lineno)
        for path in FILES
        for node in nodes_of(path)
        if (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("caesura"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("caesura") for alias in node.names))
    ]
    assert wrong == []


def outside(package: str) -> dict[str, set[str]]:
    return {
        str(path.relative_to(ROOT)): {
            name
            for found in imports_of(path)
            if (name := found.target.split(".")[0]) not in sys.stdlib_module_names and name != "caesura"
        }
        for path in FILES
        if path.is_relative_to(ROOT / package)
    }


def test_io_struct_needs_msgspec_and_the_standard_library():
    assert {name for names in outside("io_struct").values() for name in names} == {"msgspec"}


def test_the_client_never_imports_torch_but_for_tensors():
    users = {file for file, names in outside("client").items() if names & {"torch", "numpy", "transformers"}}
    assert all(file.startswith("client/trainer/") for file in users)


def test_the_engine_runs_without_what_only_tests_and_demos_need():
    allowed_names = {"click", "msgspec", "numpy", "safetensors", "torch", "zmq", "flashinfer", "triton"}
    users = outside("scheduler")
    of_images = {file: names for file, names in users.items() if file.startswith("scheduler/images/")}
    foreign = "scheduler/models/transformers_backend/"
    of_foreign = {file: names for file, names in users.items() if file.startswith(foreign)}
    others = users.keys() - of_images.keys() - of_foreign.keys()
    assert {name for file in others for name in users[file]} <= allowed_names
    assert {name for names in of_foreign.values() for name in names} <= allowed_names | {
        "huggingface_hub",
        "transformers",
    }
    assert {name for names in of_images.values() for name in names} <= allowed_names | {
        "diffusers",
        "transformers",
    }


def test_only_an_image_engine_loads_the_room_of_images():
    program = (
        "import sys, caesura.scheduler.runtime.engine\n"
        "print(sorted(name for name in sys.modules if name.startswith('caesura.scheduler.image')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_wire_loads_without_torch():
    program = (
        "import sys, caesura.io_struct\n"
        "third = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(name for name in third if name in ('torch', 'numpy', 'zmq', 'safetensors')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_one_function_empties_the_device_cache():
    users = {
        str(path.relative_to(ROOT))
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, (ast.Attribute, ast.Name))
        and (node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id)
        in ("empty_cache", "malloc_trim")
    }
    assert "scheduler/memory/device_memory.py" in users
    assert users <= {"scheduler/memory/device_memory.py", "scheduler/memory/host.py"}, (
        "host.py is the CPU's module itself"
    )


PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
LOADERS = {"torch.load", "torch.save", "numpy.load", "np.load"}
LOADS = {name.rpartition(".")[2] for name in LOADERS}
PARSERS = {"pickletools"}
READER = "transfer/legacy_pickle.py"
METHODS = {"recv_pyobj", "send_pyobj", "recv_json", "recv_serialized"}


def test_only_one_module_writes_the_state_of_the_engine():
    facts = {
        "generation",
        "pause_mode",
        "ownership",
        "weights",
        "weights_detail",
        "stamp",
        "released",
        "step",
    }
    writers = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "scheduler").rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in facts
        and ast.unparse(node.value).rpartition(".")[2] == "state"
    ]
    assert writers == [], "engine_state.py has a method for each change"


def test_nothing_is_ever_unpickled():
    wrong = []
    for path in FILES:
        modules = PICKLES if str(path.relative_to(ROOT)) == READER else PICKLES | PARSERS
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
            wrong += [f"{where(path, node.lineno)}: {name}" for name in names]
    assert wrong == []


def test_the_client_imports_neither_torch_nor_the_engine_nor_what_one_command_needs():
    program = (
        "import sys, caesura.client, caesura.client.cli\n"
        "heavy = {name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy', 'transformers')}\n"
        "of_others = ('caesura.scheduler', 'caesura.client.group', 'caesura.client.serve.app')\n"
        "ours = {name for name in sys.modules if name.startswith(of_others)}\n"
        "print(sorted(heavy | ours))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_launcher_offers_every_option_of_the_engine():
    offered = set(inspect.signature(launch_scheduler).parameters)
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    of_the_launcher = {"startup_timeout", "log_path", "model", "curve_server_key", "curve_client_key_file"}
    assert offered - of_the_launcher == fields - {"model_path"}


def test_every_option_of_a_generation_is_a_keyword_of_both_clients():
    explicit = {"id", "rid", "input_ids", "sampling_params", "stream"}
    assert set(GenerateReqInput.__struct_fields__) - explicit == set(GenerateOptions.__annotations__)
    for client in (SchedulerClient, AsyncSchedulerClient):
        for method in (client.generate, client.submit):
            given = inspect.signature(method).parameters
            assert given["options"].kind is inspect.Parameter.VAR_KEYWORD
            assert given.keys() & GenerateOptions.__annotations__.keys() == set()
