"""Writes ``flashinfer_signatures.json``: what a release of FlashInfer says that its functions take.

Read from the sources of a wheel, or of the installed package, without importing them, which a machine without
CUDA cannot:

    pip download --no-deps flashinfer-python
    python tests/support/record_flashinfer.py flashinfer_python-*.whl
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

RECORDED = Path(__file__).with_name("flashinfer_signatures.json")
USED = {
    "flashinfer": (
        "append_paged_kv_cache",
        "BatchAttentionWithAttentionSinkWrapper.__init__",
        "BatchAttentionWithAttentionSinkWrapper.plan",
        "BatchAttentionWithAttentionSinkWrapper.reset_workspace_buffer",
        "BatchAttentionWithAttentionSinkWrapper.run",
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer",
        "BatchDecodeWithPagedKVCacheWrapper.run",
        "BatchDecodeWithPagedKVCacheWrapper.workspace_size",
        "BatchMLAPagedAttentionWrapper.__init__",
        "BatchMLAPagedAttentionWrapper.plan",
        "BatchMLAPagedAttentionWrapper.run",
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "BatchPrefillWithPagedKVCacheWrapper.workspace_size",
    ),
    "flashinfer.fused_moe": ("cutlass_fused_moe", "cutlass_fused_moe_workspace_size"),
    "flashinfer.gemm": ("fp8_blockscale_gemm_sm90", "gemm_fp8_nt_groupwise", "group_gemm_fp8_nt_groupwise"),
    "flashinfer.mla": ("MLAPlanMetadata.csr",),
}
"""Names that the engine calls, by the module that it imports them from."""


class Sources:
    """The files of a package, in a wheel or installed."""

    def __init__(self, wheel: str | None) -> None:
        if wheel is not None:
            archive = zipfile.ZipFile(wheel)
            self.version = Path(wheel).name.split("-")[1]
            self._names = set(archive.namelist())
            self._read = lambda name: archive.read(name).decode()
            return
        spec = find_spec("flashinfer")
        if spec is None or spec.origin is None:
            sys.exit("FlashInfer is not installed: name a wheel")
        from importlib.metadata import version

        root = Path(spec.origin).parents[1]
        self.version = version("flashinfer-python")
        self._names = {str(path.relative_to(root)) for path in root.glob("flashinfer/**/*.py")}
        self._read = lambda name: (root / name).read_text(encoding="utf-8")

    def module(self, name: str) -> tuple[str, ast.Module]:
        """Return a module's package, which relative imports begin at, and its syntax tree."""
        path = name.replace(".", "/")
        if f"{path}.py" in self._names:
            return name.rpartition(".")[0], ast.parse(self._read(f"{path}.py"))
        return name, ast.parse(self._read(f"{path}/__init__.py"))

    def definition(self, module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef]:
        """Return the module and node that define ``name`` of ``module``; of several definitions, the last."""
        package, tree = self.module(module)
        defined = [
            node
            for node in module_level(tree.body)
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
        ]
        if defined:
            return module, defined[-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name in (alias.asname, alias.name) or alias.name == "*":
                        base = package.split(".")[: len(package.split(".")) - node.level + 1]
                        origin = ".".join([*base, node.module or ""]) if node.level else node.module or ""
                        with suppress(LookupError):
                            return self.definition(origin, name if alias.name == "*" else alias.name)
        raise LookupError(f"{module} has no {name}")

    def signature(self, module: str, name: str) -> str:
        owner, _, method = name.rpartition(".")
        where, node = self.definition(module, owner or method)
        if isinstance(node, ast.FunctionDef):
            return parameters(node.args)
        methods = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
        if method not in methods:
            if not node.bases:
                raise LookupError(f"{module} has no {name}")
            return self.signature(where, f"{ast.unparse(node.bases[0])}.{method}")
        found = methods[method]
        found = methods.get(forwards_to(found) or "", found)
        del (found.args.posonlyargs or found.args.args)[0]
        return parameters(found.args)


def module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those below its conditions too, but none of a function's."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from module_level(
                [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.stmt)]
            )


def forwards_to(function: ast.FunctionDef) -> str | None:
    """Return the method that is given this one's ``**kwargs``, and says what they may be, or None."""
    for node in ast.walk(function):
        if (
            function.args.kwarg is None
            or not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
        ):
            continue
        if any(
            each.arg is None and ast.unparse(each.value) == function.args.kwarg.arg for each in node.keywords
        ):
            return node.func.attr
    return None


def parameters(given: ast.arguments) -> str:
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [None if default is None else ast.Constant(...) for default in given.kw_defaults]
    return ast.unparse(given)


def main() -> None:
    sources = Sources(sys.argv[1] if len(sys.argv) > 1 else None)
    found = {
        module: {name: sources.signature(module, name) for name in names} for module, names in USED.items()
    }
    recorded = {"flashinfer-python": sources.version, "signatures": found}
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
