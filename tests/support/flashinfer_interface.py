"""FlashInfer with nothing in it but its signatures: what the engine calls must bind to what a release says it takes.

The signatures are facts of the release that ``flashinfer_signatures.json`` names; ``record_flashinfer.py`` has read them.
Nothing is computed: attention gives memory of its query's shape. ``fake_flashinfer.py`` computes, and believes its caller.
"""

import inspect
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .record_flashinfer import RECORDED

_LAUNCHING = frozenset({"append_paged_kv_cache", "run"})


def recorded() -> dict[str, dict[str, inspect.Signature]]:
    """By module and name, without ``self``; every default is ``...``."""
    read = json.loads(RECORDED.read_text(encoding="utf-8"))["signatures"]
    return {
        module: {name: inspect.signature(eval(f"lambda {given}: None")) for name, given in names.items()}
        for module, names in read.items()
    }


@dataclass(frozen=True, slots=True)
class Call:
    """Of a function or a method."""

    name: str
    arguments: dict[str, Any]
    """By parameter; defaults are not in it."""


class Interface:
    """Modules with the recorded names, each of which takes what its signature allows.

    Attributes:
        calls: all of them, in their order.
    """

    def __init__(self, launched: Callable[..., None] = lambda name, *arguments: None) -> None:
        """``launched(name, *arguments)`` is called for what runs on the device."""
        self.calls: list[Call] = []
        self._launched = launched

    def modules(self) -> dict[str, ModuleType]:
        """By name, as ``sys.modules`` has them."""
        return {module: self._module(module, names) for module, names in recorded().items()}

    def _module(self, name: str, signatures: dict[str, inspect.Signature]) -> ModuleType:
        made = ModuleType(name)
        classes: dict[str, dict[str, Any]] = {}
        for each, signature in signatures.items():
            owner, _, method = each.rpartition(".")
            if owner:
                classes.setdefault(owner, {})[method] = _method(self._function(each, signature))
            else:
                setattr(made, each, self._function(each, signature))
        for owner, methods in classes.items():
            setattr(made, owner, type(owner, (), methods))
        return made

    def _function(self, name: str, signature: inspect.Signature) -> Any:
        last = name.rpartition(".")[2]

        def called(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
            self.calls.append(Call(name, arguments))
            if last in _LAUNCHING:
                self._launched(last, arguments)
            if last == "autotune":
                return nullcontext()
            if last != "run":
                return None
            out, query = arguments.get("out"), arguments["q"]
            return torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out

        called.__signature__ = signature  # type: ignore[attr-defined]
        return called


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: function(*args, **kwargs)
