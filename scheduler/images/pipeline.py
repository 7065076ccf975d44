"""A diffusion pipeline with its weights: loading it, and the names under which updates write it.

Invariants:
- The weights of all components are one set of slots, ``component.name``, so transports, sessions and checks
  work as on a language model's. An update is of one component.
- What touched a component poisons it: :meth:`~..weights.loader.WeightLoader.missing` asks for components.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...io_struct import CaesuraError, ErrorCode
from ..layers.parameters import WeightSlot
from ..memory.host_copy import exhaust
from ..memory.residency import ComponentResidencyManager
from ..memory.workspace import Workspace
from ..models.causal_lm import Weights
from ..runtime.dtypes import by_torch_name
from ..runtime.engine_config import EngineConfig
from ..runtime.files import is_pipeline
from ..weights.digests import WeightDigests
from ..weights.loaded_model import LoadedWeights
from ..weights.loader import WeightLoader
from ..weights.source import ComponentSource
from ..weights.transports.disk import Checkpoint, open_checkpoint
from .components import (
    Blocks,
    Component,
    build_component,
    class_names,
    config_difference,
    read_index,
    strategy_of,
)
from .flux import Flux
from .pipeline_family import Family
from .qwen_image import QwenImage
from .sd3 import StableDiffusion3

DEFAULT_COMPONENT = "transformer"
"""Component that an update writes which names none."""


FAMILIES: dict[str, type[Family]] = {kind.pipeline: kind for kind in (StableDiffusion3, Flux, QwenImage)}


class DiffusionModel(Weights):
    def __init__(self, components: Mapping[str, Component]) -> None:
        """``components``: the transformer's first."""
        self.parts = components
        self.components = tuple(components)
        self.kept_components = frozenset(name for name, each in components.items() if each.movable)
        self._slots = {name: slot for each in components.values() for name, slot in each.slots.items()}

    def weight_slots(self) -> dict[str, WeightSlot]:
        return self._slots

    def is_skipped(self, name: str) -> bool:
        component, _, key = name.partition(".")
        return component in self.parts and self.parts[component].skips(key)

    def finalize_weights(self) -> None:
        pass  # nothing is derived

    def named_storage(self) -> Iterator[tuple[str, Tensor]]:
        for component in self.parts.values():
            yield from component.storage()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPipeline(LoadedWeights):
    model: DiffusionModel
    family: Family
    movable: Mapping[str, Blocks | None]
    """Components that come and go, with the blocks of those that do so layer by layer."""

    @property
    def weights_bytes(self) -> int:
        return sum(component.nbytes for component in self.model.parts.values())


def load_pipeline(
    config: EngineConfig, residency: ComponentResidencyManager, folder: str | None
) -> LoadedPipeline:
    """Read the pipeline in ``config.model_path`` into fresh weights; ``unsupported`` without diffusers.

    ``folder``: the transformer's weights where they are another's: those of a committed update.
    """
    root = Path(config.model_path)
    index = read_index(root)
    kind = family_of(index, root)
    dtype = None if config.dtype == "auto" else by_torch_name(config.dtype)
    device = torch.device(config.device)
    names, workspace = class_names(index), Workspace()
    held = WeightDigests() if config.weights_digest else None
    components: dict[str, Component] = {}
    movable: dict[str, Blocks | None] = {}
    digests = []
    for name, allowed in reversed(list(kind.classes.items())):  # what leaves again comes before what stays
        if name not in names:
            continue
        strategy = strategy_of(name, config)
        # A window of blocks leaves as many holes in the allocator as a large component.
        layerwise = strategy is not None and strategy.kind == "layerwise"
        mover = None if strategy is None else residency.register(name, strategy, memory_intensive=layerwise)
        class_path = next(path for path in allowed if path.endswith(f".{names[name]}"))
        with residency.component("weights" if mover is None else name):
            component, checkpoint = build_component(name, root / name, class_path, dtype, device, mover)
        if strategy is not None:
            movable[name] = Blocks(component.module) if layerwise else None
            assert mover is not None
            mover.divide(blocks.tensors() if (blocks := movable[name]) is not None else [])
        if folder is not None and name == DEFAULT_COMPONENT:
            checkpoint = open_component(folder, component)
        _load(component, checkpoint, workspace, config.load_bucket_bytes, held)
        if mover is not None:
            exhaust(residency.leave([name]))
        components[name] = component
        digests.append(checkpoint.local_digest)
    components = {name: components[name] for name in kind.classes if name in components}
    residency.forget_peak()  # each of them was whole on the device while it was loaded
    model = DiffusionModel(components)
    return LoadedPipeline(
        model=model,
        loader=WeightLoader(model, held),
        family=kind.load(root, {name: each.module for name, each in components.items()}, names),
        movable=movable,
        dtype=components[DEFAULT_COMPONENT].dtype,
        device=device,
        digest=hashlib.sha256("".join(digests).encode()).hexdigest(),
    )


def _load(
    component: Component,
    checkpoint: Checkpoint,
    workspace: Workspace,
    bucket_bytes: int,
    digests: WeightDigests | None,
) -> None:
    loader = WeightLoader(DiffusionModel({component.name: component}), digests)
    source = ComponentSource(checkpoint.into(workspace), component.name)
    loader.check(source.specs, complete=True)
    for piece in source.pieces(bucket_bytes, loader.skip):
        assert piece is not None, "a file has everything at once"
        loader.write(piece)


def open_component(path: str, component: Component) -> Checkpoint:
    """Open the checkpoint of ``component`` in ``path``: a folder of its own, or one of a whole pipeline.

    CaesuraError: ``checkpoint_error``, or ``weight_mismatch`` with what differs in its config.
    """
    folder = Path(path)
    if is_pipeline(folder):
        folder /= component.name
    checkpoint = open_checkpoint(folder)
    differing = config_difference(component.folder, folder)
    if differing:
        reason = f"{folder}/config.json differs in what the {component.name} computes: {', '.join(differing)}"
        raise CaesuraError(ErrorCode.WEIGHT_MISMATCH, reason, config=differing)
    return checkpoint


def family_of(index: Mapping[str, Any], root: Path) -> type[Family]:
    """Return a pipeline's family by its index; ``unsupported_model`` names what is not served."""
    name = index.get("_class_name")
    kind = FAMILIES.get(name) if isinstance(name, str) else None
    if kind is None:
        reason = f"pipeline {name!r} is not supported; supported are {', '.join(FAMILIES)}"
        raise _refused(reason, "_class_name")
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
