"""A diffusers folder as modules whose weights the engine owns, which come and go if not always on the device.

A *stage* is a stretch of steps of one kind. Components with a strategy come before its first step and leave
before the next stage, or when no sample is left.

Invariants:
- Modules are diffusers' and transformers' own. Their parameters, and the buffers of their checkpoints, live
  in storage of ``memory/residency.py`` and are written by :class:`~..layers.parameters.WeightSlot` alone:
  those of layers that ``packed_layers.py`` computes, in its layout.
- A tensor is known as ``component.name``, where ``name`` is the one in the component's own folder. What is
  tied to another parameter has no slot: its name is skipped.
- Only the classes that a family lists are made, whatever the folder's index says; nothing remote is run.
- A step finds its components on the device, also after a release of memory in between. The device cache is
  emptied by the residency manager alone.
"""

import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...io_struct import Residency
from ..kernels import native
from ..layers.matrix import Matrix, OffloadablePackedSlot
from ..layers.parameters import OffloadableSlot, Parameter, Placement, WeightSlot
from ..memory.host_copy import exhaust
from ..memory.offload import (
    ComponentOffloadStrategy,
    LayerwiseOffloadStrategy,
    OffloadableComponent,
    Strategy,
)
from ..memory.residency import ComponentResidencyManager
from ..observability.stage_profiler import StageProfiler
from ..runtime.dtypes import DTYPES
from ..runtime.engine_config import EngineConfig
from ..runtime.files import PIPELINE_INDEX, checkpoint_error, read_json
from ..weights.transports.disk import Checkpoint, open_checkpoint
from .image_request import Kind
from .joint_blocks import use_joint_blocks
from .packed_layers import packable_layers, use_packed

_MAX_INDEX_BYTES = 1 << 20
_NOT_FORWARD = {
    "_name_or_path", "_diffusers_version", "transformers_version", "torch_dtype", "dtype", "architectures",
    "_commit_hash",
}  # fmt: skip
"""Fields of a component's config.json that change nothing of what it computes."""


def read_index(folder: str | Path) -> dict[str, Any]:
    return read_json(Path(folder) / PIPELINE_INDEX, _MAX_INDEX_BYTES)


def class_names(index: dict[str, Any]) -> dict[str, str]:
    return {
        name: entry[1]
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
    }


class Component:
    def __init__(
        self,
        name: str,
        folder: Path,
        module: nn.Module,
        dtype: torch.dtype,
        device: torch.device,
        saved: Iterable[str] = (),
        movable: OffloadableComponent | None = None,
    ) -> None:
        """Name by ``saved`` what its (maybe older) checkpoint has; without ``movable`` it stays put."""
        self.name = name
        self.folder = folder
        self.module = module
        self.dtype = dtype
        self.slots: dict[str, WeightSlot] = {}
        self.movable = movable
        self._storage: list[tuple[str, Tensor]] = []
        stored: dict[str, Tensor] = dict(module.named_parameters())
        kept = module.state_dict(keep_vars=True)
        stored |= {key: buffer for key, buffer in module.named_buffers() if key in kept}
        self.tied = frozenset(kept.keys() - stored.keys())
        names, places = _names_in_file(module, saved), _places(module)
        place = Placement(dtype, device)
        layers, matrices = packable_layers(module, place), {}
        for key, old in stored.items():
            full_name, kind = f"{name}.{names.get(key, key)}", dtype if old.is_floating_point() else old.dtype
            layer = layers.get(key)
            if layer is None:
                parameter = Parameter(full_name, tuple(old.shape), kind, device)
            else:
                matrices[layer] = Matrix(full_name, layer.out_features, layer.in_features, place)
                parameter = matrices[layer].parameter
            for holder, own in places[old]:
                is_parameter = isinstance(old, nn.Parameter)
                holder[own] = (
                    nn.Parameter(parameter.data, requires_grad=False) if is_parameter else parameter.data
                )
            if movable is None:
                self.slots[full_name] = (parameter if layer is None else matrices[layer]).slot(full_name)
            elif layer is None:
                self.slots[full_name] = OffloadableSlot(parameter, movable)
            else:
                self.slots[full_name] = OffloadablePackedSlot(parameter, movable, tuple(old.shape))
            self._storage.append((full_name, parameter.data))
        use_packed(matrices)
        for owner in module.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and buffer.device != device:
                    owner._buffers[key] = buffer.to(device)
        module.eval()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._storage)

    def storage(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights to read by name: from the host, if they come and go and have been away."""
        for name, tensor in self._storage:
            yield name, tensor if self.movable is None else self.movable.values(tensor)

    def skips(self, key: str) -> bool:
        """Return True for a checkpoint's tensor that is tied, or a table that the module makes itself."""
        return key in self.tied or key.rpartition(".")[2] == "position_ids"


def build_component(
    name: str,
    folder: Path,
    class_path: str,
    dtype: torch.dtype | None,
    device: torch.device,
    movable: OffloadableComponent | None = None,
) -> tuple[Component, Checkpoint]:
    """Return the component in ``folder``, still without values, and its checkpoint; dtype None: as saved."""
    checkpoint = open_checkpoint(folder)
    floats = (spec.dtype for spec in checkpoint.specs if spec.dtype.startswith(("F", "BF")))
    saved = next((DTYPES[name] for name in floats), None)
    with _without_values():
        module = _make_module(class_path, folder)
    names = [spec.name for spec in checkpoint.specs]
    dtype = dtype or saved or torch.float32
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and native.why_not() is None:
        use_joint_blocks(module)
    return Component(name, folder, module, dtype, device, names, movable), checkpoint


def config_difference(ours: Path, theirs: Path) -> list[str]:
    a, b = (read_json(folder / "config.json", _MAX_INDEX_BYTES) for folder in (ours, theirs))
    names = (a.keys() | b.keys()) - _NOT_FORWARD
    return sorted(name for name in names if a.get(name) != b.get(name))


def _make_module(class_path: str, folder: Path) -> nn.Module:
    library, _, name = class_path.partition(".")
    kind = getattr(importlib.import_module(library), name)
    config_file = folder / "config.json"
    config = read_json(config_file, _MAX_INDEX_BYTES)
    try:
        if library == "transformers":
            return _as_module(kind(kind.config_class.from_dict(config)))
        return _as_module(kind.from_config(config))
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise checkpoint_error(config_file, f"is no config of {name}: {error}") from error


def _as_module(made: Any) -> nn.Module:
    assert isinstance(made, nn.Module)
    return made


def _names_in_file(module: nn.Module, saved: Iterable[str]) -> dict[str, str]:
    """Return the file's name of each tensor that the renamings of the module's class change."""
    renamings = getattr(module, "_checkpoint_conversion_mapping", {})
    renamings = renamings or _RENAMED.get(type(module).__name__, {})
    names = {}
    for name in saved:
        key = name
        for pattern, replacement in renamings.items():
            key = re.sub(pattern, replacement, key)
        names[key] = name
    return names


_RENAMED = {
    "Qwen2_5_VLForConditionalGeneration": {
        r"^visual": "model.visual",
        r"^model(?!\.(language_model|visual))": "model.language_model",
    }
}
"""Names that checkpoints of transformers before 4.52 have for what is now elsewhere."""


@contextmanager
def _without_values() -> Iterator[None]:
    """Within the block, modules are made with parameters on the meta device, and with real buffers."""
    register = nn.Module.register_parameter

    def register_empty(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(owner, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore


def _places(module: nn.Module) -> Mapping[Tensor, list[tuple[dict[str, Any], str]]]:
    """Return where the modules hold each parameter and buffer: tied ones in several places."""
    found = defaultdict(list)
    for owner in module.modules():
        for holder in (owner._parameters, owner._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    found[tensor].append((holder, key))
    return found


class Blocks:
    """Blocks of one module, in the order of computation as far as its kind tells."""

    def __init__(self, module: nn.Module) -> None:
        self.before: Callable[[int], None] = lambda number: None
        self._modules = list(_blocks_of(module))
        for number, block in enumerate(self._modules):
            block.register_forward_pre_hook(lambda *_, number=number: self.before(number))

    def tensors(self) -> list[list[Tensor]]:
        return [[*block.parameters(), *block.buffers()] for block in self._modules]


def _blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost lists of modules; towers and encoders that steps skip come last."""
    decoder: Any = getattr(module, "decoder", None)
    encoder: Any = getattr(module, "encoder", None)
    if all(hasattr(half, "mid_block") for half in (decoder, encoder)):
        yield from (decoder.mid_block, *decoder.up_blocks, *encoder.down_blocks, encoder.mid_block)
        return
    lists = list(_outermost_lists(module, ""))
    for _, entries in sorted(lists, key=lambda found: "visual" in found[0]):
        yield from entries


def _outermost_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield path + name, child
        else:
            yield from _outermost_lists(child, f"{path}{name}.")


_STRATEGIES: dict[Residency, Strategy] = {
    "offload": ComponentOffloadStrategy(),
    "layerwise": LayerwiseOffloadStrategy(),
}


def strategy_of(name: str, config: EngineConfig) -> Strategy | None:
    transformer = name == "transformer"
    return _STRATEGIES.get(config.transformer_residency if transformer else config.frozen_residency)


def kind_using(component: str) -> Kind:
    if component.startswith("text_encoder"):
        return "encode"
    return "decode" if component == "vae" else "denoise"


class ComponentStages:
    def __init__(
        self, residency: ComponentResidencyManager, movable: Mapping[str, Blocks | None], times: StageProfiler
    ) -> None:
        """``movable``: components with a strategy, with the blocks of those that are there layer by layer."""
        self._residency = residency
        self._times = times
        self._blocks = movable
        self._used: dict[Kind, list[str]] = {"encode": [], "denoise": [], "decode": []}
        for name in movable:
            self._used[kind_using(name)].append(name)
        self._kind: Kind | None = None

    def comes_in_blocks(self, component: str) -> bool:
        return self._blocks.get(component) is not None

    def enter(self, kind: Kind) -> None:
        """Prepare a step of ``kind``; CaesuraError ``out_of_memory``: a component does not fit."""
        if not self._blocks:
            return
        if kind == self._kind:
            self._use(kind)
            return
        self.leave()
        self._kind = kind
        if self._used[kind]:
            with self._times.stage("components.arrive"):
                exhaust(self._residency.bring(self._used[kind]))
        self._use(kind)

    def leave(self) -> None:
        """End the stage: no step of its kind comes next."""
        if self._kind is None:
            return
        kind, self._kind = self._kind, None
        if self._used[kind]:
            with self._times.stage("components.leave"):
                exhaust(self._residency.leave(self._used[kind]))

    def _use(self, kind: Kind) -> None:
        for name in self._used[kind]:
            at_layer = self._residency.use(name)
            if (blocks := self._blocks[name]) is not None:
                blocks.before = at_layer
