"""A transformers model: built on the meta device, then made to compute over the engine's parameters.

transformers 5 keeps some weights in another form than checkpoints do (experts stacked in one parameter,
modules renamed). What it would save is asked of it on the meta device, and each answer is traced back to the
memory that it is a part of.

Invariants:
- No parameter is ever given memory by torch. Buffers that checkpoints do not hold (rotary frequencies) are
  what transformers computes when it loads a checkpoint; they are allocated as always, so no release loses
  them.
- A checkpoint tensor, under the name and in the shape that ``save_pretrained`` writes, is a contiguous part
  of one parameter; anything else is refused by name.
- Linear layers, embeddings, the head and gated experts become the engine's layers; every other parameter
  (norms, routers, sinks) gets engine storage that the module's own code reads. Nothing stays meta.
- Each checkpoint tensor has one slot; parts of one product are neighbours in one parameter.
- Engine names of decoder layer N begin with ``layers.N.``, whatever the architecture calls it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ...layers.embedding import Embedding
from ...layers.experts import Experts
from ...layers.linear import Linear
from ...layers.moe import RoutedExperts
from ...layers.parameters import Layer, Parameter, Placement, PlainSlot, WeightSlot
from ..config import ModelConfig
from .interfaces import IMPLEMENTATION, Computed, NamedExperts, checkpoint_names
from .probe import Probe, refused
from .products import Head, PartOfProduct, Product, SharedProduct, gather_by
from .transformers_config import FAILURES, read_config


def build(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return this config's module on the meta device, with the engine's attention, or UNSUPPORTED_MODEL."""
    kind: type[PreTrainedModel] = getattr(transformers, config.architecture)
    options = {"experts_implementation": IMPLEMENTATION} if kind._can_set_experts_implementation() else {}
    try:
        read = read_config(config)
        with torch.device("meta"):
            module: PreTrainedModel = kind._from_config(
                read, dtype=dtype, attn_implementation=IMPLEMENTATION, **options
            )
    except FAILURES as error:
        reason = f"its modules cannot be built: {type(error).__name__}: {error}"
        raise refused(config.architecture, reason) from error
    module.eval()
    module.requires_grad_(False)
    return module


def compute_buffers(module: PreTrainedModel, device: torch.device) -> None:
    """Give buffers memory on ``device``, and values unless checkpoints do; refuse a tensor without any."""
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            each._buffers[name] = torch.zeros_like(buffer, device=device)
    for parameter in module.parameters():
        parameter._is_hf_initialized = True
    module.initialize_weights()
    for path, each in module.named_modules():
        _fix_frequencies(each)
        for name, value in vars(each).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise refused(type(module).__name__, f"{path}.{name} is neither a parameter nor a buffer")


def _fix_frequencies(module: Any) -> None:
    """Fix frequencies that follow a batch's longest position: the first set serves every context here."""
    kind = getattr(module, "rope_type", None)
    if kind is not None:  # what a forward on the meta device has left for the second set
        for name in [name for name, value in vars(module).items() if isinstance(value, Tensor)]:
            delattr(module, name)
    if isinstance(kind, str):
        module.rope_type = "default"
    elif isinstance(kind, dict):
        module.rope_type = dict.fromkeys(kind, "default")


def stored_tensors(module: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield every parameter and buffer of checkpoints: name, owner, name there, tensor; a tied one once."""
    tied = set(module.all_tied_weights_keys)
    for path, each in module.named_modules(remove_duplicate=True):
        tensors = dict(each._parameters)
        tensors |= {k: b for k, b in each._buffers.items() if k not in each._non_persistent_buffers_set}
        for name, tensor in tensors.items():
            full = f"{path}.{name}" if path else name
            if tensor is not None and full not in tied:
                yield full, each, name, tensor


def float32_names(module: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return names of tensors that transformers keeps in float32 in a model of ``dtype``, or None."""
    kept = set(module._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())
    if not kept:
        return None
    return re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in sorted(kept)))


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring elements of a parameter."""

    parameter: str
    shape: tuple[int, ...]
    offset: int
    """Elements from the parameter's first."""

    def of(self, data: Tensor) -> Tensor:
        return data.view(-1)[self.offset :][: prod(self.shape)].view(self.shape)


class _WithoutCopies(TorchDispatchMode):
    """Copies are their originals: a conversion makes its results contiguous, and they would not be views."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.name() == "aten::clone":
            return args[0]
        return func(*args, **(kwargs or {}))


def checkpoint_parts(module: PreTrainedModel) -> dict[str, Part]:
    """Return a meta module's checkpoint tensors by name, tied ones once; refuse what is no part of one."""
    tied = set(module.all_tied_weights_keys)
    state = {name: tensor for name, tensor in module.state_dict(keep_vars=False).items() if name not in tied}
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in state.items()}
    with _WithoutCopies():  # type: ignore[no-untyped-call]
        saved = revert_weight_conversion(module, dict(state))
    parts: dict[str, Part] = {}
    for name, tensor in saved.items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None or not tensor.is_contiguous():
            raise refused(type(module).__name__, f"the checkpoint's {name} is no part of one parameter")
        parts[name] = Part(owner, tuple(tensor.shape), tensor.storage_offset())
    return parts


class _Plain:
    def __init__(self, parameter: Parameter, slots: list[WeightSlot]) -> None:
        self._parameter, self._slots = parameter, slots

    def parameters(self) -> Iterator[Parameter]:
        yield self._parameter

    def slots(self) -> Iterator[WeightSlot]:
        yield from self._slots


class Assembled:
    """A module whose parts the engine's layers have replaced; CaesuraError if a tensor has no place."""

    def __init__(self, module: PreTrainedModel, probe: Probe, place: Placement) -> None:
        self._module, self._probe, self._place = module, probe, place
        self._parts = checkpoint_parts(module)
        self._by_parameter: dict[str, list[str]] = {}
        for name, part in self._parts.items():
            self._by_parameter.setdefault(part.parameter, []).append(name)
        self._float32 = float32_names(module, place.dtype)
        self._paths = dict(module.named_modules())
        self._done: set[str] = set()
        self.layers: list[Layer] = []
        self.head: Head | None = None
        """None if the module computes its logits itself."""
        self.routing: RoutedExperts | None = None
        self.torch_experts = False
        self._replace_embeddings()
        self._replace_experts()
        self._replace_products()
        for name, owner, attribute, tensor in list(stored_tensors(self._module)):
            if (name not in self._done and tensor.is_meta) or attribute in owner._buffers:
                self._place_plain(name, owner, attribute, tensor)
        left = [name for name, parameter in self._module.named_parameters() if parameter.is_meta]
        if left:
            raise refused(type(self._module).__name__, f"parameters without a place: {', '.join(left[:3])}")

    # Products

    def _replace_products(self) -> None:
        grouped: set[str] = set()
        for group in self._probe.products:
            modules = [self._linear(path) for path in group]
            linears = [each for each in modules if each is not None]
            same_bias = len({each.bias is None for each in linears}) == 1
            if len(linears) == len(group) and same_bias and not grouped & set(group):
                self._replace_group(group, linears)
                grouped |= set(group)
        for path in self._paths:
            linear = None if path in grouped else self._linear(path)
            if linear is not None:
                product = self._product([path], [linear])
                self._set(path, Product(product, self._place))

    def _linear(self, path: str) -> nn.Linear | None:
        module = self._paths[path]
        if type(module) is not nn.Linear or f"{path}.weight" in self._done or not module.weight.is_meta:
            return None
        if self._float32 is not None and self._float32.search(path):
            return None
        return module if self._checkpoint_module(path, module) is not None else None

    def _checkpoint_module(self, path: str, module: nn.Module) -> str | None:
        found = set()
        for name, parameter in module.named_parameters(recurse=False):
            names = self._by_parameter.get(f"{path}.{name}", [])
            if len(names) != 1 or self._parts[names[0]].shape != tuple(parameter.shape):
                return None
            base, _, last = names[0].rpartition(".")
            if last != name:
                return None
            found.add(base)
        return found.pop() if len(found) == 1 else None

    def _replace_group(self, group: list[str], linears: list[nn.Linear]) -> None:
        sizes = [each.out_features for each in linears]
        shared = SharedProduct(self._product(group, linears), sizes)
        for number, (path, linear) in enumerate(zip(group, linears, strict=True)):
            self._set(
                path, PartOfProduct(shared, number, linear.in_features, linear.out_features, self._place)
            )

    def _product(self, paths: list[str], linears: list[nn.Linear]) -> Linear:
        parts: dict[str, int] = {}
        for path, linear in zip(paths, linears, strict=True):
            name = self._checkpoint_module(path, linear)
            assert name is not None
            parts[name] = linear.out_features
            self._done |= {f"{path}.{each}" for each, _ in linear.named_parameters()}
        parent = paths[0].rpartition(".")[0]
        last = "+".join(path.rpartition(".")[2] for path in paths)
        name = self._engine_name(f"{parent}.{last}" if parent else last)
        first = linears[0]
        product = Linear(name, first.in_features, parts, bias=first.bias is not None, place=self._place)
        self.layers.append(product)
        return product

    # Embeddings and the head

    def _replace_embeddings(self) -> None:
        head = self._module.get_output_embeddings()
        tied = dict(self._module.all_tied_weights_keys)
        head_path = next((path for path, each in self._paths.items() if each is head), None)
        source = tied.get(f"{head_path}.weight")
        tables: dict[str, Embedding] = {}
        for path, each in self._paths.items():
            if isinstance(each, nn.Embedding):
                names = self._by_parameter.get(f"{path}.weight", [])
                if len(names) == 1 and names[0].endswith(".weight"):
                    tables[f"{path}.weight"] = self._gathered(
                        path, each, names[0], source == f"{path}.weight"
                    )
        if not isinstance(head, nn.Linear) or head_path is None or getattr(head, "bias", None) is not None:
            return
        if source is not None:
            if source not in tables:
                raise refused(type(self._module).__name__, f"its head is tied to {source}")
            project = tables[source].project
        elif self._linear(head_path) is not None:
            project = self._product([head_path], [head]).forward
        else:
            return
        self.head = Head(project, head.out_features, self._place)
        self._set(head_path, self.head)

    def _gathered(self, path: str, module: nn.Embedding, name: str, tied: bool) -> Embedding:
        vocab, hidden = module.num_embeddings, module.embedding_dim
        checkpoint = name.removesuffix(".weight")
        table = Embedding(
            self._engine_name(path), checkpoint, vocab, hidden, projects=tied, place=self._place
        )
        self.layers.append(table)
        self._done.add(f"{path}.weight")
        gather_by(module, table, self._place)
        return table

    # Experts

    def _replace_experts(self) -> None:
        routed = dict(self._probe.routed)
        kinds = {(k, getattr(self._paths[path], "num_experts", None)) for path, k in routed.items()}
        if len(kinds) == 1:
            (top_k, count) = kinds.pop()
            if isinstance(count, int) and len(routed) == len(self._probe.routed):
                self.routing = RoutedExperts(len(self._probe.layers), top_k, count, place=self._place)
        for path in routed:
            module = self._paths[path]
            names = checkpoint_names(module, path, self._parts)
            replaced = None
            if names is not None:
                sizes = getattr(module, "down_proj").shape  # noqa: B009
                replaced = Experts(self._engine_name(path), path, *sizes, place=self._place)
                self.layers.append(NamedExperts(replaced, names))
                for name in ("gate_up_proj", "down_proj"):
                    self._done.add(f"{path}.{name}")
                    delattr(module, name)
            self.torch_experts |= replaced is None
            computed = Computed(self._layer_of(path), self.routing, replaced)
            setattr(module, Computed.ATTRIBUTE, computed)

    # Everything else

    def _place_plain(self, name: str, owner: nn.Module, attribute: str, tensor: Tensor) -> None:
        dtype = tensor.dtype
        if dtype == self._place.dtype and self._float32 is not None and self._float32.search(name):
            dtype = torch.float32
        parameter = Parameter(self._engine_name(name), tuple(tensor.shape), dtype, self._place.device)
        slots: list[WeightSlot] = [
            PlainSlot(checkpoint, parameter.name, self._parts[checkpoint].of(parameter.data))
            for checkpoint in self._by_parameter.get(name, [])
        ]
        if attribute in owner._buffers:
            owner._buffers[attribute] = parameter.data
        else:
            setattr(owner, attribute, nn.Parameter(parameter.data, requires_grad=False))
        self.layers.append(_Plain(parameter, slots))

    def _set(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self._module.get_submodule(parent), name, module)

    def _layer_of(self, path: str) -> int:
        for number, prefix in enumerate(self._probe.paths):
            if f"{path}.".startswith(f"{prefix}."):
                return number
        return 0

    def _engine_name(self, path: str) -> str:
        for number, prefix in enumerate(self._probe.paths):
            if path.startswith(f"{prefix}."):
                return f"layers.{number}.{path.removeprefix(prefix + '.')}"
        return path.removeprefix(f"{self._module.base_model_prefix}.")
