"""Choice of the implementation that serves, its limits in the environment, and the compiled library."""

import ctypes
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.stale_builds import refuse_stale_builds

from caesura.scheduler import kernels
from caesura.scheduler.kernels import native
from caesura.scheduler.kernels.self_test import failure
from caesura.transfer import words


@pytest.fixture
def loading(monkeypatch):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    native._library.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    native._library.cache_clear()
    native._library()


def test_torch_serves_operations_missing_in_the_table():
    for operation, device, dtype in [
        ("linear", "cpu", torch.float64), ("linear", "meta", torch.float32), ("bake", "cpu", torch.float32)
    ]:  # fmt: skip
        assert kernels.best(operation, device, dtype) == kernels.TORCH


@pytest.mark.usefixtures("built")
def test_the_best_serves_and_can_be_limited():
    best = kernels.best("linear", "cpu", torch.bfloat16)
    assert best in native.ISAS[1:]
    assert set(kernels.serving("cpu", torch.float32)) == set(kernels.OPERATIONS)
    with native.limited_to("avx2") as possible:
        assert possible
        assert set(kernels.serving("cpu", torch.float32).values()) == {"avx2"}
    assert kernels.best("linear", "cpu", torch.bfloat16) == best
    assert set(kernels.serving("cpu", torch.float16).values()) == {best}
    assert set(kernels.serving("cpu", torch.float64).values()) == {kernels.TORCH}


@pytest.fixture
def on_cuda(loading):
    kernels.why_not_triton.cache_clear()

    def says(installed: bool, reason: str | None = None) -> None:
        module = SimpleNamespace(why_not=lambda device: reason)
        loading.setattr(kernels, "find_spec", lambda name: module if installed else None)
        loading.setattr(kernels, "import_module", lambda name, package: module)

    yield says
    kernels.why_not_triton.cache_clear()


def test_triton_serves_between_products_on_cuda(on_cuda):
    on_cuda(installed=True)
    served = kernels.serving("cuda", torch.bfloat16)
    assert served["elementwise"] == served["experts"] == kernels.TRITON
    assert served["linear"] == served["decoder"] == kernels.TORCH
    assert kernels.best("elementwise", "cuda", torch.float64) == kernels.TORCH
    assert kernels.best("elementwise", "meta", torch.bfloat16) == kernels.TORCH


def test_torch_serves_where_triton_does_not_and_says_why(on_cuda, loading, caplog):
    device = torch.device("cuda")
    for installed, reason, environment in (
        (False, None, ""), (True, "no C compiler", ""), (True, None, kernels.TORCH)
    ):  # fmt: skip
        on_cuda(installed, reason)
        loading.setenv(native.VARIABLE, environment)
        kernels.why_not_triton.cache_clear()
        assert set(kernels.serving(device, torch.bfloat16).values()) == {kernels.TORCH}
        assert kernels.why_not_triton(device) is not None
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["no C compiler"]


def test_the_environment_forces_torch(loading):
    loading.setenv(native.VARIABLE, "torch")
    assert kernels.best("linear", "cpu", torch.float32) == kernels.TORCH
    assert native.why_not() == "CAESURA_KERNELS=torch"


@pytest.mark.usefixtures("built")
def test_the_environment_limits_and_unknowns_are_refused(loading):
    loading.setenv(native.VARIABLE, "avx2")
    assert kernels.best("linear", "cpu", torch.float32) == "avx2"
    native._library.cache_clear()
    loading.setenv(native.VARIABLE, "sse9")
    with pytest.raises(ValueError, match="CAESURA_KERNELS=sse9: expected one of torch, avx2"):
        kernels.best("linear", "cpu", torch.float32)


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Load ``native.py`` as it is beside another library, or with a changed source beside the built one."""
    monkeypatch.delenv(native.VARIABLE, raising=False)

    def load(*changed: str) -> ModuleType:
        path = tmp_path / "native.py"
        path.write_text(Path(native.__file__).read_text().replace(*changed or ("", "")))
        spec = spec_from_file_location(f"{kernels.__name__}.beside", path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("content,reason", [(None, "not built"), (b"no library", "does not load")])
def test_without_a_library_torch_serves_and_says_why(beside, tmp_path, content, reason):
    if content is not None:
        (tmp_path / "_cpu.so").write_bytes(content)
    found = beside()
    assert found.isa() == kernels.TORCH
    assert reason in found.why_not()
    with pytest.raises(RuntimeError, match=reason):
        found.function("caesura_isa")()


def test_a_library_of_other_sources_is_not_called(beside, tmp_path):
    source = tmp_path / "old.c"
    source.write_text("int caesura_abi(void) { return -1; }")
    try:
        subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", tmp_path / "_cpu.so"], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    found = beside()
    assert found.isa() == kernels.TORCH
    assert "other sources" in found.why_not()


@pytest.mark.usefixtures("built")
def test_a_stale_library_ends_the_test_run(loading):
    refuse_stale_builds()
    loading.setattr(native, "_ABI", -1)
    native._library.cache_clear()
    with pytest.raises(pytest.UsageError, match="other sources"):
        refuse_stale_builds()
    loading.setattr(native, "_find", lambda: None)
    native._library.cache_clear()
    refuse_stale_builds()  # those tests are skipped: nothing was built


def test_stale_functions_of_words_end_the_test_run(monkeypatch):
    if words.library() is None:
        pytest.skip("words.cpp was not compiled")
    monkeypatch.setattr(words, "_ABI", -1)
    words.library.cache_clear()
    try:
        with pytest.raises(pytest.UsageError, match="_words"):
            refuse_stale_builds()
    finally:
        words.library.cache_clear()


@pytest.mark.usefixtures("built")
def test_a_library_with_other_structure_sizes_is_not_called(beside, tmp_path):
    (tmp_path / "_cpu.so").symlink_to(native._find())
    found = beside('"scale_columns ', '"scale_columns more ')
    assert found.isa() == kernels.TORCH
    size = ctypes.sizeof(native.DecoderStep)
    assert f"a decoder step of {size} bytes, this source makes one of {size + 8}" in found.why_not()


@pytest.mark.usefixtures("built")
def test_one_openmp_runtime_serves_torch_and_the_kernels():
    program = (
        "import os, torch\n"
        "from caesura.scheduler.kernels import linear\n"
        "torch.set_num_threads(2)\n"
        "w, x = torch.zeros(1024, 1024), torch.zeros(256, 1024)\n"
        "torch.mm(x, w)\n"
        "torch.tanh(w)\n"
        "before = os.listdir('/proc/self/task')\n"
        "linear.Product(w, 1024, 1024)(x)\n"
        "after = os.listdir('/proc/self/task')\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}\n"
        "print(before == after, sum('libgomp' in name or 'libomp' in name or 'libiomp' in name for name in "
        "files))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True 1\n", "")


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_arm_has_instruction_sets_of_its_own(beside, monkeypatch, machine):
    monkeypatch.setattr("platform.machine", lambda: machine)
    found = beside()
    assert found.ISAS == ("torch", "neon", "neonbf16")
    assert found.isa() == kernels.TORCH
    assert "on x86-64 or 64-bit ARM" in found.why_not()
    monkeypatch.setenv(native.VARIABLE, "avx2")
    with pytest.raises(ValueError, match="CAESURA_KERNELS=avx2: expected one of torch, neon, neonbf16"):
        beside().isa()


@pytest.mark.parametrize("machine", [
    ("-U__linux__", "-D__APPLE__", "-U__x86_64__", "-D__aarch64__"), ("-D__clang__",), ("-U__x86_64__",)
])  # fmt: skip
def test_the_sources_refuse_other_platforms_with_a_reason(machine):
    header = Path(native.__file__).parent / "cpu" / "common.h"
    try:
        done = subprocess.run(["g++", *machine, "-E", header], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no g++")
    assert done.returncode == 1
    assert "for Linux and GCC, on x86-64 or 64-bit ARM; elsewhere the engine runs on torch" in done.stderr


def test_the_build_names_every_source():
    folder = Path(native.__file__).parent / "cpu"
    text = (Path(native.__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    missing = [
        path.name
        for path in folder.iterdir()
        if path.suffix in (".cpp", ".h") and f'"scheduler/kernels/cpu/{path.name}"' not in text
    ]
    assert missing == []


NINJA = """Ninja build failed. Ninja output:
ninja: Entering directory `/root/.cache/flashinfer'
[1/3] nvcc -c kernel.cu
/bin/sh: 1: nvcc: not found
"""


class CompileError(Exception):
    """No RuntimeError."""


def raising(error):
    yield 0.0
    raise error


@pytest.mark.parametrize("differences,told", [
    (raising(RuntimeError(NINJA)),
     "fails: RuntimeError: Ninja build failed. Ninja output: … /bin/sh: 1: nvcc: not found"),
    (raising(RuntimeError("Could not find nvcc: error\nfatal")),
     "fails: RuntimeError: Could not find nvcc: error"),
    (raising(CompileError("at 12:3")), "fails: CompileError: at 12:3"),
    (raising(KeyError()), "fails: KeyError"),
    (raising(OSError("\n \n")), "fails: OSError"),
    (raising(ValueError("x" * 5000)), f"fails: ValueError: {'x' * 288}"),
    ([], None),
    ([0.0, 0.1, 0.05], None),
    ([0.2, 0.0], "is off by 0.200"),
    ([float("nan"), 0.0], "is off by nan"),
    ([0.3, float("nan"), 0.0], "is off by nan"),
    ([float("inf")], "is off by inf"),
])  # fmt: skip
def test_a_self_test_tells_its_error_or_its_largest_difference(differences, told):
    assert failure(lambda: differences, 0.1, "a step") == (told and f"a step {told}")
