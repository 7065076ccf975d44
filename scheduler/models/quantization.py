"""The ``quantization_config`` of a checkpoint: FP8 in blocks, experts in MXFP4, or nothing.

Invariant: every field with an unsupported value is refused by name, unknown fields included.
"""

import re
from typing import Any

from ...io_struct import CaesuraError, ErrorCode
from ..layers.parameters import Fp8Blocks

_FIXED: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float",),
    "expert_dtype": ("fp8",),
    "modules_to_convert": ([],),
    "dequantize": (False,),
}
"""Supported values of each field; null and absent mean the first."""
_SKIPPED = ("modules_to_not_convert", "ignored_layers")
_MXFP4 = {
    "quant_method": ("mxfp4",),
    "dequantize": (False, True),  # of no consequence: the engine always does
}
_MODULE = re.compile(r"[\w.]+")


def is_mxfp4(config: dict[str, Any]) -> bool:
    """Return True if weights are said to be in MXFP4. Their names in the checkpoint show which."""
    stated = config.get("quantization_config")
    return isinstance(stated, dict) and stated.get("quant_method") == "mxfp4"


def parse_quantization(config: dict[str, Any], source: str, *, mxfp4: bool = False) -> Fp8Blocks | None:
    """Return the storage of weights that stay quantised, or None; ``mxfp4``: experts in MXFP4 can be read.

    Raises:
        CaesuraError: UNSUPPORTED_MODEL with the fields, as ``quantization_config.…``.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise _unsupported(source, {"quantization_config": stated})
    widened = mxfp4 and is_mxfp4(config)
    supported = _is_of_mxfp4 if widened else _is_supported
    refused = {
        f"quantization_config.{name}": value
        for name, value in stated.items()
        if value is not None and not supported(name, value)
    }
    if widened:
        if refused:
            raise _unsupported(source, refused)
        return None
    for required in ("quant_method", "weight_block_size"):  # null means one scale for all of a weight
        if stated.get(required) is None:
            refused[f"quantization_config.{required}"] = None
    if refused:
        raise _unsupported(source, refused)
    rows, columns = stated["weight_block_size"]
    skipped = frozenset(module for name in _SKIPPED for module in stated.get(name) or ())
    return Fp8Blocks(rows, columns, skipped)


def _is_of_mxfp4(name: str, value: object) -> bool:
    return name in _SKIPPED or value in _MXFP4.get(name, ())


def _is_supported(name: str, value: object) -> bool:
    if name == "weight_block_size":
        return (
            isinstance(value, list)
            and len(value) == 2
            and all(type(size) is int and size > 0 for size in value)
        )
    if name in _SKIPPED:  # names; transformers would also take regular expressions
        return isinstance(value, list) and all(
            isinstance(module, str) and _MODULE.fullmatch(module) for module in value
        )
    return value in _FIXED.get(name, ())


def _unsupported(source: str, refused: dict[str, Any]) -> CaesuraError:
    named = ", ".join(f"{name} = {value!r}" for name, value in refused.items())
    return CaesuraError(
        ErrorCode.UNSUPPORTED_MODEL,
        f"{source} asks for what this engine does not do: {named}",
        fields=list(refused),
    )
