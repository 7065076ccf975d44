"""FlashInfer with nothing in it but its signatures: what the engine calls must bind to what a release says it
takes.

The signatures are facts of the release that ``flashinfer_signatures.json`` names; ``record_flashinfer.py``
has read them. Nothing is computed: attention gives memory of its query's shape, a product of its rows and
outputs. ``fake_flashinfer.py`` and ``fake_fp8_libraries.py`` compute, with what :func:`takes` binds.
"""

import functools
import inspect
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch

from .record_flashinfer import RECORDED

T = TypeVar("T")
_PRODUCTS = {
    "fp8_blockscale_gemm_sm90": ("input", "weight", 0),
    "gemm_fp8_nt_groupwise": ("a", "b", 0),
    "group_gemm_fp8_nt_groupwise": ("a", "b", 1),
}
"""Rows, weights, and which of the weights' dimensions the outputs are."""
_LAUNCHING = frozenset({"append_paged_kv_cache", "run", "cutlass_fused_moe", *_PRODUCTS})


def recorded() -> dict[str, dict[str, inspect.Signature]]:
    read = json.loads(RECORDED.read_text(encoding="utf-8"))["signatures"]
    return {
        module: {name: inspect.signature(eval(f"lambda {given}: None")) for name, given in names.items()}
        for module, names in read.items()
    }


def takes(name: str, **known: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a stand-in for ``name``, which gets the arguments of a call by their recorded parameters.

    Args:
        known: the defaults of those optional parameters that the stand-in understands.
    """
    signature = next(names[name] for names in recorded().values() if name in names)
    parameters = signature.parameters.values()
    swallows = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    optional = {each.name for each in parameters if each.default is ... or each.kind in swallows}

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> T:
            split = int("." in name)
            arguments = signature.bind(*args[split:], **kwargs).arguments
            assert optional & arguments.keys() <= known.keys(), f"the stand-in for {name} takes no more"
            return function(*args[:split], SimpleNamespace(**{**known, **arguments}))

        return called

    return decorate


class Interface:
    """Modules with the recorded names, each of which takes what its signature allows."""

    def __init__(self, launched: Callable[..., None]) -> None:
        self._launched = launched

    def modules(self) -> dict[str, ModuleType]:
        made = {module: self._module(module, names) for module, names in recorded().items()}
        for name, module in made.items():
            package, _, last = name.rpartition(".")
            if package:
                setattr(made[package], last, module)
        return made

    def _module(self, name: str, signatures: dict[str, inspect.Signature]) -> ModuleType:
        made = ModuleType(name)
        classes: dict[str, dict[str, Any]] = {}
        for each, signature in signatures.items():
            owner, _, method = each.rpartition(".")
            if owner:
                function = self._function(each, signature)
                own = f"{owner}.__init__" in signatures  # else the engine makes none, and calls the class
                classes.setdefault(owner, {})[method] = _method(function) if own else staticmethod(function)
            else:
                setattr(made, each, self._function(each, signature))
        for owner, methods in classes.items():
            setattr(made, owner, type(owner, (), methods))
        return made

    def _function(self, name: str, signature: inspect.Signature) -> Any:
        last = name.rpartition(".")[2]

        def called(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            if last in _LAUNCHING:
                self._launched(last, arguments)
            return _result(last, arguments)

        return called


def _result(name: str, arguments: dict[str, Any]) -> Any:
    if name == "run":
        out = arguments.get("out")
        return torch.empty_like(arguments["q"]) if out is None else out
    if name in _PRODUCTS:
        rows, weight, dimension = _PRODUCTS[name]
        given = arguments[rows]
        shape = given.shape[0], arguments[weight].shape[dimension]
        return torch.empty(shape, dtype=torch.bfloat16, device=given.device)
    if name == "workspace_size":
        return 1 << 20, 1 << 20
    return 1 << 20 if name == "cutlass_fused_moe_workspace_size" else None


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(*args, **kwargs)
