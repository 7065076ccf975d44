"""Pipeline class to family."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...io_struct import CaesuraError, ErrorCode
from .components import class_names
from .family import Family
from .flux import Flux
from .qwen_image import QwenImage
from .sd3 import StableDiffusion3

FAMILIES: dict[str, type[Family]] = {kind.pipeline: kind for kind in (StableDiffusion3, Flux, QwenImage)}


def family_of(index: Mapping[str, Any], root: Path) -> type[Family]:
    """The family of a pipeline, by its ``model_index.json``.

    Raises:
        CaesuraError: ``unsupported_model``, by name: the pipeline, or the class of one of its components.
    """
    name = index.get("_class_name")
    kind = FAMILIES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise _refused(
            f"pipeline {name!r} is not supported; supported are {', '.join(FAMILIES)}", "_class_name"
        )
    found = class_names(dict(index))
    for component, allowed in kind.classes.items():
        given = found.get(component)
        if given is None and component in kind.optional:
            continue
        if given not in {path.rpartition(".")[2] for path in allowed}:
            raise _refused(f"{root}: {component} is {given!r}, not {' or '.join(allowed)}", component)
    scheduler = found.get("scheduler")
    if scheduler != "FlowMatchEulerDiscreteScheduler":
        raise _refused(f"{root}: scheduler {scheduler!r} is not FlowMatchEulerDiscreteScheduler", "scheduler")
    return kind


def _refused(reason: str, field: str) -> CaesuraError:
    return CaesuraError(ErrorCode.UNSUPPORTED_MODEL, reason, fields=[field])
