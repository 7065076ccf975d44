"""The ``quantization_config`` of a checkpoint: FP8 in blocks, or nothing.

Invariant: every field that is set to something that the engine does not do is refused by name, unknown ones included.
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
"""Field to the values that the engine does; null and absent are the first one."""
_SKIPPED = ("modules_to_not_convert", "ignored_layers")
_MODULE = re.compile(r"[\w.]+")


def parse_quantization(config: dict[str, Any], source: str) -> Fp8Blocks | None:
    """What ``config`` says about quantised weights; None: they are not.

    Raises:
        CaesuraError: UNSUPPORTED_MODEL with the fields, as ``quantization_config.…``.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise _unsupported(source, {"quantization_config": stated})
    refused = {
        f"quantization_config.{name}": value
        for name, value in stated.items()
        if value is not None and not _is_supported(name, value)
    }
    for required in ("quant_method", "weight_block_size"):  # null means one scale for all of a weight
        if stated.get(required) is None:
            refused[f"quantization_config.{required}"] = None
    if refused:
        raise _unsupported(source, refused)
    rows, columns = stated["weight_block_size"]
    skipped = frozenset(module for name in _SKIPPED for module in stated.get(name) or ())
    return Fp8Blocks(rows, columns, skipped)


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
